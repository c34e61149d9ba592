"""ZipAR: decode several rows of the token grid at once, each a few columns behind the one above (arXiv
2412.04062).

Training-free and lossy: cell (r, c) is decided before the cells right of column ``c + window - 1`` of the row
above exist. With ``window >= columns`` nothing overlaps and the tokens are those of plain autoregressive
decoding with the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visacc.decoders.base import Verdict
from visacc.decoders.plan import PackedPlan, PlanDecoder
from visacc.decoders.zipar_adaptive import AdaptiveRows
from visacc.decoders.zipar_plan import MODES, STAND_INS, layout_rows, row_lag, zipar_plan
from visacc.models.base import ImageModel, Layout, ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run

UNWRITTEN = ("mask", "zero")


class ZipAR(PlanDecoder):
    """Row-overlapping decoding.

    Args:
        window: columns of the row above that must exist before a row may start; ``None`` takes half the
            columns. At the published 24x24 grid quality holds down to about 16 (fixed window) and collapses
            at 8.
        mode: ``paper`` overlaps every row; ``llamagen`` and ``lumina`` are the schedules of the two published
            programs (row 0 alone; the row-end token counted as a column).
        adaptive: ``window`` is a minimum; each row starts once the law of its first token has settled (a
            speculative-sampling test between two passes, arXiv 2412.04062 v3). Not lossless either.
        unwritten: slots nobody has written yet are hidden (``mask``), or seen as zero vectors as in the
            published LlamaGen program (``zero``).
        stand_in: token that takes the place of the unknown last token of the row above: the newest of the row
            above that one (``two_up``, the published choice) or the newest of the row above.
        stand_in_visible: whether later tokens see the stand-in until the true token replaces it (as
            published).
        refresh_row_end: feed a model's row-end token again once its row is complete.
        legacy_interval: count the guidance interval as the published LlamaGen program does (restarting at row
            1).

    Raises:
        ValueError: a window below 1, an unknown mode or policy.
    """

    name = "zipar"
    summary = "rows of the grid overlap, a window of columns apart (lossy)"
    requires = frozenset({"grid", "tree_mask"})

    def __init__(
        self,
        window: int | None = None,
        mode: str = "paper",
        *,
        adaptive: bool = False,
        unwritten: str = "mask",
        stand_in: str = "two_up",
        stand_in_visible: bool = True,
        refresh_row_end: bool = False,
        legacy_interval: bool = False,
    ) -> None:
        super().__init__()
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"zipar window must be an integer of at least 1 (columns), got {window!r}")
        for label, value, known in (("mode", mode, MODES), ("unwritten", unwritten, UNWRITTEN)):
            if value not in known:
                raise ValueError(f"unknown zipar {label} {value!r}; choose one of {', '.join(known)}")
        if stand_in not in STAND_INS:
            raise ValueError(f"unknown zipar stand_in {stand_in!r}; choose one of {', '.join(STAND_INS)}")
        if adaptive and mode == "lumina":
            raise ValueError(
                "the adaptive window counts columns: use mode 'paper' or 'llamagen' with adaptive=True"
            )
        if adaptive and (legacy_interval or refresh_row_end):
            raise ValueError(
                "legacy_interval and refresh_row_end belong to the fixed window, not to adaptive=True"
            )
        self.window, self.mode, self.adaptive = window, mode, adaptive
        self.unwritten, self.stand_in, self.stand_in_visible = unwritten, stand_in, stand_in_visible
        self.refresh_row_end, self.legacy_interval = refresh_row_end, legacy_interval
        self._rows: AdaptiveRows | None = None

    def options(self) -> dict[str, Any]:
        names = ("window", "mode", "adaptive", "unwritten", "stand_in", "stand_in_visible")
        return {name: getattr(self, name) for name in names}

    def check(self, model: ImageModel) -> None:
        super().check(model)
        rows = layout_rows(model.layout)
        # with the lag of a full row every token sees the whole context of plain decoding
        self.lossless = row_lag(rows, self._window(model.layout), self.mode).step >= rows.width

    def _window(self, layout: Layout) -> int:
        return max(1, layout.grid[2] // 2) if self.window is None else self.window

    def plan(self, layout: Layout) -> PackedPlan:
        return zipar_plan(
            layout,
            self._window(layout),
            mode=self.mode,
            unwritten=self.unwritten,
            stand_in=self.stand_in,
            stand_in_visible=self.stand_in_visible,
            refresh_row_end=self.refresh_row_end,
        )

    def _adaptive_rows(self, layout: Layout) -> AdaptiveRows:
        return AdaptiveRows(
            layout_rows(layout),
            layout.total,
            self._window(layout),
            first_alone=self.mode == "llamagen",
            hide_unwritten=self.unwritten == "mask",
            stand_in=self.stand_in,
            stand_in_visible=self.stand_in_visible,
        )

    def max_nodes(self, layout: Layout) -> int:
        return self._adaptive_rows(layout).nodes if self.adaptive else super().max_nodes(layout)

    def begin(self, run: Run, law: Tensor) -> Tensor:
        first = super().begin(run, law)
        if self.adaptive:
            self._rows = self._adaptive_rows(run.layout)
            self.state = self._rows.begin(run, law)
        return first

    def propose(self, run: Run) -> Proposal:
        return self._rows.propose(run, self.state) if self._rows else super().propose(run)

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        if self._rows:
            return self._rows.now.predicted
        return super().predicted_slots(run, proposal)

    def guidance(self, run: Run, slots: Tensor) -> Tensor | None:
        if not self.legacy_interval or run.sampling.guidance_interval < 0:
            return None
        plan, step, width = self.plan_on(run.layout, run.device), run.step - 1, run.layout.grid[2]
        # row 0 counts passes as plain decoding does; from row 1 on tokens are counted, from zero again
        decided = sum(plan.n_out[width:step]) if step >= width else step - 1
        on = decided <= run.sampling.guidance_interval
        return torch.full(slots.shape, run.sampling.guidance_scale if on else 1.0, device=run.device)

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        if self._rows:
            return self._rows.judge(run, self.state, law)
        return super().judge(run, proposal, law, output)
