"""``visacc_tree``: tree attention inside unmodified transformers models.

An attention implementation that gets the shape of a window or tree in compact form (lengths, left padding,
packed ancestors, depths) through an extra keyword of the model's forward, instead of a dense mask over the
cache::

    register_tree_attention()
    model.set_attn_implementation(TREE)
    model(inputs_embeds=..., position_ids=..., cache=slot_cache, attention_mask=placeholder(model),
    visacc_shape=shape)

transformers hands every layer its own ``sliding_window`` (None on full layers), so Gemma-3-like models need
no second mask. Without ``visacc_shape`` (prompts, plain generation) the implementation is transformers' SDPA
attention; the matching mask function is registered as well, because transformers silently drops causality for
implementations without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visacc.kernels.attention_ops import tree_attention

TREE = "visacc_tree"


@dataclass
class TreeShape:
    """Who sees whom in one forward; see :func:`visacc.kernels.tree_attention`.

    Attributes:
        start: int64 [rows] first real slot (left padding before it).
        end: int64 [rows] slots ``start..end-1`` are seen by every node; node n lies at slot ``end + n``.
        words: int32 [rows, N, ceil(N / 32)] packed visibility among the nodes, or ``None`` for a causal
            chain.
        depth: int64 [rows, N] depth of every node, for sliding windows over trees; ``None`` for a chain.
    """

    start: Tensor
    end: Tensor
    words: Tensor | None = None
    depth: Tensor | None = None


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    visacc_shape: TreeShape | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [rows, heads, N, dim] queries over [rows, kv heads, slots, dim] keys and values.

    With ``visacc_shape`` the mask argument is a placeholder and ignored; ``sliding_window`` then counts
    tokens along the
    path: a key is seen if its index exceeds the query's minus the window.
    """
    if visacc_shape is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    if kwargs.get("softcap"):
        raise ValueError(
            "visacc_tree has no logit soft-capping; use attn_implementation='eager' for this model"
        )
    shape = visacc_shape
    out = tree_attention(
        query.transpose(1, 2),
        key,
        value,
        shape.end,
        start=shape.start,
        words=shape.words,
        scale=scaling,
        window=sliding_window,
        depth=shape.depth,
    )
    return out, None


def register_tree_attention() -> str:
    """Make ``attn_implementation="visacc_tree"`` known to transformers (idempotent). Returns the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(TREE, tree_attention_forward)
    AttentionMaskInterface.register(TREE, sdpa_mask)
    return TREE


def placeholder(layer_types: list[str] | None, device: torch.device | str) -> Tensor | dict[str, Tensor]:
    """What to pass as ``attention_mask`` beside ``visacc_shape``: a 4-D mask keeps transformers from building
    one.

    layer_types: the text configuration's ``layer_types`` for models whose text model takes one mask per layer
        type
    (Gemma 3, Qwen2.5-VL), None for those that take a single tensor (Llama, Mistral).
    """
    empty = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    if layer_types is None:
        return empty
    return dict.fromkeys(set(layer_types), empty)
