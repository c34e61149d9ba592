"""A video tokenizer without time compression: an image tokenizer on every frame."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visacc.models.llamagen.vq import VQModel


class FrameTokenizer(nn.Module):
    """Frames through a VQ image tokenizer; one latent frame per frame, so codes never depend on other frames."""

    def __init__(self, vq: VQModel) -> None:
        super().__init__()
        self.vq = vq

    @property
    def codebook_size(self) -> int:
        return self.vq.config.codebook_size

    def frames(self, latent_frames: int) -> int:
        return latent_frames

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """Height and width in pixels of so many latent rows and columns."""
        return rows * self.vq.config.downsample, columns * self.vq.config.downsample

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video float [B, T, 3, H, W] in [0, 1] -> codes int64 [B, T, H', W']."""
        step = self.vq.config.downsample
        if video.ndim != 5 or video.shape[2] != 3 or not video.is_floating_point():
            raise ValueError(
                f"videos must be float [B, T, 3, H, W] in [0, 1], got {video.dtype} {tuple(video.shape)}"
            )
        batch, _, _, height, width = video.shape
        if height % step or width % step:
            raise ValueError(f"frame sides must be divisible by {step}, got {height}x{width}")
        codes = self.vq.encode(video.flatten(0, 1) * 2 - 1)
        return codes.view(batch, -1, height // step, width // step)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [B, T, H', W'] -> video in [0, 1]."""
        if codes.ndim != 4:
            raise ValueError(f"video codes must be [B, T, H, W], got {tuple(codes.shape)}")
        pixels = self.vq.decode_codes(codes.flatten(0, 1))
        return (pixels / 2 + 0.5).clamp(0, 1).unflatten(0, codes.shape[:2])
