"""Draws and races: one program per row, two passes (draw) or one (race) over the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.triton.common import NO_FUSION, row_draw, row_tile, row_total, rows_of, warps


@triton.jit
def draw_kernel(
    w_ptr,  # fp32 [R, V]
    w_stride,
    fallback_ptr,  # fp32 [R, V] or None
    fallback_stride,
    U_ptr,  # int64 [R]
    out_ptr,  # int64 [R]
    V,
    HAS_FALLBACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = w_ptr + r * w_stride
    total = row_total(row, V, BLOCK)
    if HAS_FALLBACK:  # noqa: SIM102 - the outer branch is resolved at compile time
        if total == 0:
            row = fallback_ptr + r * fallback_stride
            total = row_total(row, V, BLOCK)
    tl.store(out_ptr + r, row_draw(row, total, tl.load(U_ptr + r), V, BLOCK))


@triton.jit
def race_kernel(
    p_ptr,  # fp32 [R, V]
    p_stride,
    e_ptr,  # fp32 [R, V]
    e_stride,
    out_ptr,  # int64 [R]
    V,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    best = tl.full((), -1.0, tl.float32)
    winner = tl.zeros((), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        p = tl.load(p_ptr + r * p_stride + offs, mask=mask, other=0.0)
        e = tl.load(e_ptr + r * e_stride + offs, mask=mask, other=1.0)
        score = tl.where(mask, tl.div_rn(p, e), -1.0)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, offs, 2147483647), 0)
        winner = tl.where(top > best, first, winner)
        best = tl.maximum(best, top)
    tl.store(out_ptr + r, winner.to(tl.int64))


def draw(weights: Tensor, U: Tensor, fallback: Tensor | None) -> Tensor:
    """See `visacc.kernels.draw`."""
    R, V = weights.shape
    weights, out = rows_of(weights), torch.empty(R, dtype=torch.int64, device=weights.device)
    other = weights if fallback is None else rows_of(fallback)
    BLOCK = row_tile(V)
    draw_kernel[(R,)](
        weights,
        weights.stride(0),
        other,
        other.stride(0),
        U.contiguous(),
        out,
        V,
        HAS_FALLBACK=fallback is not None,
        BLOCK=BLOCK,
        num_warps=warps(BLOCK),
        **NO_FUSION,
    )
    return out


def race(p: Tensor, E: Tensor) -> Tensor:
    """See `visacc.kernels.race`; p, E [R, V]."""
    R, V = p.shape
    p, E, out = rows_of(p), rows_of(E), torch.empty(R, dtype=torch.int64, device=p.device)
    BLOCK = row_tile(V)
    race_kernel[(R,)](
        p, p.stride(0), E, E.stride(0), out, V, BLOCK=BLOCK, num_warps=warps(BLOCK), **NO_FUSION
    )
    return out
