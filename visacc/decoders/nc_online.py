"""Neighbour tables learned from what decodes show: no data, no gradients of the model.

Whenever a position is evaluated in two passes in a row and tokens at its table neighbours changed in between, the two laws
are an observation of what the change did (the position's own token plays no part in it). Observations are kept in a ring;
the tables, their gates and the base law are fitted to them by Adam on

    CE(law now, softmax(old logits + shift)) + FRESH CE(law now, softmax(base + shift of all neighbours)).

*Delayed release*: a decode reads a frozen copy made when it began; what it shows reaches later decodes only. Within a
decode the tables are therefore constants, whatever was seen before, and the output law stays exact. Images do depend on
what was decoded before (their law does not), except with coupling ``gumbel-exact``.

Tables are released once they have brought stale laws closer to the true ones than leaving them alone, on observations
that they were not fitted to yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from visacc.decoders.neighbour_tables import NeighbourTables, Offset, gates
from visacc.kernels import process_logits
from visacc.models.base import ImageModel, ModelOutput
from visacc.sampling import SamplingParams

if TYPE_CHECKING:
    from visacc.engine import Run

LOOKS = 32
"""Directions of a law that the gates look at."""

FRESH = 0.2
"""Weight of the first law of fresh positions beside the corrections."""

RATE = 0.02
BATCH = 256
ROOM = 1 << 26
"""Bytes of observations that online learning keeps."""

_FLOOR = -30.0  # log-probabilities below this carry no information, and -inf no difference
_MEMORY = 0.98  # of the release test, per pass


class Witness:
    """Keeps what passes show.

    Args:
        vocab: number of codes V.
        offsets: O grid offsets.
        tables: what the decodes that are watched correct with.
        room: bytes of observations to keep; the newest stay.
        share: part of the positions of a pass that is kept.

    Attributes:
        old, new: float16 [room, V] log-probabilities (guided, before temperature) in the pass before, and now.
        was, now: int32 [room, O] the neighbours' tokens that the two passes saw, -1 for none.
        ahead: int32 [room] positions between the first one tested now and this one, -1 for an entry without content.
    """

    def __init__(
        self,
        vocab: int,
        offsets: tuple[Offset, ...],
        device: torch.device,
        tables: NeighbourTables | None = None,
        *,
        room: int = ROOM,
        share: float = 0.25,
    ) -> None:
        self.vocab, self.offsets, self.share, self._frozen = vocab, offsets, share, tables
        size = max(room // (4 * vocab + 8 * len(offsets) + 4), BATCH)
        with torch.inference_mode(False):
            laws = torch.zeros(2, size, vocab, dtype=torch.float16, device=device)
            tokens = torch.full((2, size, len(offsets)), -1, dtype=torch.int32, device=device)
            self.ahead = torch.full((size,), -1, dtype=torch.int32, device=device)
        (self.old, self.new), (self.was, self.now) = laws.unbind(), tokens.unbind()
        self.passes = self.size = self._next = 0
        self.generator = torch.Generator(device=device).manual_seed(0)

    @property
    def device(self) -> torch.device:
        return self.old.device

    def tables(self, fingerprint: str, guidance_scale: float) -> NeighbourTables | None:
        """What the next decode corrects with; ``None`` for nothing. The caller may keep the object, it never changes."""
        return self._frozen

    @torch.inference_mode(False)
    @torch.no_grad()
    def look(
        self, old: Tensor, new: Tensor, was: Tensor, now: Tensor, changed: Tensor, ahead: Tensor
    ) -> Tensor:
        """One pass.

        Args:
            old, new: float32 [B, N, V] log-probabilities before and now.
            was, now: int64 [O, B, N] neighbours' tokens that the two passes saw, -1 for none.
            changed: bool [B, N] positions that both passes evaluated, with a neighbour that changed.
            ahead: int64 [N] positions between the first one tested now and each.

        Returns:
            int64 where the observations were put.
        """
        self.passes += 1
        many = changed.numel()
        count = min(max(round(self.share * many), min(many, 64)), len(self.old))
        # as many on every pass: only the device knows how many changed, and entries without content weigh nothing
        order = torch.rand(many, generator=self.generator, device=self.device) * changed.flatten()
        score, pick = order.topk(count)
        place = (torch.arange(count, device=self.device) + self._next) % len(self.old)
        if self.device.type == "cpu":
            pick = pick[score > 0]
            count = len(pick)
            place, score = place[:count], score[:count]
        self.old[place], self.new[place] = (z.flatten(0, 1)[pick].half() for z in (old, new))
        self.was[place], self.now[place] = (t.flatten(1)[:, pick].T.int() for t in (was, now))
        self.ahead[place] = torch.where(score > 0, ahead.expand(changed.shape).flatten()[pick], -1).int()
        self._next = (self._next + count) % len(self.old)
        self.size = min(self.size + count, len(self.old))
        return place


class Learner(Witness):
    """Tables of one model at one sampling setting, fitted to what was seen so far.

    Args:
        sampling: the setting of the decodes that are watched.
        rank: of the tables.
        steps: fitting steps after every pass.
    """

    def __init__(
        self,
        vocab: int,
        offsets: tuple[Offset, ...],
        device: torch.device,
        sampling: SamplingParams,
        *,
        rank: int = 32,
        steps: int = 1,
        room: int = ROOM,
        share: float = 0.25,
    ) -> None:
        super().__init__(vocab, offsets, device, room=room, share=share)
        self.sampling, self.steps, self.rank = sampling, steps, min(rank, vocab)
        self.heat = heat_of(sampling)
        count, start = len(offsets), torch.Generator().manual_seed(0)
        with torch.inference_mode(False):
            self._stale, self._mended = (torch.zeros((), device=device) for _ in range(2))
            shapes = {
                "left": torch.zeros(count, vocab, self.rank),
                "right": 0.3 * torch.randn(count, self.rank, vocab, generator=start),
                "base": torch.zeros(vocab),
                "probe": torch.randn(vocab, LOOKS, generator=start),
                "mixer": torch.zeros(LOOKS, count, self.rank),
                "fresh_gate": torch.ones(count, self.rank),
            }
            self.weights = {n: nn.Parameter(t.to(device)) for n, t in shapes.items()}
        self._adam = torch.optim.Adam(self.weights.values(), lr=RATE, betas=(0.9, 0.99))
        self._taken = 0

    @property
    def useful(self) -> bool:
        """Whether the tables have brought new observations closer so far."""
        return bool(self._mended < self._stale)

    def tables(self, fingerprint: str, guidance_scale: float) -> NeighbourTables | None:
        if not self._taken or (self.steps and not self.useful):
            return None
        copies = {n: w.detach().clone() for n, w in self.weights.items()}
        return NeighbourTables(self.offsets, fingerprint=fingerprint, guidance_scale=guidance_scale, **copies)

    @torch.inference_mode(False)
    @torch.no_grad()
    def look(
        self, old: Tensor, new: Tensor, was: Tensor, now: Tensor, changed: Tensor, ahead: Tensor
    ) -> Tensor:
        place = super().look(old, new, was, now, changed, ahead)
        if self.steps:
            stale, mended = distances(self, place[:64], self.weights, self.sampling)
            counts = self.ahead[place[:64]] >= 0
            self._stale = _MEMORY * self._stale + (stale * counts).sum()
            self._mended = _MEMORY * self._mended + (mended * counts).sum()
            self.fit(self.steps, rate=RATE / (1 + self._taken / 2000))
        return place

    def fit(self, steps: int, *, rate: float = RATE, fade: bool = False) -> None:
        """Take ``steps`` steps of Adam on random observations, at a rate that falls to zero if ``fade``."""
        if not self.size:
            return
        with torch.inference_mode(False), torch.enable_grad():
            for step in range(steps):
                for group in self._adam.param_groups:
                    group["lr"] = rate * (1 - step / steps) if fade else rate
                pick = torch.randint(self.size, (BATCH,), generator=self.generator, device=self.device)
                loss = self._loss(pick)
                self._adam.zero_grad()
                loss.backward()
                self._adam.step()
        self._taken += steps

    def _loss(self, pick: Tensor) -> Tensor:
        weight = (self.ahead[pick] >= 0).float()
        target = (self.new[pick].float() * self.heat).softmax(1)
        _, corrected, first = predict(self, pick, self.weights, self.sampling)
        each = -(target * (corrected.log_softmax(1) + FRESH * first.log_softmax(1))).sum(1)
        return (weight * each).sum() / weight.sum().clamp(min=1)


def heat_of(sampling: SamplingParams) -> float:
    """What logits are multiplied with; greedy laws are compared as they are at temperature 1."""
    return 1 / sampling.temperature if sampling.temperature > 0 else 1.0


def predict(
    seen: Witness, pick: Tensor, tables: Mapping[str, Tensor], sampling: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V] after temperature of the observations ``pick`` [n]: the old ones, those corrected by the tensors of
    tables (see :attr:`NeighbourTables.tensors`), and those of the neighbours alone."""
    heat, order = heat_of(sampling), torch.arange(len(seen.offsets), device=seen.device)
    old = seen.old[pick].float() * heat
    was, now = seen.was[pick].long(), seen.now[pick].long()
    row = tables["left"][order, now.clamp(min=0)] * (now >= 0)[..., None]
    change = row - tables["left"][order, was.clamp(min=0)] * (was >= 0)[..., None]
    if "probe" in tables:
        change = change * gates(_law(old, sampling), tables["probe"], tables["mixer"])
        row = row * tables["fresh_gate"]
    right = heat * tables["right"].flatten(0, 1)
    return old, old + change.flatten(1) @ right, heat * tables["base"] + row.flatten(1) @ right


