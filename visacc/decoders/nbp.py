"""Next-block prediction (arXiv 2502.07737): a whole block of tokens a step, for models trained that way.

The block just drawn is fed, attends to itself and to all before, and each of its tokens predicts the token at the same
place of the next block. After a text prompt the first block comes token by token ("hybrid"), then one step feeds its last
token with the model's middle tokens; after given frames every step is a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict
from visacc.kernels import draw, rng
from visacc.models.base import Layout, ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run


class NBP(Decoder):
    """Block-parallel decoding; the block size is the model's own.

    Nothing is verified: inside a block the tokens are drawn independently of each other, which is what the model was
    trained for. Its output law is the model's own law under this factorisation.
    """

    name = "nbp"
    summary = "next-block prediction of NBP models, one block a step"
    lossless = False
    requires = frozenset({"blocks"})

    def __init__(self) -> None:
        super().__init__()
        self._block = 1
        self._count = self._cached = 0
        self._from_text = True

    def max_nodes(self, layout: Layout) -> int:
        return layout.grid[2] * layout.grid[1]

    def start(self, run: Run, law: Tensor) -> Verdict:
        # one number a slot, whatever the step: all of them in one call
        every = torch.arange(run.total, device=run.device).expand(run.batch, -1)
        self.state = {"words": run.noise.integer(rng.DRAW, every, 0)}
        self._block, self._count, self._cached = run.model.block, 0, 0
        self._from_text = law.shape[1] < self._block or self._block == 1
        if run.total % self._block:
            raise ValueError(f"{run.total} tokens do not divide into the model's blocks of {self._block}")
        slots = torch.arange(law.shape[1], device=run.device).expand(run.batch, -1)
        return self._drawn(run, law, slots, None)

    def propose(self, run: Run) -> Proposal:
        n, count, device = self._block, self._count, run.device
        special = None
        if self._from_text and count < n:
            slots = torch.arange(count - 1, count, device=device)
        elif self._from_text and count == n:
            slots = torch.arange(n - 1, 2 * n - 1, device=device)
            special = torch.arange(n, device=device)
            special[0] = -1
        else:
            slots = torch.arange(count - n, count, device=device)
        positions = slots.clamp(max=run.total - 1).expand(run.batch, -1)
        size = len(slots)
        return Proposal(
            run.sequence.gather(1, positions),
            positions,
            torch.ones_like(positions, dtype=torch.bool),
            visible=torch.ones(run.batch, size, size, dtype=torch.bool, device=device),
            special=special,
            reach=self._cached + size,
            full=True,
        )

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        return torch.arange(self._count, self._count + proposal.size, device=run.device).expand(run.batch, -1)

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        self._cached += proposal.size
        fed = torch.full((run.batch,), proposal.size, dtype=torch.long, device=run.device)
        return self._drawn(run, law, self.predicted_slots(run, proposal), fed)

    def finished(self, run: Run) -> bool:
        return self._count >= run.total

    def _drawn(self, run: Run, law: Tensor, slots: Tensor, fed: Tensor | None) -> Verdict:
        words = self.state["words"]
        assert words is not None
        word = words[:, self._count : self._count + slots.shape[1]]
        tokens = draw(law.reshape(-1, law.shape[-1]), word.reshape(-1)).view(slots.shape)
        self._count += slots.shape[1]
        return Verdict(tokens, slots, torch.ones_like(slots, dtype=torch.bool), cache_keep=fed)
