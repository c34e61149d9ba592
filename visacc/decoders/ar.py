"""Plain autoregressive decoding: one token a step. The yardstick of every other decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from visacc.decoders.base import Decoder, Verdict, gumbel_draw
from visacc.models.base import ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run


class AR(Decoder):
    """One token per target forward, drawn as ``argmax(log p + G)`` with Gumbel noise G fixed by seed and slot."""

    name = "ar"
    summary = "plain autoregressive decoding, one token a step"
    lossless = True
    fixed_shape = True

    def propose(self, run: Run) -> Proposal:
        position = (run.count - 1)[:, None]
        proposal = Proposal(run.last_tokens()[:, None], position, position < run.total - 1)
        if self._in_step:
            proposal.reach, proposal.full = run.high + run.since_check, True
        return proposal

    @property
    def _in_step(self) -> bool:
        """Every row gains one token a step, so the host knows where all of them stand; subclasses may do otherwise."""
        return type(self) is AR

    def finished(self, run: Run) -> bool:
        return self._in_step and run.high + run.since_check >= run.total

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        slots = run.count[:, None]
        token = gumbel_draw(run, law, slots.clamp(max=run.total - 1), bound=run.high + run.since_check + 1)
        return Verdict(token, slots, slots < run.total)
