"""Attention over a slot-addressed static cache, shared by the native architectures."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [R, N, S] -> additive mask [R, 1, N, S], made once per pass instead of once per layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf).unsqueeze(1)


def slot_index(slots: Tensor, cache: Tensor) -> Tensor:
    """Slots int64 [R, N] -> scatter index [2, R, Hkv, N, hd] for one layer of ``cache`` [L, 2, R, Hkv, S, hd]."""
    rows, width = slots.shape
    return slots[None, :, None, :, None].expand(2, rows, cache.shape[3], width, cache.shape[5])


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, index: Tensor | None, bias: Tensor | None, limit: int
) -> Tensor:
    """Write k and v into the cache, then attend to its slots below ``limit``.

    Args:
        q: [R, H, N, hd]; k, v: [R, Hkv, N, hd].
        layer_kv: [2, R, Hkv, S, hd], changed in place.
        index: see :func:`slot_index`; ``None`` for the N slots before ``limit``, in order.
        bias: additive mask [R, 1, N, limit]; ``None`` if everything below ``limit`` is seen.

    Returns:
        [R, N, H * hd].
    """
    if index is None:
        layer_kv[0, :, :, limit - k.shape[2] : limit] = k
        layer_kv[1, :, :, limit - v.shape[2] : limit] = v
    else:
        layer_kv.scatter_(3, index, torch.stack((k, v)).to(layer_kv.dtype))
    keys, values = layer_kv[:, :, :, :limit].unbind(0)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)
