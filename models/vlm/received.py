"""How much attention each position of a prompt receives: what visual token pruning ranks picture tokens by."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

_NAME = "visacc_received"
_BLOCK = 512
"""Queries whose maps are held at a time: memory stays linear in the length of the prompt."""


@contextmanager
def received(attention: nn.Module, valid: Tensor) -> Iterator[list[Tensor]]:
    """Within the block, a forward of the ``attention`` module puts one [B, N] float32 into the list it gives.

    The output of the module is that of its own implementation. A number is the attention a position receives, averaged
    over heads and over the queries that are no padding.

    Args:
        attention: self-attention of a decoder layer of transformers.
        valid: bool [B, N], False at padding.
    """
    module: Any = attention
    own = module.config
    plain: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: list[Tensor] = []
    module._visacc_received = (
        ALL_ATTENTION_FUNCTIONS.get_interface(own._attn_implementation, plain),
        valid,
        found,
    )
    module.config = copy.copy(own)
    module.config._attn_implementation_internal = _NAME
    try:
        yield found
    finally:
        module.config = own
        del module._visacc_received


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    inner, valid, found = module._visacc_received
    found.append(_share(query, key, attention_mask, valid, kwargs.get("scaling")))
    return inner(module, query, key, value, attention_mask, **kwargs)


def _share(query: Tensor, key: Tensor, mask: Tensor | None, valid: Tensor, scaling: float | None) -> Tensor:
    """query [B, H, N, d], key [B, G, N, d], mask bool or additive [B or 1, 1, N, N] (``None``: causal) -> [B, N]."""
    batch, heads, length, dim = query.shape
    keys = key[:, :, :length].repeat_interleave(heads // key.shape[1], dim=1).float()
    scale = dim**-0.5 if scaling is None else scaling
    total = torch.zeros(batch, length, device=query.device)
    order = torch.arange(length, device=query.device)
    for first in range(0, length, _BLOCK):
        part = slice(first, min(first + _BLOCK, length))
        scores = query[:, :, part].float() @ keys.transpose(2, 3) * scale
        if mask is None:
            scores = scores.masked_fill(order > order[part, None], -torch.inf)
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, :, part, :length], -torch.inf)
        else:
            scores = scores + mask[:, :, part, :length].float()
        maps = scores.softmax(-1).mean(1)  # [B, block, N]
        total += torch.where(valid[:, part, None], maps, 0.0).sum(1)
    return total / valid.sum(1, keepdim=True)


AttentionInterface.register(_NAME, _forward)
