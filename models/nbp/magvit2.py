"""The video tokenizer of NBP (arXiv 2502.07737): causal 3-D convolutions and FSQ, after MAGVIT-v2.

Videos are float [B, T, 3, H, W] in [0, 1] with T = 1 + s n frames (s = time stride): the first frame stands alone, so
an image is a video of one frame and codes never depend on later frames. Tensor names are those of the published files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.nbp.fsq import FSQ, LEVELS
from visacc.models.video_prompt import check_clips
from visacc.weights import load_checked, read_weights, tensors_in


@dataclass
class Magvit2Config:
    """Shape of the tokenizer; the defaults are the published one.

    Attributes:
        widths, units: channels and residual units of every stage, finest first.
        strides: (time, rows, columns) between stages.
        groups: groups of the normalisation.
        levels: FSQ levels.
    """

    widths: Sequence[int] = (128, 256, 256, 512)
    units: Sequence[int] = (4, 4, 4, 8)
    strides: Sequence[tuple[int, int, int]] = ((1, 2, 2), (2, 2, 2), (2, 2, 2))
    groups: int = 32
    levels: Sequence[int] = LEVELS

    def __post_init__(self) -> None:
        self.widths, self.units, self.levels = tuple(self.widths), tuple(self.units), tuple(self.levels)
        self.strides = tuple((int(a), int(b), int(c)) for a, b, c in self.strides)
        if len(self.units) != len(self.widths) or len(self.strides) != len(self.widths) - 1:
            raise ValueError("a tokenizer of k stages needs k widths, k unit counts and k - 1 strides")
        if any(width % self.groups for width in self.widths):
            raise ValueError(f"channels {self.widths} do not divide into {self.groups} norm groups")

    @property
    def stride(self) -> tuple[int, int, int]:
        """Pixels per code in time, rows and columns."""
        t, h, w = (math.prod(axis) for axis in zip(*self.strides, strict=True))
        return t, h, w


class CausalConv(nn.Module):
    """3x3x3 convolution, replicated borders, all time padding in front."""

    def __init__(self, c_in: int, c_out: int, stride: tuple[int, int, int] = (1, 1, 1)) -> None:
        super().__init__()
        self.conv = nn.Conv3d(c_in, c_out, 3, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"))


class FrameNorm(nn.GroupNorm):
    """Group normalisation of every frame by itself."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        return super().forward(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, -1)).transpose(1, 2)


class Swish(nn.Module):
    """x sigmoid(beta x) with one learned beta per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1, channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.beta * x).sigmoid()


class Unit(nn.Module):
    """Residual unit."""

    def __init__(self, c_in: int, c_out: int, groups: int) -> None:
        super().__init__()
        self.fn = nn.Sequential(
            FrameNorm(groups, c_in),
            Swish(c_in),
            CausalConv(c_in, c_out),
            FrameNorm(groups, c_out),
            Swish(c_out),
            CausalConv(c_out, c_out),
        )
        self.changes = c_in != c_out
        if self.changes:
            self.residual_fn = nn.Sequential(_Pointwise(c_in, c_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + (self.residual_fn(x) if self.changes else x)


class _Pointwise(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class DepthToSpace(nn.Module):
    """Channels (t, h, w, c) to space; where time doubles the first frame is dropped: T -> 2 T - 1."""

    def __init__(self, stride: tuple[int, int, int]) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        t, h, w = self.stride
        x = x.unflatten(1, (t, h, w, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
        x = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return x[:, :, t - 1 :]


def _encoder(config: Magvit2Config) -> nn.ModuleList:
    layers: list[nn.Module] = [CausalConv(3, config.widths[0])]
    before = config.widths[0]
    for i, (width, count) in enumerate(zip(config.widths, config.units, strict=True)):
        layers += [Unit(before if j == 0 else width, width, config.groups) for j in range(count)]
        if i < len(config.strides):
            layers.append(CausalConv(width, width, config.strides[i]))
        before = width
    layers += [FrameNorm(config.groups, before), Swish(before), nn.Conv3d(before, len(config.levels), 1)]
    return nn.ModuleList(layers)


def _decoder(config: Magvit2Config) -> nn.ModuleList:
    before = config.widths[-1]
    layers: list[nn.Module] = [CausalConv(len(config.levels), before)]
    for i in reversed(range(len(config.widths))):
        width = config.widths[i]
        layers += [Unit(before if j == 0 else width, width, config.groups) for j in range(config.units[i])]
        if i > 0:
            stride = config.strides[i - 1]
            layers += [CausalConv(width, width * math.prod(stride)), DepthToSpace(stride)]
        before = width
    layers += [FrameNorm(config.groups, before), Swish(before), CausalConv(before, 3)]
    return nn.ModuleList(layers)


class Magvit2(nn.Module):
    """Encoder, FSQ, decoder."""

    def __init__(self, config: Magvit2Config | None = None) -> None:
        super().__init__()
        self.config = config or Magvit2Config()
        self.encoder_layers = _encoder(self.config)
        self.decoder_layers = _decoder(self.config)
        self.quantizer = FSQ(self.config.levels, "nbp")

    @property
    def codebook_size(self) -> int:
        return self.quantizer.codebook_size

    def frames(self, latent_frames: int) -> int:
        """Pixel frames of so many latent frames: 1 + s (n - 1)."""
        return 1 + self.config.stride[0] * (latent_frames - 1)

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """Height and width in pixels of so many latent rows and columns."""
        return rows * self.config.stride[1], columns * self.config.stride[2]

    def features(self, video: Tensor) -> Tensor:
        """Video [B, T, 3, H, W] -> encoder output before quantisation [B, C, T', H', W']."""
        check_clips(video, self.config.stride)
        x = video.transpose(1, 2)
        for layer in self.encoder_layers:
            x = layer(x)
        return x

    def quantized(self, video: Tensor) -> Tensor:
        """Quantised features [B, C, T', H', W'], straight-through gradient."""
        return self.quantizer.quantize(self.features(video).movedim(1, -1)).movedim(-1, 1)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video -> codes int64 [B, T', H', W']."""
        return self.quantizer.codes(self.quantized(video).movedim(1, -1))

    def decode_features(self, z: Tensor) -> Tensor:
        """Quantised features [B, C, T', H', W'] -> video [B, T, 3, H, W], not clamped."""
        for layer in self.decoder_layers:
            z = layer(z)
        return z.transpose(1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, T', H', W'] -> video in [0, 1]."""
        if codes.ndim != 4:
            raise ValueError(f"video codes must be [B, T, H, W], got {tuple(codes.shape)}")
        dtype = next(self.parameters()).dtype
        return self.decode_features(self.quantizer.values(codes).movedim(-1, 1).to(dtype)).clamp(0, 1)

    def forward(self, video: Tensor) -> Tensor:
        """Reconstruction for training, not clamped."""
        return self.decode_features(self.quantized(video))


def load_magvit2(path: str | Path, config: Magvit2Config | None = None) -> Magvit2:
    """A published tokenizer (``{'model_state_dict': {'module.<key>': ...}}``) in float32, evaluation mode."""
    content, _ = read_weights(path)
    if "model_state_dict" not in content:
        raise ValueError(f"{path} is no NBP tokenizer: 'model_state_dict' is missing")
    found = tensors_in(path, content, ("model_state_dict",))
    state = {key.removeprefix("module."): value for key, value in found.items()}
    return load_checked(path, lambda: Magvit2(config), state, "the NBP tokenizer").eval()
