"""Ratio verification of token trees: one program per row walks down the tree.

Slots are scanned once, in order: parents come before children and siblings are tested in slot order, so the
children of the current node are exactly the later slots that name it as their parent. Each rejection of a
sampled draft rewrites the residual, one pass over the vocabulary; pure point drafts need none until the final
draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.reference.tree_ratio import untried
from visacc.kernels.triton.common import (
    NO_FUSION,
    as_bytes,
    int_weight,
    row_draw,
    row_tile,
    row_total,
    rows_of,
)


@triton.jit
def _draw(row, fallback, U, V, BLOCK: tl.constexpr):
    """Integer inverse-CDF draw from a row, or from `fallback` if it is empty."""
    total = row_total(row, V, BLOCK)
    if total == 0:
        row = fallback
        total = row_total(row, V, BLOCK)
    return row_draw(row, total, U, V, BLOCK)


@triton.jit
def point_kernel(
    p_ptr,  # fp32 [B, T, V]
    p_batch,
    p_row,
    tokens_ptr,  # int64 [B, T]
    parent_ptr,  # int64 [B, T]
    live_ptr,  # uint8 [B, T]
    u_ptr,  # fp32 [B, T]
    U_ptr,  # int64 [B, T]
    scratch_ptr,  # fp32 [B, V]
    path_ptr,  # int32 [B, A], filled with -1
    n_ptr,  # int64 [B] out
    next_ptr,  # int64 [B] out
    T,
    V,
    A,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_T)
    inside = j < T
    tokens = tl.load(tokens_ptr + b * T + j, mask=inside, other=-1)
    parents = tl.load(parent_ptr + b * T + j, mask=inside, other=-2)
    lives = tl.load(live_ptr + b * T + j, mask=inside, other=0) != 0
    node = tl.zeros((), dtype=tl.int64)
    spent = tl.zeros((), dtype=tl.int64)
    n = tl.full((), 1, tl.int32)
    tl.store(path_ptr + b * A, 0)
    for s in range(1, T):
        parent = tl.load(parent_ptr + b * T + s)
        live = tl.load(live_ptr + b * T + s)
        if (parent == node) & (live != 0):
            x = tl.load(tokens_ptr + b * T + s)
            # A sibling that repeats an earlier one finds its mass spent.
            twins = tl.sum((lives & (parents == node) & (tokens == x) & (j < s)).to(tl.int32), 0)
            mass = tl.load(p_ptr + b * p_batch + node * p_row + x)
            mass = tl.where(twins > 0, 0.0, mass)
            left = 1.0 - spent.to(tl.float32) * 1.8189894035458565e-12
            if tl.load(u_ptr + b * T + s) * left < mass:
                node = node * 0 + s
                spent = spent * 0
                tl.store(path_ptr + b * A + n, s)
                n += 1
            else:
                spent += int_weight(mass)
    tl.store(n_ptr + b, n.to(tl.int64))
    last = p_ptr + b * p_batch + node * p_row
    row = scratch_ptr + b * V
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(row + offs, tl.load(last + offs, mask=offs < V, other=0.0), mask=offs < V)
    tl.debug_barrier()
    tl.store(row + tokens, tl.zeros((BLOCK_T,), tl.float32), mask=lives & (parents == node))
    tl.debug_barrier()
    tl.store(next_ptr + b, _draw(row, last, tl.load(U_ptr + b * T + node), V, BLOCK))


@triton.jit
def ratio_kernel(
    p_ptr,  # fp32 [B, T, V]
    p_batch,
    p_row,
    q_ptr,  # fp32 [B, R, V] or None
    q_batch,
    q_row,
    row_of_ptr,  # int64 [B, T] or None
    kind_ptr,  # int8 [B, T] or None
    tokens_ptr,  # int64 [B, T]
    parent_ptr,  # int64 [B, T]
    live_ptr,  # uint8 [B, T]
    u_ptr,  # fp32 [B, T]
    U_ptr,  # int64 [B, T]
    left_ptr,  # fp32 [B, T] mass of q without the slot's earlier siblings, or None
    near_ptr,  # int32 [B, T, K] or None
    scratch_ptr,  # fp32 [B, V]
    path_ptr,  # int32 [B, A], filled with -1
    n_ptr,  # int64 [B] out
    next_ptr,  # int64 [B] out
    T,
    V,
    A,
    K,
    delta,
    growth,
    KIND: tl.constexpr,  # kind of every slot if kind_ptr is None
    HAS_Q: tl.constexpr,
    HAS_KINDS: tl.constexpr,
    HAS_NEAR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row = scratch_ptr + b * V
    node = tl.zeros((), dtype=tl.int64)
    last = p_ptr + b * p_batch
    current = last  # the residual r: p of the node, or the scratch row once a child was rejected
    total = tl.full((), 1.0, tl.float32)  # sum of r
    n = tl.full((), 1, tl.int32)
    tl.store(path_ptr + b * A, 0)
    for s in range(1, T):
        parent = tl.load(parent_ptr + b * T + s)
        live = tl.load(live_ptr + b * T + s)
        if (parent == node) & (live != 0):
            x = tl.load(tokens_ptr + b * T + s)
            kind = tl.full((), KIND, tl.int32)
            if HAS_KINDS:
                kind = tl.load(kind_ptr + b * T + s).to(tl.int32)
            q_at = p_ptr
            q_x = tl.full((), 1.0, tl.float32)
            left = tl.full((), 1.0, tl.float32)
            if HAS_Q:
                q_at = q_ptr + b * q_batch + tl.maximum(tl.load(row_of_ptr + b * T + node), 0) * q_row
                if kind != 0:
                    q_x = tl.load(q_at + x)
                left = tl.where(kind == 1, tl.load(left_ptr + b * T + s), left)
            r_x = tl.load(current + x)
            gain = r_x
            if HAS_NEAR:
                j = tl.arange(0, BLOCK_K)
                ids = tl.load(near_ptr + (b * T + s) * K + j, mask=j < K, other=-1)
                sums = tl.cumsum(int_weight(tl.load(current + ids, mask=ids >= 0, other=0.0)), 0)
                bound = ((total * delta + r_x * growth) * 549755813888.0).to(tl.int64)
                mass = tl.max(tl.where(sums <= bound, sums, 0), 0)
                gain = r_x + mass.to(tl.float32) * 1.8189894035458565e-12
            if q_x > 0:
                if (q_x * total) * tl.load(u_ptr + b * T + s) < gain * left:
                    node = node * 0 + s
                    last = p_ptr + b * p_batch + node * p_row
                    current = last
                    total = total * 0 + 1.0
                    tl.store(path_ptr + b * A + n, s)
                    n += 1
                else:
                    sampled = kind != 0
                    scale = tl.maximum(total, 1e-20)
                    mass = tl.zeros((), dtype=tl.int64)
                    tl.debug_barrier()  # no warp may still have to read what the pass overwrites
                    for start in range(0, V, BLOCK):
                        offs = start + tl.arange(0, BLOCK)
                        mask = offs < V
                        r = tl.load(current + offs, mask=mask, other=0.0)
                        if HAS_Q:
                            q = tl.load(q_at + offs, mask=mask & sampled, other=0.0)
                            less = tl.maximum(tl.div_rn(r, scale) - tl.div_rn(q, left), 0.0)
                            r = tl.where(sampled, less, r)
                        r = tl.where(offs == x, 0.0, r)
                        mass += tl.sum(int_weight(r), 0)
                        tl.store(row + offs, r, mask=mask)
                    tl.debug_barrier()
                    current = row
                    total = tl.where(sampled, mass.to(tl.float32) * 1.8189894035458565e-12, total - r_x)
    tl.store(n_ptr + b, n.to(tl.int64))
    tl.store(next_ptr + b, _draw(current, last, tl.load(U_ptr + b * T + node), V, BLOCK))


def walk_warps(block: int) -> int:
    """16 elements a thread: more threads spill (scripts/kernel_report.py)."""
    return max(1, block // 512)


def tree_verify(
    p: Tensor,
    tokens: Tensor,
    parent: Tensor,
    live: Tensor,
    u: Tensor,
    U: Tensor,
    q_rows: Tensor | None,
    q_row_of: Tensor | None,
    kind: Tensor | int,
    companions: Tensor | None,
    delta: float,
    growth: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `visacc.kernels.tree_verify`."""
    B, T, V = p.shape
    device = p.device
    p = rows_of(p)
    tokens, parent = tokens.contiguous(), parent.to(torch.int64).contiguous()
    scratch = torch.empty(B, V, dtype=torch.float32, device=device)
    path = torch.full((B, width), -1, dtype=torch.int32, device=device)
    n = torch.empty(B, dtype=torch.int64, device=device)
    following = torch.empty(B, dtype=torch.int64, device=device)
    BLOCK = row_tile(V, 2048)
    if q_rows is None and companions is None:
        point_kernel[(B,)](
            p,
            p.stride(0),
            p.stride(1),
            tokens,
            parent,
            as_bytes(live),
            u.contiguous(),
            U.contiguous(),
            scratch,
            path,
            n,
            following,
            T,
            V,
            width,
            BLOCK_T=max(16, triton.next_power_of_2(T)),
            BLOCK=BLOCK,
            num_warps=walk_warps(BLOCK),
            **NO_FUSION,
        )
        return path, n, following
    left = None
    if q_rows is not None and q_row_of is not None:
        left = untried(tokens, parent, live, q_rows, q_row_of, kind).contiguous()
    q_rows = None if q_rows is None else rows_of(q_rows)
    K = 1 if companions is None else companions.shape[2]
    kinds = kind.to(torch.int8).contiguous() if isinstance(kind, Tensor) else None
    ratio_kernel[(B,)](
        p,
        p.stride(0),
        p.stride(1),
        q_rows,
        0 if q_rows is None else q_rows.stride(0),
        0 if q_rows is None else q_rows.stride(1),
        None if q_row_of is None else q_row_of.to(torch.int64).contiguous(),
        kinds,
        tokens,
        parent,
        as_bytes(live),
        u.contiguous(),
        U.contiguous(),
        left,
        None if companions is None else companions.to(torch.int32).contiguous(),
        scratch,
        path,
        n,
        following,
        T,
        V,
        width,
        K,
        delta,
        growth,
        KIND=0 if isinstance(kind, Tensor) else kind,
        HAS_Q=q_rows is not None,
        HAS_KINDS=kinds is not None,
        HAS_NEAR=companions is not None,
        BLOCK_K=max(16, triton.next_power_of_2(K)),
        BLOCK=BLOCK,
        num_warps=walk_warps(BLOCK),
        **NO_FUSION,
    )
    return path, n, following
