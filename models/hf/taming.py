"""The convolutional VQ decoder of the taming-transformers lineage: Chameleon, Anole, Lumina-mGPT, Liquid
(8192 codes) and Emu3.5's IBQ tokenizer (131072 codes).

transformers carries only the encoder half for Chameleon; checkpoints keep the decoder in the original
``vqgan.ckpt``, or under ``model.vqmodel.decoder.*`` where a conversion kept it. The architecture is read off
the tensor shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.reading import naming
from visacc.weights import blank, read_weights, tensors_in
from visacc.writing import write_safetensors

FILE = "vqgan_decoder.safetensors"
_PARTS = ("decoder.", "post_quant_conv.", "quantize.embedding.")
_PREFIXES = ("", "model.vqmodel.", "vqmodel.", "model.model.vqmodel.")


@dataclass(frozen=True)
class TamingConfig:
    """Shape of the decoder.

    Attributes:
        codes, embed_dim: the codebook.
        z_channels: channels between ``post_quant_conv`` and the decoder.
        widths: channels of every level, full resolution first.
        blocks: residual blocks per level.
        attention: levels with attention after each block.
        out_channels: colour channels.
    """

    codes: int
    embed_dim: int
    z_channels: int
    widths: tuple[int, ...]
    blocks: int
    attention: tuple[int, ...] = ()
    out_channels: int = 3

    @property
    def upsample(self) -> int:
        """Pixels per code along each side."""
        return 2 ** (len(self.widths) - 1)


def infer_config(tensors: Mapping[str, Tensor]) -> TamingConfig:
    """The configuration that fits a state dict under the original names."""

    def shape(name: str) -> torch.Size:
        if name not in tensors:
            raise ValueError(f"the VQ decoder's weights lack {name!r}")
        return tensors[name].shape

    levels = 1 + max((int(k.split(".")[2]) for k in tensors if k.startswith("decoder.up.")), default=-1)
    if not levels:
        raise ValueError("no VQ decoder weights (decoder.up.*) in this file")
    blocks = 1 + max(int(k.split(".")[4]) for k in tensors if k.startswith("decoder.up.0.block."))
    widths = tuple(shape(f"decoder.up.{i}.block.0.conv1.weight")[0] for i in range(levels))
    attention = tuple(i for i in range(levels) if f"decoder.up.{i}.attn.0.q.weight" in tensors)
    codes, embed = shape("quantize.embedding.weight")
    return TamingConfig(
        codes,
        embed,
        shape("decoder.conv_in.weight")[1],
        widths,
        blocks,
        attention,
        shape("decoder.conv_out.weight")[0],
    )


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class _Residual(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = _norm(c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return h + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class _Attention(nn.Module):
    """Single-head attention over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2)[:, None] for conv in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(out)


class _Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Level(nn.Module):
    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool, upsample: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(_Residual(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        self.attn = nn.ModuleList(_Attention(c_out) for _ in range(blocks if attention else 0))
        self.upsample = _Upsample(c_out) if upsample else None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return x if self.upsample is None else self.upsample(x)


class _Decoder(nn.Module):
    def __init__(self, c: TamingConfig) -> None:
        super().__init__()
        top = c.widths[-1]
        self.conv_in = nn.Conv2d(c.z_channels, top, 3, padding=1)
        self.mid = nn.ModuleDict({"block_1": _Residual(top, top), "attn_1": _Attention(top)})
        self.mid["block_2"] = _Residual(top, top)
        inner = (*c.widths[1:], top)  # what enters level i comes from level i + 1
        self.up = nn.ModuleList(
            _Level(inner[i], width, c.blocks, i in c.attention, i > 0) for i, width in enumerate(c.widths)
        )
        self.norm_out = _norm(c.widths[0])
        self.conv_out = nn.Conv2d(c.widths[0], c.out_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid["block_2"](self.mid["attn_1"](self.mid["block_1"](self.conv_in(z))))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class TamingDecoder(nn.Module):
    """Codes [B, H, W] -> pixels [B, 3, H', W'], nominally in [-1, 1]. Any grid works. Code vectors are
    used as stored."""

    def __init__(self, config: TamingConfig) -> None:
        super().__init__()
        self.config = config
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(config.codes, config.embed_dim)})
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.z_channels, 1)
        self.decoder = _Decoder(config)

    @property
    def codebook(self) -> Tensor:
        """float [V, d] code vectors as stored."""
        return self.get_parameter("quantize.embedding.weight")

    def forward(self, codes: Tensor) -> Tensor:
        z = F.embedding(codes, self.codebook).movedim(-1, 1)
        return self.decoder(self.post_quant_conv(z))

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], source: str | Path = "the VQ decoder"
    ) -> TamingDecoder:
        """Build from a state dict under the original names, in float32, frozen, in eval mode.

        ``source`` names the file in errors.
        """
        with naming(source):
            config = infer_config(tensors)
        model = blank(source, lambda: cls(config), tensors, "the decoder its first layers describe")
        model.load_state_dict({k: v.float() for k, v in tensors.items()}, assign=True)
        return model.requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        """Write the weights under the original names, where :func:`find_decoder` looks for them."""
        write_safetensors(Path(folder) / FILE, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, **_: Any) -> TamingDecoder:
        return cls.from_tensors(read_decoder(Path(folder) / FILE), Path(folder) / FILE)


def _strip(names: Mapping[str, Any]) -> dict[str, str]:
    """{original name: name in the file} of the decoder's tensors."""
    found = {}
    for name in names:
        for prefix in _PREFIXES:
            rest = name[len(prefix) :]
            if name.startswith(prefix) and rest.startswith(_PARTS):
                found[rest] = name
    return found


def read_decoder(path: Path) -> dict[str, Tensor]:
    """Decoder tensors (original names) of a ``.safetensors``, ``.ckpt``, ``.pt`` or ``.bin`` file; may be
    empty.

    Raises:
        ValueError: not a file of tensors.
    """
    try:
        content, _ = read_weights(path, mapped=True)
    except ValueError as error:
        raise ValueError(f"{error}; save its decoder tensors as {FILE} and try again") from error
    tensors = tensors_in(path, content, ("state_dict",))
    return {short: tensors[long] for short, long in _strip(tensors).items()}


def find_decoder(folder: Path) -> dict[str, Tensor]:
    """Decoder tensors somewhere in a checkpoint folder: our own file, the original one, or among the
    model's weights."""
    for name in (FILE, "vqgan.ckpt", "tokenizer/vqgan.ckpt", "chameleon/tokenizer/vqgan.ckpt", "model.ckpt"):
        if (folder / name).is_file():
            return read_decoder(folder / name)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= read_decoder(shard)
    return tensors if any(k.startswith("decoder.up.") for k in tensors) else {}
