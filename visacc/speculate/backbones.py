"""Backbones: rows in, predicted features out."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from visacc.speculate.blocks import (
    Attend,
    CrossLayer,
    DecoderLayer,
    Eagle3Layer,
    RMSNorm,
    rotate,
)
from visacc.speculate.config import DrafterConfig


class Stack(nn.Module):
    """One decoder layer: EAGLE-1/2, MSD, FLASH without its semi-autoregressive head, ViSpec."""

    self_layers = 1

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(c, c.input_norm)])

    def forward(self, x: Tensor, how: Attend) -> tuple[Tensor, Tensor | None]:
        """Rows [B, n, W] -> features [B, n, D] (and an intermediate state to supervise, DREAM only)."""
        return self.layers[0](x, how, 0), None


class DreamStack(nn.Module):
    """Decoder layer without input norm, gated cross-attention, pre-norm decoder layer, final norm."""

    self_layers = 2

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(c, False), CrossLayer(c), DecoderLayer(c, True)])
        self.norm = RMSNorm(c.hidden_size, c.eps)

    def forward(self, x: Tensor, how: Attend) -> tuple[Tensor, Tensor | None]:
        first, cross, last = self.layers
        mid = cross(first(x, how, 0), how)
        return self.norm(last(mid, how, 1)), mid


class Eagle3Stack(nn.Module):
    """EAGLE-3's single layer; its un-normed output is the next feature."""

    self_layers = 1

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Eagle3Layer(c)])

    def forward(self, x: Tensor, how: Attend) -> tuple[Tensor, Tensor | None]:
        return self.layers[0](x, how, 0), None


class SemiAutoregressive(nn.Module):
    """FLASH's head: one attention over the rows, then K features per row (heads_ahead = K).

    Every query head attends every key/value group and sums the results: y_h = sum_g softmax(q_h k_g) v_g. No
    residual, no norm. Entry (j, i) of the output is the predicted feature h_{j+1+i}.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        size, inner = c.hidden_size, c.num_heads * c.head_dim
        self.q_proj = nn.Linear(size, inner)
        self.k_proj = nn.Linear(size, c.kv_heads * c.head_dim)
        self.v_proj = nn.Linear(size, c.kv_heads * c.head_dim)
        self.o_proj = nn.Linear(inner, size)
        width = c.intermediate_size or 4 * size
        self.ar_proj = nn.Sequential(
            nn.Linear(size, width), nn.SiLU(), nn.Linear(width, c.heads_ahead * size)
        )

    def forward(self, x: Tensor, how: Attend) -> Tensor:
        """[B, n, D] -> [B, n, K, D]."""
        c = self.c

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, c.head_dim)).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), how.pos, c.rope_theta)
        k, v = rotate(heads(self.k_proj(x)), how.pos, c.rope_theta), heads(self.v_proj(x))
        if how.kv is not None:
            assert how.address is not None
            how.kv.put(0, k, v, how.address)
            k, v = (t.to(q.dtype) for t in how.kv.view(0, how.limit))
        batch, _, n, _ = q.shape
        groups = k.shape[1]
        every = q.reshape(batch, 1, c.num_heads * n, c.head_dim).expand(-1, groups, -1, -1)
        mask = how.mask[:, None].expand(-1, c.num_heads, -1, -1).reshape(batch, 1, c.num_heads * n, -1)
        y = F.scaled_dot_product_attention(every, k, v, attn_mask=mask).sum(1)
        y = y.view(batch, c.num_heads, n, c.head_dim).transpose(1, 2).flatten(2)
        return self.ar_proj(self.o_proj(y)).unflatten(-1, (c.heads_ahead, c.hidden_size))


class SemiStack(nn.Module):
    """FLASH with its semi-autoregressive head as the whole backbone."""

    self_layers = 1

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.layers = SemiAutoregressive(c)

    def forward(self, x: Tensor, how: Attend) -> tuple[Tensor, Tensor | None]:
        return self.layers(x, how), None


def make_backbone(c: DrafterConfig) -> nn.Module:
    if c.method == "dream":
        return DreamStack(c)
    if c.method == "eagle3":
        return Eagle3Stack(c)
    if c.method == "flash" and c.heads_ahead > 1:
        return SemiStack(c)
    return Stack(c)
