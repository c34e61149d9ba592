"""Locality-aware parallel decoding (arXiv 2507.01957): a group of places a step, in an order chosen for locality.

Step i feeds the codes of group i-1 and one query per place of group i; both kinds see everything known, the queries also
each other. Queries leave no trace: the next step's codes overwrite their cache slots. Needs a model trained this way.
Nothing is verified; the output law differs from one-at-a-time decoding by design.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict
from visacc.kernels import draw, rng
from visacc.models.base import Layout, ModelOutput, Proposal
from visacc.models.lpd.groups import lpd_group_sizes
from visacc.models.lpd.order import lpd_order

if TYPE_CHECKING:
    from visacc.engine import Run

SCHEDULES = ("linear", "constant")


def _integers(name: str, values: Any) -> Tensor:
    """int64 tensor of nested lists or a tensor."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if (
        found is None
        or found.is_floating_point()
        or found.is_complex()
        or found.dtype == torch.bool
        or not found.ndim
    ):
        raise ValueError(f"{name} must be a list of integers, got {values!r:.80}")
    return found.long()


class LPD(Decoder):
    """Parallel decoding of an LPD model.

    Args:
        steps: forwards per image, any number from 2 to the number of tokens (from 1 when cells are given).
        repulsion: rho, how far apart the places of one step keep (2 for 256 px, 4 for 512 px were published).
        proximity: tau, how strongly a place must touch what is known to be preferred.
        guidance_schedule: "linear" grows the scale from 1 to ``guidance_scale`` over the tokens (published runs),
            "constant" uses it everywhere.
        group_sizes: tokens per step in place of ``steps``.
        orders: generation order(s), raster indices [N] for all images or [B, N]; ``None`` draws one per image from the
            image's seed. B counts the images of the whole call.
        known: codes to keep, int64 [h, w] for all images or [B, h, w], -1 where a code is to be generated (in- and
            outpainting, editing). The same cells must be given in every image.
    """

    name = "lpd"
    summary = "locality-aware parallel decoding of LPD models, a group of places a step"
    lossless = False
    requires = frozenset({"set_query"})

    def __init__(
        self,
        steps: int = 20,
        repulsion: float = 2.0,
        proximity: float = 1.0,
        guidance_schedule: str = "linear",
        group_sizes: Sequence[int] | None = None,
        orders: Any = None,
        known: Any = None,
    ) -> None:
        super().__init__()
        if guidance_schedule not in SCHEDULES:
            raise ValueError(
                f"guidance_schedule must be one of {', '.join(SCHEDULES)}, got {guidance_schedule!r}"
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, got {steps!r}")
        for name, value in (("repulsion", repulsion), ("proximity", proximity)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
        self.steps, self.repulsion, self.proximity = steps, repulsion, proximity
        self.guidance_schedule = guidance_schedule
        self._groups = None if group_sizes is None else tuple(_integers("group_sizes", group_sizes).tolist())
        self._orders = None if orders is None else _integers("orders", orders)
        self._known = None if known is None else _integers("known", known)
        self._bounds: list[int] = []
        self._step = 0

    def options(self) -> dict[str, Any]:
        return {
            "steps": self.steps if self._groups is None else len(self._groups),
            "repulsion": self.repulsion,
            "proximity": self.proximity,
            "guidance_schedule": self.guidance_schedule,
        }

    def _given(self, layout: Layout) -> Tensor:
        """bool [total]: cells that are known. Checks the shape and the range of the codes."""
        if self._known is None:
            return torch.zeros(layout.total, dtype=torch.bool)
        known, (_, rows, columns) = self._known, layout.grid
        if known.shape[-2:] != (rows, columns) or known.ndim not in (2, 3):
            raise ValueError(
                f"known must be integer codes [{rows}, {columns}] or [B, {rows}, {columns}], -1 = free"
            )
        if int(known.max()) >= layout.vocab or int(known.min()) < -1:
            raise ValueError(f"known codes must lie in -1..{layout.vocab - 1}: codes of another tokenizer?")
        mask = (known >= 0).reshape(-1, layout.total)
        if bool((mask != mask[0]).any()):
            raise ValueError("all images of a batch must have the same known cells")
        if bool(mask[0].all()):
            raise ValueError("every cell is known: nothing is left to generate")
        return mask[0]

    def _sizes(self, layout: Layout) -> tuple[int, ...]:
        given = int(self._given(layout).sum())
        if self._groups is not None:
            return self._groups
        return lpd_group_sizes(layout.total - given, self.steps, free_start=given > 0)

    def max_nodes(self, layout: Layout) -> int:
        sizes = self._sizes(layout)
        return max(a + b for a, b in zip((0, *sizes), sizes, strict=False))

    def opening(self, run: Run) -> Proposal:
        layout, batch = run.layout, run.batch
        given = self._given(layout).to(run.device)
        cells = given.nonzero()[:, 0]
        sizes = self._sizes(layout)
        self._bounds, self._step = [0, *accumulate(sizes)], 0
        # one number a cell, whatever the step: all of them in one call
        every = torch.arange(run.total, device=run.device).expand(batch, -1)
        self.state = {
            "order": self._make_orders(run, sizes, cells.tolist()),
            "words": run.noise.integer(rng.DRAW, every, 0),
        }
        self._offset = cells.numel()
        context = tokens = torch.empty(batch, 0, dtype=torch.long, device=run.device)
        if self._offset:
            assert self._known is not None
            codes = self._of_batch("known", self._known.reshape(-1, layout.total), batch).to(run.device)
            run.sequence = torch.where(given, codes, run.sequence)
            run.filled = run.filled | given
            run.count = run.count + self._offset
            run.low = run.high = self._offset
            context, tokens = cells.expand(batch, -1), codes[:, cells]
        return self._proposal(run, context, tokens)

    def _of_batch(self, name: str, rows: Tensor, batch: int) -> Tensor:
        """The rows [batch, N] of this batch's images; one row stands for every image."""
        if len(rows) == 1:
            return rows.expand(batch, -1)
        start, stop, count = self.images or (0, batch, batch)
        if len(rows) != count:
            raise ValueError(f"{name} is given for {len(rows)} images, the call makes {count}")
        return rows[start:stop]

    def _make_orders(self, run: Run, sizes: tuple[int, ...], known: list[int]) -> Tensor:
        layout = run.layout
        if self._orders is None:
            drawn = [
                lpd_order(
                    sizes,
                    layout.grid[1:],
                    proximity=self.proximity,
                    repulsion=self.repulsion,
                    rng=random.Random(seed),
                    known=known,
                )
                for seed in run.noise.seeds.tolist()
            ]
            return torch.tensor(drawn, device=run.device)
        orders = torch.atleast_2d(self._orders)
        orders = self._of_batch("orders", orders, run.batch).to(run.device)
        free = layout.total - len(known)
        if orders.shape != (run.batch, free):
            raise ValueError(f"orders must be [{free}] or [{run.batch}, {free}], got {tuple(orders.shape)}")
        expected = torch.tensor([c for c in range(layout.total) if c not in set(known)], device=run.device)
        if not torch.equal(orders.sort(dim=1).values, expected.expand(run.batch, -1)):
            raise ValueError("every order must be a permutation of the cells to generate")
        if sum(sizes) != free or min(sizes) < 1:
            raise ValueError(f"group sizes must be positive and sum to {free}, got a sum of {sum(sizes)}")
        return orders

    def _proposal(self, run: Run, context: Tensor, tokens: Tensor) -> Proposal:
        """Known ``tokens`` at ``context`` cells [B, a], then a query for every cell of the current group."""
        order = self.state["order"]
        assert order is not None
        cells = order[:, self._bounds[self._step] : self._bounds[self._step + 1]]
        a, g = context.shape[1], cells.shape[1]
        device = run.device
        fed = torch.cat([tokens, torch.zeros_like(cells)], dim=1)
        positions = torch.cat([context, cells], dim=1)
        is_query = torch.arange(a + g, device=device) >= a
        visible = (~is_query[None, :] | is_query[:, None]).expand(run.batch, -1, -1)
        return Proposal(
            fed,
            positions,
            torch.ones_like(positions, dtype=torch.bool),
            visible=visible,
            special=torch.where(is_query, 0, -1),
            outputs=torch.arange(a, a + g, device=device),
        )

    def propose(self, run: Run) -> Proposal:
        order = self.state["order"]
        assert order is not None
        cells = order[:, self._bounds[self._step - 1] : self._bounds[self._step]]
        return self._proposal(run, cells, run.sequence.gather(1, cells))

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        return proposal.take(proposal.positions)

    def guidance(self, run: Run, slots: Tensor) -> Tensor | None:
        """``w_p = 1 + (scale - 1) p / N`` with p the place in the generation order."""
        if self.guidance_schedule == "constant" or not run.sampling.guided:
            return None
        place = torch.arange(self._bounds[self._step], self._bounds[self._step + 1], device=slots.device)
        ramp = (self._offset + place) / run.total
        return (1 + (run.sampling.guidance_scale - 1) * ramp).expand(slots.shape)

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        slots = self.predicted_slots(run, proposal)
        words = self.state["words"]
        assert words is not None
        word = words.gather(1, slots)
        tokens = draw(law.reshape(-1, law.shape[-1]), word.reshape(-1)).view(slots.shape)
        context = proposal.size - slots.shape[1]
        kept = torch.full((run.batch,), context, dtype=torch.long, device=run.device)
        return Verdict(tokens, slots, torch.ones_like(slots, dtype=torch.bool), cache_keep=kept)

    def advance(self, run: Run, verdict: Verdict) -> None:
        self._step += 1

    def finished(self, run: Run) -> bool:
        return self._step >= len(self._bounds) - 1
