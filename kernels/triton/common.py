"""Device functions and launch helpers that several kernels share.

Decision kernels are launched with `NO_FUSION`: contracting a multiplication and an addition into one rounding
would make their decisions differ from the torch reference. Divisions that must match use `tl.div_rn`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.dispatch import interpreting

NO_FUSION: dict[str, Any] = {} if interpreting() else {"enable_fp_fusion": False}

TILE = 4096
"""Vocabulary entries per pass of a streaming kernel."""


def row_tile(vocab: int, limit: int = TILE) -> int:
    """Tile of a pass over a vocabulary row."""
    return min(limit, max(16, triton.next_power_of_2(vocab)))


def warps(block: int) -> int:
    """Warps of a one-dimensional block: 8 elements a thread or so."""
    return max(1, min(8, block // 256))


def rows_of(a: Tensor) -> Tensor:
    """The tensor itself if its last dimension is dense, else a copy."""
    return a if a.stride(-1) == 1 else a.contiguous()


def as_bytes(a: Tensor) -> Tensor:
    """A bool tensor as uint8, contiguous (Triton loads bools as bytes)."""
    return a.contiguous().view(torch.uint8)


@triton.jit
def int_weight(w):
    """round(w * 2**39) as int64; the scaling is exact."""
    return (w * 549755813888.0 + 0.5).to(tl.int64)


@triton.jit
def scaled_rank(U, total):
    """floor(U * total / 2**32) without overflow, int64."""
    return (U * (total >> 20) + ((U * (total & 0xFFFFF)) >> 20)) >> 12


@triton.jit
def row_total(row, V, BLOCK: tl.constexpr):
    """Sum of the integer weights of a row, int64."""
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(int_weight(tl.load(row + offs, mask=offs < V, other=0.0)), 0)
    return total


@triton.jit
def row_draw(row, total, U, V, BLOCK: tl.constexpr):
    """One id by integer inverse CDF from a row whose weights sum to `total`, int64."""
    rank = scaled_rank(U, total)
    token = tl.zeros((), dtype=tl.int64)
    before = tl.zeros((), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        w = int_weight(tl.load(row + offs, mask=mask, other=0.0))
        prefix = before + tl.cumsum(w, 0)
        # Prefix sums ascend, so the number of those not above the rank is the index of the first above it.
        token += tl.sum((mask & (prefix <= rank)).to(tl.int64), 0)
        before += tl.sum(w, 0)
    return tl.minimum(token, V - 1)


@triton.jit
def residual_tile(p_row, q_row, offs, mask, dense, point, x, HAS_Q: tl.constexpr):
    """Weights of a redraw at ids `offs`: max(p - q, 0) if dense, p without x if point, else p."""
    w = tl.load(p_row + offs, mask=mask, other=0.0)
    if HAS_Q:
        q = tl.load(q_row + offs, mask=mask & dense, other=0.0)
        w = tl.maximum(w - q, 0.0)
    return tl.where(point & (offs == x), 0.0, w)


@triton.jit
def residual_total(p_row, q_row, dense, point, x, V, HAS_Q: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the integer weights of a redraw, int64."""
    total = tl.zeros((), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        w = residual_tile(p_row, q_row, offs, offs < V, dense, point, x, HAS_Q)
        total += tl.sum(int_weight(w), 0)
    return total


@triton.jit
def residual_draw(p_row, q_row, dense, point, x, U, V, HAS_Q: tl.constexpr, BLOCK: tl.constexpr):
    """As `row_draw`, from the residual; from p where that is empty."""
    total = residual_total(p_row, q_row, dense, point, x, V, HAS_Q, BLOCK)
    if total == 0:
        dense = dense & False
        point = point & False
        total = residual_total(p_row, q_row, dense, point, x, V, HAS_Q, BLOCK)
    rank = scaled_rank(U, total)
    token = tl.zeros((), dtype=tl.int64)
    before = tl.zeros((), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        w = int_weight(residual_tile(p_row, q_row, offs, mask, dense, point, x, HAS_Q))
        prefix = before + tl.cumsum(w, 0)
        # Prefix sums ascend, so the number of those not above the rank is the index of the first above it.
        token += tl.sum((mask & (prefix <= rank)).to(tl.int64), 0)
        before += tl.sum(w, 0)
    return tl.minimum(token, V - 1)
