"""What a generation of a vision-language target gives and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class TextStats:
    """What a generation cost. A step is one target forward; the prompt's forward is not counted in ``steps``.

    Attributes:
        tokens: int64 [B] generated tokens. steps: int64 [B] tree forwards of each row.
        accepted: int64 [B] drafted tokens that were committed.
        prefill_seconds, seconds: wall time of the prompt's forward, and of everything.
        draft_seconds, target_seconds: parts of it (exact on a CPU only).
        committed: int64 [N], how many (step, row) pairs committed n tokens.
    """

    tokens: Tensor
    steps: Tensor
    accepted: Tensor
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0
    committed: Tensor | None = None

    @property
    def tau(self) -> float:
        """Committed tokens per target step, the bonus token included (tau); the prompt's token is not
        counted.
        """
        return float((self.tokens - 1).sum() / self.steps.sum().clamp(min=1))

    @property
    def accepted_per_step(self) -> float:
        """Committed drafts per target step, without the bonus token."""
        return float(self.accepted.sum() / self.steps.sum().clamp(min=1))

    def summary(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "tokens": int(self.tokens.sum()),
            "steps": int(self.steps.sum()),
            "tokens_per_step": self.tau,
            "accepted_per_step": self.accepted_per_step,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
        }


@dataclass
class TextResult:
    """Generated ids int64 [B, L] (padded behind the end), their lengths [B], and the statistics."""

    ids: Tensor
    lengths: Tensor
    stats: TextStats
