"""The NBP backbone (arXiv 2502.07737): a minGPT-style transformer with one absolute position table.

A block of n tokens predicts the n tokens at the same places of the next block; attention is bidirectional inside a block
and causal between blocks; n = 1 is ordinary next-token prediction. Tensor names are those of the published checkpoints
(under their ``transformer.`` prefix).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.attention import cached_attention, mask_bias, slot_index

#: raw text id that pads condition texts on the right
PAD = 2


@dataclass
class NBPConfig:
    """Hyper-parameters; the defaults are NBP-base on UCF-101 (hybrid, text condition).

    Attributes:
        grid: latent (frames, rows, columns).
        block: tokens predicted at once.
        video_vocab, text_vocab: sizes of the two id ranges.
        cond_tokens: text ids before the video; 0 for models without text (ids then start at 0, no special tokens).
        positions: rows of the position table.
        cond_drop: probability of training without the text (guidance needs a model trained so).
    """

    dim: int = 1536
    layers: int = 24
    heads: int = 16
    grid: tuple[int, int, int] = (5, 16, 16)
    block: int = 16
    video_vocab: int = 64000
    text_vocab: int = 32000
    cond_tokens: int = 8
    positions: int = 5120
    dropout: float = 0.1
    cond_drop: float = 0.0

    def __post_init__(self) -> None:
        self.grid = (int(self.grid[0]), int(self.grid[1]), int(self.grid[2]))
        if self.dim % self.heads:
            raise ValueError(f"width {self.dim} does not divide into {self.heads} heads")
        if self.block < 1 or self.tokens % self.block:
            raise ValueError(f"{self.tokens} tokens do not divide into blocks of {self.block}")
        if self.cond_tokens == 0 and self.text_vocab:
            raise ValueError("a model without condition tokens has no text ids: set text_vocab=0")
        if self.prefix + self.tokens > self.positions:
            raise ValueError(
                f"{self.prefix + self.tokens} places need a larger position table than {self.positions}"
            )

    @property
    def hybrid(self) -> bool:
        """Text condition, begin-of-video token, first block token by token."""
        return self.cond_tokens > 0

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def prefix(self) -> int:
        """Input places before the first video token: text and begin-of-video, or nothing."""
        return self.cond_tokens + 1 if self.hybrid else 0

    @property
    def special(self) -> int:
        """Special ids: begin-of-video and the middle tokens 1..n-1."""
        return self.block if self.hybrid else 0

    @property
    def video_shift(self) -> int:
        """Joint id of video code 0."""
        return self.special + self.text_vocab

    @property
    def vocab(self) -> int:
        return self.video_shift + self.video_vocab


class Attention(nn.Module):
    def __init__(self, config: NBPConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.key = nn.Linear(config.dim, config.dim)
        self.query = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.resid_drop = nn.Dropout(config.dropout)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, N, D] -> q, k, v [R, H, N, hd]."""
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return q, k, v

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.resid_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def window(
        self, x: Tensor, layer_kv: Tensor, index: Tensor | None, bias: Tensor | None, limit: int
    ) -> Tensor:
        q, k, v = self.project(x)
        return self.proj(cached_attention(q, k, v, layer_kv, index, bias, limit))


class Block(nn.Module):
    def __init__(self, config: NBPConfig) -> None:
        super().__init__()
        dim = config.dim
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(config)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(config.dropout)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))

    def window(
        self, x: Tensor, layer_kv: Tensor, index: Tensor | None, bias: Tensor | None, limit: int
    ) -> Tensor:
        x = x + self.attn.window(self.ln1(x), layer_kv, index, bias, limit)
        return x + self.mlp(self.ln2(x))


