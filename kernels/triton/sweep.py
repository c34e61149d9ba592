"""Correction and coupled redraw of a window: one program per sample walks the window from its first position on.

A position none of whose neighbours moved costs a few scalar loads and its own test; only corrected laws and redraws walk
the vocabulary. Tokens and laws that a program writes it also reads again, so a barrier follows every write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visacc.kernels.triton.common import as_bytes, residual_draw, row_tile, rows_of, warps


def sweep_warps(block: int) -> int:
    """There is one program per sample, so that more warps cost nobody anything; two of them spill."""
    return max(4, warps(block))


@triton.jit
def _moved(near_ptr, now_row, seen_row, fresh, slot, S, o):
    """Token at offset o now and as the forward saw it, -1 for none: int64 scalars."""
    cell = tl.load(near_ptr + o * S + slot)
    new = tl.load(now_row + cell, mask=cell >= 0, other=-1)
    old = tl.load(seen_row + cell, mask=(cell >= 0) & (fresh == 0), other=-1)
    return new, old


@triton.jit
def _corrected_tile(
    z, offs, mask, near_ptr, now_row, seen_row, left_ptr, right_ptr, gate_row, fresh, slot, S, V, O, R,
    HAS_GATE: tl.constexpr,
):  # fmt: skip
    """z [BLOCK] plus the tables' rows of the neighbours that moved."""
    for o in range(0, O):
        new, old = _moved(near_ptr, now_row, seen_row, fresh, slot, S, o)
        if new != old:
            for r in range(0, R):
                f = tl.load(left_ptr + (o * V + new) * R + r, mask=new >= 0, other=0.0)
                f -= tl.load(left_ptr + (o * V + old) * R + r, mask=old >= 0, other=0.0)
                if HAS_GATE:
                    f *= tl.load(gate_row + o * R + r)
                row = right_ptr + (tl.zeros((), tl.int64) + o * R + r) * V
                z += f * tl.load(row + offs, mask=mask, other=0.0)
    return z


