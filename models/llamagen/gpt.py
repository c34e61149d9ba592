"""The LlamaGen decoder-only transformer (arXiv 2406.06525): class- or text-conditional, 2-D rotary embedding.

Sequence = ``prefix_len`` prefix vectors (1 class embedding, or the projected caption features), then the
image codes in raster order; code ``t`` sits at sequence position ``prefix_len + t``. There is no start token:
the last prefix vector predicts code 0. Tensor names are those of the official checkpoints.

Two forward passes:

* :meth:`GPT.forward` -- teacher forcing over a whole image (training, scoring);
* :meth:`GPT.forward_window` -- inference over a slot-addressed static cache with per-row positions, slots and
  masks: plain decoding, Jacobi windows, drafted trees and position sets are all calls of this one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.attention import cached_attention, mask_bias, slot_index
from visacc.models.llamagen.config import GPTConfig, rotary_table


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate interleaved pairs in float32. x ``[..., N, heads, hd]``, turn complex64 ``[..., N, 1, hd/2]``, or its
    real view float32 ``[..., N, 1, hd/2, 2]``.

    A complex product because it reads each pair once: real arithmetic needs a shuffled copy, which takes five
    times as long on a CPU at 32 tokens. Compiled code is the other way round: it fuses the real one and has no
    complex numbers.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    if turn.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2).to(x.dtype)
    (a, b), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.kv_heads, self.head_dim = config.n_head, config.kv_heads, config.head_dim
        self.gqa = self.n_head != self.kv_heads
        self.dropout = config.attn_dropout_p
        self.wqkv = nn.Linear(config.dim, (self.n_head + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def project(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x ``[R, N, dim]`` -> rotated q ``[R, H, N, hd]`` and k, plain v ``[R, Hkv, N, hd]``."""
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim))
        turned = rotate(qkv[..., : self.n_head + self.kv_heads, :], turn).transpose(1, 2)
        value = qkv[..., self.n_head + self.kv_heads :, :].transpose(1, 2)
        return turned[:, : self.n_head], turned[:, self.n_head :], value

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor | None) -> Tensor:
        """Full-sequence attention; mask is bool ``[B, 1, L, L]`` or None for plain causal."""
        q, k, v = self.project(x, turn)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.gqa,
        )
        return self.wo(out.transpose(1, 2).flatten(2))

    def window(
        self, x: Tensor, turn: Tensor, layer_kv: Tensor, index: Tensor, bias: Tensor, limit: int
    ) -> Tensor:
        """Attention over the cache. layer_kv ``[2, R, Hkv, S, hd]``, index ``[2, R, Hkv, N, hd]`` (slots)."""
        q, k, v = self.project(x, turn)
        return self.wo(cached_attention(q, k, v, layer_kv, index, bias, limit))


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.resid_dropout = nn.Dropout(config.resid_dropout_p)
        self.ffn_dropout = nn.Dropout(config.ffn_dropout_p)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.resid_dropout(self.attention(self.attention_norm(x), turn, mask))
        return x + self.ffn_dropout(self.feed_forward(self.ffn_norm(x)))

    def window(
        self, x: Tensor, turn: Tensor, layer_kv: Tensor, index: Tensor, bias: Tensor, limit: int
    ) -> Tensor:
        """The block over the cache, see :meth:`Attention.window`."""
        x = x + self.attention.window(self.attention_norm(x), turn, layer_kv, index, bias, limit)
        return x + self.feed_forward(self.ffn_norm(x))


