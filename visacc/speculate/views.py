"""What drafters see of a target: the prompt, the features of its forwards, the outcome of a verification.

Notation (as in the papers): D hidden size, V vocabulary, N prompt length in target positions (image
placeholders expanded), h_j the target's state at position j after its final norm, e_j its input embedding
(at a visual position the projected image feature). The *root* is the newest committed token: sampled, not
yet run through the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class TargetFeatures:
    """States of one target forward for the rows it ran.

    Attributes:
        last: [B, L, D] after the final norm (what ``lm_head`` reads).
        taps: ``{i: [B, L, D]}``, the input of layer i (``hidden_states[i]`` in transformers); only requested
            layers.
    """

    last: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)

    def gather(self, nodes: Tensor) -> TargetFeatures:
        """Features at slots ``nodes`` int64 [B, A]."""

        def pick(x: Tensor) -> Tensor:
            return x.gather(1, nodes.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))

        return TargetFeatures(pick(self.last), {i: pick(x) for i, x in self.taps.items()})

    def map(self, fn) -> TargetFeatures:  # type: ignore[no-untyped-def]
        return TargetFeatures(fn(self.last), {i: fn(x) for i, x in self.taps.items()})


@dataclass
class PromptView:
    """A batch of prompts as the target saw them, left-padded.

    Attributes:
        input_ids: int64 [B, N], placeholders expanded.
        inputs_embeds: [B, N, D] merged text and image embeddings (``hidden_states[0]``).
        visual: bool [B, N], positions that hold an image feature.
        image_index: int64 [B, N], running image number of a visual position, -1 for text.
        valid: bool [B, N], False at left padding.
        seq_pos: int64 [B, N], 0..n_valid-1 (0 at padding).
        rope_pos: int64 [3, B, N] grid positions of M-RoPE targets, else ``None``.
        visual_score: [B, N] attention that each image token receives in the target's last layer, where asked
            for.
    """

    input_ids: Tensor
    inputs_embeds: Tensor
    visual: Tensor
    image_index: Tensor
    valid: Tensor
    seq_pos: Tensor
    rope_pos: Tensor | None = None
    visual_score: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """int64 [B] real positions."""
        return self.valid.sum(1)

    @classmethod
    def build(
        cls,
        input_ids: Tensor,
        inputs_embeds: Tensor,
        visual: Tensor | None = None,
        image_index: Tensor | None = None,
        valid: Tensor | None = None,
        rope_pos: Tensor | None = None,
    ) -> PromptView:
        """Fill in what follows from the rest: no padding, text only, one image per contiguous visual span."""
        if valid is None:
            valid = torch.ones_like(input_ids, dtype=torch.bool)
        if visual is None:
            visual = torch.zeros_like(valid)
        if image_index is None:
            image_index = spans(visual)
        seq_pos = (valid.long().cumsum(1) - 1).clamp(min=0)
        return cls(input_ids, inputs_embeds, visual, image_index, valid, seq_pos, rope_pos)


def spans(visual: Tensor) -> Tensor:
    """Number the contiguous runs of ``visual`` [B, N] in every row: 0, 1, ... inside, -1 outside."""
    before = torch.cat([torch.zeros_like(visual[:, :1]), visual[:, :-1]], dim=1)
    number = (visual & ~before).long().cumsum(1) - 1
    return torch.where(visual, number, -1)


@dataclass
class AcceptedStep:
    """What a verification kept, as drafters are told (slot 0 = the root counts as kept).

    Attributes:
        path: int64 [B, A] slots of the kept nodes in order, padded arbitrarily beyond ``n``.
        n: int64 [B] number of kept nodes; 0 for a row that is finished.
        tokens: int64 [B, A] tokens of the kept nodes.
        feats: their target features, [B, A, D].
        next_root: int64 [B] the token that follows.
    """

    path: Tensor
    n: Tensor
    tokens: Tensor
    feats: TargetFeatures
    next_root: Tensor
