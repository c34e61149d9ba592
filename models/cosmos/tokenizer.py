"""The Cosmos discrete video tokenizer (DV8x16x16, arXiv 2501.03575): causal factorised convolutions and FSQ.

Tensor names are those of the published modules (the released TorchScript encoder's state dict maps onto them). Videos
are float [B, T, 3, H, W] in [0, 1], T = 1 + 8 n; codes never depend on later frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.cosmos.haar import patch, unpatch
from visacc.models.nbp.fsq import FSQ, LEVELS
from visacc.models.video_prompt import check_clips
from visacc.weights import check_state, read_weights, tensors_in


@dataclass
class TokenizerConfig:
    """Shape of the tokenizer; the defaults are the published DV8x16x16."""

    channels: int = 128
    multipliers: Sequence[int] = (2, 4, 4)
    blocks: int = 2
    z_channels: int = 16
    spatial: int = 16
    temporal: int = 8
    patch: int = 4
    levels: Sequence[int] = LEVELS

    def __post_init__(self) -> None:
        self.multipliers, self.levels = tuple(self.multipliers), tuple(self.levels)

    @property
    def spatial_steps(self) -> int:
        return int(math.log2(self.spatial // self.patch))

    @property
    def temporal_steps(self) -> int:
        return int(math.log2(self.temporal // self.patch))


class Conv(nn.Module):
    """Causal convolution: zeros around rows and columns, the first frame repeated in front."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: tuple[int, int, int],
        *,
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.front = kernel[0] - stride[0] if stride[0] > 1 else kernel[0] - 1
        self.conv3d = nn.Conv3d(c_in, c_out, kernel, stride=stride, padding=(0, padding, padding))

    def forward(self, x: Tensor) -> Tensor:
        if self.front:
            x = torch.cat([x[:, :, :1].expand(-1, -1, self.front, -1, -1), x], dim=2)
        return self.conv3d(x)