class LabelEmbedder(nn.Module):
    """Class embedding; the last row is the null class."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.null_label = config.num_classes
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)

    def null(self, batch: int) -> Tensor:
        return torch.full((batch,), self.null_label, device=self.embedding_table.weight.device)

    def forward(self, labels: Tensor) -> Tensor:
        if labels.ndim != 1 or labels.is_floating_point():
            raise ValueError(f"class labels must be integers [B], got {labels.dtype} {tuple(labels.shape)}")
        return self.embedding_table(labels)[:, None]


class CaptionMLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        self.fc2 = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Projects caption features; the null caption is a *fixed* random sequence kept in the checkpoint."""

    uncond_embedding: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.shape = (config.prefix_len, config.caption_dim)
        self.cap_proj = CaptionMLP(config)
        noise = torch.randn(config.uncond_rows, config.caption_dim) / config.caption_dim**0.5
        self.register_buffer("uncond_embedding", noise)

    def null(self, batch: int) -> Tensor:
        return self.uncond_embedding[-self.shape[0] :].expand(batch, -1, -1)

    def forward(self, features: Tensor) -> Tensor:
        if features.shape[1:] != self.shape:
            raise ValueError(f"caption features must be [B, *{self.shape}], got {tuple(features.shape)}")
        return self.cap_proj(features.to(self.cap_proj.fc1.weight.dtype))


class WindowOutput(NamedTuple):
    """logits float32 ``[R, N | 1 | 0, V]``; hidden ``[R, N, dim]`` per layer that was asked for."""

    logits: Tensor
    hidden: tuple[Tensor, ...]


