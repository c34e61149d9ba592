"""Tree attention: few query nodes, long slot-addressed K/V, packed visibility bits, split over the K/V axis.

The query heads of one K/V head are packed into the rows of a program, so a group reads K/V once. Every
program walks its slice of the K/V axis with an online softmax in base 2; slices are merged by a second
kernel. The number of slices depends on shapes and capacity only, lengths are read on the device: the launch
can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.dispatch import UnsupportedError, interpreting
from visacc.kernels.triton.common import rows_of

PROGRAMS = 2 * 132
"""Programs that fill an H200 twice: slices are added until there are as many."""

MIN_SLICE = 256


class Config(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int


def config(dim: int, rows: int, dtype: torch.dtype, window: bool = False) -> Config:
    """Tile sizes without register spills on sm_90 (scripts/kernel_report.py); rows = nodes * heads per K/V
    head."""
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    wide = triton.next_power_of_2(dim) > 64
    if dtype == torch.float32:
        return Config(min(block_m, 32), 32, 4, 2)
    if wide and block_m == 128 and (dim % 8 or window):
        block_m = 64  # masked loads and window tests take the registers that the larger tile would need
    if block_m == 128:
        return Config(128, 64, 8, 2)
    if wide and block_m == 64:
        tight = window or (dim % 8 != 0 and dtype == torch.float16)
        return Config(64, 64, 8 if tight else 4, 2)
    return Config(block_m, 64, 4, 3)


def precision(dtype: torch.dtype) -> str:
    """float32 inputs take three TF32 products a piece: near float32, at tensor-core speed and register
    use."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def splits_for(batch: int, heads: int, blocks: int, capacity: int) -> int:
    """Slices of the K/V axis: enough programs to fill the device, none shorter than MIN_SLICE slots."""
    splits = 1
    while batch * heads * blocks * splits < PROGRAMS and capacity >= 2 * splits * MIN_SLICE:
        splits *= 2
    return splits


