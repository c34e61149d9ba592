"""The adaptive window of ZipAR (arXiv 2412.04062 v3): a row starts once the law of its first token has
settled.

From the pass on in which ``window`` columns of the row above exist, a candidate for the row's first token is
drawn from its present law p_k, and tested in the next pass, when the row above has one column more, with
min(1, p_{k+1} / p_k). If it passes, the row starts with it; if not, it is replaced by a draw from max(p_{k+1}
- p_k, 0) and tested again. The first test is speculative sampling, later ones start from a residual draw and
  are a heuristic: do not call it lossless.

Samples of a batch settle at different passes. Each keeps its own row progress, so a sample's tokens do not
depend on the others in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from visacc.decoders.base import Verdict, gumbel_draw
from visacc.decoders.zipar_plan import Rows
from visacc.kernels import rng
from visacc.models.base import Proposal
from visacc.verify import verify_chain

if TYPE_CHECKING:
    from visacc.engine import Run

State = dict[str, Tensor | None]


@dataclass
class _Nodes:
    """What the nodes of the pass under way stand for.

    Attributes:
        lane: int64 [B, A] grid row of each lane; live: bool [B, A].
        row: int64 [B] the row in test; testing: bool [B]; complete: bool [B], the row above it is complete.
        query: int64 [B] node that predicts the first token of the row in test.
        predicted: int64 [B, N] slot that each node predicts, ``total`` for none.
    """

    lane: Tensor
    live: Tensor
    row: Tensor
    testing: Tensor
    complete: Tensor
    query: Tensor
    predicted: Tensor


class AdaptiveRows:
    """Row bookkeeping of one layout.

    Per-sample state: ``done`` and ``fed`` [B, H] columns decided and fed per row, ``valid`` [B, L] addresses
    that may be seen, ``candidate`` [B] first token of the row in test, ``law`` [B, V] its last law,
    ``tested`` [B] whether there is a candidate.

    Nodes of a proposal: A *lanes*, one per row in progress (its newest token, which predicts the next column
        or, in a
    complete row, is only written back), then the vectors before the row in test (row-end tokens, or one
    stand-in).
    """

    def __init__(
        self,
        rows: Rows,
        total: int,
        window: int,
        *,
        first_alone: bool,
        hide_unwritten: bool,
        stand_in: str,
        stand_in_visible: bool,
    ) -> None:
        self.rows, self.total = rows, total
        self.window = min(window, rows.width)
        self.first_alone, self.hide_unwritten = first_alone, hide_unwritten
        self.stand_in, self.stand_in_visible = stand_in, stand_in_visible
        self.lanes = min(rows.height, rows.width // self.window + 2)
        self.before = max(1, *map(len, rows.gaps[1:])) if rows.height > 1 else 1
        self.header = len(rows.gaps[0])
        self.nodes = max(self.lanes + self.before, self.header)
        self.length = total + self.nodes

    def begin(self, run: Run, law: Tensor) -> State:
        rows, device, shape = self.rows, run.device, (run.batch, self.rows.height)
        self.cells = torch.tensor(rows.cells, device=device)
        self.gaps = None
        if rows.row_ends:  # forced slots before each row, padded on the left with -1
            padded = [[-1] * (self.before - len(g)) + list(g) for g in rows.gaps[1:]]
            self.gaps = torch.tensor([[-1] * self.before, *padded], dtype=torch.int64, device=device)
        self.tail = torch.tensor(rows.tail, dtype=torch.int64, device=device)
        done = torch.zeros(shape, dtype=torch.int64, device=device)
        done[:, 0] = 0 if self.header else 1
        return {
            "done": done,
            "fed": torch.zeros(shape, dtype=torch.int64, device=device),
            "valid": torch.zeros(run.batch, self.length, dtype=torch.bool, device=device),
            "candidate": torch.zeros(run.batch, dtype=torch.int64, device=device),
            "law": torch.zeros_like(law),
            "tested": torch.zeros(run.batch, dtype=torch.bool, device=device),
        }

    def propose(self, run: Run, state: State) -> Proposal:
        if self.header and run.step == 1:
            return self._propose_header(run, state)
        done, fed = cast("Tensor", state["done"]), cast("Tensor", state["fed"])
        height, width = self.rows.height, self.rows.width
        low = (fed == width).long().cumprod(1).sum(1)  # complete and written-back rows are a prefix
        lane = low[:, None] + torch.arange(self.lanes, device=run.device)
        inside = lane.clamp(max=height - 1)
        count = done.gather(1, inside)
        live = (lane < height) & (count > fed.gather(1, inside)) & ((lane < height - 1) | (count < width))
        slot = self.cells[inside, (count - 1).clamp(min=0)]
        predicted = torch.where(count < width, self.cells[inside, count.clamp(max=width - 1)], self.total)

        row = (done > 0).sum(1)
        at = row.clamp(max=height - 1)
        above = done.gather(1, (at - 1).clamp(min=0)[:, None])[:, 0]
        need = torch.where(row == 1, width, self.window) if self.first_alone else self.window
        testing, complete = (row < height) & (above >= need), above == width
        first = torch.where(testing, self.cells[at, 0], self.total)
        if self.gaps is not None:
            ahead = self.gaps[at]
            tokens = torch.zeros_like(ahead)
            ahead_live = testing[:, None] & (ahead >= 0)
            query = torch.full_like(row, self.lanes + self.before - 1)
        else:
            ahead = self.cells[(at - 1).clamp(min=0), width - 1][:, None]
            tokens = run.sequence.gather(1, self._borrowed(done, at)[:, None])
            ahead_live = (testing & ~complete)[:, None]
            # a complete row's own last token predicts the next row: no stand-in
            query = torch.where(complete, (at - 1 - low).clamp(0, self.lanes - 1), self.lanes)
        slots = torch.cat([slot, ahead.clamp(min=0)], dim=1)
        tokens = torch.cat([run.sequence.gather(1, slot), tokens], dim=1)
        alive = torch.cat([live, ahead_live], dim=1)
        predicted = torch.cat([predicted, torch.full_like(ahead, self.total)], dim=1)
        # scatter through a spare column: samples that test nothing must not touch the query's entry
        spare = torch.where(testing, query, predicted.shape[1])
        padded = torch.cat([predicted, predicted[:, :1]], dim=1)
        predicted = padded.scatter(1, spare[:, None], first[:, None])[:, :-1]
        self.now = _Nodes(lane, live, row, testing, complete, query, predicted)
        keep = alive.clone()
        if self.gaps is None and not self.stand_in_visible:
            keep[:, self.lanes :] = False
        # lanes past the last row share its index, so the write must not depend on their order
        state["fed"] = fed.scatter_reduce(1, inside, torch.where(live, count, 0), "amax")
        return self._proposal(state, tokens, slots, alive, keep)

    def _borrowed(self, done: Tensor, row: Tensor) -> Tensor:
        """Slot whose token stands in for the last token of the row above ``row`` [B]."""
        source = row - 2 if self.stand_in == "two_up" else row - 1
        source = torch.where(source < 0, row - 1, source).clamp(min=0)
        newest = done.gather(1, source[:, None])[:, 0] - 1
        return self.cells[source, newest.clamp(min=0)]

    def _propose_header(self, run: Run, state: State) -> Proposal:
        """The forced slots before the first row; the last one predicts the first cell."""
        slots = torch.arange(self.header, device=run.device).expand(run.batch, -1)
        alive = torch.ones_like(slots, dtype=torch.bool)
        predicted = torch.where(slots == self.header - 1, self.header, self.total)
        none = torch.zeros_like(slots, dtype=torch.bool)
        self.now = _Nodes(slots, none, slots[:, 0], none[:, 0], none[:, 0], slots[:, -1], predicted)
        return self._proposal(state, torch.zeros_like(slots), slots, alive, alive)

    def _proposal(self, state: State, tokens: Tensor, slots: Tensor, alive: Tensor, keep: Tensor) -> Proposal:
        spare = self.total + torch.arange(slots.shape[1], device=slots.device)
        address = torch.where(alive, slots, spare)
        # a stand-in's entry must not make its address valid, nor may a dead node's
        kept = torch.where(keep, address, spare)
        valid = cast("Tensor", state["valid"]).scatter(1, kept, True)
        state["valid"] = valid
        every = torch.arange(self.length, device=slots.device)
        own = address[..., None]
        see = every < own
        if self.hide_unwritten:
            see = see & valid[:, None]
        return Proposal(
            tokens, slots, alive, address=address, context=see | (every == own), reach=self.length
        )

    def judge(self, run: Run, state: State, law: Tensor) -> Verdict:
        if self.header and run.step == 2:
            return self._judge_header(run, state, law)
        now, rows = self.now, torch.arange(run.batch, device=run.device)
        done, width = cast("Tensor", state["done"]), self.rows.width
        slots = now.predicted[:, : self.lanes]
        lane_row = now.lane.clamp(max=self.rows.height - 1)
        moving = now.live & (done.gather(1, lane_row) < width)
        inside = slots.clamp(max=run.total - 1)
        tokens = gumbel_draw(run, law[:, : self.lanes], inside, bound=run.total)

        at = now.row.clamp(max=self.rows.height - 1)
        first = self.cells[at, 0]
        p = law[rows, now.query]
        token, starts = self._test(run, state, p, first)
        done = done.scatter_add(1, lane_row, moving.long())
        state["done"] = done.scatter_add(1, at[:, None], starts[:, None].long())
        parts = [(tokens, inside, moving), (token[:, None], first[:, None], starts[:, None])]
        if self.gaps is not None:
            ahead = self.gaps[at]
            parts.append((torch.zeros_like(ahead), ahead.clamp(min=0), starts[:, None] & (ahead >= 0)))
        if len(self.tail):
            tail = self.tail.expand(run.batch, -1)
            ended = (done[:, -1] == width)[:, None]
            parts.append((torch.zeros_like(tail), tail, ended & ~run.filled[:, self.tail]))
        return Verdict(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))

    def _test(self, run: Run, state: State, p: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Test the candidates against the present laws p [B, V] -> first tokens [B] and which rows start."""
        now = self.now
        tested = cast("Tensor", state["tested"]) & now.testing
        drawn = gumbel_draw(run, p[:, None], slot[:, None], bound=run.total)
        verdict = verify_chain(
            p[:, None].expand(-1, 2, -1),
            cast("Tensor", state["candidate"])[:, None],
            tested.long(),
            drawn.expand(-1, 2),
            q=cast("Tensor", state["law"])[:, None],
            onehot=torch.zeros_like(drawn, dtype=torch.bool),
            u=run.noise.uniform(rng.ACCEPT, slot[:, None], run.step),
            U=run.noise.integer(rng.RESIDUAL, slot[:, None], run.step),
        )
        token = verdict.coupled[:, 0]
        starts = now.testing & ((tested & (verdict.n_accepted > 0)) | now.complete)
        waiting = now.testing & ~starts
        state["candidate"] = torch.where(waiting, token, 0)
        state["law"] = torch.where(waiting[:, None], p, 0.0)
        state["tested"] = waiting
        return token, starts

    def _judge_header(self, run: Run, state: State, law: Tensor) -> Verdict:
        cell = torch.full((run.batch, 1), self.header, dtype=torch.int64, device=run.device)
        token = gumbel_draw(run, law[:, -1:], cell, bound=run.total)
        forced = torch.arange(1, self.header, device=run.device).expand(run.batch, -1)
        slots = torch.cat([cell, forced], dim=1)
        tokens = torch.cat([token, torch.zeros_like(forced)], dim=1)
        done = cast("Tensor", state["done"]).clone()
        done[:, 0] = 1
        state["done"] = done
        return Verdict(tokens, slots, torch.ones_like(slots, dtype=torch.bool))
