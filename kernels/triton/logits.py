"""Fused logits -> probabilities, without a sort: thresholds are found bit by bit on an order-preserving key.

`row_kernel` keeps a row of up to 16384 entries in registers and bisects the 32 bits of the key.
`stream_kernel` takes any vocabulary: the combined logits go to the output row (which stays in the L2 cache)
and a 16-ary search finds four bits per pass. Both searches end at the exact threshold.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.triton.common import NO_FUSION, as_bytes, int_weight, rows_of

ROW_LIMIT = 16384
STREAM_TILE = 4096
SEARCH_TILE = 1024


@triton.jit
def order_key(z):
    """fp32 -> int32 whose signed order is the order of the floats; both zeros map to one key."""
    z = tl.where(z == 0.0, 0.0, z)
    s = z.to(tl.int32, bitcast=True)
    return s ^ ((s >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def combine(
    c_ptr, c_stride, u_ptr, u_stride, allowed_ptr, allowed_stride, r, offs, mask, scale, temperature,
    HAS_UNCOND: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Guided, masked, tempered logits at `offs`; -inf outside of the row."""
    z = tl.load(c_ptr + r * c_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_UNCOND:
        u = tl.load(u_ptr + r * u_stride + offs, mask=mask, other=0.0).to(tl.float32)
        z = (z - u) * scale + u
    if HAS_ALLOWED:
        mask = mask & (tl.load(allowed_ptr + r * allowed_stride + offs, mask=mask, other=0) != 0)
    z = tl.where(mask, z, -float("inf"))
    if HAS_TEMPERATURE:
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def row_kernel(
    c_ptr,  # [R, V] any float dtype
    c_stride,
    u_ptr,  # [R, V] or None
    u_stride,
    allowed_ptr,  # uint8 [R or 1, V] or None
    allowed_stride,
    scale_ptr,  # fp32 [R]
    temperature_ptr,  # fp32 [R]
    k_ptr,  # int32 [R]
    top_p_ptr,  # fp32 [R]
    out_ptr,  # fp32 [R, V]
    V,
    HAS_UNCOND: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < V
    scale = tl.full((), 1.0, tl.float32)
    temperature = tl.full((), 1.0, tl.float32)
    if HAS_UNCOND:
        scale = tl.load(scale_ptr + r)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + r)
    z = combine(
        c_ptr, c_stride, u_ptr, u_stride, allowed_ptr, allowed_stride, r, offs, inside, scale,
        temperature, HAS_UNCOND, HAS_ALLOWED, HAS_TEMPERATURE,
    )  # fmt: skip
    broken = tl.max((z != z).to(tl.int32), 0) > 0
    z = tl.where(z == z, z, 0.0)
    # From here on a logit lives in its key alone; ids outside of the row have a key below every float's.
    low = tl.full((), -2147483648, tl.int32)
    key = tl.where(inside, order_key(z), low)
    threshold = low + 1
    if HAS_K:
        k = tl.load(k_ptr + r)
        on = (k > 0) & (k < V)
        zero = tl.zeros((), dtype=tl.int32)
        t = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, zero, low)
        for bit in range(0, 31):
            candidate = t | (tl.full((), 1073741824, tl.int32) >> bit)
            t = tl.where(tl.sum((key >= candidate).to(tl.int32), 0) >= k, candidate, t)
        threshold = tl.where(on, t, threshold)
    top = key_value(tl.max(key, 0))
    if HAS_P:
        top_p = tl.load(top_p_ptr + r)
        # float32 sums: integer masses of a whole row would not fit into the registers. The cut is exact unless the
        # mass above it is within rounding of p.
        w = tl.where(key >= threshold, tl.exp(key_value(key) - top), 0.0)
        need = top_p * tl.sum(w, 0)
        zero = tl.zeros((), dtype=tl.int32)
        t = tl.where(tl.sum(tl.where(key >= 0, w, 0.0), 0) >= need, zero, low)
        for bit in range(0, 31):
            candidate = t | (tl.full((), 1073741824, tl.int32) >> bit)
            t = tl.where(tl.sum(tl.where(key >= candidate, w, 0.0), 0) >= need, candidate, t)
        threshold = tl.maximum(threshold, tl.where(top_p >= 1.0, low, t))
    e = tl.where(key >= threshold, tl.exp(key_value(key) - top), 0.0)
    prob = e / tl.sum(e, 0)
    tl.store(out_ptr + r * V + offs, tl.where(broken, float("nan"), prob), mask=inside)