class GPT(nn.Module):
    """LlamaGen GPT with the official tensor names (no biases; output is not tied to the embedding)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = (LabelEmbedder if config.model_type == "c2i" else CaptionEmbedder)(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.tok_dropout = nn.Dropout(config.token_dropout_p)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._tables: dict[torch.device, Tensor] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Official initialisation: normal(0, initializer_range) everywhere, zero output head."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        nn.init.zeros_(self.output.weight)

    @property
    def blocks(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.layers)

    def rope(self, device: torch.device) -> Tensor:
        """Rotary table on ``device``. Not a buffer: it stays as it is when the model is cast."""
        if device not in self._tables:
            with torch.inference_mode(False):  # made while decoding, it may be needed in training later
                self._tables[device] = rotary_table(self.config).to(device)
        return self._tables[device]

    # ---- conditioning -------------------------------------------------------------------------------------
    def null_condition(self, batch: int) -> Tensor:
        """Condition of the null branch: labels ``[B]`` or features ``[B, prefix_len, caption_dim]``."""
        return self.cls_embedding.null(batch)

    def embed_prefix(self, cond: Tensor) -> Tensor:
        """labels ``[B]`` or features ``[B, prefix_len, caption_dim]`` -> vectors ``[B, prefix_len, dim]``."""
        return self.cls_embedding(cond)

    def drop_condition(self, cond: Tensor, drop: Tensor) -> Tensor:
        """Replace the condition of the rows marked in bool ``drop [B]`` by the null condition."""
        null = self.null_condition(cond.shape[0])
        return torch.where(drop.view(-1, *[1] * (cond.ndim - 1)), null.to(cond.dtype), cond)

    # ---- teacher forcing ----------------------------------------------------------------------------------
    def forward(
        self,
        tokens: Tensor,
        cond: Tensor,
        caption_mask: Tensor | None = None,
        *,
        drop: Tensor | None = None,
        return_loss: bool = False,
    ) -> Tensor:
        """Logits float32 ``[B, N, V]`` for codes ``tokens [B, N]``, N <= block_size; row t predicts token t.

        cond: labels or caption features; caption_mask ``[B, prefix_len]`` (True = valid). In training mode
        the condition is dropped with ``class_dropout_prob`` unless bool ``drop [B]`` says which rows to drop;
        dropped rows keep their caption mask, as in generation. ``return_loss`` gives the mean cross entropy.
        """
        cfg = self.config
        if drop is None and self.training and cfg.class_dropout_prob > 0:
            drop = torch.rand(tokens.shape[0], device=tokens.device) < cfg.class_dropout_prob
        if drop is not None:
            cond = self.drop_condition(cond, drop)
        x = torch.cat([self.embed_prefix(cond), self.tok_embeddings(tokens[:, :-1])], dim=1)
        x = self.tok_dropout(x)
        length = x.shape[1]
        turn = self.rope(x.device)[:length, None]
        mask = None if caption_mask is None else prefix_causal_mask(caption_mask, length)[:, None]
        for layer in self.blocks:
            x = layer(x, turn, mask)
        logits = self.output(self.norm(x[:, cfg.prefix_len - 1 :])).float()
        if not return_loss:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    # ---- inference ----------------------------------------------------------------------------------------
    def empty_cache(self, rows: int, slots: int) -> Tensor:
        """Zeroed key/value store ``[L, 2, R, Hkv, S, hd]`` in the dtype and on the device of the weights."""
        cfg, weight = self.config, self.output.weight
        return weight.new_zeros(cfg.n_layer, 2, rows, cfg.kv_heads, slots, cfg.head_dim)

    def forward_window(
        self,
        inputs: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        cache: Tensor,
        limit: int | None = None,
        *,
        logits: Literal["all", "last", "none"] = "all",
        hidden: Sequence[int] = (),
    ) -> WindowOutput:
        """One pass over a window of every row, keys and values written into the cache first.

        Args:
            inputs: codes int64 ``[R, N]``, or input vectors ``[R, N, dim]`` (the prefix).
            positions: int64 ``[R, N]``, row of the rotary table (prefix_len + raster index).
            slots: int64 ``[R, N]``, cache slot that each entry's key and value are written to.
            mask: bool ``[R, N, S]`` or ``[R, N, limit]``, the slots each query sees, its own included.
            cache: see :meth:`empty_cache`; changed in place.
            limit: only slots below this host integer are read.
            logits: evaluate the output head on all entries, on the last one only, or not at all.
            hidden: layer outputs to return: i = after block i, n_layer = after the final norm.
        """
        limit = cache.shape[4] if limit is None else limit
        x = inputs if inputs.is_floating_point() else F.embedding(inputs, self.tok_embeddings.weight)
        turn = self.rope(x.device)[positions].unsqueeze(2)
        bias, index = mask_bias(mask[..., :limit], x.dtype), slot_index(slots, cache)
        wanted: dict[int, Tensor] = {}
        for i, layer in enumerate(self.blocks):
            x = layer.window(x, turn, cache[i], index, bias, limit)
            if i in hidden:
                wanted[i] = x
        normed = self.norm(x)
        wanted[len(self.layers)] = normed
        heads = {"all": normed, "last": normed[:, -1:], "none": normed[:, :0]}[logits]
        return WindowOutput(self.output(heads).float(), tuple(wanted[i] for i in hidden))


def prefix_causal_mask(caption_mask: Tensor, length: int) -> Tensor:
    """bool ``[B, L, L]``: causal, padded caption slots hidden from everyone but themselves (no empty row)."""
    prefix = caption_mask.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=caption_mask.device).tril()
    mask = mask.expand(caption_mask.shape[0], -1, -1).clone()
    mask[:, :, :prefix] &= caption_mask[:, None, :].bool()
    return mask | torch.eye(length, dtype=torch.bool, device=mask.device)


PaddingRule = Literal["self", "half", "float"]


def padded_prefix_mask(caption_mask: Tensor, rule: PaddingRule = "self") -> Tensor:
    """bool ``[B, P, P]`` of the prefix alone; ``rule`` is what *padded* query slots see.

    Image codes never see padded slots, so the rule cannot change an image; it changes the features of the
    padded slots, which drafters read. ``self``: only themselves (official LlamaGen). ``half``: the padded
    slots up to their own (what the drafters' original program computes in half precision, and released
    drafters were trained on). ``float``: those and every valid slot (the same program in float32).
    """
    mask = prefix_causal_mask(caption_mask, caption_mask.shape[1])
    if rule == "self":
        return mask
    if rule not in ("half", "float"):
        raise ValueError(f"unknown padding rule {rule!r}; choose self, half or float")
    valid = caption_mask.bool()
    order = torch.arange(valid.shape[1], device=valid.device)
    padded = ~valid[:, None, :] & (order <= order[:, None])
    seen = padded | valid[:, None, :] if rule == "float" else padded
    return torch.where(valid[:, :, None], mask, seen)
