"""The slot-addressed K/V tensor of a :class:`DecodeState`, dressed as a transformers cache.

transformers' own caches have one length for all rows and grow by appending. Here every row writes where its
own nodes belong (ragged acceptance, trees, out-of-order sets), and rejecting a node costs nothing: it is
simply never seen again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from visacc.models.compiling import fixed, put_slots


class SlotLayer(CacheLayerMixin):
    """One layer: writes the new K/V at given slots, returns the slots below ``limit``.

    Args:
        store: [2, rows, kv heads, capacity, head dim] keys and values, written in place.
        slots: int64 [rows, N] slot of every new token, or ``None`` for the first N slots of every row
            (prompts).
        limit: slots returned to attention.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, store: Tensor, slots: Tensor | None, limit: int) -> None:
        super().__init__()
        self.keys, self.values = store[0], store[1]
        self.slots, self.limit = slots, limit
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, N, dim] and return [rows, heads, limit, dim], on the layer's own device."""
        assert self.keys is not None
        assert self.values is not None
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        value = new.to(store.device, store.dtype)
        if self.slots is None:
            store[:, :, : new.shape[2]] = value
        else:
            if torch.compiler.is_compiling():
                put_slots(store, self.slots, value)
            else:
                store.scatter_(2, self.slots[:, None, :, None].expand(value.shape), value)
        return store[:, :, : self.limit].to(new.device, new.dtype)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.limit, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:  # name of get_max_length in earlier releases of transformers 5
        return self.get_max_length()


def slot_cache(kv: Tensor, slots: Tensor | None, limit: int, *, static: bool = False) -> Cache:
    """A transformers cache over ``kv`` [layers, 2, rows, kv heads, capacity, head dim] for one forward.

    Args:
        static: for a compiled forward, see :func:`visacc.models.compiling.fixed`.
    """
    layers: list[Any] = [SlotLayer(store, slots, limit) for store in kv]
    if static:
        fixed(store for layer in layers for store in (layer.keys, layer.values))
    return Cache(layers=layers)


def cache_keyword(forward: Callable[..., Any]) -> str:
    """The name under which a transformers forward takes its cache: ``cache`` since 5.23,
    ``past_key_values`` before."""
    names = inspect.signature(forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ValueError(
        f"{getattr(forward, '__qualname__', forward)} takes neither 'cache' nor 'past_key_values'"
    )


def cache_shape(config: Any) -> tuple[int, int, int]:
    """(layers, kv heads, head dim) of a text model's configuration."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, dim
