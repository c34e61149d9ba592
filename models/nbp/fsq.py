"""Finite scalar quantisation (arXiv 2309.15505) in the two variants that released tokenizers use.

Each channel is squashed to (-L/2, L/2), rounded, and read as one digit of the code. The variants differ near boundaries:

- NBP's MAGVIT2: half width (L - 1)(1 - 1e-3)/2, shift tan(o/h);
- Cosmos: half width (L - 1)(1 + 1e-3)/2, shift atanh(o/h), as in the reference code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

LEVELS = (8, 8, 8, 5, 5, 5)


class FSQ(nn.Module):
    """Quantiser without parameters.

    Args:
        levels: values per channel; the first channel is the lowest digit of a code.
        variant: "nbp" or "cosmos", see the module docstring.
    """

    def __init__(self, levels: Sequence[int] = LEVELS, variant: Literal["nbp", "cosmos"] = "nbp") -> None:
        super().__init__()
        if any(level < 2 for level in levels):
            raise ValueError(f"FSQ needs at least two levels per channel, got {tuple(levels)}")
        self.levels, self.variant = tuple(levels), variant

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Half width h, offset o, shift and integer half L // 2 of every channel, float32 [C]."""
        level = torch.tensor(self.levels, device=like.device, dtype=torch.float32)
        slack = 1 - 1e-3 if self.variant == "nbp" else 1 + 1e-3
        half = (level - 1) * slack / 2
        offset = torch.where(level % 2 == 0, 0.5, 0.0)
        ratio = offset / half
        shift = ratio.tan() if self.variant == "nbp" else ratio.atanh()
        return half, offset, shift, level // 2

    def bound(self, z: Tensor) -> Tensor:
        """z [..., C] -> values before rounding."""
        half, offset, shift, _ = self._tables(z)
        return (z.float() + shift).tanh() * half - offset

    def quantize(self, z: Tensor) -> Tensor:
        """z [..., C] -> values in [-1, 1] on the grid, straight-through gradient."""
        bounded = self.bound(z)
        rounded = bounded + (bounded.round() - bounded).detach()
        return rounded / self._tables(z)[3]

    def codes(self, values: Tensor) -> Tensor:
        """Grid values [..., C] -> codes int64 [...]."""
        half = self._tables(values)[3]
        digits = (values * half + half).round().long()
        return (digits * self._basis(values.device)).sum(-1)

    def values(self, codes: Tensor) -> Tensor:
        """Codes int64 [...] -> grid values float32 [..., C]."""
        if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= self.codebook_size):
            raise ValueError(f"codes must lie in 0..{self.codebook_size - 1}: codes of another tokenizer?")
        level = torch.tensor(self.levels, device=codes.device)
        digits = codes[..., None] // self._basis(codes.device) % level
        half = (level // 2).float()
        return (digits - half) / half

    def _basis(self, device: torch.device) -> Tensor:
        basis = [math.prod(self.levels[:i]) for i in range(len(self.levels))]
        return torch.tensor(basis, device=device)
