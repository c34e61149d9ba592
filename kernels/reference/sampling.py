"""Drawing: exact integer inverse CDF, and exponential races (the Gumbel-max trick without logarithms of
p).
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_SCALE = float(1 << 39)
"""Weights up to 1 become integers of at most 39 bits; a row then sums to less than 2**62 for any V below
2**22.
"""


def integer_weights(w: Tensor) -> Tensor:
    """round(w * 2**39) as int64. Scaling by a power of two is exact, so every backend gets the same
    integers.
    """
    return w.mul(WEIGHT_SCALE).add_(0.5).to(torch.int64)


def as_mass(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of integer weights back as probability mass: one rounding, then an exact scaling."""
    return total.to(dtype).mul_(1 / WEIGHT_SCALE)


def scaled_rank(U: Tensor, total: Tensor) -> Tensor:
    """floor(U * total / 2**32) without overflow, for U < 2**32 and total < 2**51."""
    return (U * (total >> 20) + ((U * (total & 0xFFFFF)) >> 20)) >> 12


def draw(weights: Tensor, U: Tensor, fallback: Tensor | None = None) -> Tensor:
    """See `visacc.kernels.draw`."""
    if fallback is not None:
        # Exactly the rows whose integer weights are all zero: round(w 2**39) = 0 iff w < 2**-40.
        empty = weights.amax(1, keepdim=True) < 0.5 / WEIGHT_SCALE
        weights = torch.where(empty, fallback, weights)
    cdf = integer_weights(weights).cumsum(1)
    total = cdf[:, -1]
    rank = scaled_rank(U, total)
    # The first id whose prefix sum exceeds the rank; ids of weight zero can never be it.
    token = torch.searchsorted(cdf, rank[:, None], right=True).squeeze(1)
    return token.clamp_(max=weights.shape[1] - 1)


def race(p: Tensor, E: Tensor) -> Tensor:
    """See `visacc.kernels.race`. argmax returns the lowest index among equals."""
    return (p / E).argmax(-1)


def race_topk(p: Tensor, E: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.race_topk`."""
    score, ids = (p / E).topk(m, dim=-1)
    return ids, score > 0
