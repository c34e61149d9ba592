"""Measuring neighbour tables from a model's own samples: no data, no gradients.

For contexts taken from the model's own images, one token is replaced by other codes and the laws of the positions that
have it as a neighbour are read off; the tables are the mean effect of each code, centred. See
:mod:`visacc.decoders.neighbour_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.ar import AR
from visacc.decoders.nc_online import MAX_CODES, Learner
from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import IMAGE_OFFSETS, NeighbourTables, Offset, low_rank
from visacc.engine import decode
from visacc.models.base import Conditioning, DecodeState, ImageModel, ModelOutput, Proposal
from visacc.sampling import SamplingParams, probs


@dataclass
class Staleness:
    """How far the law of a position moves when one neighbour's token changes, by offset.

    Attributes:
        before: float [O] mean total variation between the laws under the old and the new token.
        after: float [O] the same with the table's correction applied to the old law.
    """

    offsets: tuple[Offset, ...]
    before: list[float]
    after: list[float]

    @property
    def ratio(self) -> list[float]:
        return [a / b if b else 1.0 for a, b in zip(self.after, self.before, strict=True)]


def calibrate(
    model: ImageModel,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    *,
    contexts: int = 128,
    rank: int = 32,
    codes: int = 512,
    refine: int = 0,
    seed: int = 0,
    rows: int = 64,
    offsets: tuple[Offset, ...] = IMAGE_OFFSETS,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[NeighbourTables, Staleness]:
    """Measure tables on ``contexts`` random positions of the model's own images.

    Four fifths of the contexts make the tables, the others measure what they are worth (and gate each offset).

    Args:
        prompts: prompts (or labels) to sample from, used in turn.
        sampling: the settings that will be decoded with (the tables are those of the guided raw logits).
        rank: of the factors.
        codes: codes tried per context: three quarters the most probable ones, the others random.
        refine: images to decode afterwards with the tables, learning from what the passes show (up to 4096 codes).
        rows: codes tried per forward.

    Returns:
        The tables, and the total variation by offset before and after the correction on the held-out contexts.

    Raises:
        ValueError: a model without a grid, too few contexts or codes, a rank beyond the number of codes.
    """
    if "grid" not in model.provides:
        raise ValueError(f"{model.name} has no token grid; neighbour tables need one")
    if "tree_mask" not in model.provides:
        raise ValueError(f"{model.name} takes no tree masks, which trying many codes at one position needs")
    if contexts < 8:
        raise ValueError(f"contexts must be at least 8, got {contexts}")
    vocab = model.layout.vocab
    if not 1 <= rank <= vocab:
        raise ValueError(f"rank must lie in 1..{vocab} (the number of codes), got {rank}")
    if codes < 2:
        raise ValueError(f"codes must be at least 2, got {codes}")
    images = max(1, -(-contexts // 3))
    texts = [prompts[i % len(prompts)] for i in range(images)]
    sequences = _sample(model, texts, sampling, seed)
    picks = _positions(model, contexts, seed)
    held_from = round(0.8 * contexts)
    sums = EffectSums(len(offsets), vocab, rank, warm_up=max(4, contexts // 5))
    generator = torch.Generator().manual_seed(seed)
    held: list[tuple[int, Tensor, Tensor, Tensor]] = []
    for i, slot in enumerate(picks):
        image = i % images
        cond = model.encode([texts[image]])
        found = _effects(
            model, cond, sequences[image], slot, sampling, offsets, min(codes, vocab), rows, generator
        )
        if i < held_from:
            sums.add(found, int(sequences[image, slot]))
        else:
            held += _pairs(found, generator)
        if progress:
            progress(i + 1, len(picks))
    left, right = sums.factors(rank)
    tables = NeighbourTables(offsets, left, right, sums.base(), model.fingerprint(), sampling.guidance_scale)
    tables.left *= _gate(tables, held)[:, None, None]
    tables.base -= _explained(model, sequences, tables)
    if refine:
        tables = _refined(model, tables, prompts, sampling, refine, seed + images)
    return tables, _staleness(tables, held, sampling)


def _refined(
    model: ImageModel,
    tables: NeighbourTables,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    images: int,
    seed: int,
) -> NeighbourTables:
    """The tables after learning from ``images`` decodes that use them."""
    if model.layout.vocab > MAX_CODES:
        raise ValueError(
            f"refine learns V x V tables, for up to {MAX_CODES} codes; {model.name} has {model.layout.vocab}"
        )
    learner = Learner(model.layout.vocab, tables.offsets, model.device)
    learner.start_from(tables)
    for start in range(0, images, 8):
        ids = range(start, min(start + 8, images))
        cond = model.encode([prompts[i % len(prompts)] for i in ids])
        decode(model, NCSJD(64, tables=learner, rank=tables.rank), cond, sampling, [seed + i for i in ids])
    learned = learner.tables(tables.rank, tables.fingerprint, tables.guidance_scale)
    assert learned is not None
    return learned.to("cpu")


@dataclass
class Effects:
    """What putting other codes at one position does: ``ids`` int64 [M] the codes tried, ``law`` float32 [M] their
    probability there, ``logits`` float32 [M, V] per offset the log-probabilities of the position at that offset."""

    ids: Tensor
    law: Tensor
    logits: dict[int, Tensor]


class EffectSums:
    """Weighted means of the centred effects, V x V per offset, or V x few where V is large.

    A code's effect counts a little more where it is probable: what it does where it belongs is what matters, but averages
    over many contexts matter more. Beyond ``FULL`` codes the first contexts only find the directions that effects take
    (one step of subspace iteration), the others are accumulated in these directions.
    """

    FULL = 4096

    def __init__(self, offsets: int, vocab: int, rank: int, warm_up: int) -> None:
        self.vocab, self.warm_up = vocab, warm_up
        width = vocab if vocab <= self.FULL else min(vocab, 4 * rank)
        self.total = torch.zeros(offsets, vocab, width)
        self.weight = torch.zeros(offsets, vocab)
        self.logits, self.count = torch.zeros(vocab, dtype=torch.float64), 0
        self.basis: Tensor | None = None
        self._search: Tensor | None = None
        if width < vocab:
            start = torch.randn(vocab, width, generator=torch.Generator().manual_seed(0))
            self.basis = torch.linalg.qr(start)[0].expand(offsets, -1, -1)
            self._search = torch.zeros(offsets, vocab, width)

    def add(self, found: Effects, token: int) -> None:
        """One context; ``token`` is the code that was really there."""
        weight = (found.law + 0.01 / self.vocab) ** FLATTENING
        for o, z in found.logits.items():
            effect = weight[:, None] * (z - (found.law[:, None] * z).sum(0) / found.law.sum())
            self.logits += z[(found.ids == token).nonzero()[0, 0]].double()
            self.count += 1
            if self._search is not None and self.basis is not None:
                self._search[o] += effect.T @ (effect @ self.basis[o])
                continue
            if self.basis is not None:
                effect = effect @ self.basis[o]
            self.total[o].index_add_(0, found.ids, effect)
            self.weight[o].index_add_(0, found.ids, weight)
        if self._search is not None:
            self.warm_up -= 1
            if self.warm_up == 0:
                self.basis, self._search = torch.linalg.qr(self._search)[0], None

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Low-rank factors of the means. Rows that were hardly ever probable are drawn towards zero."""
        prior = PRIOR * self.weight.sum(1, keepdim=True) / (self.weight > 0).sum(1, keepdim=True).clamp(min=1)
        mean = self.total / (self.weight + prior).clamp(min=1e-9)[..., None]
        if self.basis is None:
            return low_rank(mean - mean.mean(2, keepdim=True), rank)
        u, s, vh = torch.linalg.svd(mean, full_matrices=False)
        root = s[:, :rank].sqrt()
        right = root[..., None] * vh[:, :rank] @ self.basis.mT
        right = right - right.mean(2, keepdim=True)
        return (u[..., :rank] * root[:, None]).contiguous(), right.contiguous()

    def base(self) -> Tensor:
        """Mean log-probabilities [V]."""
        return (self.logits / max(self.count, 1)).float()


