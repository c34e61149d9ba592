"""Public ops on the slot-addressed K/V cache: tree attention and commit.

Both are registered as `torch.library` custom ops (`visacc::tree_attention`, `visacc::commit_kv`), so that
they can stand inside a compiled or graph-captured model forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels import checks
from visacc.kernels.dispatch import UnsupportedError, choose, launcher, warn_unsupported
from visacc.kernels.reference import attention as _attention
from visacc.kernels.reference import cache as _cache
from visacc.kernels.reference.attention import attention_mask

__all__ = ["attention_mask", "commit_kv", "tree_attention"]


@torch.library.custom_op("visacc::tree_attention", mutates_args=(), device_types="cuda")
def _tree_attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    start: Tensor | None,
    words: Tensor | None,
    scale: float,
    window: int | None,
    depth: Tensor | None,
) -> Tensor:
    return launcher("attention").tree_attention(q, k, v, lengths, start, words, scale, window, depth)


@_tree_attention_kernel.register_kernel("cpu")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    start: Tensor | None,
    words: Tensor | None,
    scale: float,
    window: int | None,
    depth: Tensor | None,
) -> Tensor:
    return launcher("attention").tree_attention(q, k, v, lengths, start, words, scale, window, depth)


@_tree_attention_kernel.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    start: Tensor | None,
    words: Tensor | None,
    scale: float,
    window: int | None,
    depth: Tensor | None,
) -> Tensor:
    return q.new_empty(q.shape)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    start: Tensor | None = None,
    words: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    depth: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of N proposed nodes, [B, N, H, D] like q.

    q: [B, N, H, D], any strides. k, v: [B, Hkv, S, D] cache views (float16, bfloat16 or float32), H a
        multiple of Hkv;
    the nodes' own K/V must already be at slots lengths .. lengths + N - 1. lengths: int [B] committed slots.
    start: int [B], slots before it are padding. words: int32 [B, N, ceil(N/32)], bit j of row i: node i sees
        node j
    (`tree_index(...).words`, `pack_bits`); None = causal chain. scale: default D ** -0.5.

    window: sliding window in tokens along the path; a key is seen if its index exceeds the query's minus
        `window`, where a
    committed slot has its own number as index and a node lengths + depth. depth: int [B, N], default 0..N-1.

    A node that sees nothing gets zeros. Traffic floor B Hkv (lengths + N) D 2 elements.
    """
    B, N, H, D = q.shape
    if k.ndim != 4 or k.shape[0] != B or k.shape[3] != D or k.shape != v.shape:
        raise ValueError(
            f"k and v must both be [B={B}, heads, slots, D={D}], got {list(k.shape)} and {list(v.shape)}"
        )
    if H % k.shape[1]:
        raise ValueError(f"{H} query heads are not a multiple of {k.shape[1]} K/V heads")
    checks.shape("lengths", lengths, ("B",), B)
    checks.optional("start", start, ("B",), B)
    checks.optional("words", words, ("B", "N", "W"), B, N, -(-N // 32))
    checks.optional("depth", depth, ("B", "N"), B, N)
    checks.same_device(q, k, v, lengths, start, words, depth)
    given = (q, k, v, lengths, start, words, D**-0.5 if scale is None else scale, window, depth)
    if choose(backend, (q,)) == "triton":
        try:
            return _tree_attention_kernel(*given)
        except UnsupportedError as error:
            warn_unsupported("tree_attention", str(error))
    return _attention.tree_attention(*given)


@torch.library.custom_op("visacc::commit_kv", mutates_args=("kv",))
def _commit_kernel(kv: Tensor, path: Tensor, n: Tensor, start: Tensor) -> None:
    launcher("cache").commit_kv(kv, path, n, start)


@_commit_kernel.register_fake
def _(kv: Tensor, path: Tensor, n: Tensor, start: Tensor) -> None:
    return None


def commit_kv(kv: Tensor, path: Tensor, n: Tensor, start: Tensor, *, backend: str | None = None) -> None:
    """Move accepted K/V in place: slot start + path[j] -> start + j for j < n, in every layer, row and head.

    kv: [layers * 2, B, heads, S, D] (a view is fine). path: int [B, P], ascending with path[j] >= j, -1
        padded.
    n, start: int [B]. One launch; chains need no call, their accepted prefix is already in place.
    """
    if kv.ndim != 5:
        raise ValueError(f"kv must be [layers * 2, B, heads, slots, D], got {list(kv.shape)}")
    B = kv.shape[1]
    checks.shape("path", path, ("B", "P"), B, path.shape[-1])
    checks.shape("n", n, ("B",), B)
    checks.shape("start", start, ("B",), B)
    checks.same_device(kv, path, n, start)
    if kv.stride(4) == 1 and choose(backend, (kv,)) == "triton":
        _commit_kernel(kv, path, n, start)
    else:
        _cache.commit_kv(kv, path, n, start)
