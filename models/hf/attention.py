"""Attention masks in the form each transformers backend understands, and the ``visacc_tree`` backend.

A boolean 4-D mask means "may attend" to SDPA, but eager attention *adds* it as 0/1 and so ignores it
silently; flash attention takes no 4-D mask at all. One function converts, one refuses.

``visacc_tree`` is an attention implementation that gets the shape of a window or tree in compact form
(lengths, left padding, ancestor relation) through an extra keyword of the model's forward, instead of a dense
mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TREE = "visacc_tree"


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


@dataclass
class TreeShape:
    """Who sees whom in one forward, without a dense mask over the cache.

    Attributes:
        start: int64 [rows] first real slot (left padding before it).
        end: int64 [rows] slots in ``start..end-1`` are seen by every node; node n lies at slot ``end + n``.
        visible: bool [rows, N, N] query x key among the nodes, or ``None`` for a causal chain.
    """

    start: Tensor
    end: Tensor
    visible: Tensor | None

    def dense(self, size: int, slots: int) -> Tensor:
        """The same as bool [rows, N, slots]."""
        slot = torch.arange(slots, device=self.start.device)
        order = torch.arange(size, device=self.start.device)
        seen = ((slot >= self.start[:, None]) & (slot < self.end[:, None]))[:, None].expand(-1, size, -1)
        own = self.visible
        if own is None:
            own = (order[:, None] >= order).expand(len(self.start), size, size)
        at = (self.end[:, None] + order)[:, None].expand_as(own)
        return seen.clone().scatter_(2, at, own)


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    visacc_shape: TreeShape | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [rows, heads, N, dim] queries over [rows, kv heads, slots, dim] keys and values.

    With ``visacc_shape`` the mask argument is a placeholder and ignored; without it (prompts, text
    generation, sets of nodes) this is transformers' SDPA attention.
    """
    if visacc_shape is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    seen = visacc_shape.dense(query.shape[2], key.shape[2])[:, None]
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def register_tree_attention() -> str:
    """Make ``attn_implementation="visacc_tree"`` known to transformers (idempotent). Returns the name.

    The mask function is registered as well: without one, transformers would drop 2-D padding masks and the
    causal mask of prompts without a word.
    """
    AttentionInterface.register(TREE, tree_attention_forward)
    AttentionMaskInterface.register(TREE, sdpa_mask)
    return TREE
