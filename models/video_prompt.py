"""Prompts of video models, and the codes of the frames that they continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class VideoTokenizer(Protocol):
    """What a video model needs of its tokenizer. Videos are float [B, T, 3, H, W] in [0, 1]."""

    @property
    def codebook_size(self) -> int: ...

    def encode(self, video: Tensor) -> Tensor:
        """-> codes int64 [B, T', H', W']."""

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, T', H', W'] -> video."""

    def frames(self, latent_frames: int) -> int:
        """Pixel frames of so many latent frames."""


@dataclass(frozen=True)
class VideoPrompt:
    """A text (or nothing) and frames to continue (or none), float [T, 3, H, W] in [0, 1]."""

    text: str | None = None
    frames: Tensor | None = None


def as_prompts(prompts: Sequence[Any]) -> list[VideoPrompt]:
    """Texts and prompt objects as prompt objects."""
    items = []
    for prompt in prompts:
        if prompt is None or isinstance(prompt, str):
            prompt = VideoPrompt(text=prompt)
        if not isinstance(prompt, VideoPrompt):
            raise ValueError(f"a video prompt is a text or a VideoPrompt, got {type(prompt).__name__}")
        items.append(prompt)
    return items


def given_codes(
    items: Sequence[VideoPrompt],
    tokenizer: VideoTokenizer | None,
    latent_frames: int,
    grid: tuple[int, int, int],
    device: torch.device,
    name: str,
) -> Tensor:
    """Codes int64 [B, K] in raster order of the frames that the prompts bring.

    Args:
        latent_frames: how many latent frames every prompt must bring.
        grid: latent (frames, rows, columns) of the model.

    Raises:
        ValueError: frames missing or not asked for, wrong number, size or range, no tokenizer.
    """
    if latent_frames == 0:
        if any(item.frames is not None for item in items):
            raise ValueError(
                f"{name} was loaded to generate from text alone; load it with given_frames=1 or more"
            )
        return torch.empty(len(items), 0, dtype=torch.long, device=device)
    if tokenizer is None:
        raise ValueError(f"{name} was loaded without a tokenizer and cannot read frames")
    need, clips = tokenizer.frames(latent_frames), []
    for item in items:
        frames = item.frames
        if frames is None:
            raise ValueError(f"{name} continues {need} frames, but a prompt brings none")
        if frames.ndim != 4 or frames.shape[1] != 3 or not frames.is_floating_point():
            raise ValueError(
                f"frames must be float [T, 3, H, W] in [0, 1], got {frames.dtype} {tuple(frames.shape)}"
            )
        if len(frames) != need:
            raise ValueError(f"{name} continues exactly {need} frames, a prompt brings {len(frames)}")
        if not bool(frames.isfinite().all()) or float(frames.min()) < -1e-3 or float(frames.max()) > 1 + 1e-3:
            raise ValueError("frames must be finite and lie in [0, 1]")
        clips.append(frames)
    sizes = {tuple(clip.shape[2:]) for clip in clips}
    if len(sizes) != 1:
        raise ValueError(f"all prompts of a batch must bring frames of one size, got {sorted(sizes)}")
    codes = tokenizer.encode(torch.stack(clips).to(device))
    if tuple(codes.shape[1:]) != (latent_frames, *grid[1:]):
        height, width = sizes.pop()
        raise ValueError(
            f"frames of {height}x{width} become latents of {codes.shape[2]}x{codes.shape[3]}, but {name} works on"
            f" {grid[1]}x{grid[2]}: another frame size"
        )
    return codes.flatten(1)
