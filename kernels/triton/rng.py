"""Philox words of a broadcast grid in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def philox_kernel(
    seed_ptr, seed_r, seed_c,  # int64 [R, C] through strides, like the counters
    c0_ptr, c0_r, c0_c,
    c1_ptr, c1_r, c1_c,
    c2_ptr, c2_r, c2_c,
    c3_ptr, c3_r, c3_c,
    out_ptr,  # int64 [4, R, C]
    R,
    C,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    seed = tl.load(seed_ptr + r * seed_r + c * seed_c, mask=mask, other=0)
    w0 = tl.load(c0_ptr + r * c0_r + c * c0_c, mask=mask, other=0).to(tl.uint32)
    w1 = tl.load(c1_ptr + r * c1_r + c * c1_c, mask=mask, other=0).to(tl.uint32)
    w2 = tl.load(c2_ptr + r * c2_r + c * c2_c, mask=mask, other=0).to(tl.uint32)
    w3 = tl.load(c3_ptr + r * c3_r + c * c3_c, mask=mask, other=0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, w0, w1, w2, w3)
    at = out_ptr + r * C + c
    plane = (tl.zeros((), dtype=tl.int64) + R) * C  # not R.to(): a launch with R = 1 passes a Python integer
    tl.store(at, w0.to(tl.int64), mask=mask)
    tl.store(at + plane, w1.to(tl.int64), mask=mask)
    tl.store(at + 2 * plane, w2.to(tl.int64), mask=mask)
    tl.store(at + 3 * plane, w3.to(tl.int64), mask=mask)


def philox(*args: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `visacc.kernels.rng.philox`; int64 tensors seed, c0, c1, c2, c3 of broadcastable shapes."""
    shape = torch.broadcast_shapes(*(a.shape for a in args))
    lead, C = shape[:-1], shape[-1] if shape else 1
    R = lead.numel()
    given: list[Tensor | int] = []
    for a in args:
        wide = a.ndim > 0 and a.shape[-1] != 1
        flat = a.expand(*lead, C if wide else 1).reshape(R, C if wide else 1)
        given += [flat, flat.stride(0), flat.stride(1) if wide else 0]
    out = torch.empty(4, R, C, dtype=torch.int64, device=args[0].device)
    BLOCK = max(16, min(512, triton.next_power_of_2(C)))
    philox_kernel[(R, triton.cdiv(C, BLOCK))](*given, out, R, C, BLOCK=BLOCK, num_warps=max(1, BLOCK // 128))
    w0, w1, w2, w3 = (w.view(shape) for w in out)
    return w0, w1, w2, w3
