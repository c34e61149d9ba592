"""Fréchet video distance: the protocols of the video papers, streaming.

    fvd = FVD(I3DFeatures(path), PROTOCOLS["ucf101"])
    for clips in real: fvd.update(clips, real=True)     # [B, T, 3, H, W] in [0, 1]
    for clips in fake: fvd.update(clips, real=False)
    fvd.compute()

Distances are made in float64 by symmetric eigendecomposition (``metrics.frechet``). The originals use scipy's
matrix square root (StyleGAN-V), SVD square roots on features that they overwrite (VideoGPT), or float32
(NBP's evaluation script).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.metrics.frechet import frechet
from visacc.metrics.stats import FeatureStats

RESIZES = ("crop", "stretch")


@dataclass(frozen=True)
class VideoProtocol:
    """How clips become I3D input.

    Attributes:
        frames: the first so many frames of every clip are used.
        reduce: both sets are first scaled to this many pixels (shorter side, crop), 0 for never.
        resize: "crop" scales the shorter side to 224 and crops the centre; "stretch" ignores the aspect ratio and first
            truncates to bytes (tokenizer evaluation).
        size: side of the network's input.
    """

    frames: int = 16
    reduce: int = 0
    resize: str = "crop"
    size: int = 224

    def __post_init__(self) -> None:
        if self.resize not in RESIZES:
            raise ValueError(f"resize must be one of {', '.join(RESIZES)}, got {self.resize!r}")


PROTOCOLS = {
    #: NBP generation on UCF-101: StyleGAN-V's I3D, 128 px clips, training clips as reference, 10000 samples
    "ucf101": VideoProtocol(),
    #: NBP frame prediction on Kinetics-600: both sets at 64 px, validation clips, 50000 samples
    "k600": VideoProtocol(reduce=64),
    #: reconstruction by a video tokenizer: VideoGPT's I3D
    "tokenizer": VideoProtocol(resize="stretch"),
}


def crop_resize(video: Tensor, size: int) -> Tensor:
    """Frames [..., C, H, W]: shorter side to ``size``, longer side rounded up, bilinear (no antialias),
    centre crop.
    """
    height, width = video.shape[-2:]
    scale = size / min(height, width)
    if height < width:
        target = (size, math.ceil(width * scale))
    else:
        target = (math.ceil(height * scale), size)
    flat = video.reshape(-1, *video.shape[-3:])
    flat = F.interpolate(flat, size=target, mode="bilinear", align_corners=False)
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    return flat[..., top : top + size, left : left + size].reshape(*video.shape[:-2], size, size)


def stretch_resize(video: Tensor, size: int) -> Tensor:
    """Bytes as float [..., C, H, W] -> [..., C, size, size], bilinear, aspect ratio ignored."""
    flat = video.reshape(-1, *video.shape[-3:])
    flat = F.interpolate(flat, size=(size, size), mode="bilinear", align_corners=False)
    return flat.reshape(*video.shape[:-2], size, size)


def preprocess(clips: Tensor, protocol: VideoProtocol) -> Tensor:
    """Clips [B, T, 3, H, W] in [0, 1] -> network input [B, 3, frames, 224, 224] in [-1, 1]."""
    if clips.ndim != 5 or clips.shape[2] != 3 or not clips.is_floating_point():
        raise ValueError(
            f"clips must be float [B, T, 3, H, W] in [0, 1], got {clips.dtype} {tuple(clips.shape)}"
        )
    if clips.shape[1] < protocol.frames:
        raise ValueError(
            f"the protocol compares {protocol.frames} frames, a clip has {clips.shape[1]}: truncated video?"
        )
    if not bool(clips.isfinite().all()) or float(clips.min()) < -1e-3 or float(clips.max()) > 1 + 1e-3:
        raise ValueError("clips must be finite and lie in [0, 1]")
    clips = clips[:, : protocol.frames].float()
    if protocol.reduce:
        clips = crop_resize(clips, protocol.reduce)
    if protocol.resize == "stretch":
        clips = stretch_resize((clips * 255).clamp(0, 255).floor(), protocol.size) / 255
    else:
        clips = crop_resize(clips, protocol.size)
    return (2 * clips - 1).transpose(1, 2)


class FVD:
    """Streaming Fréchet video distance.

    Args:
        features: network input [B, 3, T, S, S] -> features [B, d], e.g. :class:`metrics.fvd_i3d.I3DFeatures`.
        protocol: see :data:`PROTOCOLS`; ``None`` hands the clips over as they are, [B, T, 3, H, W] in [0, 1].
    """

    def __init__(self, features: Callable[[Tensor], Tensor], protocol: VideoProtocol | None) -> None:
        self.features, self.protocol = features, protocol
        self.extractor: str | None = getattr(features, "extractor", None)
        self.real: FeatureStats | None = None
        self.fake: FeatureStats | None = None

    def update(self, clips: Tensor, *, real: bool) -> FVD:
        """Add clips [B, T, 3, H, W] in [0, 1] to one of the two sets."""
        rows = self.features(clips if self.protocol is None else preprocess(clips, self.protocol))
        name = "real" if real else "fake"
        stats = getattr(self, name)
        if stats is None:
            stats = FeatureStats(rows.shape[1], extractor=self.extractor)
            setattr(self, name, stats)
        stats.update(rows.cpu())
        return self

    def merge(self, other: FVD) -> FVD:
        """Add what another process has seen."""
        for name in ("real", "fake"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                setattr(self, name, theirs if mine is None else mine.merge(theirs))
        return self

    def compute(self) -> float:
        """The distance; needs at least two clips on either side."""
        if self.real is None or self.fake is None:
            raise ValueError(
                "a Fréchet video distance needs real and generated clips; one of the sets is empty"
            )
        return frechet(self.fake, self.real)


class RandomVideoFeatures:
    """A fixed feature space for tiny worlds: seeded, untrained 3-D convolutions, means and deviations of
    their channels.

    Random convolutions rank distributions of small videos without any download. The numbers compare models
    with each other in this space only; they are not FVD in the sense of any paper.
    """

    extractor = "random-conv3d-v1"
    dim = 128

    def __init__(self, seed: int = 1234) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(16, 3, (3, 5, 5)), (32, 16, (3, 3, 3)), (64, 32, (3, 3, 3))]
        self._weights = []
        for c_out, c_in, kernel in shapes:
            weight = torch.empty(c_out, c_in, *kernel)
            nn.init.orthogonal_(weight, gain=1.4, generator=generator)
            self._weights.append(weight)

    @torch.inference_mode()
    def __call__(self, clips: Tensor) -> Tensor:
        """Clips float [B, T, 3, H, W] in [0, 1] -> [B, 128]."""
        x = 4 * (clips.float().transpose(1, 2) - 0.5)
        for i, weight in enumerate(self._weights):
            x = F.conv3d(
                x, weight, stride=(1 if i == 0 else 2, 2, 2), padding=tuple(k // 2 for k in weight.shape[2:])
            )
            x = F.leaky_relu(x, 0.2)
        flat = x.flatten(2)
        return torch.cat([flat.mean(2), flat.std(2)], dim=1)
