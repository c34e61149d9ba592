"""Masses of relaxed rules: LANTERN's neighbour prefix sum, GSD's dynamic group. One program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.triton.common import NO_FUSION, as_bytes, int_weight, row_tile, rows_of, warps


@triton.jit
def neighbour_mass_kernel(
    p_ptr,  # fp32 [R, V]
    p_stride,
    ids_ptr,  # int32 [R, K], -1 = none
    bound_ptr,  # fp32 [R]
    out_ptr,  # fp32 [R]
    K,
    BLOCK_K: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_K)
    ids = tl.load(ids_ptr + r * K + j, mask=j < K, other=-1)
    near = tl.load(p_ptr + r * p_stride + ids, mask=ids >= 0, other=0.0)
    sums = tl.cumsum(int_weight(near), 0)
    limit = (tl.load(bound_ptr + r) * 549755813888.0).to(tl.int64)
    mass = tl.max(tl.where(sums <= limit, sums, 0), 0)
    tl.store(out_ptr + r, mass.to(tl.float32) * 1.8189894035458565e-12)


@triton.jit
def _order(row, offs, mask):
    """Key (bits of p, id) of ids with p > 0 as int64, -1 elsewhere: unique, ascending in p, then in id."""
    p = tl.load(row + offs, mask=mask, other=0.0)
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | offs.to(tl.int64)
    return tl.where(mask & (p > 0), key, -1)


@triton.jit
def group_kernel(
    p_ptr,  # fp32 [R, V]
    p_stride,
    q_ptr,  # fp32 [R, V] or None
    q_stride,
    x_ptr,  # int64 [R]
    onehot_ptr,  # uint8 [R] or None
    e_ptr,  # fp32 [V, E]
    e_stride,
    num_ptr,  # fp32 [R] out
    den_ptr,  # fp32 [R] out
    V,
    E,
    size,
    prob_threshold,
    distance_threshold,
    HAS_Q: tl.constexpr,
    HAS_ONEHOT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = p_ptr + r * p_stride
    x = tl.load(x_ptr + r)
    p_x = tl.load(row + x)
    own = (p_x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | x
    lower = tl.zeros((), dtype=tl.int32)
    upper = tl.zeros((), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        key = _order(row, offs, offs < V)
        lower += tl.sum(((key >= 0) & (key < own)).to(tl.int32), 0)
        upper += tl.sum((key > own).to(tl.int32), 0)
    # The window of `size` ranks around x, shifted to stay inside of the ids that have mass.
    start_rank = tl.minimum(tl.maximum(lower - size // 2, 0), tl.maximum(lower + upper + 1 - size, 0))
    below = lower - start_rank
    above = tl.minimum(upper, size - 1 - below)

    d = tl.arange(0, BLOCK_E)
    code = tl.load(e_ptr + x * e_stride + d, mask=d < E, other=0.0).to(tl.float32)
    p_sum = tl.zeros((), dtype=tl.int64)
    q_sum = tl.zeros((), dtype=tl.int64)
    at = own
    for i in range(0, below + above):
        down = i < below
        if i == below:
            at = own
        # The next key below (or above) the last one: one masked reduction over the row.
        best = tl.full((), -1, tl.int64)
        if down == 0:
            best = tl.full((), 9223372036854775807, tl.int64)
        for start in range(0, V, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            key = _order(row, offs, offs < V)
            if down:
                best = tl.maximum(best, tl.max(tl.where(key < at, key, -1), 0))
            else:
                best = tl.minimum(best, tl.min(tl.where(key > at, key, 9223372036854775807), 0))
        at = best
        y = at & 0xFFFFFFFF
        p_y = (at >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        other = tl.load(e_ptr + y * e_stride + d, mask=d < E, other=0.0).to(tl.float32)
        gap = other - code
        near = (tl.abs(p_y - p_x) < prob_threshold) & (tl.sum(gap * gap, 0) < distance_threshold)
        p_sum += tl.where(near, int_weight(p_y), 0)
        if HAS_Q:
            q_sum += tl.where(near, int_weight(tl.load(q_ptr + r * q_stride + y)), 0)
    numerator = p_x + p_sum.to(tl.float32) * 1.8189894035458565e-12
    tl.store(num_ptr + r, tl.where(p_x > 0, numerator, 0.0))
    denominator = p_x * 0.0 + 1.0
    if HAS_Q:
        denominator = tl.load(q_ptr + r * q_stride + x) + q_sum.to(tl.float32) * 1.8189894035458565e-12
        if HAS_ONEHOT:
            denominator = tl.where(tl.load(onehot_ptr + r) != 0, 1.0, denominator)
    tl.store(den_ptr + r, denominator)


def neighbour_mass(p: Tensor, companions: Tensor, bound: Tensor) -> Tensor:
    """See `visacc.kernels.neighbour_mass`; p [R, V], companions [R, K], bound [R]."""
    R, K = companions.shape
    p, out = rows_of(p), torch.empty(R, dtype=torch.float32, device=p.device)
    BLOCK_K = max(16, triton.next_power_of_2(K))
    neighbour_mass_kernel[(R,)](
        p,
        p.stride(0),
        companions.to(torch.int32).contiguous(),
        bound.to(torch.float32).contiguous(),
        out,
        K,
        BLOCK_K=BLOCK_K,
        num_warps=warps(BLOCK_K),
        **NO_FUSION,
    )
    return out


def group_sums(
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    onehot: Tensor | None,
    embedding: Tensor,
    size: int,
    prob_threshold: float,
    distance_threshold: float,
) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.group_sums`."""
    R, V = p.shape
    p, q, embedding = rows_of(p), None if q is None else rows_of(q), rows_of(embedding)
    numerator = torch.empty(R, dtype=torch.float32, device=p.device)
    denominator = torch.empty_like(numerator)
    BLOCK = row_tile(V)
    group_kernel[(R,)](
        p,
        p.stride(0),
        q,
        0 if q is None else q.stride(0),
        x.contiguous(),
        None if onehot is None else as_bytes(onehot),
        embedding,
        embedding.stride(0),
        numerator,
        denominator,
        V,
        embedding.shape[1],
        size,
        prob_threshold,
        distance_threshold,
        HAS_Q=q is not None,
        HAS_ONEHOT=onehot is not None,
        BLOCK_E=max(16, triton.next_power_of_2(embedding.shape[1])),
        BLOCK=BLOCK,
        num_warps=warps(BLOCK),
        **NO_FUSION,
    )
    return numerator, denominator