FLATTENING = 0.25
"""Power of a code's probability in a context with which its effect counts there (measured: 1 is clearly worse)."""

PRIOR = 0.02
"""Pseudo-weight of a zero effect, as a part of the mean weight of a code."""


@torch.no_grad()
def _sample(model: ImageModel, texts: list[Any], sampling: SamplingParams, seed: int) -> Tensor:
    parts = []
    for start in range(0, len(texts), 8):
        part = texts[start : start + 8]
        seeds = list(range(seed + start, seed + start + len(part)))
        parts.append(decode(model, AR(), model.encode(part), sampling, seeds).sequence)
    return torch.cat(parts)


def _positions(model: ImageModel, count: int, seed: int) -> list[int]:
    """Random image slots that have a right and a lower neighbour (away from the last row)."""
    g = torch.Generator().manual_seed(seed)
    below, right = model.layout.neighbour(dy=1), model.layout.neighbour(dx=1)
    good = ((below >= 0) & (right >= 0) & (torch.arange(model.layout.total) > 0)).nonzero()[:, 0]
    return good[torch.randint(len(good), (count,), generator=g)].tolist()


@torch.no_grad()
def _effects(
    model: ImageModel,
    cond: Conditioning,
    sequence: Tensor,
    slot: int,
    sampling: SamplingParams,
    offsets: tuple[Offset, ...],
    codes: int,
    rows: int,
    generator: torch.Generator,
) -> Effects:
    """Put ``codes`` codes at ``slot`` and read the positions that have it as a neighbour (the tokens between are the
    image's own)."""
    neighbours = [model.layout.neighbour(*o) for o in offsets]
    target = {o: int(t[0]) for o, n in enumerate(neighbours) if len(t := (n == slot).nonzero()[:, 0])}
    span = max(target.values()) - slot
    device = model.device
    state, output = model.prefill(cond, guidance=sampling.guided, window=max(slot, rows * span))
    if slot:
        output = _run(model, state, sequence[None, :slot], 0)
        state.lengths = state.lengths + slot
    place = torch.tensor([[slot]], device=device)
    last = ModelOutput(output.logits[:, -1:], None if output.uncond is None else output.uncond[:, -1:])
    law = probs(last, place, model.layout, sampling)[0, 0].cpu()
    ids = _tried(law, int(sequence[slot]), codes, generator)
    wanted = torch.tensor([at - slot - 1 for at in target.values()], device=device)
    parts: list[Tensor] = []
    for tried in ids.split(rows):
        # the codes are branches of one tree, so that they share the cache of the tokens before
        branch = torch.arange(len(tried), device=device).repeat_interleave(span)
        depth = torch.arange(span, device=device).repeat(len(tried))
        tokens = sequence[slot + depth]
        tokens[depth == 0] = tried.to(device)
        visible = (branch[:, None] == branch) & (depth[:, None] >= depth)
        live = torch.ones_like(tokens[None], dtype=torch.bool)
        proposal = Proposal(tokens[None], slot + depth[None], live, visible=visible[None])
        state.limit = min(state.prefix + slot + len(tokens), state.kv.shape[4])
        z = _guided(model.forward(state, proposal), sampling)[0].unflatten(0, (len(tried), span))
        parts.append(z[:, wanted].log_softmax(2).clamp(min=-30).cpu())
    logits = torch.cat(parts)
    return Effects(ids, law[ids], {o: logits[:, i] for i, o in enumerate(target)})