@triton.jit
def _race(p_row, e_row, V, BLOCK: tl.constexpr):
    """argmax p / E, ties to the lowest id: int64."""
    best = tl.full((), -1.0, tl.float32)
    winner = tl.zeros((), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        p = tl.load(p_row + offs, mask=mask, other=0.0)
        e = tl.load(e_row + offs, mask=mask, other=1.0)
        score = tl.where(mask, tl.div_rn(p, e), -1.0)
        top = tl.max(score, 0)
        lowest = tl.min(tl.where(score == top, offs, 2147483647), 0)
        winner = tl.where(top > best, lowest, winner)
        best = tl.maximum(best, top)
    return winner.to(tl.int64)


@triton.jit
def sweep_kernel(
    law_ptr,  # fp32 [B, W, V] laws in, corrected laws out
    draft_ptr,  # int64 [B, W]
    now_ptr,  # int64 [B, S] tokens by slot, updated
    seen_ptr,  # int64 [B, S]
    first_ptr,  # int64 [B]
    near_ptr,  # int64 [O, S], -1 = none
    left_ptr,  # fp32 [O, V, R]
    right_ptr,  # fp32 [O, R, V]
    fresh_ptr,  # uint8 [B, W]
    given_ptr,  # uint8 [B, W] or None
    gate_ptr,  # fp32 [B, W, O, R] or None
    q_ptr,  # fp32 [B, W, V] or None
    q_batch,
    q_row,
    onehot_ptr,  # uint8 [B, W] or None
    drafted_ptr,  # uint8 [B, W] or None
    u_ptr,  # fp32 [B, W], with U
    U_ptr,  # int64 [B, W]
    E_ptr,  # fp32 [B, W, V], in place of u and U
    e_batch,
    e_row,
    tokens_ptr,  # int64 [B, W] out
    W,
    S,
    V,
    O,
    R,
    HAS_GIVEN: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_ONEHOT: tl.constexpr,
    HAS_DRAFTED: tl.constexpr,
    RACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    now_row = now_ptr + b * S
    seen_row = seen_ptr + b * S
    first = tl.load(first_ptr + b)
    for k in range(0, W):
        at = b * W + k
        slot = first + k
        token = tl.load(draft_ptr + at)
        moves = slot < S
        if HAS_GIVEN:
            moves = moves & (tl.load(given_ptr + at) == 0)
        if moves:
            fresh = tl.load(fresh_ptr + at)
            row = law_ptr + at * V
            gate_row = left_ptr
            if HAS_GATE:
                gate_row = gate_ptr + at * O * R
            changed = tl.zeros((), tl.int32)
            for o in range(0, O):
                new, old = _moved(near_ptr, now_row, seen_row, fresh, slot, S, o)
                changed += (new != old).to(tl.int32)
            if changed > 0:
                peak = tl.full((), float("-inf"), tl.float32)
                for start in range(0, V, BLOCK):
                    offs = start + tl.arange(0, BLOCK)
                    mask = offs < V
                    law = tl.load(row + offs, mask=mask, other=0.0)
                    z = tl.where(law > 0, tl.log(tl.where(law > 0, law, 1.0)), float("-inf"))
                    z = _corrected_tile(
                        z, offs, mask, near_ptr, now_row, seen_row, left_ptr, right_ptr, gate_row, fresh, slot, S, V,
                        O, R, HAS_GATE,
                    )  # fmt: skip
                    tl.store(row + offs, z, mask=mask)
                    peak = tl.maximum(peak, tl.max(z, 0))
                tl.debug_barrier()
                total = tl.zeros((), tl.float32)
                for start in range(0, V, BLOCK):
                    offs = start + tl.arange(0, BLOCK)
                    mask = offs < V
                    z = tl.exp(tl.load(row + offs, mask=mask, other=float("-inf")) - peak)
                    tl.store(row + offs, z, mask=mask)
                    total += tl.sum(z, 0)
                tl.debug_barrier()
                for start in range(0, V, BLOCK):
                    offs = start + tl.arange(0, BLOCK)
                    mask = offs < V
                    tl.store(
                        row + offs, tl.div_rn(tl.load(row + offs, mask=mask, other=0.0), total), mask=mask
                    )
                tl.debug_barrier()
            if RACE:
                token = _race(row, E_ptr + b * e_batch + k * e_row, V, BLOCK)
            else:
                drafted = k >= 0
                if HAS_DRAFTED:
                    drafted = tl.load(drafted_ptr + at) != 0
                q_x = tl.full((), 1.0, tl.float32)
                point = k >= 0
                q_at = law_ptr
                if HAS_Q:
                    point = k < 0
                    q_at = q_ptr + b * q_batch + k * q_row
                    if HAS_ONEHOT:
                        point = tl.load(onehot_ptr + at) != 0
                    q_x = tl.load(q_at + token, mask=point == 0, other=1.0)
                kept = drafted & (tl.load(u_ptr + at) * q_x < tl.load(row + token))
                if kept == 0:
                    dense = drafted & (point == 0)
                    token = residual_draw(
                        row, q_at, dense, drafted & point, token, tl.load(U_ptr + at), V, HAS_Q, BLOCK
                    )
            tl.store(now_row + slot, token)
        elif slot < S:
            tl.store(now_row + slot, token)
        tl.store(tokens_ptr + at, token)
        tl.debug_barrier()


def neighbour_sweep(
    p: Tensor,
    draft: Tensor,
    known: Tensor,
    seen: Tensor,
    first: Tensor,
    neighbour: Tensor,
    left: Tensor,
    right: Tensor,
    fresh: Tensor,
    given: Tensor | None,
    gate: Tensor | None,
    q: Tensor | None,
    q_onehot: Tensor | None,
    has_draft: Tensor | None,
    u: Tensor | None,
    U: Tensor | None,
    E: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.neighbour_sweep`."""
    B, W, V = p.shape
    O, _, R = left.shape
    laws = p.contiguous().clone()
    now = known.contiguous().clone()
    tokens = torch.empty(B, W, dtype=torch.int64, device=p.device)
    q = None if q is None else rows_of(q)
    E = None if E is None else rows_of(E)
    BLOCK = row_tile(V)
    sweep_kernel[(B,)](
        laws,
        draft.contiguous(),
        now,
        seen.contiguous(),
        first.contiguous(),
        neighbour.contiguous(),
        left.contiguous(),
        right.contiguous(),
        as_bytes(fresh),
        None if given is None else as_bytes(given),
        None if gate is None else gate.contiguous(),
        q,
        0 if q is None else q.stride(0),
        0 if q is None else q.stride(1),
        None if q_onehot is None else as_bytes(q_onehot),
        None if has_draft is None else as_bytes(has_draft),
        None if u is None else u.contiguous(),
        None if U is None else U.contiguous(),
        E,
        0 if E is None else E.stride(0),
        0 if E is None else E.stride(1),
        tokens,
        W,
        known.shape[1],
        V,
        O,
        R,
        HAS_GIVEN=given is not None,
        HAS_GATE=gate is not None,
        HAS_Q=q is not None,
        HAS_ONEHOT=q_onehot is not None,
        HAS_DRAFTED=has_draft is not None,
        RACE=E is not None,
        BLOCK=BLOCK,
        num_warps=sweep_warps(BLOCK),
    )
    return tokens, laws
