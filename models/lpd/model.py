"""The LPD transformer (arXiv 2507.01957): context rows carry what is known, query rows ask for a place.

Row for a known code t at raster cell r: ``z_proj_ln(token_emb[t] + pos_embed[1 + r])``; the class row sits at position
row 0; a query row is ``z_proj_ln(mask_token + pos_embed[1 + r])`` and its logits are the law of the code at r itself.
The learned absolute table is the only position signal. Tensor names are those of the published checkpoints.

Beyond them, a model may take a caption: ``text_len`` word rows after the class row, which together form the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.attention import cached_attention, mask_bias, slot_index
from visacc.models.lpd.parts import Part, attend, split_mask, training_mask


@dataclass
class LPDConfig:
    """Hyper-parameters; the defaults are LPD-L at 256 pixels.

    ``text_vocab`` > 0 adds a caption of ``text_len`` word ids (0 pads) to the prefix.
    """

    dim: int = 1024
    depth: int = 24
    heads: int = 16
    vocab: int = 16384
    classes: int = 1000
    grid: int = 16
    dropout: float = 0.1
    class_drop: float = 0.1
    text_vocab: int = 0
    text_len: int = 0

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"width {self.dim} does not divide into {self.heads} heads")
        if (self.text_vocab > 0) != (self.text_len > 0):
            raise ValueError("text_vocab and text_len are given together or not at all")

    @property
    def tokens(self) -> int:
        return self.grid**2

    @property
    def prefix(self) -> int:
        """Rows before the image: the class, then the caption's words."""
        return 1 + self.text_len


class Attention(nn.Module):
    def __init__(self, config: LPDConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.proj_drop = nn.Dropout(config.dropout)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, N, D] -> q, k, v [R, H, N, hd]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def forward(self, x: Tensor, parts: Sequence[Part]) -> Tensor:
        q, k, v = self.project(x)
        mixed = [
            attend(q[:, :, part.rows], part.columns_of(k), part.columns_of(v), part.mask) for part in parts
        ]
        return self.proj_drop(self.proj(torch.cat(mixed, dim=2).transpose(1, 2).flatten(2)))

    def window(self, x: Tensor, layer_kv: Tensor, index: Tensor, bias: Tensor, limit: int) -> Tensor:
        q, k, v = self.project(x)
        return self.proj(cached_attention(q, k, v, layer_kv, index, bias, limit))


class Mlp(nn.Module):
    def __init__(self, config: LPDConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.dim, 4 * config.dim)
        self.fc2 = nn.Linear(4 * config.dim, config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, config: LPDConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, parts: Sequence[Part]) -> Tensor:
        x = x + self.attn(self.norm1(x), parts)
        return x + self.mlp(self.norm2(x))

    def window(self, x: Tensor, layer_kv: Tensor, index: Tensor, bias: Tensor, limit: int) -> Tensor:
        x = x + self.attn.window(self.norm1(x), layer_kv, index, bias, limit)
        return x + self.mlp(self.norm2(x))


