"""Moving the accepted nodes' K/V to the consecutive slots behind the committed ones."""

from __future__ import annotations

import torch
from torch import Tensor


def commit_kv(kv: Tensor, path: Tensor, n: Tensor, start: Tensor) -> None:
    """See `visacc.kernels.commit_kv`."""
    rows = torch.arange(kv.shape[1], device=kv.device)[:, None]
    order = torch.arange(path.shape[1], device=kv.device)
    source = torch.where(order < n[:, None], path.clamp(min=0).long(), order)
    base = start.long()[:, None]
    by_row = kv.permute(1, 3, 0, 2, 4)  # [rows, slots, layers * 2, heads, dim]
    # The right-hand side is gathered into a copy first, so overlapping moves are safe.
    by_row[rows, base + order] = by_row[rows, base + source]
