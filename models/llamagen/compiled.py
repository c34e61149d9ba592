"""The window forward of a LlamaGen GPT for torch.compile: the arithmetic of ``GPT.forward_window`` on a cache of fixed
width, without complex numbers, keys and values of every layer as tensors of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.models.compiling import compiled, fixed, kept, put_slots
from visacc.models.llamagen.gpt import GPT


class CompiledWindow:
    """Callable like ``GPT.forward_window`` for codes and all logits; one graph per set of shapes.

    Raises:
        RuntimeError: this machine cannot compile.
    """

    def __init__(self, gpt: GPT) -> None:
        self.gpt, device = gpt, gpt.output.weight.device
        self.turns = torch.view_as_real(gpt.rope(device))
        self._run = compiled(self._forward, device, whole=True)

    def __call__(
        self, codes: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, cache: Tensor
    ) -> Tensor:
        """Logits float32 [R, N, V]; ``mask`` bool [R, N, S] over the whole cache [L, 2, R, H, S, d]."""
        # separate inputs: writing into one layer of a whole would copy the whole
        stores = [store for layer in cache for store in layer]
        fixed(stores)
        return kept(self._run(codes, positions, slots, mask, stores))

    def _forward(
        self, codes: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, stores: Sequence[Tensor]
    ) -> Tensor:
        gpt = self.gpt
        x = F.embedding(codes, gpt.tok_embeddings.weight)
        turn = self.turns[positions].unsqueeze(2)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -math.inf).unsqueeze(1)
        for i, layer in enumerate(gpt.blocks):
            own = layer.attention
            q, k, v = own.project(layer.attention_norm(x), turn)
            keys, values = stores[2 * i], stores[2 * i + 1]
            put_slots(keys, slots, k)
            put_slots(values, slots, v)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=own.gqa)
            x = x + own.wo(y.transpose(1, 2).flatten(2))
            x = x + layer.feed_forward(layer.ffn_norm(x))
        return gpt.output(gpt.norm(x)).float()
