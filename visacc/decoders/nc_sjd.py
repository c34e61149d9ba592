"""Neighbour-corrected coupling: coupled Jacobi decoding whose stale draft laws are corrected before the redraw.

A Jacobi window stalls because one replaced token makes the recorded laws of its right and lower neighbours stale. Here a
pending position's law is shifted at once by what a small table says about the neighbours that changed,

    Z_j  ->  Z_j + sum_o  B_o[new token at j-o] - B_o[token the forward saw at j-o],

the draft is coupled to the shifted law, and the shifted law is recorded. The correction of position j is a function of
earlier positions only, so the recorded law is legal whatever the tables hold: they can cost speed, never exactness. The
position under test is never corrected (all its neighbours are final and equal to what the forward saw).

The sweep is sequential along the window. It runs here as a few passes over all positions at once that reuse each
position's random numbers; after as many passes as the window is long it *is* the sequential sweep, and long before in
practice. Fresh positions draw from the additive neighbour model softmax(base + sum_o B_o[token at j-o]).

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

from visacc.decoders.base import Verdict, gumbel_draw
from visacc.decoders.jacobi import Jacobi
from visacc.decoders.nc_online import MAX_CODES, Learner, learner_for, observe
from visacc.decoders.neighbour_tables import IMAGE_OFFSETS, TABLE_FILE, NeighbourTables, neighbour_slots
from visacc.kernels import rng, window_resample
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
            earlier decodes with this model), or "auto": the file beside the checkpoint (``neighbours.safetensors``), and
            "online" where there is none.
        passes: passes of the sweep.
        fresh: how fresh positions are drafted: ``tables`` (additive neighbour model), or an initialisation of
            :mod:`visacc.decoders.window_init`.
        online: whether "auto" may learn online; ``False`` decodes as mc-sjd where no file is found.
        rank: of the tables learned online.

    Raises:
        ValueError: tables of another model, no tables to be found, more codes than can be learned, unknown switches.
    """

    name = "nc-sjd"
    summary = "coupled Jacobi decoding with neighbour-corrected draft laws"
    requires = frozenset({"grid"})

    def __init__(
        self,
        window: int = 32,
        coupling: str = "maximal",
        tables: str | Path | NeighbourTables | Learner = "auto",
        passes: int = 4,
        fresh: str = "tables",
        online: bool = True,
        rank: int = 32,
    ) -> None:
        if coupling == "independent":
            raise ValueError("nc-sjd couples its redraws: choose maximal, gumbel or gumbel-exact")
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"passes must be an integer of at least 1, got {passes!r}")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be an integer of at least 1, got {rank!r}")
        super().__init__(window, coupling, "random" if fresh == "tables" else fresh)
        self.source, self.passes, self.fresh, self.online, self.rank = tables, passes, fresh, online, rank
        self._tables: NeighbourTables | None = None
        self._learner: Learner | None = None
        self._learns = False
        self._checked: ImageModel | None = None

    def options(self) -> dict[str, Any]:
        where = "given" if isinstance(self.source, (NeighbourTables, Learner)) else str(self.source)
        return {
            "window": self.window,
            "coupling": self.coupling,
            "tables": where,
            "passes": self.passes,
            "fresh": self.fresh,
        }

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
        if isinstance(self.source, Learner):
            self._learns = True
            return None
        vocab = model.layout.vocab
        if str(self.source) == "online":
            if vocab > MAX_CODES:
                raise ValueError(
                    f"neighbour tables are learned online for up to {MAX_CODES} codes, {model.name} has {vocab}; measure"
                    " them with 'visacc calibrate' and pass tables=FILE"
                )
            self._learns = True
            return None
        if str(self.source) != "auto":
            return NeighbourTables.load(self.source)
        beside = None if model.folder is None else model.folder / TABLE_FILE
        if beside is not None and beside.is_file():
            return NeighbourTables.load(beside)
        self._learns = self.online and vocab <= MAX_CODES
        if self._learns:
            text = (
                "they are learned while decoding, so images get faster one by one and, unless coupling is gumbel-exact, a"
                " seed's image depends on what was decoded before (its law does not)"
            )
        else:
            text = "decoding as mc-sjd does" + (
                f" (online learning takes up to {MAX_CODES} codes, this model has {vocab})"
                if self.online
                else ""
            )
        log.warning(
            "nc-sjd: no neighbour tables for %s ('visacc calibrate' measures them): %s", model.name, text
        )
        return None

    @property
    def _redraws_in_place(self) -> bool:
        return self._tables is None and super()._redraws_in_place  # the sweep redraws

    @staticmethod
    def _settled(before: Tensor, tokens: Tensor) -> bool:
        """Whether further passes would change nothing. Only a CPU looks, where looking is free."""
        return tokens.device.type == "cpu" and torch.equal(before, tokens)

    def begin(self, run: Run, law: Tensor) -> Tensor:
        if self._learns:
            given = self.source if isinstance(self.source, Learner) else None
            self._learner = given or learner_for(run.model, run.sampling, IMAGE_OFFSETS)
            self._tables = self._learner.tables(
                self.rank, run.model.fingerprint(), run.sampling.guidance_scale
            )
        first = super().begin(run, law)
        if self._tables is not None or self._learner is not None:
            offsets = self._learner.offsets if self._tables is None and self._learner else IMAGE_OFFSETS
            offsets = offsets if self._tables is None else self._tables.offsets
            neighbour = neighbour_slots(run.layout, offsets).to(run.device)
            self._neighbour, self._has = neighbour.clamp(min=0), neighbour >= 0
        self._heat = 1 / run.sampling.temperature if run.sampling.temperature > 0 else 0.0
        return first

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        if self._learner is not None:
            state, seen = self.state, _write(run.sequence, proposal.positions, proposal.tokens, proposal.live)
            old = (state.get("z"), state.get("z_seen"), state.get("z_first"))
            before = None if old[0] is None else cast("tuple[Tensor, Tensor, Tensor]", old)
            slots = self.predicted_slots(run, proposal)
            latest = observe(run, self._learner, before, seen, slots, output, self._neighbour, self._has)
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
        source = gained[:, None] + torch.arange(width, device=run.device)
        carried = source < size
        new_slots = (run.count + gained)[:, None] + torch.arange(width, device=run.device)
        place = new_slots.clamp(max=run.total - 1)
        rows = torch.arange(run.batch, device=run.device)[:, None]

        seen = _write(
            run.sequence, inside[:, : size - 1], drafts[:, : size - 1], slots[:, : size - 1] < run.total
        )
        known = _write(run.sequence, inside, tokens, keep)
        first_fresh = (slots[:, -1] + 1).clamp(max=run.total)
        plain = self._fill(run, place, first_fresh, known, None, want_q=self._ratio_test)

        start = law[rows, source.clamp(max=size - 1)].log()
        if self.fresh == "tables":
            start = torch.where(carried[..., None], start, tables.base * self._heat)
        sweep = _Sweep(self, tables, run, place, new_slots < run.total, carried, seen, start)
        if self._ratio_test:
            has_draft = source < (run.total - 1 - run.count).clamp(min=0, max=size - 1)[:, None]
            at = source.clamp(max=drafts.shape[1] - 1)
            sweep.couple(
                drafts.gather(1, at), None if q is None else q[rows, at], onehot.gather(1, at), has_draft
            )
        swept, laws = sweep.run_passes(known, plain.tokens, self.passes, correct_fresh=self.fresh == "tables")
        if self.fresh == "tables":
            forced = (
                torch.zeros_like(carried)
                if self._fill.forced is None
                else self._fill.forced[place] & ~carried
            )
            self.state["drafts"] = torch.where(forced, 0, swept)
            self.state["onehot"] = forced
        else:
            self.state["drafts"] = torch.where(carried, swept, plain.tokens)
            self.state["onehot"] = ~carried & plain.onehot
            if self._ratio_test and plain.q is not None:
                laws = torch.where(carried[..., None], laws, plain.q)
        if self._ratio_test:
            self.state["q"] = laws


