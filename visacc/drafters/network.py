"""EAGLE-type drafter networks for image models (arXiv 2401.15077; LANTERN, arXiv 2410.03355, 2502.06352).

Row j takes the target's feature f_j (after its final norm) and the embedding of token j + 1, and predicts
f_{j+1}: ``h = blocks(fc([emb(t_{j+1}); f_j]))``, no final norm. The target's own head turns h into logits, and h
is the feature of the next drafted row. Tensor names are those of the released files.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.drafters.config import DrafterConfig
from visacc.speculate.blocks import MLP
from visacc.speculate.kv import RowCache

_TAIL = 20  # rows of the rotary table behind the grid, zero like those of the prompt


@lru_cache(maxsize=16)
def grid_turns(prefix: int, grid: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """complex64 [prefix - 1 + grid^2 + 20, head_dim / 2]: rotation of every drafter row.

    Row j carries token j + 1, so the table starts one row earlier than the target's. Rows outside of the grid are
    zero, not the identity: queries and keys vanish there, as in the target.
    """
    half = head_dim // 2
    freqs = theta ** (-torch.arange(0, half, 2, dtype=torch.float32) / half)
    line = torch.outer(torch.arange(grid, dtype=torch.float32), freqs)
    angles = torch.cat([line[:, None].expand(-1, grid, -1), line[None].expand(grid, -1, -1)], dim=-1).reshape(
        grid * grid, half
    )
    turn = torch.polar(torch.ones_like(angles), angles)
    table = F.pad(torch.view_as_real(turn), (0, 0, 0, 0, prefix - 1, _TAIL))
    return torch.view_as_complex(table.contiguous()).to(device)


def turn_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [R, H, N, d] in float32 by complex turns [R, N, d / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).to(x.dtype)


def turn_halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half-split rotary embedding of x [R, H, N, d] at positions [R, N]."""
    half = x.shape[-1] // 2
    freqs = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * freqs)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RMSNorm(nn.RMSNorm):
    """In the precision of its input: a training in mixed precision keeps the weight in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadNorm(nn.Module):
    """Layer norm over the head size with an affine map per shard of heads (Chameleon)."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.repeat = c.num_heads // c.norm_shards
        self.weight = nn.Parameter(torch.ones(c.norm_shards, c.head_dim))
        self.bias = nn.Parameter(torch.zeros(c.norm_shards, c.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [R, H, N, d]."""
        normed = F.layer_norm(x, x.shape[-1:], eps=1e-5)
        weight, bias = (p.repeat_interleave(self.repeat, 0)[:, None] for p in (self.weight, self.bias))
        return normed * weight + bias


class Attention(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        inner, kv = c.num_heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, inner, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=c.qkv_bias)
        self.o_proj = nn.Linear(inner, c.hidden_size, bias=False)
        if c.norm_shards:
            self.q_norm, self.k_norm = HeadNorm(c), HeadNorm(c)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None, layer: int) -> Tensor:
        c = self.c
        q, k, v = (
            p(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if c.norm_shards:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.family == "llamagen":
            table = grid_turns(c.prefix, c.grid, c.head_dim, c.rope_theta, x.device)
            turn = table[positions.clamp(max=len(table) - 1)]
            q, k = turn_pairs(q, turn), turn_pairs(k, turn)
        else:
            q, k = (turn_halves(y, positions, c.rope_theta) for y in (q, k))
        if cache is not None:
            cache.rows.put(layer, k, v, cache.address)
            k, v = (y.to(q.dtype) for y in cache.rows.view(layer, mask.shape[2]))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None], enable_gqa=c.kv_heads != c.num_heads
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention, x + MLP. The first block has no input norm, but for Chameleon's."""

    def __init__(self, c: DrafterConfig, index: int) -> None:
        super().__init__()
        if index or c.chameleon:
            self.input_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.normed = bool(index) or c.chameleon
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None, layer: int) -> Tensor:
        y = self.input_layernorm(x) if self.normed else x
        x = x + self.self_attn(y, positions, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Cache:
    """A row cache and the columns int64 [R, N] that this call writes to."""

    def __init__(self, rows: RowCache, address: Tensor) -> None:
        self.rows, self.address = rows, address


class EagleNetwork(nn.Module):
    """The drafter. Its embedding is its own: released files may carry the target's *head* there."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.num_layers))

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def forward(
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Predicted features [R, N, D].

        Args:
            ids: int64 [R, N] token j + 1 of every row j.
            features: [R, N, D] target feature j, or the drafter's own output for drafted rows.
            positions: int64 [R, N].
            mask: bool [R, N, C] columns seen, the own one included; C rows of this call without a cache.
            cache: ``None`` in training.
        """
        embedded = self.embed_tokens(ids)
        if self.config.embed_scale > 1:
            embedded = embedded * self.config.embed_scale
        x = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        for i, block in enumerate(self.layers):
            x = block(x, positions, mask, cache, i)
        return x
