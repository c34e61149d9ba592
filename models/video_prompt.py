"""What video models have in common: their prompts, the codes of the frames they continue, their tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from visacc.models.base import Conditioning, ImageModel


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

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """Height and width in pixels of so many latent rows and columns."""


@dataclass(frozen=True)
class VideoPrompt:
    """A text (or nothing) and frames to continue (or none), float [T, 3, H, W] in [0, 1]."""

    text: str | None = None
    frames: Tensor | None = None


class VideoModel(ImageModel):
    """Adapter of a video model.

    Attributes:
        tokenizer: turns codes into frames and back; ``None`` for codes only.
        given_frames: latent frames that every prompt brings (continuation), 0 for generation from text. The layout holds
            the generated rest.
        grid: latent (frames, rows, columns) of a whole clip.
    """

    tokenizer: VideoTokenizer | None
    given_frames: int
    grid: tuple[int, int, int]

    def _check_tokenizer(self, codes: int) -> None:
        """Raise ``ValueError`` for a tokenizer with another number of codes than the network."""
        if self.tokenizer is not None and self.tokenizer.codebook_size != codes:
            raise ValueError(
                f"{self.name} has {codes} video codes, its tokenizer {self.tokenizer.codebook_size}: another tokenizer"
            )

    @property
    def given_tokens(self) -> int:
        return self.given_frames * self.grid[1] * self.grid[2]

    def given_codes(self, items: Sequence[VideoPrompt]) -> Tensor:
        """See :func:`given_codes`."""
        return given_codes(items, self.tokenizer, self.given_frames, self.grid, self.device, self.name)

    def video_codes(self, codes: Tensor) -> Tensor:
        """Codes as the tokenizer knows them."""
        return codes

    def complete(self, cond: Conditioning, codes: Tensor) -> Tensor:
        """The given latent frames and the generated ones, int64 [B, T, H, W]."""
        given = cond.data["given"].unflatten(1, (self.given_frames, *self.grid[1:]))
        return torch.cat([given, self.video_codes(codes)], dim=1)

    def check_pixels(self) -> None:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} was loaded without a tokenizer: ask for output_type='codes'")

    def decode(self, codes: Tensor) -> Tensor:
        """Codes of whole clips as :meth:`complete` gives them [B, T, H, W] -> [B, T', 3, H', W'] in [0, 1]."""
        self.check_pixels()
        assert self.tokenizer is not None
        return self.tokenizer.decode(codes).float().clamp(0, 1)


def check_clips(video: Tensor, stride: tuple[int, int, int]) -> None:
    """Raise ``ValueError`` unless ``video`` is float [B, T, 3, H, W] that a tokenizer of this stride can read."""
    t, h, w = stride
    if video.ndim != 5 or video.shape[2] != 3 or not video.is_floating_point():
        raise ValueError(
            f"videos must be float [B, T, 3, H, W] in [0, 1], got {video.dtype} {tuple(video.shape)}"
        )
    if (video.shape[1] - 1) % t or video.shape[3] % h or video.shape[4] % w:
        raise ValueError(
            f"videos must have 1 + {t} n frames and sides divisible by {h} and {w}, got {video.shape[1]} frames of"
            f" {video.shape[3]}x{video.shape[4]}: a truncated or foreign video"
        )


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
