"""Slot-addressed static K/V cache: allocation, attention masks of a proposal, moving the kept slots of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels import commit_kv
from visacc.models.base import DecodeState, Proposal


def allocate(
    layers: int,
    rows: int,
    heads: int,
    capacity: int,
    dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Zero cache [layers, 2, rows, heads, capacity', dim] with the capacity rounded up to a multiple of 8.

    Zeros, not garbage: a masked slot still enters the value product with weight 0, and 0 * NaN is NaN.
    """
    capacity = -(-capacity // 8) * 8
    return torch.zeros(layers, 2, rows, heads, capacity, dim, dtype=dtype, device=device)


def addresses(state: DecodeState, proposal: Proposal) -> Tensor:
    """int64 [B, N] cache address of every node relative to the end of the prefix."""
    if proposal.address is not None:
        return proposal.address
    return state.lengths[:, None] + torch.arange(proposal.size, device=state.device)


def window_mask(state: DecodeState, proposal: Proposal) -> Tensor:
    """Which cache slots each node sees: bool [rows, N, limit], own slot always included.

    ``limit`` is ``state.limit``: slots beyond it are never read, which keeps attention on a CPU cheap.
    """
    address = addresses(state, proposal)
    slot = torch.arange(state.limit - state.prefix, device=state.device)
    if proposal.context is not None and proposal.context.ndim == 3:
        image = proposal.context[..., : slot.numel()]
        image = torch.nn.functional.pad(image, (0, slot.numel() - image.shape[2]))
    elif proposal.visible is None and proposal.context is None:
        image = slot <= address[..., None]
    else:
        if proposal.context is None:
            context = slot < state.lengths[:, None]
        else:
            context = proposal.context[:, : slot.numel()]
        image = context[:, None].expand(-1, proposal.size, -1).clone()
        size = proposal.size
        visible = proposal.visible
        if visible is None:
            order = torch.arange(size, device=state.device)
            visible = (order[:, None] >= order).expand(state.batch, size, size)
        image.scatter_(2, address[:, None].expand(-1, size, -1), visible)
    if state.branches > 1:
        image = image.repeat(state.branches, 1, 1)
    prompt = state.prefix_mask[:, None].expand(-1, proposal.size, -1)
    return torch.cat([prompt, image], dim=2)


def move_slots(state: DecodeState, keep: Tensor, path: Tensor) -> None:
    """Move the K/V of nodes ``path`` [B, P] to the consecutive addresses after ``lengths``, in place.

    Entries at or beyond ``keep`` [B] are left alone. The gather is a copy, so source and target may overlap.
    """
    start = state.prefix + state.lengths
    if state.branches > 1:
        path, keep, start = (
            path.repeat(state.branches, 1),
            keep.repeat(state.branches),
            start.repeat(state.branches),
        )
    commit_kv(state.kv.view(-1, *state.kv.shape[2:]), path, keep, start)
