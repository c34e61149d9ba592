"""Locality-aware generation orders (arXiv 2507.01957; rules as in the published programs).

A step takes cells that touch what is already there (they are well predicted) and lie apart from each other (they are
drawn independently): candidates with proximity >= tau in descending order, skipping those within a box of side
2 rho + 1 of one already taken in this step; what is still missing comes from farthest-point sampling over the rest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np

_NEIGHBOURS = tuple((di, dj) for di in (-1, 0, 1) for dj in (-1, 0, 1) if di or dj)


def lpd_order(
    group_sizes: Sequence[int],
    grid: int | tuple[int, int],
    *,
    proximity: float = 1.0,
    repulsion: float = 1.0,
    rng: random.Random | None = None,
    numpy_rng: np.random.RandomState | None = None,
    known: Iterable[int] = (),
) -> list[int]:
    """Raster indices of the cells to generate, in generation order.

    Args:
        group_sizes: cells per step; their sum must be the number of unknown cells, and the first must be 1 when nothing
            is known.
        grid: side of the square grid, or (rows, columns).
        proximity: tau; 1 asks for a taken edge neighbour (or two corner neighbours, which weigh 0.707 each).
        repulsion: rho, Chebyshev distance that two cells of a step must exceed.
        rng, numpy_rng: sources of randomness; consumed exactly as by the published program (one choice, one shuffle a
            step; numpy only where farthest-point sampling starts from nothing).
        known: cells that are given (in- and outpainting); they count as taken and are not part of the result.
    """
    rows, columns = (grid, grid) if isinstance(grid, int) else grid
    total, known = rows * columns, list(known)
    _check(group_sizes, total, known, proximity, repulsion)
    rng = rng or random.Random()
    numpy_rng = numpy_rng or np.random.RandomState(rng.getrandbits(32))
    score = [0.0] * total
    taken = [False] * total
    order: list[int] = []

    def take(cell: int) -> None:
        taken[cell] = True
        i, j = divmod(cell, columns)
        for di, dj in _NEIGHBOURS:
            if 0 <= i + di < rows and 0 <= j + dj < columns:
                score[cell + di * columns + dj] += 1.0 / math.sqrt(di * di + dj * dj)

    for cell in known:
        take(cell)
    groups = list(group_sizes)
    if not known:
        order.append(rng.choice(range(total)))
        take(order[0])
        groups = groups[1:]
    for size in groups:
        free = [cell for cell in range(total) if not taken[cell]]
        rng.shuffle(free)
        free.sort(key=lambda cell: -score[cell])
        near = [cell for cell in free if score[cell] >= proximity]
        chosen, rest = _spread(near, size, (rows, columns), repulsion)
        if len(chosen) < size:
            pool = free[len(near) :] + rest
            chosen += _farthest(chosen, pool, size - len(chosen), columns, numpy_rng)
        order += chosen
        for cell in chosen:
            take(cell)
    return order


def _check(
    group_sizes: Sequence[int], total: int, known: list[int], proximity: float, repulsion: float
) -> None:
    if len(set(known)) != len(known) or any(not 0 <= cell < total for cell in known):
        raise ValueError(f"known cells must be distinct raster indices below {total}")
    sizes = list(group_sizes)
    if not sizes or any(isinstance(g, bool) or not isinstance(g, int) or g < 1 for g in sizes):
        raise ValueError(f"group sizes must be positive integers, got {sizes}")
    missing = total - len(known)
    if sum(sizes) != missing:
        raise ValueError(
            f"group sizes sum to {sum(sizes)}, but {missing} of {total} cells are to be generated"
        )
    if not known and sizes[0] != 1:
        raise ValueError(f"the first group must hold one cell (nothing is known before it), got {sizes[0]}")
    if not (math.isfinite(proximity) and math.isfinite(repulsion)) or repulsion < 0:
        raise ValueError(
            f"proximity must be finite and repulsion at least 0, got {proximity} and {repulsion}"
        )


def _spread(
    cells: list[int], size: int, grid: tuple[int, int], repulsion: float
) -> tuple[list[int], list[int]]:
    """Walk ``cells`` and take up to ``size`` that keep their distance; also the refused and the unwalked ones."""
    rows, columns = grid
    reach = math.floor(repulsion)
    blocked = [False] * (rows * columns)
    chosen: list[int] = []
    refused: list[int] = []
    for place, cell in enumerate(cells):
        if len(chosen) == size:
            return chosen, refused + cells[place:]
        if blocked[cell]:
            refused.append(cell)
            continue
        chosen.append(cell)
        i, j = divmod(cell, columns)
        for a in range(max(0, i - reach), min(rows, i + reach + 1)):
            for b in range(max(0, j - reach), min(columns, j + reach + 1)):
                blocked[a * columns + b] = True
    return chosen, refused


def _farthest(
    existing: list[int], pool: list[int], count: int, columns: int, rng: np.random.RandomState
) -> list[int]:
    """Farthest-point sampling from ``pool``; ties go to the earliest. Squared distances: same order, exact."""
    if len(pool) <= count:
        return list(pool)
    cells = np.array(pool)
    points = np.stack(np.divmod(cells, columns), axis=1)

    def squared(cell: int) -> np.ndarray:
        return ((points - np.array(divmod(cell, columns))) ** 2).sum(1)

    picked: list[int] = []
    if existing:
        distance = np.min([squared(cell) for cell in existing], axis=0)
    else:
        picked.append(int(rng.randint(len(pool))))
        distance = squared(pool[picked[0]])
    while len(picked) < count:
        distance[picked] = 0
        picked.append(int(distance.argmax()))
        distance = np.minimum(distance, squared(pool[picked[-1]]))
    return [pool[i] for i in picked]