class _Sweep:
    """Passes of correction and redraw over the shifted window [B, W]."""

    def __init__(
        self,
        decoder: NCSJD,
        tables: NeighbourTables,
        run: Run,
        place: Tensor,
        real: Tensor,
        carried: Tensor,
        seen: Tensor,
        start: Tensor,
    ) -> None:
        self.decoder, self.run, self.tables = decoder, run, tables
        self.place, self.real, self.carried, self.start = place, real, carried, start
        self.cells = decoder._neighbour[:, place]  # [O, B, W]
        self.valid = decoder._has[:, place]
        # what the forward saw counts against a carried position; a fresh one starts from the bare base law
        self.offset = self._features(seen, self.valid & carried)
        self.exact = decoder.coupling != "maximal"
        if not self.exact:
            self.u = run.noise.uniform(rng.ACCEPT, place, run.step).flatten()
            self.word = run.noise.integer(rng.RESIDUAL, place, run.step).flatten()

    def _features(self, tokens: Tensor, valid: Tensor) -> Tensor:
        """Concatenated left factors of the neighbours' tokens [B, W, O r]; ``tokens`` [B, total] by slot."""
        batch = torch.arange(tokens.shape[0], device=tokens.device)[None, :, None]
        ids = tokens[batch, self.cells]  # [O, B, W]
        order = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
        features = self.tables.left[order, ids] * valid[..., None]
        return features.permute(1, 2, 0, 3).flatten(2)

    def couple(self, drafts: Tensor, q: Tensor | None, onehot: Tensor, has_draft: Tensor) -> None:
        """The old drafts and the laws they were drawn from, for the couplings that need them."""
        self.drafts, self.q, self.onehot, self.has_draft = drafts, q, onehot, has_draft & self.carried

    def run_passes(
        self, known: Tensor, fresh: Tensor, passes: int, *, correct_fresh: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the drafts [B, W] and their laws [B, W, V] after the last pass."""
        moving = self.carried | correct_fresh
        weights = self.tables.right.flatten(0, 1) * self.decoder._heat
        law = self.start.softmax(2)
        tokens = torch.where(moving, self._redraw(law), fresh)
        for _ in range(passes):
            before = tokens
            current = _write(known, self.place, before, self.real)
            shift = (self._features(current, self.valid) - self.offset) @ weights
            law = (self.start + shift).softmax(2)
            tokens = torch.where(moving, self._redraw(law), fresh)
            if self.decoder._settled(before, tokens):
                break
        return tokens, law

    def _redraw(self, law: Tensor) -> Tensor:
        if self.exact:
            run = self.run
            return gumbel_draw(run, law, self.place, run.high + (run.since_check + 2) * self.decoder.window)
        vocab = law.shape[2]
        _, tokens = window_resample(
            law.reshape(-1, vocab),
            None if self.q is None else self.q.reshape(-1, vocab),
            self.drafts.reshape(-1),
            self.u,
            self.word,
            self.onehot.reshape(-1),
            has_draft=self.has_draft.reshape(-1),
        )
        return tokens.view(law.shape[:2])


def _write(sequence: Tensor, slots: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    """``sequence`` [B, total] with the ``real`` tokens [B, W] written at their slots."""
    total = sequence.shape[1]
    padded = torch.cat([sequence, sequence[:, :1]], dim=1)
    return padded.scatter(1, torch.where(real, slots, total), tokens)[:, :total]