def _law(heated: Tensor, sampling: SamplingParams) -> Tensor:
    """Processed laws, as the decoder sees them."""
    top_k = sampling.top_k if 0 < sampling.top_k < heated.shape[1] else None
    if top_k is None and sampling.top_p == 1:
        return heated.softmax(1)
    return process_logits(heated, top_k=top_k, top_p=None if sampling.top_p == 1 else sampling.top_p)


@torch.no_grad()
def distances(
    seen: Witness, pick: Tensor, tables: Mapping[str, Tensor], sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Total variation [n] between the law that the next pass found and the old one, and the corrected one."""
    target = (seen.new[pick].float() * heat_of(sampling)).softmax(1)
    old, corrected, _ = (z.softmax(1) for z in predict(seen, pick, tables, sampling))
    return (old - target).abs().sum(1) / 2, (corrected - target).abs().sum(1) / 2


_LEARNERS: WeakKeyDictionary[ImageModel, dict[tuple[SamplingParams, int], Learner]] = WeakKeyDictionary()


def learner_for(
    model: ImageModel, sampling: SamplingParams, offsets: tuple[Offset, ...], rank: int = 32
) -> Learner:
    """The learner of a model at a sampling setting. It lives as long as the model does."""
    known = _LEARNERS.setdefault(model, {})
    key = (sampling, rank)
    if key not in known or known[key].device != model.device or known[key].vocab != model.layout.vocab:
        known[key] = Learner(model.layout.vocab, offsets, model.device, sampling, rank=rank)
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
    witness: Witness,
    before: tuple[Tensor, Tensor, Tensor] | None,
    seen: Tensor,
    slots: Tensor,
    output: ModelOutput,
    neighbour: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass of a window for the witness.

    Args:
        before: what the call for the previous pass returned.
        seen: int64 [B, total] tokens by slot that the forward saw.
        slots: int64 [B, N] consecutive slots that the outputs predict (may lie beyond the layout).
        neighbour: int64 [O, total] slot of each neighbour, -1 where there is none.

    Returns:
        log-probabilities [B, N, V], ``seen``, and the first slot [B]: to be kept per row until the next pass.
    """
    z = guided_log_probs(output, slots, run.sampling)
    if before is not None:
        old_z, old_seen, old_first = before
        place, index = slots.clamp(max=run.total - 1), slots - old_first[:, None]
        both = (slots < run.total) & (index < old_z.shape[1])
        rows = torch.arange(run.batch, device=run.device)[:, None]
        cells = neighbour[:, place]
        there, cells = cells >= 0, cells.clamp(min=0)
        was, now = (torch.where(there, tokens[rows, cells], -1) for tokens in (old_seen, seen))
        old = old_z[rows, index.clamp(max=old_z.shape[1] - 1)]
        ahead = torch.arange(slots.shape[1], device=run.device)
        witness.look(old, z, was, now, (was != now).any(0) & both, ahead)
    return z, seen, slots[:, 0]
