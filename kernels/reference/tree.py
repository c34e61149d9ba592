"""Structure of token trees: ancestors, packed visibility, children, and the walk along accepted slots.

A tree is `parent` [B, T] (slot 0 the root with parent -1, parents before children) and `live` [B, T].
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_index(parent: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.tree_index`: ancestors-or-self by repeated squaring of the parent relation."""
    T = parent.shape[1]
    slots = torch.arange(T, device=parent.device)
    own = slots[:, None] == slots
    edge = (parent[..., None] == slots) & live[..., None]
    reach = (edge | own).to(torch.float32)
    for _ in range(max(T - 1, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    ancestors = reach > 0
    return ancestors, ancestors.sum(2) - 1


def pack_bits(visible: Tensor) -> Tensor:
    """bool [..., T] -> int32 [..., ceil(T / 32)], bit j of word w is entry 32 w + j."""
    T = visible.shape[-1]
    words = -(-T // 32)
    padded = torch.nn.functional.pad(visible, (0, 32 * words - T)).unflatten(-1, (words, 32))
    weight = torch.ones((), dtype=torch.int64, device=visible.device) << torch.arange(
        32, device=visible.device
    )
    packed = (padded.to(torch.int64) * weight).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def tree_walk(
    flags: Tensor, parent: Tensor, live: Tensor, ancestors: Tensor, depth: Tensor, first: bool, width: int
) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.tree_walk`."""
    B, T = flags.shape
    slots = torch.arange(T, device=flags.device)
    flags = (flags & live) | (slots == 0)
    if first:
        sibling = parent[:, :, None] == parent[:, None, :]
        flags = flags & ~(sibling & flags[:, None, :] & (slots < slots[:, None])).any(2)
    reached = ~(ancestors & ~flags[:, None, :]).any(2) & live
    # Deepest reached slot, ties to the lowest; the root is always reached.
    best = torch.where(reached, depth * T + (T - 1 - slots), -1).argmax(1)
    rows = torch.arange(B, device=flags.device)
    column = torch.where(ancestors[rows, best], depth, width)
    path = torch.full((B, width + 1), -1, dtype=torch.int32, device=flags.device)
    path.scatter_(1, column, slots.to(torch.int32).expand(B, T))
    return path[:, :width], depth[rows, best] + 1


def child_table(parent: Tensor, live: Tensor, max_children: int) -> Tensor:
    """Live children of every slot in slot order: int64 [B, T, max_children], -1 = none."""
    B, T = parent.shape
    slots = torch.arange(T, device=parent.device)
    child = live & (parent >= 0)
    earlier = (parent[:, :, None] == parent[:, None, :]) & child[:, None, :] & (slots < slots[:, None])
    rank = earlier.sum(2)
    place = torch.where(child & (rank < max_children), parent.long() * max_children + rank, T * max_children)
    table = torch.full((B, T * max_children + 1), -1, dtype=torch.int64, device=parent.device)
    return table.scatter_(1, place, slots.expand(B, T))[:, :-1].view(B, T, max_children)
