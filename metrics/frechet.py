"""Fréchet (2-Wasserstein between Gaussians) distance of feature sets; FID when the features are
FID-Inception's.

FD = |mu1 - mu2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2). The last trace is the nuclear norm of R1' R2 with S =
R R', which needs two symmetric eigendecompositions and singular values: no matrix square root, no complex
numbers, no epsilon on the diagonal, and rank-deficient covariances (n <= d) are no special case.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from visacc.metrics.stats import ArrayLike, FeatureStats, Gaussian, as_features


def factor(cov: Tensor) -> Tensor:
    """R [d, d] with R R' = cov, negative rounding eigenvalues set to zero."""
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    return vectors * values.clamp_min(0).sqrt()


def trace_sqrt(cov1: Tensor, cov2: Tensor) -> float:
    """tr (S1 S2)^(1/2) of two covariances [d, d] float64."""
    return float(torch.linalg.svdvals(factor(cov1).T @ factor(cov2)).sum())


def trace_sqrt_features(x: Tensor, y: Tensor) -> float:
    """The same trace straight from features [n1, d], [n2, d]: exact for n < d, cost O(n1 n2 d)."""
    xc, yc = x - x.mean(dim=0), y - y.mean(dim=0)
    return float(torch.linalg.svdvals(xc @ yc.T).sum()) / ((len(x) - 1) * (len(y) - 1)) ** 0.5


def _check_pair(a: Gaussian, b: Gaussian) -> None:
    if a.extractor and b.extractor and a.extractor != b.extractor:
        raise ValueError(
            f"the two sets come from different feature extractors: {a.extractor!r} and {b.extractor!r}; "
            "compute both with the same one"
        )
    if a.dim != b.dim:
        raise ValueError(
            f"the two sets have {a.dim} and {b.dim} feature dimensions: statistics of another extractor?"
        )


def frechet(a: Gaussian | FeatureStats, b: Gaussian | FeatureStats, *, warn: bool = True) -> float:
    """Fréchet distance of two sets of statistics. May be slightly negative (rounding) for equal sets."""
    a = a.gaussian() if isinstance(a, FeatureStats) else a
    b = b.gaussian() if isinstance(b, FeatureStats) else b
    _check_pair(a, b)
    for g in (a, b) if warn else ():
        _warn_small(g, a, b)
    cov_b, mean_b = b.cov.to(a.cov.device), b.mean.to(a.mean.device)
    mean_term = float(((a.mean - mean_b) ** 2).sum())
    return mean_term + float(a.cov.trace()) + float(cov_b.trace()) - 2 * trace_sqrt(a.cov, cov_b)


def frechet_from_features(x: ArrayLike, y: ArrayLike) -> float:
    """Fréchet distance of features [n1, d], [n2, d], by whichever of the two exact routes is smaller."""
    xt, yt = as_features(x, "x"), as_features(y, "y")
    if min(len(xt), len(yt)) < 2:
        raise ValueError(f"a Fréchet distance needs at least 2 images per set, got {len(xt)} and {len(yt)}")
    if xt.shape[1] != yt.shape[1]:
        raise ValueError(f"feature dimensions differ: {xt.shape[1]} and {yt.shape[1]}")
    if max(len(xt), len(yt)) >= 2 * xt.shape[1]:
        return frechet(FeatureStats.of(xt), FeatureStats.of(yt), warn=False)
    traces = xt.var(dim=0, unbiased=True).sum() + yt.var(dim=0, unbiased=True).sum()
    mean_term = ((xt.mean(dim=0) - yt.mean(dim=0)) ** 2).sum()
    return float(mean_term + traces) - 2 * trace_sqrt_features(xt, yt)


def expected_bias(cov: Tensor, n_gen: int, n_ref: int | None) -> float:
    """Leading term of E[FD] between two finite samples of one Gaussian with covariance cov.

    (1/n + 1/m) [tr S + 1/2 sum_ij (1 + delta_ij) l_i l_j / (l_i + l_j)], l the eigenvalues of S: second-order
    expansion of the Bures distance at S with Wishart fluctuations. Says how much of a distance is sample
    size. n_ref None or 0: a reference of unlimited size.
    """
    lam = torch.linalg.eigvalsh((cov + cov.T) / 2).clamp_min(0)
    lam = lam[lam > lam.max() * 1e-14] if lam.numel() and float(lam.max()) > 0 else lam[:0]
    harmonic = lam[:, None] * lam[None, :] / (lam[:, None] + lam[None, :])
    bures = 0.5 * (harmonic.sum() + harmonic.diagonal().sum())
    return float(lam.sum() + bures) * (1 / n_gen + (1 / n_ref if n_ref else 0.0))


def _warn_small(g: Gaussian, a: Gaussian, b: Gaussian) -> None:
    if g.n is not None and g.n < g.dim + 1:
        bias = expected_bias(g.cov, a.n or g.n, b.n)
        warnings.warn(
            f"{g.n} images for {g.dim}-d features{' of ' + g.source if g.source else ''}: the covariance is "
            f"singular and the distance is only comparable at equal counts (about {bias:.4g} of it is "
            "expected from sample size alone)",
            stacklevel=3,
        )


def fd_infinity(
    gen: ArrayLike, ref: Gaussian | FeatureStats, *, points: int = 15, seed: int = 0
) -> tuple[float, float]:
    """Distance extrapolated to infinitely many generated images: (intercept, slope in 1/n).

    `points` sizes evenly spaced from min(5000, max(n/10, 2)) to n, a random subset each, straight line in 1/n
    (Chong and Forsyth 2020, arXiv 1911.07023).
    """
    x = as_features(gen)
    n = len(x)
    if n < 20:
        raise ValueError(f"extrapolating in 1/n needs at least 20 images, got {n}")
    rng = np.random.RandomState(seed)
    sizes = np.linspace(min(5000, max(n // 10, 2)), n, points).astype(int)
    values = []
    for size in sizes:
        rows = torch.from_numpy(rng.choice(n, size=size, replace=False))
        values.append(frechet(FeatureStats.of(x[rows]), ref, warn=False))
    slope, intercept = np.polyfit(1 / sizes, values, 1)
    return float(intercept), float(slope)
