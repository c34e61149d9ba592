"""KV commit: one launch over all layers, keys and values, rows and heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def commit_kernel(
    kv_ptr,  # [L, B, H, S, D] in place
    kv_l,
    kv_b,
    kv_h,
    kv_s,
    path_ptr,  # int32 [B, P]
    n_ptr,  # int64 [B]
    start_ptr,  # int64 [B]
    P,
    H,
    D,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    j = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    n = tl.load(n_ptr + b)
    start = tl.load(start_ptr + b)
    slot = tl.load(path_ptr + b * P + j, mask=j < P, other=-1).to(tl.int64)
    moved = (j < n) & (slot >= 0)
    base = kv_ptr + layer * kv_l + b * kv_b + h * kv_h + d[None, :]
    mask = moved[:, None] & (d < D)[None, :]
    values = tl.load(base + (start + slot)[:, None] * kv_s, mask=mask, other=0.0)
    tl.debug_barrier()  # sources and targets overlap: everything is read before anything is written
    tl.store(base + (start + j)[:, None] * kv_s, values, mask=mask)


def commit_warps(block_p: int, block_d: int) -> int:
    """All slots of a path are held in registers at once: 16 elements a thread."""
    return max(1, min(8, block_p * block_d // 512))


def commit_kv(kv: Tensor, path: Tensor, n: Tensor, start: Tensor) -> None:
    """See `visacc.kernels.commit_kv`."""
    L, B, H, _, D = kv.shape
    P = path.shape[1]
    BLOCK_P, BLOCK_D = max(16, triton.next_power_of_2(P)), max(16, triton.next_power_of_2(D))
    commit_kernel[(L, B * H)](
        kv,
        *kv.stride()[:4],
        path.to(torch.int32).contiguous(),
        n.to(torch.int64).contiguous(),
        start.to(torch.int64).contiguous(),
        P,
        H,
        D,
        BLOCK_P=BLOCK_P,
        BLOCK_D=BLOCK_D,
        num_warps=commit_warps(BLOCK_P, BLOCK_D),
    )
