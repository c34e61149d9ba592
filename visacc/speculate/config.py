"""Shape and method of a drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from visacc.reading import check_fields

METHODS = ("eagle", "msd", "dream", "flash", "vispec", "eagle3")
"""Drafters with a network; ``ngram`` has none."""


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter network.

    Attributes:
        method: one of ``METHODS``.
        hidden_size: width D, the target's.
        input_norm: the first decoder layer has an input norm.
        heads_ahead: FLASH: tokens predicted per forward (K); 1 means an ordinary one-token drafter.
        latents: FLASH: latent rows per image (M); 0 keeps all visual rows.
        num_q: ViSpec: learned queries per image.
        prune: DREAM: fraction of visual rows kept, 1 keeps all.
        taps: target layers whose inputs the drafter reads (EAGLE-3: three).
        draft_vocab_size: EAGLE-3: size of the drafter's own vocabulary.
        official_cross_mask: DREAM: reproduce the released code's cross-attention between siblings.
        uniform_first_row: DREAM: reproduce the released code's row without visible features (needed with
            weights trained that way).
        tree: default tree of this drafter (arguments of ``visacc.speculate.trees.make_policy``).
        target: what it was trained for, checked when it is bound.
    """

    method: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float = 1e-5
    rope_theta: float = 10000.0
    input_norm: bool = False
    qkv_bias: bool = False
    fc_bias: bool = True
    heads_ahead: int = 1
    latents: int = 0
    num_q: int = 2
    prune: float = 1.0
    taps: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    mrope_sections: tuple[int, ...] = ()
    official_cross_mask: bool = False
    uniform_first_row: bool = False
    tree: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown drafter method {self.method!r}; known: {', '.join(METHODS)}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.heads_ahead < 1:
            raise ValueError(f"heads_ahead must be at least 1, got {self.heads_ahead}")
        if not 0 < self.prune <= 1:
            raise ValueError(f"prune must lie in (0, 1], got {self.prune}")
        if self.target_hidden_size not in (0, self.hidden_size):
            raise ValueError(
                f"a drafter of width {self.hidden_size} for a target of width {self.target_hidden_size} needs an embedding"
                " of its own, which is not supported"
            )
        if self.method == "eagle3" and len(self.taps) != 3:
            raise ValueError(f"eagle3 reads three target layers, got taps={self.taps}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DrafterConfig:
        check_fields(cls, data, "a drafter configuration")
        data = {k: tuple(v) if k in ("taps", "mrope_sections") else v for k, v in data.items()}
        return cls(**data)
