"""Parallel Jacobi decoding: one Jacobi window per row of the grid, several rows at once (arXiv 2606.05703).

Training-free and lossy, like ZipAR: a row starts once the row above has ``context`` committed columns, and from then on
gets ``min(window, columns the row above is ahead)`` drafts a pass, so it never overtakes it. One forward covers all rows
in progress under a *row-causal* mask: a draft sees the prompt, every committed token before it, and the drafts of its own
row, but no draft of another row. Each row tests its drafts front to back with ``min(1, p/q)``. In the topmost unfinished
row the first failure is replaced by a residual draw at once; in the rows below it waits (its context is not complete) and
is tested again.

With ``context`` at least the number of columns no two rows overlap and the output law is the exact one: a failure that
waits is replaced by its residual draw (the published text redraws it from the new law, which would not be exact).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict
from visacc.decoders.zipar_plan import layout_rows
from visacc.kernels import draw, rng, window_resample
from visacc.models.base import ImageModel, Layout, ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run


class PJD(Decoder):
    """Row-parallel Jacobi decoding.

    Args:
        context: columns of the row above that must be committed before a row starts; ``None`` takes half the columns.
            Larger is closer to the exact law and slower (the paper measures 4 to 32).
        window: drafts per row and pass.

    Raises:
        ValueError: context or window below 1.
    """

    name = "pjd"
    summary = "a Jacobi window per row, rows overlap (lossy)"
    requires = frozenset({"grid", "tree_mask"})

    def __init__(self, context: int | None = None, window: int = 8) -> None:
        super().__init__()
        for label, value in (("context", context), ("window", window)):
            if label == "context" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{label} must be an integer of at least 1, got {value!r}")
        self.context, self.window = context, window

    def options(self) -> dict[str, Any]:
        return {"context": self.context, "window": self.window}

    def check(self, model: ImageModel) -> None:
        super().check(model)
        rows = layout_rows(model.layout)
        if model.layout.forced is not None:
            raise ValueError(
                f"pjd needs a grid without forced slots, {model.name} has row ends or headers; use decoder 'zipar' or"
                " 'mc-sjd'"
            )
        self.lossless = self._lag(model.layout) >= rows.width

    def _lag(self, layout: Layout) -> int:
        return max(1, layout.grid[2] // 2) if self.context is None else self.context

    def _lanes(self, layout: Layout) -> tuple[int, int]:
        return layout.grid[1], min(self.window, layout.grid[2])

    def max_nodes(self, layout: Layout) -> int:
        height, window = self._lanes(layout)
        rows = min(height, layout.grid[2] // min(self._lag(layout), layout.grid[2]) + 2)
        return rows * window

    def begin(self, run: Run, law: Tensor) -> Tensor:
        first = super().begin(run, law)
        height, window = self._lanes(run.layout)
        self._cells = run.layout.cell_slots.view(height, -1).to(run.device)
        self._k = torch.arange(window, device=run.device)
        done = torch.zeros(run.batch, height, dtype=torch.int64, device=run.device)
        tokens = self._uniform(run, done)
        done[:, 0] = 1
        q = torch.full((), 1 / run.layout.vocab, dtype=law.dtype, device=run.device)
        self.state = {
            "done": done,
            "wrote": torch.zeros_like(done, dtype=torch.bool),
            "drafts": tokens,
            "q": q.expand(*tokens.shape, run.layout.vocab).clone(),
            "valid": torch.zeros(
                run.batch, run.total + self.max_nodes(run.layout), dtype=torch.bool, device=run.device
            ),
        }
        return first

    def _get(self, name: str) -> Tensor:
        return cast("Tensor", self.state[name])

    def _slots(self, column: Tensor) -> Tensor:
        """Slots [B, H, ...] of columns [B, H, ...] of each row (clamped to the row)."""
        width = self._cells.shape[1]
        start = self._cells[:, 0].view(1, -1, *[1] * (column.ndim - 2))
        return start + column.clamp(0, width - 1)

    def _uniform(self, run: Run, done: Tensor) -> Tensor:
        """Fresh drafts [B, H, W] for the columns from ``done`` on."""
        slots = self._slots(done[..., None] + self._k)
        word = run.noise.integer(rng.INIT, slots.flatten(1), run.step)
        return ((word * run.layout.vocab) >> 32).view(slots.shape)

    def propose(self, run: Run) -> Proposal:
        done, wrote, drafts = self._get("done"), self._get("wrote"), self._get("drafts")
        height, width = self._cells.shape
        above = torch.cat([torch.full_like(done[:, :1], width), done[:, :-1]], dim=1)
        ready = above >= min(self._lag(run.layout), width)
        size = torch.where(ready, (above - done).clamp(max=len(self._k)), 0)
        starts = (done == 0) & (size > 0)
        # a finished row's last token is fed by nobody of its row: by the next row's start, or on its own
        following = torch.cat([starts[:, 1:], torch.zeros_like(starts[:, :1])], dim=1)
        last_row = torch.arange(height, device=run.device) == height - 1
        back = (done == width) & ~wrote & ~following & ~last_row
        self.state["wrote"] = wrote | ((done == width) & (back | following))

        column = done[..., None] + self._k
        live = (self._k < size[..., None]) | (back[..., None] & (self._k == 0))
        before = (self._cells[:, 0] - 1).clamp(min=0)
        slot = torch.where(
            self._k == 0,
            torch.where(done > 0, self._slots(done - 1), before)[..., None],
            self._slots(column - 1),
        )
        # a row starts behind the last token of the row above; while that is unknown, the newest of the row above stands in
        source = torch.where((above < width) & (done == 0), self._newest(done), slot[..., 0])
        head = run.sequence.gather(1, source)
        tokens = torch.cat([head[..., None], drafts[..., :-1]], dim=2)
        predicted = torch.where(self._k < size[..., None], self._slots(column), run.total)

        live, self._live = live.flatten(1), live
        self._above = above
        order = (~live).int().argsort(dim=1, stable=True)
        budget = self.max_nodes(run.layout)
        if run.device.type == "cpu":  # looking is free there, and every node costs
            budget = min(budget, int(live.sum(1).max()))
        self._lane = order[:, :budget]
        alive = live.gather(1, self._lane)
        spare = run.total + torch.arange(self._lane.shape[1], device=run.device)
        slots = slot.flatten(1).gather(1, self._lane)
        address = torch.where(alive, slots, spare)
        first = (self._lane % len(self._k)) == 0
        valid = self._get("valid").scatter(1, torch.where(alive & first, address, spare), True)
        self.state["valid"] = valid
        row_start = slot[..., 0].gather(1, self._lane // len(self._k))
        every = torch.arange(valid.shape[1], device=run.device)
        own = address[..., None]
        see = (every < own) & (valid[:, None] | (every > row_start[..., None]))
        self._predicted = torch.where(alive, predicted.flatten(1).gather(1, self._lane), run.total)
        return Proposal(
            tokens.flatten(1).gather(1, self._lane),
            torch.where(alive, slots, 0),
            alive,
            address=address,
            context=see | (every == own),
            reach=valid.shape[1],
        )

    def _newest(self, done: Tensor) -> Tensor:
        """int64 [B, H]: slot of the newest token of the row above each row (row 0: its own first)."""
        up = torch.cat([done[:, :1], done[:, :-1]], dim=1)
        start = torch.cat([self._cells[:1, 0], self._cells[:-1, 0]])
        return start + (up - 1).clamp(min=0)

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        return self._predicted

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        done, drafts, q = self._get("done"), self._get("drafts"), self._get("q")
        batch, height, window = drafts.shape
        vocab, width = law.shape[2], self._cells.shape[1]
        lane, tested = self._lane, self._predicted < run.total
        place = self._predicted.clamp(max=run.total - 1)
        rows = torch.arange(batch, device=run.device)[:, None]
        x, q_old = drafts.flatten(1).gather(1, lane), q.flatten(1, 2)[rows, lane]
        kept, coupled = window_resample(
            law.flatten(0, 1),
            q_old.flatten(0, 1),
            x.flatten(),
            run.noise.uniform(rng.ACCEPT, place, run.step).flatten(),
            run.noise.integer(rng.RESIDUAL, place, run.step).flatten(),
        )
        free = draw(law.flatten(0, 1), run.noise.integer(rng.DRAW, place, run.step).flatten())

        def lanes(values: Tensor, rest: Tensor) -> Tensor:
            """Values of nodes [B, N] put into their lanes [B, H, W], ``rest`` elsewhere."""
            padded = torch.cat([rest.flatten(1), rest.flatten(1)[:, :1]], dim=1)
            index = torch.where(tested, lane, height * window)
            return padded.scatter(1, index, values.view(batch, -1))[:, :-1].view(batch, height, window)

        passed = lanes(kept, torch.zeros_like(self._live))
        run_length = passed.long().cumprod(2).sum(2)
        evaluated = lanes(torch.ones_like(tested), torch.zeros_like(self._live))
        # rows that did not fit into the pass were not evaluated and do not move
        size = evaluated.sum(2)
        top = (self._above == width) & (done < width)
        gained = run_length + (top & (run_length < size)).long()
        failed = run_length[..., None]
        new = lanes(torch.where(tested, free.view(tested.shape), 0), drafts)
        new = torch.where(self._k == failed, lanes(coupled, drafts), new)
        new = torch.where(self._k < failed, drafts, new)
        laws = torch.cat([q.flatten(1, 2), q.flatten(1, 2)[:, :1]], dim=1)
        laws = laws.scatter(
            1, torch.where(tested, lane, height * window)[..., None].expand(-1, -1, vocab), law
        )[:, :-1]
        laws = laws.view(q.shape)

        column = done[..., None] + self._k
        keep = self._k < gained[..., None]
        # drafts that were fed and stand stay in the cache; node k carries the draft of column k - 1
        fed = self._live & (self._k > 0) & (self._k <= run_length[..., None]) & (self._k < size[..., None])
        spare = run.total
        address = torch.where(fed, self._slots(column - 1), spare).flatten(1)
        self.state["valid"] = self._get("valid").scatter(1, address, True)
        self.state["done"] = done + gained
        source = gained[..., None] + self._k
        inside = source < window
        source = source.clamp(max=window - 1)
        self.state["drafts"] = torch.where(inside, new.gather(2, source), self._uniform(run, done + gained))
        moved = laws.gather(2, source[..., None].expand_as(laws))
        self.state["q"] = torch.where(inside[..., None], moved, 1 / vocab)
        slots = self._slots(column).flatten(1)
        return Verdict(new.flatten(1), slots, keep.flatten(1), accepted=run_length.sum(1))
