"""Intervals of measured proportions."""

from __future__ import annotations

import math


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a proportion, of 95 % by default; without any trial it is (0, 1).

    Args:
        right: successes among ``n`` trials.
        z: quantile of the normal law.

    Raises:
        ValueError: ``right`` does not lie in 0 … n.
    """
    if not 0 <= right <= n:
        raise ValueError(f"right must lie between 0 and n={n}, got {right}")
    if n == 0:
        return 0.0, 1.0
    p, zz = right / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (centre - half) / (1 + zz)), min(1.0, (centre + half) / (1 + zz))