def _tried(law: Tensor, token: int, codes: int, generator: torch.Generator) -> Tensor:
    """int64 [codes]: the code really there, the most probable ones, and some others."""
    score = law + 1e-6 * torch.rand(law.shape, generator=generator) / law.numel()
    score[token] = 2.0
    order = score.argsort(descending=True)
    likely = codes - codes // 4
    others = order[likely:][torch.randperm(len(order) - likely, generator=generator)]
    return torch.cat([order[:likely], others])[:codes]


def _run(model: ImageModel, state: DecodeState, tokens: Tensor, start: int) -> ModelOutput:
    position = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
    state.limit = min(state.prefix + start + tokens.shape[1], state.kv.shape[4])
    live = torch.ones_like(tokens, dtype=torch.bool)
    return model.forward(state, Proposal(tokens, position, live))


def _guided(output: ModelOutput, sampling: SamplingParams) -> Tensor:
    if output.uncond is None:
        return output.logits.float()
    return output.uncond + sampling.guidance_scale * (output.logits - output.uncond)


def _explained(model: ImageModel, codes: Tensor, tables: NeighbourTables) -> Tensor:
    """Mean of the neighbours' table rows over all positions of the images [V]: what ``base`` must not repeat."""
    total = torch.zeros(tables.vocab)
    for o, neighbour in enumerate(tables.neighbours(model.layout)):
        ids = codes.cpu()[:, neighbour[neighbour >= 0]].flatten()
        total += tables.left[o][ids].sum(0) @ tables.right[o]
    return total / (codes.shape[0] * model.layout.n_image)


