"""Attention masks in the form each transformers backend understands, and the ``visacc_tree`` backend.

A boolean 4-D mask means "may attend" to SDPA, but eager attention *adds* it as 0/1 and so ignores it
silently; flash attention takes no 4-D mask at all. One function converts, one refuses.

``visacc_tree`` (:mod:`visacc.kernels.hf_attention`) gets the shape of a window or tree in compact form
instead of a dense mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels.hf_attention import TREE, TreeShape, register_tree_attention

__all__ = ["TREE", "TreeShape", "as_mask", "check_implementation", "register_tree_attention"]


def check_implementation(name: str | None) -> None:
    """Raise ``ValueError`` for attention implementations that cannot take per-node masks."""
    if name is not None and (name.startswith("flash") or name.startswith("flex") or "|" in name):
        raise ValueError(
            f"attention implementation {name!r} takes no 4-D masks, which parallel decoding needs; load the"
            " model with"
            f" attn_implementation='sdpa' ('eager' and {TREE!r} work as well)"
        )


def as_mask(visible: Tensor, implementation: str | None, dtype: torch.dtype) -> Tensor:
    """bool [rows, N, K] (True = may attend) -> 4-D mask [rows, 1, N, K] for the implementation.

    Eager attention adds its mask to the scores, so it gets 0 and the smallest finite number; the others get
    booleans.
    """
    mask = visible[:, None]
    if implementation != "eager":
        return mask
    blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), blocked)
