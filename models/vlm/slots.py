"""A transformers cache over the house's slot-addressed K/V tensor: prompts in place, tree nodes scattered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from visacc.cache import allocate


class SlotLayer(CacheLayerMixin):
    """One layer of a :class:`SlotCache`. Full length even for sliding layers: the window is in the mask."""

    is_sliding = False
    is_croppable = False

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.owner.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """``query_length`` was a tensor of positions in earlier releases of transformers 5."""
        width = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return (self.owner.limit if self.owner.address is not None else width), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    def get_max_cache_shape(self) -> int:  # name of get_max_length in earlier releases of transformers 5
        return self.owner.capacity


class SlotCache(Cache):
    """K/V [layers, 2, B, heads, capacity, dim]; allocated at the first write, when its shape is known.

    Attributes:
        address: int64 [B, T] slots of the nodes of the next forward; ``None`` while the prompt runs (slots
            0..N-1).
        limit: slots read by the next forward.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[SlotLayer(self, i) for i in range(layers)])
        self.capacity = capacity
        self.kv: Tensor | None = None
        self.address: Tensor | None = None
        self.limit = 0
        self._rows: Tensor | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.kv is None:
            batch, heads, _, dim = keys.shape
            self.kv = allocate(
                len(self.layers), batch, heads, self.capacity, dim, dtype=keys.dtype, device=keys.device
            )
        if self.address is None:
            width = keys.shape[2]
            self.kv[layer, 0, :, :, :width] = keys
            self.kv[layer, 1, :, :, :width] = values
            return keys, values
        rows = torch.arange(self.address.shape[0], device=keys.device)[:, None]
        for i, x in enumerate((keys, values)):
            # advanced indices around a slice: [B, T, heads, dim]
            self.kv[layer, i][rows, :, self.address] = x.transpose(1, 2)
        return self.kv[layer, 0, :, :, : self.limit], self.kv[layer, 1, :, :, : self.limit]
