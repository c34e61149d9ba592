"""The Cosmos autoregressive transformer (arXiv 2501.03575): Llama-style, 3-D rotary, optional text cross-attention.

Tensor names are those of the published checkpoints. Next-token prediction over video codes in raster order t, h, w;
Video2World models put a begin-of-video token first and read a text in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.attention import cached_attention, mask_bias, slot_index
from visacc.models.cosmos.positions import Yarn, absolute_table, rope_tables, rotate


@dataclass
class CosmosConfig:
    """Hyper-parameters; the defaults are the 4B model.

    Attributes:
        grid: latent (frames, rows, columns).
        context_dim: width of the text features; 0 for models without text (these have no begin-of-video token).
        yarn: original latent grid of a YaRN-extended model, or ``None``.
    """

    dim: int = 4096
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn_dim: int = 14336
    vocab: int = 64000
    grid: tuple[int, int, int] = (5, 40, 64)
    context_dim: int = 0
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        self.grid = (int(self.grid[0]), int(self.grid[1]), int(self.grid[2]))
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} key heads")

    @property
    def text(self) -> bool:
        return self.context_dim > 0

    @property
    def begin(self) -> int:
        """1 where a begin-of-video token precedes the video, else 0. Its id is ``vocab``."""
        return int(self.text)

    @property
    def input_rows(self) -> int:
        """Rows of the input table: with the begin token rounded up to a multiple of 64."""
        return -(-(self.vocab + 1) // 64) * 64 if self.text else self.vocab

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys; keys may come from a context instead."""

    def __init__(self, config: CosmosConfig, key_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        key_dim = key_dim or config.dim
        self.wq = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(key_dim, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(key_dim, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps)

    def queries(self, x: Tensor) -> Tensor:
        return self.q_norm(self.wq(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.wk(x).unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
        return k, self.wv(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

    def window(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer_kv: Tensor, index: Tensor, bias: Tensor, limit: int
    ) -> Tensor:
        k, v = self.keys_values(x)
        q, k = rotate(self.queries(x), cos, sin), rotate(k, cos, sin)
        return self.wo(cached_attention(q, k, v, layer_kv, index, bias, limit))

    def cross(self, x: Tensor, context_kv: Tensor) -> Tensor:
        """Attend to the whole context, keys and values [R, 2, Hkv, M, hd] made beforehand."""
        k, v = context_kv.unbind(1)
        out = F.scaled_dot_product_attention(self.queries(x), k, v, enable_gqa=self.heads != self.kv_heads)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: CosmosConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config: CosmosConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        if config.text:
            self.cross_attention = Attention(config, config.context_dim)
            self.cross_attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)

    def window(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        layer_kv: Tensor,
        index: Tensor,
        bias: Tensor,
        limit: int,
        context_kv: Tensor | None,
    ) -> Tensor:
        """The layer over the cache; ``turn`` cos and sin, ``context_kv`` [R, 2, Hkv, M, hd] of models with text."""
        x = x + self.attention.window(self.attention_norm(x), *turn, layer_kv, index, bias, limit)
        if context_kv is not None:
            x = x + self.cross_attention.cross(self.cross_attention_norm(x), context_kv)
        return x + self.feed_forward(self.ffn_norm(x))


class Cosmos(nn.Module):
    """Cosmos transformer. Tables are made on the device that asks, never stored."""

    def __init__(self, config: CosmosConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.input_rows, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos, sin [1 + tokens, head_dim] and the absolute table [1 + tokens, dim] (text models only)."""
        if device not in self._tables:
            cfg = self.config
            begin = cfg.text
            cos, sin = rope_tables(cfg.grid, cfg.head_dim, theta=cfg.rope_theta, yarn=cfg.yarn, begin=begin)
            absolute = absolute_table(cfg.grid, cfg.dim, begin=True).to(device) if cfg.text else None
            self._tables[device] = (cos.to(device), sin.to(device), absolute)
        return self._tables[device]

    def context_kv(self, context: Tensor) -> Tensor:
        """Text features [R, M, context_dim] -> keys and values of every layer, [R, L, 2, Hkv, M, hd]."""
        if not self.config.text:
            raise ValueError("this Cosmos model has no text input")
        if context.ndim != 3 or context.shape[2] != self.config.context_dim:
            raise ValueError(
                f"text features must be [B, M, {self.config.context_dim}], got {tuple(context.shape)}"
            )
        context = context.to(self.output.weight.dtype)
        pairs = [torch.stack(layer.cross_attention.keys_values(context), dim=1) for layer in self._layers()]
        return torch.stack(pairs, dim=1)

    def _layers(self) -> Sequence[Layer]:
        return cast("Sequence[Layer]", self.layers)

    def empty_cache(self, rows: int, slots: int) -> Tensor:
        from visacc.cache import allocate

        cfg, weight = self.config, self.output.weight
        return allocate(
            cfg.layers, rows, cfg.kv_heads, slots, cfg.head_dim, dtype=weight.dtype, device=weight.device
        )

    def forward_window(
        self,
        ids: Tensor,
        slots: Tensor,
        mask: Tensor,
        cache: Tensor,
        limit: int,
        context_kv: Tensor | None = None,
        outputs: Tensor | slice | None = None,
    ) -> Tensor:
        """One pass over ids int64 [R, N] at cache slots = sequence positions [R, N]; ``mask`` bool [R, N, limit].

        Writing over a slot replaces what was there, so rejected drafts need no rollback. Returns logits float32
        [R, M, V] of the places ``outputs`` (all by default).
        """
        if self.config.text != (context_kv is not None):
            raise ValueError("text features must be given exactly for Video2World models")
        cos_table, sin_table, absolute = self.tables(ids.device)
        place = slots.clamp(max=len(cos_table) - 1)
        cos, sin = cos_table[place].unsqueeze(1), sin_table[place].unsqueeze(1)
        x = F.embedding(ids, self.tok_embeddings.weight)
        shift = None if absolute is None else absolute[place].to(x.dtype)
        bias, index = mask_bias(mask, x.dtype), slot_index(slots, cache)
        for i, layer in enumerate(self._layers()):
            x = x if shift is None else x + shift
            context = None if context_kv is None else context_kv[:, i]
            x = layer.window(x, (cos, sin), cache[i], index, bias, limit, context)
        x = x if outputs is None else x[:, outputs]
        return self.output(self.norm(x)).float()

    def forward(self, ids: Tensor, context: Tensor | None = None) -> Tensor:
        """Logits float32 [B, S, V] of a whole sequence (begin-of-video id included where the model has one)."""
        batch, length = ids.shape
        slots = torch.arange(length, device=ids.device).expand(batch, -1)
        mask = (slots[:, :, None] >= slots[:, None, :]).contiguous()
        kv = None if context is None else self.context_kv(context)
        return self.forward_window(ids, slots, mask, self.empty_cache(batch, length), length, kv)
