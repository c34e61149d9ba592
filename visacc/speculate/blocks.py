"""Network blocks of the drafters: rotary embedding, norm, self- and cross-attention, decoder layers.

Sub-module names are those of the official checkpoints (EAGLE, MSD, DREAM, FLASH, ViSpec, EAGLE-3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visacc.speculate.config import DrafterConfig
from visacc.speculate.kv import RowCache


@dataclass
class Attend:
    """How the rows of one forward attend.

    Attributes:
        pos: int64 [B, n] (or [3, B, n] for M-RoPE drafters).
        mask: bool [B, n, columns], own column included.
        kv: cache to write to and read from; ``None`` while training, when the rows are their own keys.
        address: int64 [B, n] columns the rows write to.
        limit: number of columns read.
        cross_feats: [B, m, D] new keys of the cross-attention.
        cross_mask, cross_kv, cross_address, cross_limit: the same for the cross-attention.
        uniform_blind: a row without any visible cross key attends everything evenly (the official DREAM
            behaviour) instead of receiving zero.
    """

    pos: Tensor
    mask: Tensor
    kv: RowCache | None = None
    address: Tensor | None = None
    limit: int = 0
    cross_feats: Tensor | None = None
    cross_mask: Tensor | None = None
    cross_kv: RowCache | None = None
    cross_address: Tensor | None = None
    cross_limit: int = 0
    uniform_blind: bool = False


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, cast back before the weight as the targets' own (``torch.nn.RMSNorm`` does so after
    it)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, pos: Tensor, theta: float, sections: tuple[int, ...] = ()) -> Tensor:
    """Half-split rotary embedding of x [B, H, n, d] at positions [B, n], or [3, B, n] with M-RoPE
    ``sections``.
    """
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    if pos.ndim == 3:
        if sum(sections) != half:
            raise ValueError(f"M-RoPE sections {sections} do not sum to half the head size {half}")
        axis = torch.repeat_interleave(
            torch.arange(3, device=x.device), torch.tensor(sections, device=x.device), output_size=half
        )
        angle = pos.float()[axis].permute(1, 2, 0) * freq
    else:
        angle = pos[..., None].float() * freq
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[B, H, n, d] x [B, G, c, d] -> [B, n, H d]; mask bool [B, n, c] with at least one True per row."""
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask[:, None], enable_gqa=grouped
    )
    return y.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Rotary grouped-query attention. ``width`` is the input width (EAGLE-3 feeds 2D)."""

    def __init__(self, c: DrafterConfig, width: int | None = None) -> None:
        super().__init__()
        self.c = c
        width = width or c.hidden_size
        self.q_proj = nn.Linear(width, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, how: Attend, layer: int) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q = rotate(q, how.pos, self.c.rope_theta, self.c.mrope_sections)
        k = rotate(k, how.pos, self.c.rope_theta, self.c.mrope_sections)
        if how.kv is not None:
            assert how.address is not None
            how.kv.put(layer, k, v, how.address)
            k, v = how.kv.view(layer, how.limit)
        return self.o_proj(attention(q, k, v, how.mask))


class CrossAttention(nn.Module):
    """Queries from the rows, keys and values from target features; heads normed, no positions (DREAM)."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.eps)
        self.k_norm = RMSNorm(c.head_dim, c.eps)

    def forward(self, x: Tensor, how: Attend) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)

        if how.cross_feats is None or how.cross_mask is None:
            raise ValueError("a cross-attention block needs the target's features")
        q = self.q_norm(heads(self.q_proj(x)))
        k, v = self.k_norm(heads(self.k_proj(how.cross_feats))), heads(self.v_proj(how.cross_feats))
        if how.cross_kv is not None:
            assert how.cross_address is not None
            how.cross_kv.put(0, k, v, how.cross_address)
            k, v = how.cross_kv.view(0, how.cross_limit)
        sees = how.cross_mask.any(2, keepdim=True)
        # a blind row gets every key that some row sees, with equal scores: an even mean, or nothing at all
        mask = torch.where(sees, how.cross_mask, how.cross_mask.any(1, keepdim=True))
        y = attention(q * sees[:, None], k, v, mask)
        if not how.uniform_blind:
            y = y * sees
        return self.o_proj(y)


class MLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + attention, x + MLP; the first layer of most drafters has no input norm."""

    def __init__(self, c: DrafterConfig, input_norm: bool) -> None:
        super().__init__()
        if input_norm:
            self.input_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.input_norm = input_norm

    def forward(self, x: Tensor, how: Attend, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x) if self.input_norm else x, how, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class CrossLayer(nn.Module):
    """DREAM's gated cross-attention block; both gates start at 0, so an untrained block is the identity."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.cross_attn = CrossAttention(c)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, how: Attend) -> Tensor:
        x = x + self.cross_attn_attn_gate.tanh() * self.cross_attn(self.input_layernorm(x), how)
        return x + self.cross_attn_mlp_gate.tanh() * self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(nn.Module):
    """EAGLE-3: attention over [norm(e); norm(h)] with h as the residual (arXiv 2503.01840)."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(c.hidden_size, c.eps)
        self.input_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.self_attn = SelfAttention(c, width=2 * c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.norm_before_residual = c.norm_before_residual

    def forward(self, x: Tensor, how: Attend, layer: int) -> Tensor:
        embed, h = x.chunk(2, dim=-1)
        normed = self.hidden_norm(h)
        residual = normed if self.norm_before_residual else h
        h = residual + self.self_attn(torch.cat([self.input_layernorm(embed), normed], dim=-1), how, layer)
        return h + self.mlp(self.post_attention_layernorm(h))
