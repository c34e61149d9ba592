"""Hyper-parameters of a LlamaGen GPT and the rotary tables that follow from them (arXiv 2406.06525)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass
class GPTConfig:
    """Hyper-parameters of a LlamaGen GPT; the defaults are those of the released models."""

    dim: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None
    vocab_size: int = 16384
    block_size: int = 256
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    model_type: Literal["c2i", "t2i"] = "c2i"
    num_classes: int = 1000
    caption_dim: int = 2048
    cls_token_num: int = 1
    uncond_rows: int = 120
    class_dropout_prob: float = 0.1
    token_dropout_p: float = 0.1
    attn_dropout_p: float = 0.0
    resid_dropout_p: float = 0.1
    ffn_dropout_p: float = 0.1
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.model_type not in ("c2i", "t2i"):
            raise ValueError(f"model_type must be 'c2i' or 't2i', got {self.model_type!r}")
        if self.dim % self.n_head or self.head_dim % 4:
            raise ValueError(
                f"dim {self.dim} must divide into {self.n_head} heads of a size that 4 divides (2-D rotary)"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.grid**2 != self.block_size:
            raise ValueError(f"block_size must be a square number of image tokens, got {self.block_size}")
        if self.model_type == "t2i" and self.uncond_rows < self.cls_token_num:
            raise ValueError(
                f"uncond_rows {self.uncond_rows} must be at least the prefix length {self.cls_token_num}"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    @property
    def grid(self) -> int:
        """Side of the square token grid."""
        return math.isqrt(self.block_size)

    @property
    def prefix_len(self) -> int:
        return 1 if self.model_type == "c2i" else self.cls_token_num

    @property
    def max_len(self) -> int:
        """Sequence positions of a full image: prefix + all image tokens."""
        return self.prefix_len + self.block_size

    @property
    def ffn_dim(self) -> int:
        hidden = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return -(-hidden // self.multiple_of) * self.multiple_of


def rotary_angles(config: GPTConfig) -> Tensor:
    """Rotation angles of the image cells, float32 ``[grid*grid, head_dim/2]``: row half, column half."""
    half = config.head_dim // 2
    freqs = 1.0 / (config.rope_base ** (torch.arange(0, half, 2).float() / half))
    line = torch.outer(torch.arange(config.grid).float(), freqs)
    rows = line[:, None, :].expand(-1, config.grid, -1)
    cols = line[None, :, :].expand(config.grid, -1, -1)
    return torch.cat([rows, cols], dim=-1).reshape(config.block_size, half)


def rotary_table(config: GPTConfig) -> Tensor:
    """Unit complex numbers by sequence position, complex64 ``[prefix_len + block_size, head_dim/2]``.

    Prefix rows are zero (not 1, the identity rotation): queries and keys of the prefix are the zero vector in
    every released model, and the weights were trained that way.
    """
    angles = rotary_angles(config)
    prefix = torch.zeros(config.prefix_len, config.head_dim // 2, dtype=torch.complex64)
    return torch.cat([prefix, torch.complex(angles.cos(), angles.sin())])