def block_mask(config: NBPConfig, length: int, text: Tensor | None = None) -> Tensor:
    """bool [B or 1, length, length] of the training form and of prefixes: True = row may attend to column.

    With text: everybody sees text and begin-of-video, the first row is causal, blocks start at its last token. Without:
    blocks from the start. ``text`` int64 [B, cond_tokens] are raw ids.

    The original program hides text ids equal to pad + 1 *after* the shift by the number of special tokens from the rows
    before them. That meets the pads only where the shift is 1 (next-token models); weights were trained either way.
    """
    device = None if text is None else text.device
    place = torch.arange(length, device=device)
    row, column = place[:, None], place[None, :]
    n = config.block
    if not config.hybrid:
        return (column // n <= row // n)[None]
    start = config.cond_tokens + n
    same_or_earlier = (row >= start) & (column >= start) & ((column - start) // n <= (row - start) // n)
    mask = ((column <= row) | same_or_earlier)[None]
    seen = (column < config.cond_tokens)[None]
    if text is not None and config.special <= PAD + 1:
        shown = F.pad(text + config.special != PAD + 1, (0, length - config.cond_tokens))
        seen = seen & shown[:, None]
    return mask | seen


def input_ids(config: NBPConfig, video: Tensor, text: Tensor | None, count: int) -> Tensor:
    """Joint ids that put the first ``count`` video codes before the model.

    Args:
        video: int64 [B, >= count] codes in raster order.
        text: int64 [B, cond_tokens] raw text ids for models with text.
        count: a multiple of the block size, or any number up to the block size in a model with text.

    Returns:
        int64 [B, L]; with text ``[text][BOV][first row][middle tokens][the other rows]``, L = prefix + count + n - 1
        once the first row is complete.
    """
    ids = video[:, :count] + config.video_shift
    if not config.hybrid:
        return ids
    if text is None or text.shape[1:] != (config.cond_tokens,):
        found = None if text is None else tuple(text.shape)
        raise ValueError(f"this model takes text ids [B, {config.cond_tokens}], got {found}")
    batch, n = len(video), config.block
    head = torch.cat([text + config.special, text.new_zeros(batch, 1)], dim=1)
    if count < n:
        return torch.cat([head, ids], dim=1)
    middle = torch.arange(1, n, device=video.device).expand(batch, -1)
    return torch.cat([head, ids[:, :n], middle, ids[:, n:]], dim=1)


class NBP(nn.Module):
    """NBP transformer with the published tensor names."""

    uncond_embedding: Tensor

    def __init__(self, config: NBPConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab, config.dim)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.positions, config.dim))
        self.drop = nn.Dropout(config.dropout)
        self.register_buffer("uncond_embedding", torch.randn(config.cond_tokens, config.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """minGPT's initialisation: normal(0.02), zero bias."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.pos_emb, std=0.02)

    @property
    def layers(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.blocks)

    def embed(self, ids: Tensor, first: int | Tensor = 0, uncond: Tensor | None = None) -> Tensor:
        """Joint ids int64 [R, N] -> [R, N, D].

        Args:
            first: place of the first id in the whole input, a number or int64 [R].
            uncond: bool [R], rows whose text (then at the start of ``ids``) is replaced by the null condition.
        """
        x = F.embedding(ids, self.tok_emb.weight)
        if uncond is not None:
            null = self.uncond_embedding.to(x.dtype).expand(len(ids), -1, -1)
            text = torch.where(uncond[:, None, None], null, x[:, : self.config.cond_tokens])
            x = torch.cat([text, x[:, self.config.cond_tokens :]], dim=1)
        if isinstance(first, int):
            return x + self.pos_emb[:, first : first + ids.shape[1]]
        places = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        return x + self.pos_emb[0, places]

    def forward(self, video: Tensor, text: Tensor | None = None) -> Tensor:
        """Teacher forcing: logits float32 [B, M, V] over joint ids.

        With text M = N and row i predicts video token i; without, M = N - n and row i predicts token i + n.
        """
        cfg = self.config
        if video.shape[1] != cfg.tokens:
            raise ValueError(f"video codes must be [B, {cfg.tokens}], got {tuple(video.shape)}")
        uncond = None
        if self.training and cfg.cond_drop > 0 and cfg.hybrid:
            uncond = torch.rand(len(video), device=video.device) < cfg.cond_drop
        ids = input_ids(cfg, video, text, cfg.tokens if cfg.hybrid else cfg.tokens - cfg.block)
        ids = ids[:, : cfg.cond_tokens + cfg.tokens] if cfg.hybrid else ids
        x = self.drop(self.embed(ids, uncond=uncond))
        mask = block_mask(cfg, ids.shape[1], text).to(x.device)[:, None]
        for block in self.layers:
            x = block(x, mask)
        return self.head(self.ln_f(x[:, cfg.cond_tokens :])).float()

    def target(self, video: Tensor) -> Tensor:
        """Joint ids int64 [B, M] that the rows of :meth:`forward` are compared with."""
        start = 0 if self.config.hybrid else self.config.block
        return video[:, start:] + self.config.video_shift

    def loss(self, video: Tensor, text: Tensor | None = None) -> Tensor:
        """Mean cross entropy over all predicted video tokens."""
        return F.cross_entropy(self(video, text).flatten(0, 1), self.target(video).flatten())

    def empty_cache(self, rows: int, slots: int) -> Tensor:
        from visacc.cache import allocate

        cfg, weight = self.config, self.head.weight
        return allocate(
            cfg.layers, rows, cfg.heads, slots, cfg.dim // cfg.heads, dtype=weight.dtype, device=weight.device
        )

    def forward_window(
        self,
        x: Tensor,
        slots: Tensor,
        mask: Tensor | None,
        cache: Tensor,
        limit: int,
        outputs: Tensor | slice | None = None,
    ) -> Tensor:
        """One pass over rows x [R, N, D] written to cache ``slots`` [R, N]; ``mask`` bool [R, N, limit].

        Without a mask the rows take the last N slots below ``limit`` and see everything there.
        Returns logits float32 [R, M, V] of the rows ``outputs`` (all by default).
        """
        bias = index = None
        if mask is not None:
            bias, index = mask_bias(mask, x.dtype), slot_index(slots, cache)
        for i, block in enumerate(self.layers):
            x = block.window(x, cache[i], index, bias, limit)
        x = x if outputs is None else x[:, outputs]
        return self.head(self.ln_f(x)).float()
