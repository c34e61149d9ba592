"""The drafter's training objective (EAGLE, arXiv 2401.15077, section 8 of its program; LANTERN).

Teacher forcing, one step ahead: row j reads feature f_j and token j + 1 and predicts f_{j+1}. Two terms, both averaged
over the masked rows: a smooth L1 distance between features, and the cross entropy between the target's law and the
law that the target's head makes of the predicted feature. Optional further terms: the same cross entropy on the *guided*
law, which is what decoding verifies, and more unrolled steps, in which the drafter reads its own predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.drafters.network import EagleNetwork

Head = Callable[[Tensor], Tensor]
_TINY = 1e-5


@dataclass
class DraftBatch:
    """Teacher-forced sequences.

    Attributes:
        ids: int64 [R, L], column j holds token j + 1.
        features: [R, L, D] target features.
        mask: float32 [R, L], rows that count; row j is compared with feature j + 1.
        branches: 2 if the second half of the rows are the unconditional branches of the first half.
        scale: guidance scale of the target's samples.
    """

    ids: Tensor
    features: Tensor
    mask: Tensor
    branches: int = 1
    scale: float = 1.0

    @property
    def targets(self) -> Tensor:
        """[R, L, D]: feature of the next column, zero at the end."""
        return F.pad(self.features[:, 1:], (0, 0, 0, 1))


@dataclass(frozen=True)
class LossSpec:
    """Weights of the terms; the defaults are the published ones.

    Attributes:
        feature: smooth L1. law: cross entropy of the branch's own law. guided: cross entropy of the guided law.
        unroll: passes; from the second on features are the drafter's own predictions of the pass before.
        decay: weight of a pass relative to the one before.
        noise: scale of the uniform noise on the input features, +-0.5 noise 512 / L.
    """

    feature: float = 1.0
    law: float = 0.1
    guided: float = 0.0
    unroll: int = 1
    decay: float = 0.5
    noise: float = 0.2

    def __post_init__(self) -> None:
        if (
            min(self.feature, self.law, self.guided, self.noise) < 0
            or self.unroll < 1
            or not 0 < self.decay <= 1
        ):
            raise ValueError(f"loss weights must be >= 0, unroll >= 1 and decay in (0, 1], got {self}")
        if not (self.feature or self.law or self.guided):
            raise ValueError("at least one loss term needs a positive weight")


def draft_loss(
    network: EagleNetwork, head: Head, batch: DraftBatch, spec: LossSpec | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and its parts with ``alpha`` = expected acceptance of the first draft, sum_v min(p, q) (detached).

    Args:
        head: the target's head; it is not trained.
    """
    spec = LossSpec() if spec is None else spec
    length, rows = batch.ids.shape[1], batch.ids.shape[0]
    order = torch.arange(length, device=batch.ids.device)
    causal = (order[:, None] >= order).expand(rows, -1, -1)
    positions = order.expand(rows, -1)
    goal = batch.targets
    with torch.no_grad():
        goal_logits = head(goal)
    features = batch.features
    if network.training and spec.noise:
        features = features + (torch.rand_like(features) - 0.5) * (spec.noise * 512 / length)
    total = goal.new_zeros((), dtype=torch.float32)
    parts: dict[str, Tensor] = {}
    weight = 1.0
    for step in range(spec.unroll):
        out = network(batch.ids, features, positions, causal)
        terms = _terms(out, head(out), goal, goal_logits, batch, guided=spec.guided > 0)
        total = total + weight * sum(
            getattr(spec, name) * terms[name] for name in ("feature", "law", "guided")
        )
        if step == 0:
            parts = {name: value.detach() for name, value in terms.items()}
        weight *= spec.decay
        features = torch.cat([batch.features[:, :1], out[:, :-1].to(batch.features.dtype)], dim=1)
    return total, parts


def _terms(
    out: Tensor, logits: Tensor, goal: Tensor, goal_logits: Tensor, batch: DraftBatch, *, guided: bool
) -> dict[str, Tensor]:
    mask = batch.mask.float()
    feature = F.smooth_l1_loss(out.float(), goal.float(), reduction="none").mean(-1)
    goal_law = goal_logits.softmax(-1)
    law = -(goal_law * logits.log_softmax(-1)).sum(-1)
    terms = {"feature": _mean(feature, mask), "law": _mean(law, mask)}
    half = len(out) // batch.branches
    if batch.branches == 2:
        p, q = (u + batch.scale * (c - u) for c, u in (x.split(half) for x in (goal_logits, logits)))
        p = p.softmax(-1)
        both = mask[:half] * mask[half:]
        terms["guided"] = _mean(-(p * q.log_softmax(-1)).sum(-1), both) if guided else p.new_zeros(())
    else:
        p, q, both = goal_law, logits, mask
        terms["guided"] = terms["law"]
    terms["alpha"] = _mean(torch.minimum(p, q.softmax(-1)).sum(-1), both).detach()
    return terms


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask).sum() / (mask.sum() + _TINY)
