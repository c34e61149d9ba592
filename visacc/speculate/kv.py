"""Drafter caches: K/V written at per-row addresses, scratch columns for the tree, masks over both.

Rows of a batch hold different numbers of committed columns. Columns at and beyond ``length`` are scratch: a
proposal writes there and the next commit overwrites it, so nothing has to be copied or cropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.cache import allocate


@dataclass
class RowCache:
    """K/V of one kind of attention (self or cross) for all its layers.

    Attributes:
        kv: [layers, 2, B, kv heads, capacity, head dim].
        valid: bool [B, capacity], False at the padding of the prompt.
        length: int64 [B] committed columns.
        bound: host-side upper bound on ``length``.
    """

    kv: Tensor
    valid: Tensor
    length: Tensor
    bound: int

    @classmethod
    def empty(
        cls,
        layers: int,
        batch: int,
        heads: int,
        dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RowCache:
        kv = allocate(layers, batch, heads, capacity, dim, dtype=dtype, device=device)
        valid = torch.ones(batch, kv.shape[4], dtype=torch.bool, device=device)
        return cls(kv, valid, torch.zeros(batch, dtype=torch.int64, device=device), 0)

    @property
    def capacity(self) -> int:
        return self.kv.shape[4]

    def limit(self, extra: int) -> int:
        """Columns that a forward with ``extra`` uncommitted rows may touch."""
        return min(self.bound + extra, self.capacity)

    def put(self, layer: int, keys: Tensor, values: Tensor, address: Tensor) -> None:
        """Write K and V [B, heads, n, dim] of the rows at columns ``address`` int64 [B, n]."""
        rows = torch.arange(address.shape[0], device=address.device)[:, None]
        for i, x in enumerate((keys, values)):
            # advanced indices around a slice: [B, n, heads, dim]
            self.kv[layer, i][rows, :, address] = x.transpose(1, 2).to(self.kv.dtype)

    def view(self, layer: int, limit: int) -> tuple[Tensor, Tensor]:
        return self.kv[layer, 0, :, :, :limit], self.kv[layer, 1, :, :, :limit]

    def mask(self, seen: Tensor, limit: int) -> Tensor:
        """bool [B, n, limit]: committed valid columns plus the uncommitted ones of ``seen`` bool [B, n, m].

        Column ``length + k`` is uncommitted row k. Padding must not be seen: ``seen`` starts at ``length``.
        """
        batch, n, m = seen.shape
        column = torch.arange(limit, device=seen.device)
        context = (column < self.length[:, None]) & self.valid[:, :limit]
        mask = context[:, None].expand(batch, n, limit).clone()
        fresh = (self.length[:, None] + torch.arange(m, device=seen.device)).clamp(max=limit - 1)
        return mask.scatter_(2, fresh[:, None].expand(batch, n, m), seen)

    def addresses(self, first: int, n: int) -> Tensor:
        """int64 [B, n]: columns of uncommitted rows ``first .. first+n-1``."""
        start = self.length[:, None] + first
        return (start + torch.arange(n, device=start.device)).clamp(max=self.capacity - 1)

    def commit(self, n: Tensor, most: int) -> None:
        """Keep the first ``n`` [B] uncommitted rows (at most ``most``)."""
        self.length = self.length + n
        self.bound = min(self.bound + most, self.capacity)

    def select(self, rows: Tensor) -> None:
        self.kv, self.valid, self.length = self.kv[:, :, rows], self.valid[rows], self.length[rows]
