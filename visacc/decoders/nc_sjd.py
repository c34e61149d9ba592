"""Neighbour-corrected coupling: coupled Jacobi decoding whose stale draft laws are corrected before the redraw.

A Jacobi window stalls because one replaced token makes the recorded laws of its right and lower neighbours stale. Here a
pending position's law is shifted at once by what a small table says about the neighbours that changed,

    Z_j  ->  Z_j + sum_o  B_o[new token at j-o] - B_o[token the forward saw at j-o],

(more or less of it, as gates that look at the old law say, see :mod:`visacc.decoders.neighbour_tables`), the draft is
coupled to the shifted law, and the shifted law is recorded. The correction of position j is a function of earlier positions
only, so the recorded law is legal whatever the tables hold: they can cost speed, never exactness. The position under test
is never corrected (all its neighbours are final and equal to what the forward saw).

The sweep is sequential along the window: every position reads the tokens that those before it ended with
(:func:`visacc.kernels.neighbour_sweep`). Fresh positions draw from the additive neighbour model
softmax(base + sum_o B_o[token at j-o]).

Tables come from a file (``visacc calibrate``), or are learned from the decodes themselves
(:mod:`visacc.decoders.nc_online`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visacc.decoders.base import Verdict
from visacc.decoders.jacobi import Jacobi
from visacc.decoders.nc_online import Witness, learner_for, observe
from visacc.decoders.neighbour_tables import TABLE_FILE, NeighbourTables, neighbour_slots, offsets_of
from visacc.kernels import neighbour_sweep
from visacc.models.base import ImageModel, ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run

log = logging.getLogger(__name__)
_NOTICES: WeakKeyDictionary[ImageModel, set[str]] = WeakKeyDictionary()


class NCSJD(Jacobi):
    """Jacobi decoding with neighbour-corrected coupling.

    Args:
        window: tokens read per pass.
        coupling: ``maximal``, ``gumbel`` or ``gumbel-exact`` (token for token plain AR with the same seed).
        tables: a file of :class:`NeighbourTables`, the object itself, a learner to go on with, "online" (learned from
            earlier decodes with this model and these settings), or "auto": the file beside the checkpoint
            (``neighbours.safetensors``), and "online" where there is none.
        fresh: how fresh positions are drafted: ``tables`` (additive neighbour model), or an initialisation of
            :mod:`visacc.decoders.window_init`.
        online: whether "auto" may learn online; ``False`` decodes as mc-sjd where no file is found.
        rank: of the tables learned online.

    Raises:
        ValueError: tables of another model, no tables to be found, unknown switches.
    """

    name = "nc-sjd"
    summary = "coupled Jacobi decoding with neighbour-corrected draft laws"
    requires = frozenset({"grid"})

    def __init__(
        self,
        window: int = 32,
        coupling: str = "maximal",
        tables: str | Path | NeighbourTables | Witness = "auto",
        fresh: str = "tables",
        online: bool = True,
        rank: int = 32,
    ) -> None:
        if coupling == "independent":
            raise ValueError("nc-sjd couples its redraws: choose maximal, gumbel or gumbel-exact")
        if not isinstance(tables, (str, Path, NeighbourTables, Witness)):
            raise ValueError(f"tables must be 'auto', 'online', a file or tables, got {tables!r}")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be an integer of at least 1, got {rank!r}")
        super().__init__(window, coupling, "random" if fresh == "tables" else fresh)
        self.source, self.fresh, self.online, self.rank = tables, fresh, online, rank
        self._tables: NeighbourTables | None = None
        self._learner: Witness | None = None
        self._learns = False
        self._checked: ImageModel | None = None

    def options(self) -> dict[str, Any]:
        where = "given" if isinstance(self.source, (NeighbourTables, Witness)) else str(self.source)
        return {"window": self.window, "coupling": self.coupling, "tables": where, "fresh": self.fresh}

    @property
    def remembers(self) -> bool:
        return self._learns and self.coupling != "gumbel-exact"

    def check(self, model: ImageModel) -> None:
        super().check(model)
        if self._checked is not model:
            tables = self._find(model)
            if tables is not None:
                tables.check(model)
                tables = tables.to(model.device)
            self._tables = tables
            self._checked = model

    def _find(self, model: ImageModel) -> NeighbourTables | None:
        """The tables to use; ``None`` where they are learned online or there are none."""
        self._learns = False
        if isinstance(self.source, NeighbourTables):
            return self.source
        if isinstance(self.source, Witness):
            self._learns = True
            return None
        if str(self.source) == "online":
            self._learns = True
            return None
        if str(self.source) != "auto":
            return NeighbourTables.load(self.source)
        beside = None if model.folder is None else model.folder / TABLE_FILE
        if beside is not None and beside.is_file():
            return NeighbourTables.load(beside)
        self._learns = self.online
        if self._learns:
            text = (
                "they are learned while decoding, so images get faster one by one and, unless coupling is gumbel-exact, a"
                " seed's image depends on what was decoded before (its law does not)"
            )
        else:
            text = "decoding as mc-sjd does"
        log.warning(
            "nc-sjd: no neighbour tables for %s ('visacc calibrate' measures them): %s", model.name, text
        )
        return None

    @property
    def _redraws_in_place(self) -> bool:
        return self._tables is None and super()._redraws_in_place  # the sweep redraws

    def begin(self, run: Run, law: Tensor) -> Tensor:
        self._learner = None
        if self._learns:
            given = self.source if isinstance(self.source, Witness) else None
            self._learner = given or learner_for(run.model, run.sampling, offsets_of(run.layout), self.rank)
            self._tables = self._learner.tables(run.model.fingerprint(), run.sampling.guidance_scale)
        first = super().begin(run, law)
        if self._tables is not None or self._learner is not None:
            source = self._tables or self._learner
            assert source is not None
            self._neighbour = neighbour_slots(run.layout, source.offsets).to(run.device)
        if self._tables is not None:
            # laws are corrected after temperature, the tables hold logits before it; a greedy law cannot move
            heat = 1 / run.sampling.temperature if run.sampling.temperature > 0 else 0.0
            self._right, self._base = self._tables.right * heat, (self._tables.base * heat).softmax(0)
        return first

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        if self._learner is not None:
            state, seen = self.state, _write(run.sequence, proposal.positions, proposal.tokens, proposal.live)
            old = (state.get("z"), state.get("z_seen"), state.get("z_first"))
            before = None if old[0] is None else cast("tuple[Tensor, Tensor, Tensor]", old)
            slots = self.predicted_slots(run, proposal)
            latest = observe(run, self._learner, before, seen, slots, output, self._neighbour)
            state["z"], state["z_seen"], state["z_first"] = latest
        return super().judge(run, proposal, law, output)

    def _refill(
        self,
        run: Run,
        slots: Tensor,
        inside: Tensor,
        law: Tensor,
        survivors: Tensor,
        tokens: Tensor,
        keep: Tensor,
    ) -> None:
        """Shift the window as :class:`Jacobi` does, with the sweep of corrections in place of the plain redraw."""
        size, width = slots.shape[1], self.max_nodes(run.layout) - 1
        if width == 0:
            return
        tables = self._tables
        if tables is None:
            super()._refill(run, slots, inside, law, survivors, tokens, keep)
            return
        drafts, onehot, q = self.state["drafts"], self.state["onehot"], self.state["q"]
        assert drafts is not None and onehot is not None
        gained = keep.sum(1)
        source, carried, place = self._shift(run, gained, width, size)
        first, place = place[:, 0], place.clamp(max=run.total - 1)
        rows = torch.arange(run.batch, device=run.device)[:, None]

        seen = _write(
            run.sequence, inside[:, : size - 1], drafts[:, : size - 1], slots[:, : size - 1] < run.total
        )
        known = _write(run.sequence, inside, tokens, keep)
        start = law[rows, source.clamp(max=size - 1)]
        at = source.clamp(max=drafts.shape[1] - 1)
        has_draft = source < (run.total - 1 - run.count).clamp(min=0, max=size - 1)[:, None]
        old, old_onehot = drafts.gather(1, at), onehot.gather(1, at) & carried
        old_q = None if q is None else q[rows, at]
        gate = tables.gates(start)
        if self.fresh == "tables":
            if gate is not None and tables.fresh_gate is not None:
                gate = torch.where(carried[..., None, None], gate, tables.fresh_gate.to(gate.dtype))
            start = torch.where(carried[..., None], start, self._base.to(start.dtype))
            forced = self._fill.forced
            given = None if forced is None else forced[place] & ~carried
            if given is not None:
                old = old.masked_fill(given, 0)
            fresh_onehot = torch.zeros_like(carried) if given is None else given
        else:
            first_fresh = (slots[:, -1] + 1).clamp(max=run.total)
            plain = self._fill(run, place, first_fresh, known, None, want_q=self._ratio_test)
            given = ~carried
            old, fresh_onehot = torch.where(carried, old, plain.tokens), plain.onehot & ~carried
            if self._ratio_test and plain.q is not None:
                start = torch.where(carried[..., None], start, plain.q)
        swept, laws = neighbour_sweep(
            start,
            old,
            known,
            seen,
            first,
            self._neighbour,
            tables.left,
            self._right,
            ~carried,
            given,
            gate,
            **self._choices(run, place, old_q, old_onehot, has_draft & carried),
        )
        self.state["drafts"], self.state["onehot"] = swept, fresh_onehot
        if self._ratio_test:
            self.state["q"] = laws

    def _choices(
        self, run: Run, place: Tensor, q: Tensor | None, onehot: Tensor, has_draft: Tensor
    ) -> dict[str, Any]:
        """What the coupling needs to redraw the slots ``place`` [B, W]."""
        if self.coupling != "maximal":
            run.noise.prepare(run.high + (run.since_check + 2) * self.window)
            return {"E": run.noise.exponential(place)}
        u, word, _ = run.noise.decisions(place, run.step)
        return {"q": q, "q_onehot": onehot, "has_draft": has_draft, "u": u, "U": word}


def _write(sequence: Tensor, slots: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    """``sequence`` [B, total] with the ``real`` tokens [B, W] written at their slots."""
    total = sequence.shape[1]
    padded = torch.cat([sequence, sequence[:, :1]], dim=1)
    return padded.scatter(1, torch.where(real, slots, total), tokens)[:, :total]
