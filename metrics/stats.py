"""Streaming mean and covariance of features, and the Gaussian that Fréchet distances compare.

The state is (n, mean, M2) in float64 with M2 the centred second moment; parts are merged with the pairwise
rule of Chan, Golub and LeVeque (1979), so that one pass over the data equals two passes to rounding and the
result does not depend on how rows were spread over batches or processes. Sum-of-squares accumulation loses
seven digits when the features have a large mean; float32 means change the fourth digit of a distance. Neither
is used here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ArrayLike = np.ndarray | Tensor


def as_features(x: ArrayLike, name: str = "features") -> Tensor:
    """[n, d] float64 tensor, checked: two dimensions, finite. float32 input is cast before any arithmetic."""
    t = torch.as_tensor(np.array(x, order="C") if isinstance(x, np.ndarray) else x).detach()
    if t.ndim != 2:
        raise ValueError(f"{name} must be [n, d], got shape {tuple(t.shape)}")
    t = t.to(torch.float64)
    bad = ~torch.isfinite(t).all(dim=1)
    if bool(bad.any()):
        rows = bad.nonzero().flatten().tolist()
        raise ValueError(
            f"{name} hold NaN or infinite values in {len(rows)} of {len(t)} rows (first row {rows[0]}); "
            "look at the image and the extractor that produced them"
        )
    return t


@dataclass
class Gaussian:
    """Mean [d] and covariance [d, d] (unbiased, float64) of a feature set; what statistics files hold.

    n: number of rows, None when a third-party file does not say. extractor: id of the network that made the
    features, None when unknown; two known and different ids are never compared.
    """

    mean: Tensor
    cov: Tensor
    n: int | None = None
    extractor: str | None = None
    source: str = ""

    def __post_init__(self) -> None:
        self.mean = torch.as_tensor(self.mean).to(torch.float64).reshape(-1)
        self.cov = torch.as_tensor(self.cov).to(torch.float64)
        d = self.mean.numel()
        if self.cov.numel() == 1 and d == 1:
            self.cov = self.cov.reshape(1, 1)
        if tuple(self.cov.shape) != (d, d):
            raise ValueError(f"covariance must be [{d}, {d}] for a mean of {d}, got {tuple(self.cov.shape)}")
        if not (bool(torch.isfinite(self.mean).all()) and bool(torch.isfinite(self.cov).all())):
            raise ValueError(f"statistics {self.source or ''} hold NaN or infinite values".replace("  ", " "))

    @property
    def dim(self) -> int:
        return self.mean.numel()


@dataclass
class FeatureStats:
    """One-pass statistics of feature rows: `update` with batches, `merge` with other parts, in any split."""

    dim: int
    n: int = 0
    extractor: str | None = None
    device: torch.device | str = "cpu"
    mean: Tensor = field(default=None, repr=False)  # type: ignore[assignment]
    m2: Tensor = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.mean is None:
            self.mean = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        if self.m2 is None:
            self.m2 = torch.zeros(self.dim, self.dim, dtype=torch.float64, device=self.device)

    @classmethod
    def of(cls, features: ArrayLike, extractor: str | None = None) -> FeatureStats:
        """Statistics of one feature matrix [n, d]."""
        x = as_features(features)
        return cls(x.shape[1], extractor=extractor, device=x.device).update(x)

    def update(self, features: ArrayLike) -> FeatureStats:
        """Add a batch [b, d]; b may be 0 or 1."""
        x = as_features(features)
        if x.shape[1] != self.dim:
            raise ValueError(f"these statistics hold {self.dim}-d features, got {x.shape[1]}-d rows")
        if len(x) == 0:
            return self
        x = x.to(self.mean.device)
        mean = x.mean(dim=0)
        centred = x - mean
        return self._add(len(x), mean, centred.T @ centred)

    def merge(self, other: FeatureStats) -> FeatureStats:
        """Add another part (in place). Merge ranks in rank order to get the same bits every time."""
        if other.dim != self.dim:
            raise ValueError(f"cannot merge {other.dim}-d statistics into {self.dim}-d ones")
        if self.extractor and other.extractor and self.extractor != other.extractor:
            raise ValueError(
                f"cannot merge features of {other.extractor!r} into features of {self.extractor!r}"
            )
        if other.n == 0:
            return self
        return self._add(other.n, other.mean.to(self.mean.device), other.m2.to(self.mean.device))

    def _add(self, k: int, mean: Tensor, m2: Tensor) -> FeatureStats:
        total = self.n + k
        delta = mean - self.mean
        self.m2 = self.m2 + m2 + torch.outer(delta, delta) * (self.n * k / total)
        self.mean = self.mean + delta * (k / total)
        self.n = total
        return self

    @property
    def cov(self) -> Tensor:
        """Unbiased covariance [d, d]."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.n}")
        return self.m2 / (self.n - 1)

    def gaussian(self, source: str = "") -> Gaussian:
        return Gaussian(self.mean, self.cov, self.n, self.extractor, source)

    def flat(self) -> Tensor:
        """[1 + d + d*d] float64: the whole state as one tensor, for a gather across processes."""
        head = torch.tensor([float(self.n)], dtype=torch.float64, device=self.mean.device)
        return torch.cat([head, self.mean, self.m2.reshape(-1)])

    @classmethod
    def from_flat(cls, state: Tensor, extractor: str | None = None) -> FeatureStats:
        d = round((-1 + (1 + 4 * (state.numel() - 1)) ** 0.5) / 2)
        if state.numel() != 1 + d + d * d:
            raise ValueError(f"a flat state has 1 + d + d*d numbers, got {state.numel()}")
        return cls(
            d,
            int(state[0]),
            extractor,
            state.device,
            state[1 : 1 + d].clone(),
            state[1 + d :].reshape(d, d).clone(),
        )


def merge_all(parts: Iterable[FeatureStats]) -> FeatureStats:
    """Merge parts in the order given into a fresh object."""
    total: FeatureStats | None = None
    for part in parts:
        if total is None:
            total = FeatureStats(part.dim, extractor=part.extractor, device=part.mean.device)
        total.merge(part)
    if total is None:
        raise ValueError("nothing to merge: no parts were given")
    return total