@triton.jit
def split_kernel(
    q_ptr,  # [B, N, H, D]
    q_b, q_n, q_h,
    k_ptr,  # [B, Hkv, S, D]
    k_b, k_h, k_s,
    v_ptr,  # [B, Hkv, S, D]
    v_b, v_h, v_s,
    length_ptr,  # int32 [B]
    start_ptr,  # int32 [B] or None
    words_ptr,  # int32 [B, N, W] or None (causal chain)
    words_b, words_n,
    depth_ptr,  # int32 [B, N] or None
    out_ptr,  # [B, N, H, D], or fp32 [splits, B, N, H, D]
    lse_ptr,  # fp32 [splits, B, N, H] or None
    scale,  # softmax scale * log2(e)
    window,
    B, N, HKV, S,
    D: tl.constexpr,
    ALIGN: tl.constexpr,  # strides are given in units of this many elements, which makes loads vectors of that size
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // HKV).to(tl.int64)
    hk = (tl.program_id(0) % HKV).to(tl.int64)
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = m // GROUP
    head = hk * GROUP + m % GROUP
    real = node < N
    d = tl.arange(0, BLOCK_D)
    length = tl.load(length_ptr + b)
    start = length * 0
    if HAS_START:
        start = tl.load(start_ptr + b)
    deep = node
    if HAS_DEPTH:
        deep = tl.load(depth_ptr + b * N + node, mask=real, other=0)

    row = b * q_b + node.to(tl.int64) * q_n + head * q_h
    q_at = q_ptr + row[:, None] * ALIGN + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    total = tl.minimum(length + N, S)
    chunk = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_N) * BLOCK_N
    low = split * chunk
    high = tl.minimum(low + chunk, total)
    first = start
    if HAS_WINDOW:
        first = tl.maximum(first, length - window)
    low = tl.maximum(low, first // BLOCK_N * BLOCK_N)
    for s0 in range(low, high, BLOCK_N):
        s = s0 + tl.arange(0, BLOCK_N)
        inside = s < high
        slot = b * k_b + hk * k_h + s.to(tl.int64) * k_s
        k_at = k_ptr + slot[None, :] * ALIGN + d[:, None]
        k = tl.load(k_at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = ((s >= start) & (s < length) & inside)[None, :] & real[:, None]
        if s0 + BLOCK_N > length:
            j = s - length
            proposed = (j >= 0) & inside
            if HAS_WORDS:
                word_at = words_ptr + b * words_b + node[:, None] * words_n + (j >> 5)[None, :]
                word = tl.load(word_at, mask=real[:, None] & proposed[None, :], other=0)
                among = ((word >> (j & 31)[None, :]) & 1) != 0
            else:
                among = j[None, :] <= node[:, None]
            seen = seen | (among & proposed[None, :] & real[:, None])
        if HAS_WINDOW:
            index = s
            if s0 + BLOCK_N > length:
                j = s - length
                path = j
                if HAS_DEPTH:
                    path = tl.load(depth_ptr + b * N + j, mask=(j >= 0) & inside, other=0)
                index = tl.where(j >= 0, length + path, s)
            seen = seen & (index[None, :] > (length + deep - window)[:, None])
        score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        norm = norm * shrink + tl.sum(weight, 1)
        slot = b * v_b + hk * v_h + s.to(tl.int64) * v_s
        v_at = v_ptr + slot[:, None] * ALIGN + d[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    row = (b * N + node.to(tl.int64)) * (HKV * GROUP) + head
    keep = real[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + row[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        row += split.to(tl.int64) * B * N * (HKV * GROUP)
        tl.store(out_ptr + row[:, None] * D + d[None, :], acc, mask=keep)
        lse = tl.where(norm > 0, top + tl.log2(tl.where(norm > 0, norm, 1.0)), -float("inf"))
        tl.store(lse_ptr + row, lse, mask=real)


@triton.jit
def merge_kernel(
    part_ptr,  # fp32 [SPLITS, R, D]
    lse_ptr,  # fp32 [SPLITS, R]
    out_ptr,  # [R, D]
    R,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, SPLITS)
    stride = tl.zeros((), dtype=tl.int64) + R  # not R.to(): a launch with R = 1 passes a Python integer
    lse = tl.load(lse_ptr + split[:, None] * stride + r[None, :], mask=(r < R)[None, :], other=-float("inf"))
    top = tl.max(lse, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    norm = tl.sum(tl.exp2(lse - safe[None, :]), 0)
    keep = (r < R)[:, None] & (d < D)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for i in range(SPLITS):
        one = tl.load(lse_ptr + i * stride + r, mask=r < R, other=-float("inf"))
        part = tl.load(part_ptr + (i * stride + r[:, None]) * D + d[None, :], mask=keep, other=0.0)
        acc += part * tl.exp2(one - safe)[:, None]
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(out_ptr + r[:, None].to(tl.int64) * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=keep)


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
    splits: int | None = None,
) -> Tensor:
    """See `visacc.kernels.tree_attention`; `splits` overrides the number of slices (a power of two)."""
    B, N, H, D = q.shape
    HKV, S = k.shape[1:3]
    if D > 128:
        raise UnsupportedError(f"head size {D} exceeds 128")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedError(f"dtype {q.dtype}")
    group = H // HKV
    c = config(D, N * group, q.dtype, window is not None)
    blocks = triton.cdiv(N * group, c.block_m)
    splits = splits_for(B, HKV, blocks, S) if splits is None else splits
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    out = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    part, lse = out, None
    if splits > 1:
        part = torch.empty(splits, B, N, H, D, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, B, N, H, dtype=torch.float32, device=q.device)
    if words is not None and words.stride(2) != 1:
        words = words.contiguous()
    BLOCK_D = max(16, triton.next_power_of_2(D))
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    align = math.gcd(8, *strides)
    q_s, k_s, v_s = ([stride // align for stride in strides[i : i + 3]] for i in (0, 3, 6))
    split_kernel[(B * HKV, blocks, splits)](
        q, *q_s,
        k, *k_s,
        v, *v_s,
        lengths.to(torch.int32),
        None if start is None else start.to(torch.int32),
        words,
        0 if words is None else words.stride(0),
        0 if words is None else words.stride(1),
        None if depth is None else depth.to(torch.int32).contiguous(),
        part,
        lse,
        scale * 1.4426950408889634,
        0 if window is None else window,
        B, N, HKV, S,
        D=D,
        ALIGN=align,
        GROUP=group,
        SPLITS=splits,
        HAS_START=start is not None,
        HAS_WORDS=words is not None,
        HAS_WINDOW=window is not None,
        HAS_DEPTH=depth is not None,
        UPCAST=interpreting(),
        PRECISION=precision(q.dtype),
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        BLOCK_D=BLOCK_D,
        num_warps=c.warps,
        num_stages=c.stages,
    )  # fmt: skip
    if splits > 1:
        R = B * N * H
        merge_kernel[(triton.cdiv(R, 16),)](
            part, lse, out, R, D=D, SPLITS=splits, BLOCK_R=16, BLOCK_D=BLOCK_D, num_warps=4
        )
    return out
