"""Position tables of the Cosmos autoregressive models (arXiv 2501.03575): 3-D rotary with YaRN, absolute sin-cos.

Latent frames, rows and columns each turn their own part of a head. Angles are made in float32; a begin-of-video token
and padding sit at angle 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Yarn:
    """YaRN as used by 12B and 13B: per axis, low frequencies are divided by ``scale``.

    The attention temperature that belongs to YaRN is computed by the original program but not applied.
    """

    original: Grid
    scale: float = 2.0
    beta_fast: float = 4.0
    beta_slow: float = 1.0


def rope_frequencies(head_dim: int, theta: float, yarn: Yarn | None = None) -> tuple[Tensor, Tensor]:
    """Inverse frequencies float32 of the two spatial axes and of time."""
    spatial_dim = head_dim // 6 * 2
    time_dim = head_dim - 2 * spatial_dim
    spatial, time = (
        1.0 / theta ** (torch.arange(0, dim, 2).float()[: dim // 2] / dim) for dim in (spatial_dim, time_dim)
    )
    if yarn is None:
        return spatial, time
    return _yarn(spatial, yarn, yarn.original[1]), _yarn(time, yarn, yarn.original[0])


def _yarn(frequencies: Tensor, yarn: Yarn, length: int) -> Tensor:
    high, low = (2 * math.pi * beta / length for beta in (yarn.beta_fast, yarn.beta_slow))
    keep = ((frequencies - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - keep) / yarn.scale + keep)


def _axes(grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Frame, row and column of every cell in raster order, float32 [T H W]."""
    t, h, w = grid
    cell = torch.arange(t * h * w)
    return (cell // (h * w)).float(), (cell // w % h).float(), (cell % w).float()


def rope_tables(
    grid: Grid,
    head_dim: int,
    *,
    theta: float = 500000.0,
    yarn: Yarn | None = None,
    begin: bool = False,
    rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [rows, head_dim], for the half-split rotation.

    Args:
        begin: a begin-of-video token takes row 0.
        rows: table length, padded with angle 0; 0 means no padding.
    """
    spatial, time = rope_frequencies(head_dim, theta, yarn)
    frame, row, column = _axes(grid)
    parts = [torch.outer(frame, time), torch.outer(row, spatial), torch.outer(column, spatial)]
    angles = torch.cat(parts, dim=1).repeat(1, 2)
    angles = _padded(angles, begin, rows)
    return angles.cos(), angles.sin()


def absolute_table(grid: Grid, dim: int, *, begin: bool = False, rows: int = 0) -> Tensor:
    """Sin-cos table float32 [rows, dim], rounded to bfloat16 as the original stores it; zero for begin and padding."""
    spatial_dim = dim // 6 * 2
    parts = []
    for place, width in zip(_axes(grid), (dim - 2 * spatial_dim, spatial_dim, spatial_dim), strict=True):
        omega = 1.0 / 10000 ** (torch.arange(width // 2, dtype=torch.float64) / (width / 2))
        angle = torch.outer(place.double(), omega)
        parts.append(torch.cat([angle.sin(), angle.cos()], dim=1))
    table = torch.cat(parts, dim=1).float()
    return _padded(table, begin, rows).bfloat16().float()


def _padded(table: Tensor, begin: bool, rows: int) -> Tensor:
    table = torch.nn.functional.pad(table, (0, 0, int(begin), 0))
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, rows - len(table))))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation. x [R, H, N, hd]; tables [R or 1, 1, N, hd]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)