def _factorised(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(Conv(c_in, c_out, (1, 3, 3), padding=1), Conv(c_out, c_out, (3, 1, 1)))


class Norm(nn.Module):
    """One-group normalisation of every frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        return self.norm(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, -1)).transpose(1, 2)


class ResBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = Norm(c_in), _factorised(c_in, c_out)
        self.norm2, self.conv2 = Norm(c_out), _factorised(c_out, c_out)
        self.nin_shortcut = Conv(c_in, c_out, (1, 1, 1)) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class AttnBlock(nn.Module):
    """Single-head attention inside each frame, or causal along time at each place."""

    def __init__(self, channels: int, axis: str) -> None:
        super().__init__()
        self.axis = axis
        self.norm = Norm(channels)
        self.q, self.k, self.v, self.proj_out = (Conv(channels, channels, (1, 1, 1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shape = h.shape  # [B, C, T, H, W]
        if self.axis == "space":
            q, k, v = (f(h).permute(0, 2, 3, 4, 1).flatten(2, 3) for f in (self.q, self.k, self.v))
            out = F.scaled_dot_product_attention(q, k, v)
            out = out.unflatten(2, shape[3:]).permute(0, 4, 1, 2, 3)
        else:
            q, k, v = (f(h).permute(0, 3, 4, 2, 1).flatten(1, 2) for f in (self.q, self.k, self.v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = out.unflatten(1, shape[3:]).permute(0, 4, 3, 1, 2)
        return x + self.proj_out(out.contiguous())


class Down(nn.Module):
    """Halve space and/or time: strided convolution plus average pooling."""

    def __init__(self, channels: int, spatial: bool, temporal: bool) -> None:
        super().__init__()
        self.spatial, self.temporal = spatial, temporal
        if spatial:
            self.conv1 = Conv(channels, channels, (1, 3, 3), stride=(1, 2, 2))
        if temporal:
            self.conv2 = Conv(channels, channels, (3, 1, 1), stride=(2, 1, 1))
        if spatial or temporal:
            self.conv3 = Conv(channels, channels, (1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.spatial or self.temporal):
            return x
        if self.spatial:
            x = F.pad(x, (0, 1, 0, 1, 0, 0))
            x = self.conv1(x) + F.avg_pool3d(x, (1, 2, 2), (1, 2, 2))
        if self.temporal:
            x = torch.cat([x[:, :, :1], x], dim=2)
            x = self.conv2(x) + F.avg_pool3d(x, (2, 1, 1), (2, 1, 1))
        return self.conv3(x)


class Up(nn.Module):
    """Double space and/or time: repetition plus convolution. A single frame stays single."""

    def __init__(self, channels: int, spatial: bool, temporal: bool) -> None:
        super().__init__()
        self.spatial, self.temporal = spatial, temporal
        if temporal:
            self.conv1 = Conv(channels, channels, (3, 1, 1))
        if spatial:
            self.conv2 = Conv(channels, channels, (1, 3, 3), padding=1)
        if spatial or temporal:
            self.conv3 = Conv(channels, channels, (1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.spatial or self.temporal):
            return x
        if self.temporal:
            if x.shape[2] > 1:
                x = x.repeat_interleave(2, dim=2)[:, :, 1:]
            x = self.conv1(x) + x
        if self.spatial:
            x = x.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)
            x = self.conv2(x) + x
        return self.conv3(x)


class Level(nn.Module):
    """Residual blocks of one resolution, then a change of resolution."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        blocks: int,
        *,
        downsample: Down | None = None,
        upsample: Up | None = None,
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        if downsample is not None:
            self.downsample = downsample
        if upsample is not None:
            self.upsample = upsample

    def forward(self, x: Tensor) -> Tensor:
        for child in (*self.block, *(m for name, m in self.named_children() if name != "block")):
            x = child(x)
        return x


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels)
        self.attn_1 = nn.Sequential(AttnBlock(channels, "space"), AttnBlock(channels, "time"))
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = [config.channels, *(config.channels * m for m in config.multipliers)]
        last = len(config.multipliers) - 1
        self.patch = config.patch
        self.conv_in = _factorised(3 * config.patch**3, config.channels)
        self.down = nn.ModuleList()
        for i in range(last + 1):
            down = (
                Down(widths[i + 1], i < config.spatial_steps, i < config.temporal_steps) if i < last else None
            )
            self.down.append(Level(widths[i], widths[i + 1], config.blocks, downsample=down))
        self.mid = Middle(widths[-1])
        self.norm_out = Norm(widths[-1])
        self.conv_out = _factorised(widths[-1], config.z_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(patch(x, self.patch))
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in config.multipliers]
        last = len(widths) - 1
        self.patch = config.patch
        self.conv_in = _factorised(config.z_channels, widths[-1])
        self.mid = Middle(widths[-1])
        levels = []
        for i in range(last + 1):
            level = Level(widths[min(i + 1, last)], widths[i], config.blocks + 1)
            if i > 0:
                step = last - i
                temporal = 0 < step < config.temporal_steps + 1
                spatial = temporal or (
                    step < config.spatial_steps and config.spatial_steps > config.temporal_steps
                )
                level.upsample = Up(widths[i], spatial, temporal)
            levels.append(level)
        self.up = nn.ModuleList(levels)
        self.norm_out = Norm(widths[0])
        self.conv_out = _factorised(widths[0], 3 * config.patch**3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(list(self.up)):
            x = level(x)
        return unpatch(self.conv_out(F.silu(self.norm_out(x))), self.patch)


class CosmosTokenizer(nn.Module):
    """Encoder, FSQ, decoder."""

    def __init__(self, config: TokenizerConfig | None = None) -> None:
        super().__init__()
        self.config = config or TokenizerConfig()
        channels = len(self.config.levels)
        self.encoder, self.decoder = Encoder(self.config), Decoder(self.config)
        self.quant_conv = Conv(self.config.z_channels, channels, (1, 1, 1))
        self.post_quant_conv = Conv(channels, self.config.z_channels, (1, 1, 1))
        self.quantizer = FSQ(self.config.levels, "cosmos")

    @property
    def codebook_size(self) -> int:
        return self.quantizer.codebook_size

    def frames(self, latent_frames: int) -> int:
        """Pixel frames of so many latent frames: 1 + 8 (n - 1)."""
        return 1 + self.config.temporal * (latent_frames - 1)

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """Height and width in pixels of so many latent rows and columns."""
        return rows * self.config.spatial, columns * self.config.spatial

    def features(self, video: Tensor) -> Tensor:
        """Video in [-1, 1] as [B, 3, T, H, W] -> [B, C, T', H', W'] before quantisation."""
        return self.quant_conv(self.encoder(video))

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video [B, T, 3, H, W] in [0, 1] -> codes int64 [B, T', H', W']."""
        side = self.config.spatial
        check_clips(video, (self.config.temporal, side, side))
        z = self.features(video.transpose(1, 2).to(self.quant_conv.conv3d.weight.dtype) * 2 - 1)
        return self.quantizer.codes(self.quantizer.quantize(z.movedim(1, -1)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, T', H', W'] -> video [B, T, 3, H, W] in [0, 1]."""
        if codes.ndim != 4:
            raise ValueError(f"video codes must be [B, T, H, W], got {tuple(codes.shape)}")
        z = self.quantizer.values(codes).movedim(-1, 1).to(self.post_quant_conv.conv3d.weight.dtype)
        return (self.decoder(self.post_quant_conv(z)).float() * 0.5 + 0.5).clamp(0, 1).transpose(1, 2)


def load_tokenizer(
    path: str | Path, config: TokenizerConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> CosmosTokenizer:
    """Tokenizer from a state dict, or from the folder with the published ``encoder.jit`` and ``decoder.jit``.

    TorchScript archives run code, so they are opened for their tensors only when the folder is given explicitly.
    Buffers of wavelets and levels are skipped.
    """
    path = Path(path)
    state: dict[str, Tensor] = {}
    if path.is_dir():
        for name in ("encoder.jit", "decoder.jit"):
            if not (path / name).is_file():
                raise ValueError(f"{path} does not hold {name} of the Cosmos tokenizer")
            try:
                state.update(torch.jit.load(str(path / name), map_location="cpu").state_dict())
            except RuntimeError as error:
                raise ValueError(f"{path / name} is truncated or no TorchScript file") from error
    else:
        state = tensors_in(path, read_weights(path)[0], ("state_dict",))
    model = CosmosTokenizer(config)
    wanted = model.state_dict()
    found = {key: value for key, value in state.items() if key in wanted}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of the Cosmos DV tokenizer, first {missing[0]}"
        )
    check_state(path, model, found, "the Cosmos DV tokenizer")
    model.load_state_dict(found)
    return model.to(dtype).eval()
