"""Neighbour tables learned while decoding: no calibration, no data, no gradients.

Whenever a position is evaluated in two passes in a row and tokens at its table neighbours changed in between, the move
of its raw guided logits is an observation of the tables' effect (the position's own token plays no part in it). With
changes C = {(o, a -> b)}, e the move, y = sum_C B_o[b] - B_o[a] the predicted one, both centred by the weights
w = (p_old + p_new) / 2,

    r = (e - y) w / (w + 0.2 / V),      B_o[b] += eta r,   B_o[a] -= eta r,     eta = min(1, 8 / (4 + visits)) / (2 |C|).

*Delayed release*: a decode reads a frozen copy made when it began; what it observes reaches later decodes only. Within
a decode the tables are therefore constants, whatever was seen before, and the output law stays exact. Images do depend
on what was decoded before (their law does not), except with coupling ``gumbel-exact``.

*Gate*: every observation first tests the table it is about to change; the table of an offset is used with the factor
clip(sum e_o y_o / sum y_o^2, 0, 1), so that a table that predicts nothing is switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visacc.decoders.neighbour_tables import NeighbourTables, Offset, low_rank
from visacc.models.base import ImageModel, ModelOutput
from visacc.sampling import SamplingParams

if TYPE_CHECKING:
    from visacc.engine import Run

MAX_CODES = 4096
_FLOOR = -30.0  # log-probabilities below this carry no information, and -inf no difference
_MEMORY = 0.98  # of the gate, per pass


class Learner:
    """Full tables of one model at one guidance setting, and what has been seen of them.

    Args:
        vocab: number of codes V.
        offsets: O grid offsets.

    Attributes:
        full: float32 [O, V, V].
        visits: float32 [O, V] observations of each row so far.
        passes: forwards observed so far.
    """

    def __init__(self, vocab: int, offsets: tuple[Offset, ...], device: torch.device) -> None:
        count = len(offsets)
        self.vocab, self.offsets = vocab, offsets
        self.full = torch.zeros(count, vocab, vocab, device=device)
        self.visits = torch.zeros(count, vocab, device=device)
        self.passes = 0
        self._cross, self._square = torch.zeros(count, device=device), torch.zeros(count, device=device)
        self._logits = torch.zeros(vocab, dtype=torch.float64, device=device)
        self._seen = torch.zeros(count, vocab, dtype=torch.float64, device=device)
        self._positions = torch.zeros((), dtype=torch.float64, device=device)
        self._frozen: NeighbourTables | None = None
        self._frozen_at = 0

    @property
    def device(self) -> torch.device:
        return self.full.device

    def start_from(self, tables: NeighbourTables, visits: float = 16.0) -> None:
        """Begin with measured tables, trusted as much as that many observations of each row."""
        self.full = (tables.left @ tables.right).to(self.device)
        self.visits.fill_(visits)
        self._cross.fill_(1.0)
        self._square.fill_(1.0)
        self._frozen = tables.to(self.device)

    @property
    def gate(self) -> Tensor:
        """float32 [O]: factor with which each offset's table is used."""
        return torch.where(self._square > 0, self._cross / self._square.clamp(min=1e-12), 0).clamp(0, 1)

    def tables(self, rank: int, fingerprint: str, guidance_scale: float) -> NeighbourTables | None:
        """What has been learned so far as low-rank tables; before the first observation what it started from, or ``None``.

        Renewed once a tenth more has been seen; the caller may keep the object, it never changes.
        """
        if not self.passes:
            return self._frozen
        if self._frozen is None or self._frozen.rank != rank or self.passes > 1.1 * self._frozen_at:
            left, right = low_rank(self.full * self.gate[:, None, None], min(rank, self.vocab))
            share = (self._seen / self._positions.clamp(min=1)).float()
            base = (self._logits / self._positions.clamp(min=1)).float()
            base = base - torch.einsum("ov,ovr,orw->w", share, left, right)
            self._frozen = NeighbourTables(self.offsets, left, right, base, fingerprint, guidance_scale)
            self._frozen_at = self.passes
        return self._frozen

    def look(self, z: Tensor, ids: Tensor, has: Tensor, real: Tensor) -> None:
        """Count one pass towards the mean logits that no neighbour explains.

        Args:
            z: float32 [B, N, V] log-probabilities of the raw guided logits.
            ids: int64 [O, B, N] neighbours' tokens; has: bool [O, B, N] where there is one.
            real: bool [B, N] image slots inside the layout.
        """
        self.passes += 1
        self._logits += torch.einsum("bnv,bn->v", z, real.float()).double()
        self._positions += real.sum()
        for o in range(len(self.offsets)):
            self._seen[o].index_add_(0, ids[o].flatten(), (has[o] & real).flatten().double())

    def learn(self, old_z: Tensor, z: Tensor, old_ids: Tensor, ids: Tensor, changed: Tensor) -> None:
        """Learn from positions that were evaluated twice.

        Args:
            old_z, z: float32 [B, N, V] log-probabilities before and now.
            old_ids, ids: int64 [O, B, N] neighbours' tokens that the two passes saw.
            changed: bool [O, B, N] where they differ (False where there is no pair to compare).
        """
        weight = (old_z.exp() + z.exp()) / 2
        # few positions move in a pass, but which ones only the device knows: all take part, most with weight 0
        weight = weight * changed.any(0)[..., None]

        def centred(move: Tensor) -> Tensor:
            return move - (weight * move).sum(2, keepdim=True)

        error = centred(z - old_z)
        moves = [
            centred((self.full[o][ids[o]] - self.full[o][old_ids[o]]) * changed[o][..., None])
            for o in range(len(self.offsets))
        ]
        for move in moves:
            error = error - move
        for o, move in enumerate(moves):
            alone = error + move  # what is left to explain once the other offsets have spoken
            self._cross[o] = _MEMORY * self._cross[o] + (weight * alone * move).sum()
            self._square[o] = _MEMORY * self._square[o] + (weight * move * move).sum()
        step = error * (weight / (weight + 0.2 / self.vocab))
        shared = changed.sum(0).clamp(min=1)
        for o in range(len(self.offsets)):
            rows = torch.cat([ids[o].flatten(), old_ids[o].flatten()])
            hit = changed[o].flatten().float().repeat(2)
            rate = hit * (8 / (4 + self.visits[o][rows])).clamp(max=1) / (2 * shared.flatten().repeat(2))
            # a row that this pass meets many times takes the mean of its steps, not their sum
            crowd = torch.zeros_like(self.visits[o]).index_add_(0, rows, rate).clamp(min=1)
            rate = rate / crowd[rows]
            sign = torch.ones_like(rate)
            sign[rate.numel() // 2 :] = -1
            self.full[o].index_add_(0, rows, step.flatten(0, 1).repeat(2, 1) * (rate * sign)[:, None])
            self.visits[o].index_add_(0, rows, hit)


_LEARNERS: WeakKeyDictionary[ImageModel, dict[tuple[float, int], Learner]] = WeakKeyDictionary()


def learner_for(model: ImageModel, sampling: SamplingParams, offsets: tuple[Offset, ...]) -> Learner:
    """The learner of a model at a guidance setting. It lives as long as the model does."""
    known = _LEARNERS.setdefault(model, {})
    key = (sampling.guidance_scale, sampling.guidance_interval if sampling.guided else -1)
    if key not in known or known[key].device != model.device or known[key].vocab != model.layout.vocab:
        known[key] = Learner(model.layout.vocab, offsets, model.device)
    return known[key]


def forget(model: ImageModel) -> None:
    """Drop everything learned about a model."""
    _LEARNERS.pop(model, None)


def guided_log_probs(output: ModelOutput, slots: Tensor, sampling: SamplingParams) -> Tensor:
    """float32 [B, N, V]: log-softmax of the guided logits, before temperature, top-k and top-p."""
    z = output.logits.float()
    if output.uncond is not None:
        scale: float | Tensor = sampling.guidance_scale
        if sampling.guidance_interval >= 0:
            guided = slots <= sampling.guidance_interval + 1
            scale = torch.where(guided, sampling.guidance_scale, 1.0)[..., None]
        z = output.uncond.float() + scale * (z - output.uncond.float())
    return z.log_softmax(2).clamp_(min=_FLOOR)


def observe(
    run: Run,
    learner: Learner,
    before: tuple[Tensor, Tensor, Tensor] | None,
    seen: Tensor,
    slots: Tensor,
    output: ModelOutput,
    neighbour: Tensor,
    has: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass of a window for the learner.

    Args:
        before: what the call for the previous pass returned.
        seen: int64 [B, total] tokens by slot that the forward saw.
        slots: int64 [B, N] consecutive slots that the outputs predict (may lie beyond the layout).
        neighbour, has: int64 and bool [O, total] slot of each neighbour and whether it exists.

    Returns:
        log-probabilities [B, N, V], ``seen``, and the first slot [B]: to be kept per row until the next pass.
    """
    z = guided_log_probs(output, slots, run.sampling)
    place = slots.clamp(max=run.total - 1)
    inside = slots < run.total
    cells, there = neighbour[:, place], has[:, place] & inside
    real = inside
    if run.layout.forced_ids is not None:
        real = inside & (run.layout.forced_ids.to(run.device)[place] < 0)
    rows = torch.arange(run.batch, device=run.device)[:, None]
    ids = seen[rows[None], cells]
    learner.look(z, ids, there, real)
    if before is not None:
        old_z, old_seen, old_first = before
        index = slots - old_first[:, None]
        both = (index < old_z.shape[1]) & real
        old_ids = old_seen[rows[None], cells]
        changed = there & both & (ids != old_ids)
        learner.learn(old_z[rows, index.clamp(max=old_z.shape[1] - 1)], z, old_ids, ids, changed)
    return z, seen, slots[:, 0]