class LPD(nn.Module):
    """LPD with the published tensor names."""

    def __init__(self, config: LPDConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.class_emb = nn.Embedding(config.classes, dim)
        self.token_emb = nn.Embedding(config.vocab, dim)
        self.fake_latent = nn.Parameter(torch.zeros(1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.tokens + 1, dim))
        self.z_proj_ln = nn.LayerNorm(dim, eps=1e-6)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        if config.text_len:
            self.word_emb = nn.Embedding(config.text_vocab, dim)
            self.word_pos = nn.Parameter(torch.zeros(1, config.text_len, dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Published initialisation: normal(0.02) for tables and vectors, Xavier uniform for Linear, zero bias."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "emb" in name or name in ("fake_latent", "mask_token", "word_pos"):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)

    @property
    def layers(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.blocks)

    # ---- rows ---------------------------------------------------------------------------------------------
    def prefix_rows(self, labels: Tensor, words: Tensor | None = None) -> Tensor:
        """Prefix [B, P, D]. labels int64 [B], -1 for "no class"; words int64 [B, text_len] (0 pads)."""
        fake = (labels < 0)[:, None]
        row = torch.where(fake, self.fake_latent, self.class_emb(labels.clamp(min=0)))
        rows = (row + self.pos_embed[:, 0])[:, None]
        if self.config.text_len:
            if words is None:
                words = labels.new_zeros(len(labels), self.config.text_len)
            rows = torch.cat([rows, self.word_emb(words) + self.word_pos], dim=1)
        return self.z_proj_ln(rows)

    def context_rows(self, codes: Tensor, cells: Tensor) -> Tensor:
        """Known codes int64 [B, N] at raster cells [B, N] -> [B, N, D]."""
        return self.z_proj_ln(self.token_emb(codes) + self.pos_embed[0, 1 + cells])

    def query_rows(self, cells: Tensor) -> Tensor:
        """Queries for raster cells [B, N] -> [B, N, D]."""
        return self.z_proj_ln(self.mask_token + self.pos_embed[0, 1 + cells])

    def training_rows(
        self, tokens: Tensor, labels: Tensor, orders: Tensor, last: int, words: Tensor | None
    ) -> Tensor:
        """Input of block 0, [B, L, D]; see :func:`~visacc.models.lpd.parts.training_mask` for the layout."""
        known = orders[:, : orders.shape[1] - last]
        prefix = self.prefix_rows(labels, words)
        return torch.cat(
            [prefix, self.context_rows(tokens.gather(1, known), known), self.query_rows(orders)], dim=1
        )

    # ---- teacher forcing ----------------------------------------------------------------------------------
    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        orders: Tensor,
        group_sizes: Sequence[int],
        words: Tensor | None = None,
    ) -> Tensor:
        """Logits float32 [B, N, V] in generation order.

        Args:
            tokens: int64 [B, N] codes in raster order.
            labels: int64 [B], -1 for "no class" (training drops the class itself with ``class_drop``).
            orders: int64 [B, N], raster cell generated p-th.
            group_sizes: positive, sum N.
            words: int64 [B, text_len] for models with captions; dropped together with the class.
        """
        n = self.config.tokens
        if sum(group_sizes) != n or min(group_sizes) < 1:
            raise ValueError(f"group sizes must be positive and sum to {n}, got a sum of {sum(group_sizes)}")
        if tokens.shape[1] != n or orders.shape != tokens.shape:
            raise ValueError(
                f"tokens and orders must be [B, {n}], got {tuple(tokens.shape)}, {tuple(orders.shape)}"
            )
        if self.training and self.config.class_drop > 0:
            drop = torch.rand(len(labels), device=labels.device) < self.config.class_drop
            labels = torch.where(drop, -1, labels)
            words = None if words is None else words.masked_fill(drop[:, None], 0)
        x = self.training_rows(tokens, labels, orders, group_sizes[-1], words)
        mask = training_mask(group_sizes, self.config.prefix)
        parts = split_mask(mask, len(mask) - n, x.device)
        for block in self.layers:
            x = block(x, parts)
        return self.head(self.norm(x[:, -n:])).float()

    # ---- inference ----------------------------------------------------------------------------------------
    def empty_cache(self, rows: int, slots: int) -> Tensor:
        from visacc.cache import allocate

        cfg, weight = self.config, self.head.weight
        return allocate(
            cfg.depth, rows, cfg.heads, slots, cfg.dim // cfg.heads, dtype=weight.dtype, device=weight.device
        )

    def forward_window(
        self, x: Tensor, slots: Tensor, mask: Tensor, cache: Tensor, limit: int, outputs: Tensor | None = None
    ) -> Tensor:
        """One pass over rows x [R, N, D] written to cache ``slots`` [R, N]; ``mask`` bool [R, N, limit].

        Returns logits float32 [R, M, V] of the rows ``outputs`` [M] (all by default).
        """
        bias, index = mask_bias(mask, x.dtype), slot_index(slots, cache)
        for i, block in enumerate(self.layers):
            x = block.window(x, cache[i], index, bias, limit)
        x = x if outputs is None else x[:, outputs]
        return self.head(self.norm(x)).float()
