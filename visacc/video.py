"""Text to video and video continuation with any decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visacc.decoders.base import Decoder
from visacc.engine import decode
from visacc.memory import in_batches
from visacc.models.base import ImageModel
from visacc.models.video_prompt import VideoModel, VideoPrompt
from visacc.pipeline import batch_progress, image_seeds, positive, settings_of
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams
from visacc.stats import DecodeStats
from visacc.video_io import check_fps, to_frames, write_clip

OUTPUT_TYPES = ("np", "pil", "pt", "codes")


@dataclass
class VideoOutput:
    """Result of a video pipeline.

    Attributes:
        videos: list of uint8 arrays [T, H, W, 3] ("np"), lists of PIL images ("pil"), a float tensor [B, T, 3, H, W] in
            [0, 1] ("pt"), or the codes ("codes"). Given frames come first, as the tokenizer reconstructs them.
        codes: int64 [B, T', H', W'] of whole videos.
        seeds: seed of each video.
        stats: steps, acceptance and time of the generated part.
        fps: frames per second to play at.
        settings: decoder, its options and the sampling parameters that were used.
    """

    videos: Any
    codes: Tensor
    seeds: list[int]
    stats: DecodeStats
    fps: float
    settings: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path, index: int = 0) -> None:
        """Write one video (output type "np" or "pil") as .mp4, .gif or .png."""
        if isinstance(self.videos, Tensor):
            raise ValueError("only videos of output_type 'np' or 'pil' can be saved")
        clip = self.videos[index]
        write_clip(np.stack([np.asarray(frame) for frame in clip]), path, self.fps)


class _VideoPipeline:
    """What both pipelines share.

    Args:
        model: a video adapter.
        decoder: registered name, or a decoder object.
        fps: frames per second of the outputs.
        options: options of the decoder, e.g. ``window=64``.
    """

    def __init__(
        self, model: ImageModel, decoder: str | Decoder = "ar", *, fps: float = 8, **options: Any
    ) -> None:
        if not isinstance(model, VideoModel):
            raise ValueError(f"{model.name} is no video model")
        self.model, self.fps = model, check_fps(fps)
        self.set_decoder(decoder, **options)

    def set_decoder(self, decoder: str | Decoder, **options: Any) -> None:
        """Change the decoder of the following calls."""
        make_decoder(decoder, **options).check(self.model)
        self._decoder, self._options = decoder, options

    def _run(
        self,
        prompts: list[VideoPrompt],
        *,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        output_type: str = "np",
        batch_size: int = 4,
        progress: Callable[[int, int], object] | None = None,
        **decoder_options: Any,
    ) -> VideoOutput:
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"unknown output_type {output_type!r}; choose one of {', '.join(OUTPUT_TYPES)}")
        positive("batch_size", batch_size)
        given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        sampling = SamplingParams.merge(self.model.defaults, given)
        if output_type != "codes":
            self.model.check_pixels()
        seeds = image_seeds(seed, generator, len(prompts))
        decoder = make_decoder(self._decoder, **{**self._options, **decoder_options})
        started, parts, codes, pixels = time.perf_counter(), [], [], []
        slots = self.model.layout.total

        def work(start: int, stop: int) -> tuple[DecodeStats, Tensor, Tensor | None]:
            part = prompts[start:stop]
            cond = self.model.encode(part)
            report = batch_progress(progress, start * slots, len(part), len(prompts) * slots)
            result = decode(self.model, decoder, cond, sampling, seeds[start:stop], progress=report)
            whole = self.model.complete(cond, result.codes)
            with torch.no_grad():
                return result.stats, whole, None if output_type == "codes" else self.model.decode(whole)

        for _, _, (stats, whole, drawn) in in_batches(len(prompts), batch_size, work, what="clips"):
            parts.append(stats)
            codes.append(whole)
            if drawn is not None:
                pixels.append(drawn)
        settings = settings_of(self.model, decoder, sampling, time.perf_counter() - started)
        videos: Any = torch.cat(codes) if output_type == "codes" else torch.cat(pixels)
        if output_type in ("np", "pil"):
            videos = list(self.model.to_uint8(videos).movedim(2, -1).cpu().numpy())
        if output_type == "pil":
            videos = [[Image.fromarray(frame) for frame in clip] for clip in videos]
        return VideoOutput(videos, torch.cat(codes), seeds, DecodeStats.merge(parts), self.fps, settings)


class TextToVideoPipeline(_VideoPipeline):
    """Generate clips from texts (or class names)."""

    def __init__(self, model: ImageModel, decoder: str | Decoder = "ar", **options: Any) -> None:
        super().__init__(model, decoder, **options)
        if self.model.given_frames:
            raise ValueError(f"{model.name} was loaded to continue frames; use VideoContinuationPipeline")

    def __call__(
        self, prompt: str | Sequence[str], *, num_videos_per_prompt: int = 1, **call: Any
    ) -> VideoOutput:
        """Clips for every prompt.

        Args:
            prompt: text or list of texts.
            call: ``seed`` (one, or one per clip), ``generator``, ``guidance_scale``, ``temperature``, ``top_k``, ``top_p``,
                ``output_type`` ("np", "pil", "pt", "codes"), ``batch_size``, ``progress`` and options of the decoder.
        """
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
            raise ValueError(f"prompt must be a non-empty text or a list of them, got {prompt!r}")
        repeat = positive("num_videos_per_prompt", num_videos_per_prompt)
        return self._run([VideoPrompt(t) for t in texts for _ in range(repeat)], **call)


class VideoContinuationPipeline(_VideoPipeline):
    """Continue clips, with a text where the model takes one."""

    def __init__(self, model: ImageModel, decoder: str | Decoder = "ar", **options: Any) -> None:
        super().__init__(model, decoder, **options)
        if not self.model.given_frames:
            raise ValueError(
                f"{model.name} was loaded to generate from text; load it with given_frames=1 or more"
            )

    @property
    def frames_needed(self) -> int:
        """Frames that a clip must bring."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.model.name} was loaded without a tokenizer and cannot read frames")
        return tokenizer.frames(self.model.given_frames)

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of the frames that a clip must bring."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.model.name} was loaded without a tokenizer and cannot read frames")
        return tokenizer.size(*self.model.grid[1:])

    def __call__(self, frames: Any, prompt: str | Sequence[str] | None = None, **call: Any) -> VideoOutput:
        """Continue one clip or a list of clips.

        Args:
            frames: a clip, or a list of clips; each is a uint8 array [T, H, W, 3], a float tensor [T, 3, H, W] in [0, 1],
                or (a single clip) a list of PIL images. Exactly :attr:`frames_needed` frames.
            prompt: text for all clips, or one per clip.
            call: as for :class:`TextToVideoPipeline`.
        """
        many = isinstance(frames, (list, tuple)) and not all(isinstance(f, Image.Image) for f in frames)
        clips = [to_frames(clip) for clip in (frames if many else [frames])]
        texts = [prompt] * len(clips) if prompt is None or isinstance(prompt, str) else list(prompt)
        if len(texts) != len(clips):
            raise ValueError(f"{len(clips)} clips need one text or {len(clips)} texts, got {len(texts)}")
        return self._run([VideoPrompt(t, c) for t, c in zip(texts, clips, strict=True)], **call)
