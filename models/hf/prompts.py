"""Prompts as token ids: checking, left padding, batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_ids(prompt: Any) -> bool:
    """Whether a prompt is given as token ids (a 1-D integer tensor, or a sequence of integers)."""
    if isinstance(prompt, Tensor):
        return prompt.ndim == 1 and not prompt.is_floating_point()
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    )


def as_list(prompt: Any) -> list[int]:
    return [int(i) for i in prompt]


def tail_from(ids: list[int], token: int) -> list[int]:
    """What follows the last ``token`` of a prompt, the token included; empty where it is absent."""
    return ids[len(ids) - 1 - ids[::-1].index(token) :] if token in ids else []


def left_pad(sequences: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Id lists -> ids int64 [B, P] padded on the left and mask bool [B, P]."""
    width = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), width), pad, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence, dtype=torch.long)
        mask[row, width - len(sequence) :] = True
    return ids, mask


def widen(ids: Tensor, mask: Tensor, width: int, pad: int) -> tuple[Tensor, Tensor]:
    """Pad [B, P] on the left to ``width``."""
    extra = width - ids.shape[1]
    if extra == 0:
        return ids, mask
    return (
        torch.nn.functional.pad(ids, (extra, 0), value=pad),
        torch.nn.functional.pad(mask, (extra, 0), value=False),
    )


def stack_branches(branches: Sequence[tuple[Tensor, Tensor]], pad: int) -> tuple[Tensor, Tensor]:
    """Branches of (ids, mask) [B, P_i] -> rows [branches * B, P], branch-major, without columns that are
    all padding."""
    width = max(ids.shape[1] for ids, _ in branches)
    wide = [widen(ids, mask, width, pad) for ids, mask in branches]
    ids, mask = torch.cat([i for i, _ in wide]), torch.cat([m for _, m in wide])
    empty = int((~mask.any(0)).long().cumprod(0).sum())
    return ids[:, empty:], mask[:, empty:]


def parse_size(size: Any, default: tuple[int, int]) -> tuple[int, int]:
    """Picture size in pixels as (height, width) from ``None``, 512, "768x512" (height x width) or (768, 512).

    Raises:
        ValueError: anything else.
    """
    if size is None:
        return default
    if isinstance(size, str):
        parts = size.lower().replace("×", "x").split("x")
        if all(p.strip().isdigit() for p in parts) and len(parts) in (1, 2):
            size = tuple(int(p) for p in parts) * (3 - len(parts))
    if isinstance(size, int) and not isinstance(size, bool):
        size = (size, size)
    if (
        isinstance(size, (tuple, list))
        and len(size) == 2
        and all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in size)
    ):
        return (size[0], size[1])
    raise ValueError(f"size must be pixels as 512, '768x512' (height x width) or (768, 512), got {size!r}")


def grid_of(size: Any, default: tuple[int, int], patch: int, name: str) -> tuple[int, int]:
    """Token grid (rows, columns) of a picture size, for models that take any multiple of ``patch`` pixels.

    Args:
        default: the token grid where ``size`` is ``None``.
    """
    if size is None:
        return default
    height, width = parse_size(size, (0, 0))
    if height % patch or width % patch:
        near = tuple(max(1, round(side / patch)) * patch for side in (height, width))
        raise ValueError(
            f"{name} draws sizes in steps of {patch} pixels; {height}x{width} is none, the nearest is"
            f" {near[0]}x{near[1]}"
        )
    return height // patch, width // patch
