"""Chain verification and coupled redraw of a window: one program per slot.

Every program repeats all D acceptance tests of its row (two gathers per draft), so that each knows the first
rejection and whether it has a token to draw; only those that draw read a row of p and q, twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.triton.common import NO_FUSION, as_bytes, residual_draw, row_tile, rows_of, warps


@triton.jit
def chain_kernel(
    p_ptr,  # fp32 [B, N, V]
    p_batch,
    p_row,
    q_ptr,  # fp32 [B, D, V] or None
    q_batch,
    q_row,
    draft_ptr,  # int64 [B, D]
    onehot_ptr,  # uint8 [B, D] or None
    n_draft_ptr,  # int64 [B] or None
    u_ptr,  # fp32 [B, D]
    U_ptr,  # int64 [B, NU]
    U_row,
    fresh_ptr,  # int64 [B, N] or None
    numerator_ptr,  # fp32 [B, D] or None
    denominator_ptr,  # fp32 [B, D] or None
    n_ptr,  # int64 [B] out
    accepted_ptr,  # uint8 [B, D] out
    tokens_ptr,  # int64 [B, N] out
    N,
    D,
    V,
    HAS_Q: tl.constexpr,
    HAS_ONEHOT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_NUMERATOR: tl.constexpr,
    HAS_DENOMINATOR: tl.constexpr,
    UNBROKEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    j = tl.arange(0, BLOCK_D)
    count = D
    if HAS_COUNT:
        count = tl.minimum(tl.load(n_draft_ptr + b).to(tl.int32), D)
    real = j < count
    x = tl.load(draft_ptr + b * D + j, mask=real, other=0)
    u = tl.load(u_ptr + b * D + j, mask=real, other=0.0)
    one = tl.full((BLOCK_D,), 1, tl.int1)
    if HAS_Q:
        one = tl.zeros((BLOCK_D,), tl.int1)
        if HAS_ONEHOT:
            one = tl.load(onehot_ptr + b * D + j, mask=real, other=0) != 0
    if HAS_NUMERATOR:
        p_x = tl.load(numerator_ptr + b * D + j, mask=real, other=0.0)
    else:
        p_x = tl.load(p_ptr + b * p_batch + j.to(tl.int64) * p_row + x, mask=real, other=0.0)
    if HAS_DENOMINATOR:
        q_x = tl.load(denominator_ptr + b * D + j, mask=real, other=1.0)
    else:
        q_x = tl.full((BLOCK_D,), 1.0, tl.float32)
        if HAS_Q:
            q_x = tl.load(q_ptr + b * q_batch + j.to(tl.int64) * q_row + x, mask=real & (one == 0), other=1.0)
    passed = real & (u * q_x < p_x)
    n = tl.min(tl.where(passed, D, j), 0)
    if k == 0:
        tl.store(n_ptr + b, n.to(tl.int64))
        tl.store(accepted_ptr + b * D + j, passed.to(tl.uint8), mask=j < D)

    mine = j == k
    own_x = tl.sum(tl.where(mine & real, x, 0), 0)
    own_pass = tl.sum((mine & passed).to(tl.int32), 0) > 0
    own_point = tl.sum((mine & one).to(tl.int32), 0) > 0
    failed = (k < count) & (own_pass == 0)
    token = own_x  # a draft that stands
    if UNBROKEN:
        stands = own_pass
        behind = k < 0
    else:
        stands = k < n
        behind = k > n
        failed = failed & (k == n)
    draws = (stands == 0) & (behind == 0)
    if HAS_FRESH:
        if stands == 0:
            token = tl.load(fresh_ptr + b * N + k)
        draws = draws & failed
    else:
        if behind:
            token = token * 0 - 1
    if draws:
        q_at = p_ptr
        if HAS_Q:
            q_at = q_ptr + b * q_batch + k.to(tl.int64) * q_row
        token = residual_draw(
            p_ptr + b * p_batch + k.to(tl.int64) * p_row,
            q_at,
            failed & (own_point == 0),
            failed & own_point,
            own_x,
            tl.load(U_ptr + b * U_row + k),
            V,
            HAS_Q,
            BLOCK,
        )
    tl.store(tokens_ptr + b * N + k, token)


def chain_verify(
    p: Tensor,
    draft: Tensor,
    q: Tensor | None,
    q_onehot: Tensor | None,
    n_draft: Tensor | None,
    u: Tensor,
    U: Tensor,
    fresh: Tensor | None,
    unbroken: bool,
    numerator: Tensor | None,
    denominator: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `visacc.kernels.chain_verify`."""
    B, N, V = p.shape
    D, device = draft.shape[1], p.device
    if D == 0 and fresh is not None:
        return draft.new_zeros(B), draft.bool(), fresh.clone()
    p, U = rows_of(p), rows_of(U)
    q = None if q is None else rows_of(q)
    n = torch.empty(B, dtype=torch.int64, device=device)
    accepted = torch.empty(B, D, dtype=torch.uint8, device=device)
    tokens = torch.empty(B, N, dtype=torch.int64, device=device)
    BLOCK = row_tile(V)
    chain_kernel[(B, N)](
        p,
        p.stride(0),
        p.stride(1),
        q,
        0 if q is None else q.stride(0),
        0 if q is None else q.stride(1),
        draft.contiguous(),
        None if q_onehot is None else as_bytes(q_onehot),
        None if n_draft is None else n_draft.to(torch.int64).contiguous(),
        u.contiguous(),
        U,
        U.stride(0),
        None if fresh is None else fresh.contiguous(),
        None if numerator is None else numerator.contiguous(),
        None if denominator is None else denominator.contiguous(),
        n,
        accepted,
        tokens,
        N,
        D,
        V,
        HAS_Q=q is not None,
        HAS_ONEHOT=q_onehot is not None,
        HAS_COUNT=n_draft is not None,
        HAS_FRESH=fresh is not None,
        HAS_NUMERATOR=numerator is not None,
        HAS_DENOMINATOR=denominator is not None,
        UNBROKEN=unbroken,
        BLOCK_D=max(16, triton.next_power_of_2(max(D, 1))),
        BLOCK=BLOCK,
        num_warps=warps(BLOCK),
        **NO_FUSION,
    )
    return n, accepted.view(torch.bool), tokens
