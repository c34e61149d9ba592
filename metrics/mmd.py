"""Kernel distances: KID (Binkowski et al. 2018, arXiv 1801.01401) and CMMD (Jayasumana et al. 2023,
2401.09603).

All kernels are float64. Row access is by index only, so `x` may be an array, a tensor or a memory-mapped
file: a KID over 50 000 images touches subset_size rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visacc.metrics.stats import ArrayLike, as_features

Kernel = Callable[[Tensor, Tensor], Tensor]
ESTIMATORS = ("unbiased", "u-statistic", "biased")
BLOCK = 4096


def polynomial_kernel(degree: int = 3, gamma: float | None = None, coef0: float = 1.0) -> Kernel:
    """(gamma a.b + coef0)^degree with gamma = 1/d unless given."""
    return lambda a, b: ((1 / a.shape[1] if gamma is None else gamma) * (a @ b.T) + coef0) ** degree


def rbf_kernel(sigma: float = 10.0) -> Kernel:
    """exp(-|a - b|^2 / (2 sigma^2)).

    Distances are expanded about the mean of b: the expansion then loses no digits to a large common mean.
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        centre = b.mean(dim=0)
        a, b = a - centre, b - centre
        squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
        return torch.exp(-squared.clamp_min(0) / (2 * sigma**2))

    return kernel


def mmd2(kxx: Tensor, kyy: Tensor, kxy: Tensor, estimator: str = "unbiased") -> float:
    """Squared MMD from the three kernel matrices [m, m], [n, n], [m, n].

    unbiased: diagonals of kxx and kyy dropped (torch-fidelity's KID); u-statistic: the diagonal of kxy
    dropped too (equal sizes only); biased: everything kept (V-statistic).
    """
    m, n = kxy.shape
    if estimator == "biased":
        return float(kxx.mean() + kyy.mean() - 2 * kxy.mean())
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    within = (kxx.sum() - kxx.trace()) / (m * (m - 1)) + (kyy.sum() - kyy.trace()) / (n * (n - 1))
    if estimator == "unbiased":
        return float(within - 2 * kxy.mean())
    if m != n:
        raise ValueError(f"the u-statistic needs equal set sizes, got {m} and {n}")
    return float(within - 2 * (kxy.sum() - kxy.trace()) / (m * (m - 1)))


@dataclass(frozen=True)
class KID:
    """Mean and population standard deviation over subsets, and every subset's value."""

    mean: float
    std: float
    per_subset: tuple[float, ...]


def _rows(x: ArrayLike, index: np.ndarray, name: str) -> Tensor:
    if isinstance(x, Tensor):
        return as_features(x[torch.from_numpy(index).to(x.device)], name)
    order = np.argsort(index, kind="stable")  # sorted access is sequential on disk
    rows = np.empty((len(index), x.shape[1]), x.dtype)
    rows[order] = x[index[order]]
    return as_features(rows, name)


def kid(
    gen: ArrayLike,
    ref: ArrayLike,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 2020,
    kernel: Kernel | None = None,
    estimator: str = "unbiased",
) -> KID:
    """Kernel Inception Distance of features [n1, d] against [n2, d], drawn exactly as torch-fidelity draws.

    One `RandomState(seed)`; per subset first the rows of `gen`, then those of `ref`, each without
    replacement.
    """
    if gen.shape[1] != ref.shape[1]:
        raise ValueError(f"feature dimensions differ: {gen.shape[1]} and {ref.shape[1]}")
    if subset_size < 2:
        raise ValueError(f"subset_size must be at least 2, got {subset_size}")
    for name, x in (("generated", gen), ("reference", ref)):
        if len(x) < subset_size:
            raise ValueError(
                f"the {name} set has {len(x)} images, fewer than subset_size={subset_size}; "
                f"give more images or a subset_size of at most {len(x)} (another protocol)"
            )
    kernel = kernel or polynomial_kernel()
    rng = np.random.RandomState(seed)
    values = []
    for _ in range(subsets):
        x = _rows(gen, rng.choice(len(gen), subset_size, replace=False), "generated features")
        y = _rows(ref, rng.choice(len(ref), subset_size, replace=False), "reference features")
        values.append(mmd2(kernel(x, x), kernel(y, y), kernel(x, y), estimator))
    return KID(float(np.mean(values)), float(np.std(values)), tuple(values))


def _mean_kernel(x: ArrayLike, y: ArrayLike, kernel: Kernel) -> float:
    total = 0.0
    for i in range(0, len(x), BLOCK):
        a = as_features(x[i : i + BLOCK])
        for j in range(0, len(y), BLOCK):
            total += float(kernel(a, as_features(y[j : j + BLOCK]).to(a.device)).sum())
    return total / (len(x) * len(y))


def cmmd(gen: ArrayLike, ref: ArrayLike, *, sigma: float = 10.0, scale: float = 1000.0) -> float:
    """CMMD: biased squared MMD with an RBF kernel on unit-norm CLIP embeddings [n, d], times 1000.

    Embeddings must be L2-normalised already (within 1e-3).
    """
    for name, x in (("generated", gen), ("reference", ref)):
        if len(x) < 1:
            raise ValueError(f"the {name} set is empty")
        norms = as_features(x[: min(len(x), BLOCK)]).norm(dim=1)
        if float((norms - 1).abs().max()) > 1e-3:
            raise ValueError(
                f"CMMD is defined on L2-normalised embeddings; the {name} ones have norms "
                f"{float(norms.min()):.4g}..{float(norms.max()):.4g}"
            )
    kernel = rbf_kernel(sigma)
    return scale * (
        _mean_kernel(gen, gen, kernel) + _mean_kernel(ref, ref, kernel) - 2 * _mean_kernel(gen, ref, kernel)
    )


def mind(gen: ArrayLike, ref: ArrayLike, *, projections: int = 1000, seed: int = 2020) -> float:
    """MIND (arXiv 2605.06797): 3 d times the sliced squared 2-Wasserstein distance of features [n, d].

    The larger set is thinned to the size of the smaller; directions and the thinning come from one torch
    generator seeded with `seed`, generated set first, as in torch-fidelity. Arithmetic in float64.
    """
    x, y = as_features(gen, "generated features"), as_features(ref, "reference features")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"feature dimensions differ: {x.shape[1]} and {y.shape[1]}")
    generator = torch.Generator().manual_seed(seed)
    n, d = min(len(x), len(y)), x.shape[1]
    if len(x) > n:
        x = x[torch.randperm(len(x), generator=generator)[:n]]
    if len(y) > n:
        y = y[torch.randperm(len(y), generator=generator)[:n]]
    u = torch.randn(projections, d, generator=generator).to(torch.float64)
    u = (u / u.norm(dim=1, keepdim=True).clamp_min(1e-12)).to(x.device)
    px, py = (x @ u.T).sort(dim=0).values, (y.to(x.device) @ u.T).sort(dim=0).values
    return 3.0 * d * float(((px - py) ** 2).mean())
