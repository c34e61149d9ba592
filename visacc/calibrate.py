"""Measuring neighbour tables from a model's own samples: no data, no gradients.

For contexts taken from the model's own images, one token is replaced by every other code and the laws of the positions
that have it as a neighbour are read off; the tables are the mean effect of each code, centred. See
:mod:`visacc.decoders.neighbour_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.ar import AR
from visacc.decoders.neighbour_tables import IMAGE_OFFSETS, NeighbourTables, Offset
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
    contexts: int = 48,
    rank: int = 32,
    seed: int = 0,
    rows: int = 64,
    offsets: tuple[Offset, ...] = IMAGE_OFFSETS,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[NeighbourTables, Staleness]:
    """Measure tables on ``contexts`` random positions of the model's own images.

    Three quarters of the contexts make the tables, the others measure what they are worth.

    Args:
        prompts: prompts (or labels) to sample from, used in turn.
        sampling: the settings that will be decoded with (the tables are those of the guided raw logits).
        rank: of the factors.
        rows: codes tried per forward.

    Returns:
        The tables, and the total variation by offset before and after the correction on the held-out contexts.

    Raises:
        ValueError: a model without a grid, too few contexts, or more than 4096 codes (V forwards per context and V x V
            sums; such models need a sampled form that does not exist yet).
    """
    if "grid" not in model.provides:
        raise ValueError(f"{model.name} has no token grid; neighbour tables need one")
    if contexts < 8:
        raise ValueError(f"contexts must be at least 8, got {contexts}")
    vocab = model.layout.vocab
    if vocab > 4096:
        raise ValueError(
            f"{model.name} has {vocab} codes; calibration tries every code in every context and supports up to 4096"
        )
    images = max(1, -(-contexts // 2))
    texts = [prompts[i % len(prompts)] for i in range(images)]
    codes = _sample(model, texts, sampling, seed)
    picks = _positions(model, contexts, seed)
    train = max(1, round(0.75 * contexts))
    full = torch.zeros(len(offsets), vocab, vocab, dtype=torch.float64)
    weights = torch.zeros(len(offsets), vocab, dtype=torch.float64)
    logits_sum, logits_count = torch.zeros(vocab, dtype=torch.float64), 0
    held: list[tuple[int, Tensor, Tensor]] = []
    for i, slot in enumerate(picks):
        image = i % images
        cond = model.encode([texts[image]])
        law, found = _effects(model, cond, codes[image], slot, sampling, offsets, rows)
        # codes that are out of place here say little about where they are in place
        weight = (law.double() + 0.2 / vocab)[:, None]
        for o, z in found.items():
            z = z.log_softmax(1).double()
            if i < train:
                full[o] += weight * (z - (law.double()[:, None] * z).sum(0))
                weights[o] += weight[:, 0]
                logits_sum += z[int(codes[image, slot])]
                logits_count += 1
            else:
                held.append((o, z.float(), law))
        if progress:
            progress(i + 1, len(picks))
    full /= weights.clamp(min=1e-9)[..., None]
    full -= full.mean(2, keepdim=True)
    base = logits_sum / max(logits_count, 1)
    tables = NeighbourTables.from_full(
        full.float(), base.float(), offsets, rank, model.fingerprint(), sampling.guidance_scale
    )
    tables.base -= _explained(model, codes, tables)
    return tables, _staleness(tables, held, sampling)


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
    rows: int,
) -> tuple[Tensor, dict[int, Tensor]]:
    """The law [V] of ``slot``, and for every code put there the guided raw logits [V, V] of the positions that have
    ``slot`` at each offset (the tokens between are the image's own)."""
    neighbours = [model.layout.neighbour(*o) for o in offsets]
    target = {o: int(t[0]) for o, n in enumerate(neighbours) if len(t := (n == slot).nonzero()[:, 0])}
    span = max(target.values()) - slot
    vocab, device = model.layout.vocab, model.device
    state, output = model.prefill(cond, guidance=sampling.guided, window=max(slot, span))
    if slot:
        output = _run(model, state, sequence[None, :slot], 0)
        state.lengths = state.lengths + slot
    place = torch.tensor([[slot]], device=device)
    last = ModelOutput(output.logits[:, -1:], None if output.uncond is None else output.uncond[:, -1:])
    law = probs(last, place, model.layout, sampling)[0, 0].cpu()
    results: dict[int, list[Tensor]] = {o: [] for o in target}
    state.select(torch.zeros(min(rows, vocab), dtype=torch.int64, device=device))
    for start in range(0, vocab, rows):
        tried = torch.arange(start, start + state.batch, device=device).clamp(max=vocab - 1)
        tokens = sequence[slot : slot + span].expand(state.batch, -1).clone()
        tokens[:, 0] = tried
        z = _guided(_run(model, state, tokens, slot), sampling)
        for o, at in target.items():
            results[o].append(z[: vocab - start, at - slot - 1].cpu())
    return law, {o: torch.cat(parts) for o, parts in results.items()}


def _run(model: ImageModel, state: DecodeState, tokens: Tensor, start: int) -> ModelOutput:
    position = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
    state.limit = min(state.prefix + start + tokens.shape[1], state.kv.shape[4])
    return model.forward(state, Proposal(tokens, position, torch.ones_like(tokens, dtype=torch.bool)))


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


def _staleness(
    tables: NeighbourTables, held: list[tuple[int, Tensor, Tensor]], sampling: SamplingParams, draws: int = 64
) -> Staleness:
    """Total variation by offset when the neighbour's token is redrawn from its own law."""
    g = torch.Generator().manual_seed(1)
    heat = 1 / sampling.temperature if sampling.temperature > 0 else 1.0
    before: list[list[float]] = [[] for _ in tables.offsets]
    after: list[list[float]] = [[] for _ in tables.offsets]
    for o, z, law in held:
        old, new = torch.multinomial(law, 2 * draws, replacement=True, generator=g).view(2, draws)
        shift = (tables.left[o][new] - tables.left[o][old]) @ tables.right[o]
        p_old, p_new = (z[old] * heat).softmax(1), (z[new] * heat).softmax(1)
        p_fix = ((z[old] + shift) * heat).softmax(1)
        before[o].append(float((p_old - p_new).abs().sum(1).mean() / 2))
        after[o].append(float((p_fix - p_new).abs().sum(1).mean() / 2))
    mean = [sum(b) / len(b) if b else 0.0 for b in before]
    mended = [sum(a) / len(a) if a else 0.0 for a in after]
    return Staleness(tables.offsets, mean, mended)
