"""Attention of a few proposed nodes over a long slot-addressed K/V cache.

A node sees the committed slots of its row and, among the proposed nodes, those its mask names: ancestors in a
tree, earlier ones in a chain, the group in a block decoder. One mask format serves them all.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_bits(words: Tensor, size: int) -> Tensor:
    """int32 words [..., W] -> bool [..., size], the inverse of `pack_bits`."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(-2)[..., :size].bool()


def attention_mask(
    lengths: Tensor,
    start: Tensor | None,
    words: Tensor | None,
    nodes: int,
    capacity: int,
    window: int | None = None,
    depth: Tensor | None = None,
) -> Tensor:
    """Which of `capacity` cache slots each of `nodes` nodes sees: bool [B, N, S]. See `tree_attention`."""
    device = lengths.device
    slot = torch.arange(capacity, device=device)
    length = lengths.long()[:, None, None]
    past = slot < length
    if start is not None:
        past = past & (slot >= start.long()[:, None, None])
    order = torch.arange(nodes, device=device)
    if words is None:
        among = (order <= order[:, None]).expand(lengths.shape[0], nodes, nodes)
    else:
        among = unpack_bits(words, nodes)
    mask = past.expand(-1, nodes, -1).clone()
    where = (length + order).expand(-1, nodes, -1)
    inside = where < capacity
    mask.scatter_(2, where.clamp(max=capacity - 1), among & inside)
    if window is None:
        return mask
    # Distances count tokens along the path: a node at depth d stands at index length + d, whatever its slot.
    deep = order.expand(lengths.shape[0], nodes) if depth is None else depth.long()
    index = slot.expand(lengths.shape[0], nodes, capacity).clone()
    index.scatter_(2, where.clamp(max=capacity - 1), (length + deep[:, None, :]).expand(-1, nodes, -1))
    return mask & (index > length + deep[..., None] - window)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    start: Tensor | None,
    words: Tensor | None,
    scale: float,
    window: int | None,
    depth: Tensor | None,
) -> Tensor:
    """See `visacc.kernels.tree_attention`."""
    mask = attention_mask(lengths, start, words, q.shape[1], k.shape[2], window, depth)
    blind = ~mask.any(2)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=(mask | blind[..., None])[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[1],
    )
    return out.transpose(1, 2).masked_fill(blind[..., None, None], 0.0)
