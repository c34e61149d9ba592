"""Precision, recall, density, coverage on k-nearest-neighbour manifolds.

Improved precision and recall: Kynkäänniemi et al. 2019 (arXiv 1904.06991). Density and coverage: Naeem et al.
2020 (arXiv 2002.09797). Distances are float64 differences, never the norm expansion: duplicates then have
distance exactly zero and ties are decided by `<=` (torch-fidelity, ADM, dgm-eval) or `<` (LANTERN), not by
rounding. Density and coverage use `<` in every implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.metrics.stats import ArrayLike, as_features

BLOCK = 1024


@dataclass(frozen=True)
class PRDC:
    precision: float
    recall: float
    density: float
    coverage: float

    @property
    def f_score(self) -> float:
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def _blocks(x: ArrayLike) -> list[slice]:
    return [slice(i, min(i + BLOCK, len(x))) for i in range(0, len(x), BLOCK)]


def neighbour_radii(x: ArrayLike, k: int) -> Tensor:
    """[n] distance of every row to its k-th nearest other row (the (k+1)-th smallest, itself included)."""
    n = len(x)
    if not 1 <= k < n:
        raise ValueError(f"k must be at least 1 and below the number of images {n}, got {k}")
    radii = []
    for rows in _blocks(x):
        a = as_features(x[rows])
        best = torch.empty(len(a), 0, dtype=torch.float64, device=a.device)
        for cols in _blocks(x):
            both = torch.cat([best, _distances(a, as_features(x[cols]).to(a.device))], dim=1)
            best = both.topk(min(k + 1, both.shape[1]), dim=1, largest=False).values
        radii.append(best.max(dim=1).values)
    return torch.cat(radii)


def prdc(gen: ArrayLike, ref: ArrayLike, *, k: int = 3, strict: bool = False) -> PRDC:
    """Precision/recall/density/coverage of gen [n1, d] against ref [n2, d]; strict: precision and recall use
    `<`.
    """
    if gen.shape[1] != ref.shape[1]:
        raise ValueError(f"feature dimensions differ: {gen.shape[1]} and {ref.shape[1]}")
    radius_ref, radius_gen = neighbour_radii(ref, k), neighbour_radii(gen, k)
    inside = torch.lt if strict else torch.le
    in_ref = torch.zeros(len(gen), dtype=torch.bool, device=radius_ref.device)
    in_gen = torch.zeros(len(ref), dtype=torch.bool, device=radius_ref.device)
    balls = 0  # pairs (generated point, real ball around it)
    nearest_gen = torch.full((len(ref),), torch.inf, dtype=torch.float64, device=radius_ref.device)
    for g in _blocks(gen):
        a = as_features(gen[g])
        for r in _blocks(ref):
            d = _distances(a, as_features(ref[r]).to(a.device))
            in_ref[g] |= inside(d, radius_ref[r][None, :]).any(dim=1)
            balls += int((d < radius_ref[r][None, :]).sum())
            in_gen[r] |= inside(d, radius_gen[g][:, None]).any(dim=0)
            nearest_gen[r] = torch.minimum(nearest_gen[r], d.min(dim=0).values)
    return PRDC(
        precision=float(in_ref.double().mean()),
        recall=float(in_gen.double().mean()),
        density=balls / (k * len(gen)),
        coverage=float((nearest_gen < radius_ref).double().mean()),
    )
