"""Fitting neighbour tables to a model's own decodes: no data, no gradients of the model.

Images are decoded with the tables as far as they have come (the first ones without), and the tables are fitted to what the
passes show; so they are made for the changes that they will meet. See :mod:`visacc.decoders.nc_online`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from visacc.decoders.nc_online import Learner, Witness, distances
from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import NeighbourTables, Offset, offsets_of
from visacc.engine import decode
from visacc.models.base import ImageModel
from visacc.sampling import SamplingParams

ROOM = 1 << 28
"""Bytes of observations that are kept."""


@dataclass
class Staleness:
    """How far laws lie from what the next pass finds, where neighbours changed in between.

    Attributes:
        offsets: the grid offsets.
        before: float [O] mean total variation where the neighbour at that offset alone changed; nan where it never did.
        after: float [O] the same with the tables' correction applied to the old law.
        first: before and after at the slot that the next pass tests first, behind the rejection.
        all: before and after over all positions with a changed neighbour.
        steps: steps of each image that this was measured on.
    """

    offsets: tuple[Offset, ...]
    before: list[float]
    after: list[float]
    first: tuple[float, float]
    all: tuple[float, float]
    steps: list[int]

    def rows(self) -> list[tuple[str, float, float]]:
        """What, before, after: for tables."""
        pairs = zip(self.offsets, self.before, self.after, strict=True)
        alone = [(f"{offset} alone", before, after) for offset, before, after in pairs]
        return [*alone, ("first tested", *self.first), ("all", *self.all)]


def calibrate(
    model: ImageModel,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    *,
    images: int = 96,
    rank: int = 32,
    window: int = 64,
    seed: int = 0,
    batch: int = 16,
    offsets: tuple[Offset, ...] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[NeighbourTables, Staleness]:
    """Fit tables to decodes of the model's own images.

    Args:
        prompts: prompts (or labels) to sample from, used in turn.
        sampling: the settings that will be decoded with.
        images: images to decode. The last batch is held out and measures what the tables are worth.
        rank: of the factors.
        window: of the decodes.
        seed: of the first image; the others follow.
        batch: images decoded together (fewer where there are few images).

    Returns:
        The tables, and what they are worth on the images held out.

    Raises:
        ValueError: a model without a grid, too few images, a rank beyond the number of codes.
    """
    _check(model, prompts, images, rank, window)
    batch = min(batch, max(images // 3, 1))
    offsets = offsets or offsets_of(model.layout)
    vocab = model.layout.vocab
    learner = Learner(vocab, offsets, model.device, sampling, rank=rank, steps=0, room=ROOM)
    starts = list(range(0, images - batch, batch))
    for start in starts:
        ids = range(start, min(start + batch, images - batch))
        _decode(model, NCSJD(window, tables=learner), prompts, sampling, [seed + i for i in ids])
        last = start == starts[-1]
        # all that was kept about four times in the end, once before
        learner.fit(learner.size // 256 * (4 if last else 1) + 1, fade=last)
        if progress:
            progress(ids[-1] + 1, images)
    tables = learner.tables(model.fingerprint(), sampling.guidance_scale)
    assert tables is not None
    held = [seed + i for i in range(images - batch, images)]
    found = measure(model, tables, prompts, sampling, held, window=window)
    if progress:
        progress(images, images)
    return tables.to("cpu"), found


def _check(model: ImageModel, prompts: Sequence[Any], images: int, rank: int, window: int) -> None:
    if "grid" not in model.provides:
        raise ValueError(f"{model.name} has no token grid; neighbour tables need one")
    NCSJD(window, tables="online").check(model)
    if not prompts:
        raise ValueError("calibration needs prompts (or labels) to sample from")
    if images < 3:
        raise ValueError(f"images must be at least 3, got {images}")
    if not 1 <= rank <= model.layout.vocab:
        raise ValueError(f"rank must lie in 1..{model.layout.vocab} (the number of codes), got {rank}")
    if window < 2:
        raise ValueError(f"window must be at least 2, got {window}: a window of 1 holds no drafts")


def measure(
    model: ImageModel,
    tables: NeighbourTables,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    seeds: list[int],
    *,
    window: int = 64,
) -> Staleness:
    """What tables are worth while decoding: see :class:`Staleness`."""
    witness = Witness(
        model.layout.vocab, tables.offsets, model.device, tables.to(model.device), room=ROOM, share=1.0
    )
    steps = _decode(model, NCSJD(window, tables=witness), prompts, sampling, seeds)
    return staleness(witness, tables.to(model.device), sampling, steps)


def _decode(
    model: ImageModel, decoder: NCSJD, prompts: Sequence[Any], sampling: SamplingParams, seeds: list[int]
) -> list[int]:
    cond = model.encode([prompts[i % len(prompts)] for i in seeds])
    return decode(model, decoder, cond, sampling, seeds).stats.steps.tolist()


@torch.no_grad()
def staleness(
    witness: Witness, tables: NeighbourTables, sampling: SamplingParams, steps: list[int]
) -> Staleness:
    """Total variation before and after the correction, over what a witness saw."""
    seen = (witness.ahead >= 0).nonzero()[:, 0]
    parts = [distances(witness, pick, tables.tensors, sampling) for pick in seen.split(512)]
    stale, mended = (torch.cat(p) for p in zip(*parts, strict=True)) if parts else (torch.zeros(0),) * 2
    changed = witness.was[seen] != witness.now[seen]
    alone = changed.sum(1) == 1

    def mean(where: torch.Tensor) -> tuple[float, float]:
        return float(stale[where].mean()), float(mended[where].mean())

    pairs = [mean(alone & changed[:, o]) for o in range(len(tables.offsets))]
    return Staleness(
        tables.offsets,
        [a for a, _ in pairs],
        [b for _, b in pairs],
        mean(witness.ahead[seen] == 0),
        mean(seen >= 0),
        steps,
    )
