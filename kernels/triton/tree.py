"""Structure of token trees and the walk along accepted slots: one program per row, everything in
registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.triton.common import NO_FUSION, as_bytes


@triton.jit
def index_kernel(
    parent_ptr,  # int64 [B, T]
    live_ptr,  # uint8 [B, T]
    ancestors_ptr,  # uint8 [B, T, T] out
    depth_ptr,  # int64 [B, T] out
    words_ptr,  # int32 [B, T, W] out
    T,
    W,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    inside = i < T
    parent = tl.load(parent_ptr + b * T + i, mask=inside, other=-1).to(tl.int32)
    live = tl.load(live_ptr + b * T + i, mask=inside, other=0) != 0
    edge = (parent[:, None] == i[None, :]) & live[:, None]
    reach = (edge | (i[:, None] == i[None, :])).to(tl.float16)
    for _ in range(STEPS):  # squaring the relation doubles the distance it covers
        reach = (tl.dot(reach, reach) > 0).to(tl.float16)
    seen = reach > 0
    depth = tl.sum(seen.to(tl.int32), 1) - 1
    tl.store(depth_ptr + b * T + i, depth.to(tl.int64), mask=inside)
    both = inside[:, None] & inside[None, :]
    tl.store(ancestors_ptr + b * T * T + i[:, None] * T + i[None, :], seen.to(tl.uint8), mask=both)
    WORDS: tl.constexpr = BLOCK_T // 32
    bits = tl.reshape(seen.to(tl.int32), (BLOCK_T, WORDS, 32)) << tl.arange(0, 32)[None, None, :]
    word = tl.sum(bits, 2)
    w = tl.arange(0, WORDS)
    out = words_ptr + b * T * W + i[:, None] * W + w[None, :]
    tl.store(out, word, mask=inside[:, None] & (w < W)[None, :])


@triton.jit
def walk_kernel(
    flags_ptr,  # uint8 [B, T]
    parent_ptr,  # int64 [B, T]
    live_ptr,  # uint8 [B, T]
    words_ptr,  # int32 [B, T, W]
    words_batch,
    depth_ptr,  # int64 [B, T]
    depth_batch,
    path_ptr,  # int32 [B, A] out
    n_ptr,  # int64 [B] out
    T,
    W,
    A,
    FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    inside = i < T
    live = tl.load(live_ptr + b * T + i, mask=inside, other=0) != 0
    flags = ((tl.load(flags_ptr + b * T + i, mask=inside, other=0) != 0) & live) | (i == 0)
    depth = tl.load(depth_ptr + b * depth_batch + i, mask=inside, other=0).to(tl.int32)
    if FIRST:
        parent = tl.load(parent_ptr + b * T + i, mask=inside, other=-2).to(tl.int32)
        # Column layout of the same vectors: the comparison below needs both orientations.
        rival = (parent[:, None] == parent[None, :]) & flags[None, :] & (i[None, :] < i[:, None])
        flags = flags & (tl.max(rival.to(tl.int32), 1) == 0)
    word = words_ptr + b * words_batch + i[:, None] * W + (i // 32)[None, :]
    bits = tl.load(word, mask=inside[:, None] & inside[None, :], other=0)
    above = (bits >> (i % 32)[None, :]) & 1
    blocked = tl.max(above * (flags == 0).to(tl.int32)[None, :], 1)
    rank = tl.where(inside & live & (blocked == 0), depth * BLOCK_T + (BLOCK_T - 1 - i), -1)
    best = BLOCK_T - 1 - tl.max(rank, 0) % BLOCK_T
    on_path = tl.sum(tl.where(i[:, None] == best, above, 0), 0)
    a = tl.arange(0, BLOCK_A)
    here = (depth[None, :] == a[:, None]) & (on_path != 0)[None, :]
    slot = tl.sum(tl.where(here, i[None, :] + 1, 0), 1) - 1
    tl.store(path_ptr + b * A + a, slot, mask=a < A)
    tl.store(n_ptr + b, (tl.max(rank, 0) // BLOCK_T + 1).to(tl.int64))


def square_warps(block: int) -> int:
    """Warps for a block x block comparison in registers."""
    return 8 if block >= 128 else 4


def tree_index(parent: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `visacc.kernels.tree_index`: ancestors, depth, words."""
    B, T = parent.shape
    W = -(-T // 32)
    ancestors = torch.empty(B, T, T, dtype=torch.uint8, device=parent.device)
    depth = torch.empty(B, T, dtype=torch.int64, device=parent.device)
    words = torch.empty(B, T, W, dtype=torch.int32, device=parent.device)
    BLOCK_T = max(32, triton.next_power_of_2(T))
    index_kernel[(B,)](
        parent.to(torch.int64).contiguous(),
        as_bytes(live),
        ancestors,
        depth,
        words,
        T,
        W,
        STEPS=max(T - 1, 1).bit_length(),
        BLOCK_T=BLOCK_T,
        num_warps=4,
        **NO_FUSION,
    )
    return ancestors.view(torch.bool), depth, words


def tree_walk(
    flags: Tensor, parent: Tensor, live: Tensor, words: Tensor, depth: Tensor, first: bool, width: int
) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.tree_walk`. words and depth may be expanded from one shape (batch stride 0)."""
    B, T = flags.shape
    W = words.shape[2]
    if words.stride(2) != 1 or words.stride(1) != W:
        words = words.contiguous()
    if depth.stride(1) != 1:
        depth = depth.contiguous()
    BLOCK_T = max(32, triton.next_power_of_2(T))
    path = torch.empty(B, width, dtype=torch.int32, device=flags.device)
    n = torch.empty(B, dtype=torch.int64, device=flags.device)
    walk_kernel[(B,)](
        as_bytes(flags),
        parent.to(torch.int64).contiguous(),
        as_bytes(live),
        words,
        words.stride(0),
        depth,
        depth.stride(0),
        path,
        n,
        T,
        W,
        width,
        FIRST=first,
        BLOCK_T=BLOCK_T,
        BLOCK_A=max(16, triton.next_power_of_2(width)),
        num_warps=square_warps(BLOCK_T),
        **NO_FUSION,
    )
    return path, n
