"""The LlamaGen image tokenizer (arXiv 2406.06525): convolutional VQ-GAN with an l2-normalised codebook.

Images are float ``[B, 3, H, W]`` in [-1, 1]; codes int64 ``[B, h*w]`` in raster order, h = H / downsample.
Tensor names are those of the official checkpoints (VQ-16, VQ-8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class VQConfig:
    """Shape of the tokenizer; the defaults are the released VQ-16."""

    ch: int = 128
    ch_mult: Sequence[int] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_dim: int = 8
    commit_loss_beta: float = 0.25
    dropout_p: float = 0.0
    norm_groups: int = 32
    in_channels: int = 3

    def __post_init__(self) -> None:
        self.ch_mult = tuple(self.ch_mult)
        for mult in (1, *self.ch_mult):
            if self.ch * mult % self.norm_groups:
                raise ValueError(
                    f"{self.ch * mult} channels do not divide into {self.norm_groups} norm groups"
                )

    @property
    def downsample(self) -> int:
        """Pixels per code along each side."""
        return 2 ** (len(self.ch_mult) - 1)


def _norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, config: VQConfig) -> None:
        super().__init__()
        self.norm1 = _norm(c_in, config.norm_groups)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = _norm(c_out, config.norm_groups)
        self.dropout = nn.Dropout(config.dropout_p)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)
        self.same = c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return (x if self.same else self.nin_shortcut(x)) + h


class AttnBlock(nn.Module):
    """Single-head attention over all pixels."""

    def __init__(self, channels: int, config: VQConfig) -> None:
        super().__init__()
        self.norm = _norm(channels, config.norm_groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2) for conv in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.proj_out(out.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, attention after each where asked, then a change of resolution."""

    def __init__(
        self, c_in: int, c_out: int, blocks: int, attention: bool, resample: str, config: VQConfig
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResnetBlock(c_in if i == 0 else c_out, c_out, config) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(c_out, config) for _ in range(blocks if attention else 0))
        if resample == "down":
            self.downsample = Downsample(c_out)
        elif resample == "up":
            self.upsample = Upsample(c_out)
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        if self.resample == "down":
            return self.downsample(x)
        return self.upsample(x) if self.resample == "up" else x


def _middle(channels: int, config: VQConfig) -> nn.ModuleList:
    return nn.ModuleList(
        [
            ResnetBlock(channels, channels, config),
            AttnBlock(channels, config),
            ResnetBlock(channels, channels, config),
        ]
    )


class Encoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch, *(config.ch * m for m in config.ch_mult)]
        last = len(config.ch_mult) - 1
        self.conv_in = nn.Conv2d(config.in_channels, config.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            Level(
                widths[i],
                widths[i + 1],
                config.num_res_blocks,
                i == last,
                "down" if i != last else "keep",
                config,
            )
            for i in range(last + 1)
        )
        self.mid = _middle(widths[-1], config)
        self.norm_out = _norm(widths[-1], config.norm_groups)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Mirror of the encoder, one more residual block per level; ``conv_blocks.0`` is the coarsest."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in reversed(config.ch_mult)]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0], config)
        self.conv_blocks = nn.ModuleList(
            Level(
                widths[max(i - 1, 0)],
                widths[i],
                config.num_res_blocks + 1,
                i == 0,
                "up" if i != last else "keep",
                config,
            )
            for i in range(last + 1)
        )
        self.norm_out = _norm(widths[-1], config.norm_groups)
        self.conv_out = nn.Conv2d(widths[-1], config.in_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Quantized(NamedTuple):
    """z straight-through quantised ``[B, C, h, w]``, codes int64 ``[B, h*w]``, scalar losses."""

    z: Tensor
    codes: Tensor
    codebook_loss: Tensor
    commit_loss: Tensor


class VectorQuantizer(nn.Module):
    """Nearest code by cosine. Stored rows are *not* unit vectors: they are normalised at every look-up."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.beta = config.commit_loss_beta
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)
        bound = 1.0 / config.codebook_size
        nn.init.uniform_(self.embedding.weight, -bound, bound)
        with torch.no_grad():
            self.embedding.weight.copy_(F.normalize(self.embedding.weight, dim=-1))

    def forward(self, z: Tensor) -> Quantized:
        """z ``[B, C, h, w]`` before normalisation. Always float32: codes must not depend on autocast."""
        with torch.autocast(z.device.type, enabled=False):
            flat = F.normalize(z.float().movedim(1, -1), dim=-1)
            book = F.normalize(self.embedding.weight.float(), dim=-1)
            rows = flat.detach().flatten(0, -2)
            distance = (
                rows.square().sum(1, keepdim=True)
                + book.detach().square().sum(1)
                - 2 * rows @ book.detach().t()
            )
            codes = distance.argmin(dim=1)
            chosen = F.embedding(codes, book).view(flat.shape)
            codebook_loss = (chosen - flat.detach()).square().mean()
            commit_loss = self.beta * (chosen.detach() - flat).square().mean()
            through = flat + (chosen - flat).detach()
        return Quantized(through.movedim(-1, 1), codes.view(z.shape[0], -1), codebook_loss, commit_loss)

    def lookup(self, codes: Tensor) -> Tensor:
        """codes ``[...]`` -> unit vectors ``[..., C]``."""
        return F.normalize(F.embedding(codes, self.embedding.weight), dim=-1)


class VQOutput(NamedTuple):
    """Reconstruction ``[B, 3, H, W]``, codes ``[B, h*w]``, scalar codebook and commitment losses."""

    recon: Tensor
    codes: Tensor
    codebook_loss: Tensor
    commit_loss: Tensor


class VQModel(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = VectorQuantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    def quantized(self, images: Tensor) -> Quantized:
        """images ``[B, 3, H, W]`` in [-1, 1] with sides divisible by ``config.downsample``."""
        step = self.config.downsample
        if images.ndim != 4 or images.shape[-1] % step or images.shape[-2] % step:
            raise ValueError(
                f"images must be [B, 3, H, W] with sides divisible by {step}, got {tuple(images.shape)}"
            )
        return self.quantize(self.quant_conv(self.encoder(images)))

    def encode(self, images: Tensor) -> Tensor:
        """images -> codes int64 ``[B, h*w]`` in raster order."""
        return self.quantized(images).codes

    def decode(self, z: Tensor) -> Tensor:
        """Quantised vectors ``[B, codebook_dim, h, w]`` -> images, nominally in [-1, 1], not clamped."""
        return self.decoder(self.post_quant_conv(z))

    def decode_codes(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """codes ``[B, h, w]``, or flat ``[B, h*w]`` with ``grid=(h, w)``, -> images ``[B, 3, H, W]``."""
        if grid is not None:
            codes = codes.unflatten(1, grid)
        if codes.ndim != 3:
            raise ValueError(f"codes must be [B, h, w] (or [B, h*w] with a grid), got {tuple(codes.shape)}")
        return self.decode(self.quantize.lookup(codes).movedim(-1, 1))

    def forward(self, images: Tensor) -> VQOutput:
        """Training pass, straight-through gradient to the encoder."""
        z, codes, codebook_loss, commit_loss = self.quantized(images)
        return VQOutput(self.decode(z), codes, codebook_loss, commit_loss)


def to_uint8(images: Tensor, size: int | tuple[int, int] | None = None) -> Tensor:
    """Decoder output ``[B, 3, H, W]`` -> bytes ``[B, H, W, 3]``, resized bicubically to ``size`` before."""
    if size is not None:
        side = (size, size) if isinstance(size, int) else size
        images = F.interpolate(images, size=side, mode="bicubic")
    return (127.5 * images + 128.0).clamp(0, 255).movedim(1, -1).to(torch.uint8)
