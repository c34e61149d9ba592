"""The resize rules behind published numbers; they differ by more than most decoders do.

All take uint8 images [b, 3, h, w] and give float32 [b, 3, H, W] in grey levels 0..255.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Size = tuple[int, int]


def _tf1_axis(n_in: int, n_out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.tensor(n_in, dtype=torch.float32) / torch.tensor(n_out, dtype=torch.float32)
    position = torch.arange(n_out, dtype=torch.float32) * scale
    low = position.floor()
    return low.long().to(device), (low.long() + 1).clamp_max(n_in - 1).to(device), (position - low).to(device)


def tf1_bilinear(images: Tensor, size: Size) -> Tensor:
    """TensorFlow 1 bilinear, align_corners=False: source = target * in/out, no half-pixel offset, no
    antialias.
    """
    x = images.to(torch.float32)
    top, bottom, fy = _tf1_axis(x.shape[2], size[0], x.device)
    left, right, fx = _tf1_axis(x.shape[3], size[1], x.device)
    upper, lower = x[:, :, top], x[:, :, bottom]
    upper = upper[..., left] + (upper[..., right] - upper[..., left]) * fx
    lower = lower[..., left] + (lower[..., right] - lower[..., left]) * fx
    return upper + (lower - upper) * fy[:, None]


def torch_bilinear(images: Tensor, size: Size) -> Tensor:
    """Half-pixel centres, no antialias (pytorch-fid, clean-fid legacy)."""
    return F.interpolate(images.to(torch.float32), size=size, mode="bilinear", align_corners=False)


def torch_bilinear_antialias(images: Tensor, size: Size) -> Tensor:
    """torchmetrics' default; not comparable with published FID."""
    return F.interpolate(
        images.to(torch.float32), size=size, mode="bilinear", align_corners=False, antialias=True
    )


def torch_bicubic(images: Tensor, size: Size) -> Tensor:
    """Bicubic without antialias, not clipped (CMMD)."""
    return F.interpolate(images.to(torch.float32), size=size, mode="bicubic", align_corners=False)


def _pil(images: Tensor, convert: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    arrays = [convert(image.permute(1, 2, 0).cpu().numpy()) for image in images]
    stacked = np.stack(arrays).astype(np.float32)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous().to(images.device)


def pil_float_bicubic(images: Tensor, size: Size) -> Tensor:
    """PIL bicubic per channel on float images, then clipped (clean-fid's "clean"): antialiased, not
    quantised.
    """

    def convert(image: np.ndarray) -> np.ndarray:
        channels = [
            np.asarray(
                Image.fromarray(image[..., c].astype(np.float32)).resize(
                    (size[1], size[0]), Image.Resampling.BICUBIC
                )
            )
            for c in range(3)
        ]
        return np.stack(channels, axis=-1).clip(0, 255)

    return _pil(images, convert)


def _pil_uint8(resample: Image.Resampling) -> Callable[[Tensor, Size], Tensor]:
    def resize(images: Tensor, size: Size) -> Tensor:
        return _pil(images, lambda a: np.asarray(Image.fromarray(a).resize((size[1], size[0]), resample)))

    return resize


pil_bicubic = _pil_uint8(Image.Resampling.BICUBIC)  # antialiased, quantised to uint8
pil_bilinear = _pil_uint8(Image.Resampling.BILINEAR)

RULES: dict[str, Callable[[Tensor, Size], Tensor]] = {
    "tf1": tf1_bilinear,
    "torch": torch_bilinear,
    "torch-antialias": torch_bilinear_antialias,
    "torch-bicubic": torch_bicubic,
    "clean": pil_float_bicubic,
    "pil-bicubic": pil_bicubic,
    "pil-bilinear": pil_bilinear,
}
