"""What a run keeps beside its numbers: where it ran, and in which step each token of a picture was committed.

Grids are kept as text, one string per row of the token grid ("1 1 2 3"): short in JSON, readable in a diff.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TRACED = 64
"""Pictures of a run whose commit order is always kept (the first ones); all of them would outgrow the statistics."""


def encode_grid(grid: Tensor) -> list[list[str]]:
    """[T, H, W] steps -> T lists of H strings. Means are kept with one decimal."""
    digits = 1 if grid.is_floating_point() else 0
    return [[" ".join(f"{v:.{digits}f}" for v in row) for row in frame] for frame in grid.tolist()]


def decode_grid(frames: Sequence[Sequence[str]]) -> np.ndarray:
    """float64 [T, H, W] of what :func:`encode_grid` wrote. Raises ``ValueError`` if it is no such grid."""
    wrong = "a grid of steps is a list of frames, each a list of rows like '1 1 2 3', all of one length"
    if not isinstance(frames, list) or not all(isinstance(frame, list) for frame in frames):
        raise ValueError(wrong)
    try:
        rows = [[[float(word) for word in row.split()] for row in frame] for frame in frames]
        grid = np.array(rows, dtype=np.float64)  # rows of unequal length raise here
    except (ValueError, TypeError, AttributeError):
        raise ValueError(wrong) from None
    if grid.ndim != 3 or not grid.size or not np.isfinite(grid).all() or grid.min() < 0:
        raise ValueError(wrong)
    return grid


def spaced(total: int, count: int) -> list[int]:
    """Up to ``count`` different numbers below ``total``, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int)).tolist()


def environment(device: torch.device | str | None = None) -> dict[str, Any]:
    """Versions and hardware that a speed depends on. No names of hosts or users."""
    import torch

    where = torch.device(device) if device is not None else torch.device("cpu")
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("visacc", "torch", "transformers", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["system"] = f"{platform.system()} {platform.machine()}"
    if where.type == "cuda":
        found["device"] = torch.cuda.get_device_name(where)
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = where.type
    found["threads"] = torch.get_num_threads()
    return found
