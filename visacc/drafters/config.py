"""Shape of an EAGLE-type drafter for an image model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from visacc.reading import check_fields

FAMILIES = ("llamagen", "anole", "lumina", "eagle")


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter network.

    Attributes:
        family: which blocks and positions: ``llamagen`` (2-D rotary of the target), ``anole`` and ``lumina``
            (Chameleon blocks with query and key norms), ``eagle`` (EAGLE-1/2 for language-model targets).
        hidden_size: width D, the target's.
        vocab_size: rows of the drafter's own embedding; ids are the target's (codes for LlamaGen).
        prefix: llamagen: prompt slots of the target; grid: side of its token grid.
        norm_shards: chameleon: rows of the query and key norms (each serves heads / shards heads).
        embed_scale: lumina: factor on the embeddings.
        tree: default tree of this drafter (name or paths).
        target: what it was trained for: name, head fingerprint, training summary.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    kv_heads: int = 0
    num_layers: int = 1
    eps: float = 1e-6
    rope_theta: float = 10000.0
    fc_bias: bool = True
    qkv_bias: bool = False
    prefix: int = 0
    grid: int = 0
    norm_shards: int = 0
    embed_scale: float = 1.0
    tree: str = ""
    target: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown drafter family {self.family!r}; known: {', '.join(FAMILIES)}")
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.num_heads)
        if self.hidden_size % self.num_heads or self.num_heads % self.kv_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must divide into num_heads {self.num_heads}, and those into"
                f" kv_heads {self.kv_heads}"
            )
        if self.family == "llamagen" and not (self.grid > 0 and self.prefix > 0 and self.head_dim % 4 == 0):
            raise ValueError(
                f"a llamagen drafter needs grid and prefix and a head size that 4 divides, got grid={self.grid},"
                f" prefix={self.prefix}, head size {self.head_dim}"
            )
        if self.chameleon and not (self.norm_shards > 0 and self.num_heads % self.norm_shards == 0):
            raise ValueError(f"norm_shards={self.norm_shards} must divide num_heads={self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def chameleon(self) -> bool:
        return self.family in ("anole", "lumina")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DrafterConfig:
        check_fields(cls, data, "a drafter configuration")
        return cls(**data)