@triton.jit
def _count16(row, cut, top, floor_key, V, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Entries (or their integer mass) with key >= cut[j], for 16 cuts: int64 [16]."""
    total = tl.zeros((16,), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        z = tl.load(row + offs, mask=offs < V, other=-float("inf"))
        key = order_key(z)
        inside = (offs < V) & (key >= floor_key)
        if WEIGHTED:
            w = int_weight(tl.where(inside, tl.exp(z - top), 0.0))
            total += tl.sum(tl.where(key[:, None] >= cut[None, :], w[:, None], 0), 0)
        else:
            total += tl.sum(((key[:, None] >= cut[None, :]) & inside[:, None]).to(tl.int32), 0).to(tl.int64)
    return total


@triton.jit
def _search(row, need, top, floor_key, V, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key whose count (mass) of entries at or above it reaches `need`: four bits per pass."""
    j = tl.arange(0, 16).to(tl.int64)
    found = tl.full((), -2147483648, tl.int64)
    for step in range(0, 8):
        stride = tl.full((), 268435456, tl.int64) >> (4 * step)
        cut = found + j * stride
        total = _count16(row, cut.to(tl.int32), top, floor_key, V, WEIGHTED, BLOCK)
        # Counts fall with j and the first one always suffices.
        enough = tl.sum((total >= need).to(tl.int32), 0)
        found += (tl.maximum(enough, 1) - 1).to(tl.int64) * stride
    return found.to(tl.int32)


@triton.jit
def stream_kernel(
    c_ptr,
    c_stride,
    u_ptr,
    u_stride,
    allowed_ptr,
    allowed_stride,
    scale_ptr,
    temperature_ptr,
    k_ptr,
    top_p_ptr,
    out_ptr,  # fp32 [R, V], holds the combined logits while the thresholds are searched
    V,
    HAS_UNCOND: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    scale = tl.full((), 1.0, tl.float32)
    temperature = tl.full((), 1.0, tl.float32)
    if HAS_UNCOND:
        scale = tl.load(scale_ptr + r)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + r)
    row = out_ptr + r * V
    top = tl.full((), -float("inf"), tl.float32)
    broken = tl.zeros((), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < V
        z = combine(
            c_ptr, c_stride, u_ptr, u_stride, allowed_ptr, allowed_stride, r, offs, inside, scale,
            temperature, HAS_UNCOND, HAS_ALLOWED, HAS_TEMPERATURE,
        )  # fmt: skip
        broken = tl.maximum(broken, tl.max((z != z).to(tl.int32), 0))
        z = tl.where(z == z, z, 0.0)
        top = tl.maximum(top, tl.max(z, 0))
        tl.store(row + offs, z, mask=inside)
    tl.debug_barrier()
    low = tl.full((), -2147483648, tl.int32)
    threshold = low
    if HAS_K:
        k = tl.load(k_ptr + r)
        if (k > 0) & (k < V):
            threshold = _search(row, k.to(tl.int64), top, low, V, False, SEARCH)
    if HAS_P:
        top_p = tl.load(top_p_ptr + r)
        if top_p < 1.0:
            mass = tl.zeros((), dtype=tl.int64)
            for start in range(0, V, BLOCK):
                offs = start + tl.arange(0, BLOCK)
                z = tl.load(row + offs, mask=offs < V, other=-float("inf"))
                keep = (offs < V) & (order_key(z) >= threshold)
                mass += tl.sum(int_weight(tl.where(keep, tl.exp(z - top), 0.0)), 0)
            need = (top_p * mass.to(tl.float32)).to(tl.int64)
            threshold = tl.maximum(threshold, _search(row, need, top, threshold, V, True, SEARCH))
    total = tl.zeros((), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        z = tl.load(row + offs, mask=offs < V, other=-float("inf"))
        keep = (offs < V) & (order_key(z) >= threshold)
        total += tl.sum(tl.where(keep, tl.exp(z - top), 0.0), 0)
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        z = tl.load(row + offs, mask=offs < V, other=-float("inf"))
        keep = order_key(z) >= threshold
        prob = tl.where(keep, tl.exp(z - top), 0.0) / total
        tl.store(row + offs, tl.where(broken > 0, float("nan"), prob), mask=offs < V)


def _per_row(value: Any, R: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(dtype).expand(R).contiguous()
    return torch.full((R,), value, dtype=dtype, device=device)


def process_logits(
    logits: Tensor,
    uncond: Tensor | None,
    scale: Any,
    allowed: Tensor | None,
    temperature: Any,
    top_k: Any,
    top_p: Any,
) -> Tensor:
    """See `visacc.kernels.process_logits`."""
    R, V = logits.shape
    device = logits.device
    if isinstance(temperature, (int, float)) and temperature == 1:
        temperature = None
    if isinstance(top_k, int) and not 0 < top_k < V:
        top_k = None
    if isinstance(top_p, (int, float)) and top_p >= 1:
        top_p = None
    logits = rows_of(logits)
    uncond = None if uncond is None else rows_of(uncond)
    allowed = None if allowed is None else as_bytes(allowed)
    out = torch.empty(R, V, dtype=torch.float32, device=device)
    given = (
        logits,
        logits.stride(0),
        uncond,
        0 if uncond is None else uncond.stride(0),
        allowed,
        0 if allowed is None or allowed.ndim == 1 else V,
        None if uncond is None else _per_row(scale, R, torch.float32, device),
        None if temperature is None else _per_row(temperature, R, torch.float32, device),
        None if top_k is None else _per_row(top_k, R, torch.int32, device),
        None if top_p is None else _per_row(top_p, R, torch.float32, device),
        out,
        V,
    )
    flags = {
        "HAS_UNCOND": uncond is not None,
        "HAS_ALLOWED": allowed is not None,
        "HAS_TEMPERATURE": temperature is not None,
        "HAS_K": top_k is not None,
        "HAS_P": top_p is not None,
    }
    if V <= ROW_LIMIT:
        BLOCK = max(16, triton.next_power_of_2(V))
        row_kernel[(R,)](*given, **flags, BLOCK=BLOCK, num_warps=row_warps(BLOCK), **NO_FUSION)
    else:
        stream_kernel[(R,)](*given, **flags, BLOCK=STREAM_TILE, SEARCH=SEARCH_TILE, num_warps=16, **NO_FUSION)
    return out


def row_warps(block: int) -> int:
    """Warps that keep a row in registers without spilling (scripts/kernel_report.py)."""
    return max(1, min(8, block // 512))