def _pairs(
    found: Effects, generator: torch.Generator, draws: int = 32
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Per offset: the offset, old and new codes [2, draws] from the law, log-probabilities [draws, V] under each."""
    pick = torch.multinomial(found.law, 2 * draws, replacement=True, generator=generator).view(2, draws)
    return [(o, found.ids[pick], z[pick[0]], z[pick[1]]) for o, z in found.logits.items()]


def _gate(tables: NeighbourTables, held: list[tuple[int, Tensor, Tensor, Tensor]]) -> Tensor:
    """float32 [O]: factor in 0..1 that fits each offset's table best to the held-out effects."""
    cross, square = torch.zeros(len(tables.offsets)), torch.full((len(tables.offsets),), 1e-9)
    for o, ids, old, new in held:
        weight = (old.exp() + new.exp()) / 2
        shift = (tables.left[o][ids[1]] - tables.left[o][ids[0]]) @ tables.right[o]
        error, shift = (m - (weight * m).sum(1, keepdim=True) for m in (new - old, shift))
        cross[o] += (weight * error * shift).sum()
        square[o] += (weight * shift * shift).sum()
    return (cross / square).clamp(0, 1)


def _staleness(
    tables: NeighbourTables, held: list[tuple[int, Tensor, Tensor, Tensor]], sampling: SamplingParams
) -> Staleness:
    """Total variation by offset when the neighbour's token is redrawn from its own law."""
    heat = 1 / sampling.temperature if sampling.temperature > 0 else 1.0
    before: list[list[float]] = [[] for _ in tables.offsets]
    after: list[list[float]] = [[] for _ in tables.offsets]
    for o, ids, old, new in held:
        shift = (tables.left[o][ids[1]] - tables.left[o][ids[0]]) @ tables.right[o]
        p_old, p_new = (old * heat).softmax(1), (new * heat).softmax(1)
        p_fix = ((old + shift) * heat).softmax(1)
        before[o].append(float((p_old - p_new).abs().sum(1).mean() / 2))
        after[o].append(float((p_fix - p_new).abs().sum(1).mean() / 2))
    mean = [sum(b) / len(b) if b else 0.0 for b in before]
    mended = [sum(a) / len(a) if a else 0.0 for a in after]
    return Staleness(tables.offsets, mean, mended)
