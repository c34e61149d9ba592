"""3-D Haar patching of the Cosmos tokenizers: two levels fold 4x4x4 pixels into 64 sub-bands per colour."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_BANDS = tuple(
    itertools.product((0, 1), repeat=3)
)  # (time, row, column), low before high, as channels are ordered


def _forward(x: Tensor) -> Tensor:
    """One level: [B, C, T, H, W] -> [B, 8 C, T/2, H/2, W/2]; every level divides by 2 sqrt 2 on top of the transform."""
    pairs = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, C, t, 2, h, 2, w, 2]
    bands = []
    for band in _BANDS:
        part = pairs
        for axis, high in zip((7, 5, 3), reversed(band), strict=True):
            first, second = part.unbind(axis)
            part = first - second if high else first + second
        bands.append(part / 8)
    return torch.cat(bands, dim=1)


def _inverse(x: Tensor) -> Tensor:
    """One level back: [B, 8 C, T, H, W] -> [B, C, 2T, 2H, 2W]."""
    bands = dict(zip(_BANDS, x.chunk(8, dim=1), strict=True))
    for axis in (2, 3, 4):
        rest = {}
        for key in {band[1:] for band in bands}:
            low, high = bands[(0, *key)], bands[(1, *key)]
            rest[key] = torch.stack([low + high, low - high], dim=axis + 1).flatten(axis, axis + 1)
        bands = rest  # type: ignore[assignment]
    return bands[()]  # type: ignore[index]


def patch(video: Tensor, size: int = 4) -> Tensor:
    """Video [B, C, 1 + size n, H, W] -> [B, C size³, 1 + n, H/size, W/size]; the first frame is repeated ``size`` times."""
    head, tail = video[:, :, :1], video[:, :, 1:]
    x = torch.cat([head.repeat_interleave(size, dim=2), tail], dim=2)
    for _ in range(size.bit_length() - 1):
        x = _forward(x)
    return x


def unpatch(x: Tensor, size: int = 4) -> Tensor:
    """Inverse of :func:`patch`; the repeats of the first frame are dropped."""
    for _ in range(size.bit_length() - 1):
        x = _inverse(x)
    return x[:, :, size - 1 :]
