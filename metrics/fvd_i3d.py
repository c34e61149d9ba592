"""I3D networks whose outputs Fréchet video distances compare. Weights are read from a path or the hub, never
bundled.

Two ports are in use, with slightly different numbers; say which one a figure was made with:

- ``styleganv``: StyleGAN-V's TorchScript file ``i3d_torchscript.pt`` (called with rescale and resize off, features on);
- ``videogpt``: a PyTorch port with ``i3d_pretrained_400.pt``, built here.

Both give 400 Kinetics outputs per clip. Clips are float [B, 3, T, 224, 224] in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.metrics.extractors.base import fill, load_state

VARIANTS = ("styleganv", "videogpt")
_Triple = tuple[int, int, int]


def same_padding(shape: Sequence[int], kernel: _Triple, stride: _Triple) -> list[int]:
    """Zeros in front and behind, as F.pad takes them (last axis first), for TensorFlow's "same"."""
    pads: list[int] = []
    for size, k, s in reversed(list(zip(shape, kernel, stride, strict=True))):
        total = max(k - (s if size % s == 0 else size % s), 0)
        pads += [total // 2, total - total // 2]
    return pads


class Unit(nn.Module):
    """Convolution with "same" padding, batch normalisation, ReLU."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: _Triple = (1, 1, 1),
        stride: _Triple = (1, 1, 1),
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.plain = kernel, stride, plain
        self.conv3d = nn.Conv3d(c_in, c_out, kernel, stride, bias=plain)
        if not plain:
            self.bn = nn.BatchNorm3d(c_out, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3d(F.pad(x, same_padding(x.shape[2:], self.kernel, self.stride)))
        return x if self.plain else F.relu(self.bn(x))


def max_pool(x: Tensor, kernel: _Triple, stride: _Triple) -> Tensor:
    """Max pooling with "same" zero padding."""
    return F.max_pool3d(F.pad(x, same_padding(x.shape[2:], kernel, stride)), kernel, stride)


class Mixed(nn.Module):
    """Inception block."""

    def __init__(self, c_in: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        a, b, c, d, e, f = widths
        self.b0 = Unit(c_in, a)
        self.b1a, self.b1b = Unit(c_in, b), Unit(b, c, (3, 3, 3))
        self.b2a, self.b2b = Unit(c_in, d), Unit(d, e, (3, 3, 3))
        self.b3b = Unit(c_in, f)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.b3b(max_pool(x, (3, 3, 3), (1, 1, 1)))
        return torch.cat([self.b0(x), self.b1b(self.b1a(x)), self.b2b(self.b2a(x)), pooled], dim=1)


_MIXED: dict[str, tuple[int, tuple[int, int, int, int, int, int]]] = {
    "3b": (192, (64, 96, 128, 16, 32, 32)),
    "3c": (256, (128, 128, 192, 32, 96, 64)),
    "4b": (480, (192, 96, 208, 16, 48, 64)),
    "4c": (512, (160, 112, 224, 24, 64, 64)),
    "4d": (512, (128, 128, 256, 24, 64, 64)),
    "4e": (512, (112, 144, 288, 32, 64, 64)),
    "4f": (528, (256, 160, 320, 32, 128, 128)),
    "5b": (832, (256, 160, 320, 32, 128, 128)),
    "5c": (832, (384, 192, 384, 48, 128, 128)),
}


class I3D(nn.Module):
    """The PyTorch port (VideoGPT); tensor names as in ``i3d_pretrained_400.pt``."""

    def __init__(self, classes: int = 400) -> None:
        super().__init__()
        self.Conv3d_1a_7x7 = Unit(3, 64, (7, 7, 7), (2, 2, 2))
        self.Conv3d_2b_1x1 = Unit(64, 64)
        self.Conv3d_2c_3x3 = Unit(64, 192, (3, 3, 3))
        for name, (c_in, widths) in _MIXED.items():
            self.add_module(f"Mixed_{name}", Mixed(c_in, widths))
        self.logits = Unit(1024, classes, plain=True)

    def pooled(self, x: Tensor) -> Tensor:
        """Clips [B, 3, T, 224, 224] -> [B, 1024, t, 1, 1]."""
        x = max_pool(self.Conv3d_1a_7x7(x), (1, 3, 3), (1, 2, 2))
        x = max_pool(self.Conv3d_2c_3x3(self.Conv3d_2b_1x1(x)), (1, 3, 3), (1, 2, 2))
        for name in _MIXED:
            if name == "4b":
                x = max_pool(x, (3, 3, 3), (2, 2, 2))
            elif name == "5b":
                x = max_pool(x, (2, 2, 2), (2, 2, 2))
            x = self.get_submodule(f"Mixed_{name}")(x)
        return F.avg_pool3d(x, (2, 7, 7), stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Clips of at least 9 frames -> logits [B, 400], averaged over time."""
        return self.logits(self.pooled(x)).flatten(2).mean(2)


def weight_file(weights: str | Path) -> Path:
    """A path, or ``hub:owner/name/file`` from the Hugging Face hub or its local cache."""
    text = str(weights)
    if text.startswith("hub:"):
        owner, _, rest = text.removeprefix("hub:").partition("/")
        name, _, file = rest.partition("/")
        if not (owner and name and file):
            raise ValueError(f"hub weights are written hub:owner/name/file, got {text!r}")
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(f"{owner}/{name}", file))
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"I3D weights {path} do not exist. They are not part of this package: get i3d_torchscript.pt (StyleGAN-V) or"
            " i3d_pretrained_400.pt (VideoGPT) and give its path, or hub:owner/name/file"
        )
    return path


class I3DFeatures:
    """Clips to 400 features.

    Args:
        weights: path or ``hub:owner/name/file``.
        variant: "styleganv" (a TorchScript file, which runs code from that file) or "videogpt" (tensors only).
    """

    dim = 400

    def __init__(
        self, weights: str | Path, variant: str = "styleganv", device: torch.device | str = "cpu"
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
        path = weight_file(weights)
        self.variant, self.device = variant, torch.device(device)
        self.extractor = f"i3d-{variant}"
        self._net: Any
        if variant == "styleganv":
            try:
                self._net = torch.jit.load(str(path), map_location=self.device).eval()
            except RuntimeError as error:
                raise ValueError(
                    f"{path} is no TorchScript file; variant 'styleganv' needs i3d_torchscript.pt"
                ) from error
        else:
            self._net = I3D()
            fill(self._net, load_state(path), path, "the I3D network of VideoGPT")
            self._net = self._net.to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, clips: Tensor) -> Tensor:
        """Clips float [B, 3, T, 224, 224] in [-1, 1] -> float32 [B, 400]."""
        if clips.ndim != 5 or clips.shape[1] != 3 or tuple(clips.shape[3:]) != (224, 224):
            raise ValueError(f"I3D takes clips [B, 3, T, 224, 224], got {tuple(clips.shape)}")
        if clips.shape[2] < 9:
            raise ValueError(f"I3D needs clips of at least 9 frames, got {clips.shape[2]}")
        clips = clips.to(self.device)
        if self.variant == "styleganv":
            return self._net(clips, rescale=False, resize=False, return_features=True).float()
        return self._net(clips).float()
