"""Reading and writing clips: MP4 (PyAV), GIF, frame sheets. Clips are uint8 arrays [T, H, W, 3]."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageSequence
from torch import Tensor

from visacc.pictures import read_image, rgb, save_image
from visacc.writing import write_atomic

Clip = NDArray[np.uint8]
SUFFIXES = (".mp4", ".gif", ".png")
LONGEST = 2_000_000_000
"""Bytes of a decoded clip beyond which a file is refused."""
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise ValueError(
            "MP4 files need PyAV: pip install 'visacc[video]' (GIF and PNG work without it)"
        ) from None
    return av


def check_clip(clip: Any) -> Clip:
    """The clip itself if it is a uint8 array [T, H, W, 3] with at least one frame."""
    array = np.asarray(clip)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
        raise ValueError(f"a clip is a uint8 array [T, H, W, 3], got {array.dtype} {array.shape}")
    return array


def check_fps(fps: float) -> float:
    """Frames a second, if they are a number that players and formats can take."""
    number = isinstance(fps, (int, float)) and not isinstance(fps, bool)
    if not (number and math.isfinite(fps) and 0.01 <= fps <= 1000):
        raise ValueError(f"fps must lie between 0.01 and 1000, got {fps!r}")
    return fps


def enlarge(clip: Clip, side: int) -> Clip:
    """Repeat pixels of small clips until the shorter side reaches about ``side`` (never shrinks)."""
    factor = max(1, side // min(clip.shape[1:3]))
    return clip.repeat(factor, axis=1).repeat(factor, axis=2)


def reduce(clip: Clip, size: tuple[int, int]) -> Clip:
    """Undo :func:`enlarge`: a clip whose pixels are repeated to a whole multiple of ``size`` (height, width), as the
    files are that we write, becomes one of that size. Other clips stay as they are.
    """
    frames, height, width, _ = clip.shape
    factor = height // size[0]
    if factor < 2 or (height, width) != (factor * size[0], factor * size[1]):
        return clip
    cells = clip.reshape(frames, size[0], factor, size[1], factor, 3).astype(np.float32)
    mean = cells.mean(axis=(2, 4))
    # what a lossy file adds to equal pixels; pixels of another picture differ by much more
    if np.abs(cells - mean[:, :, None, :, None]).mean() > REPEATED:
        return clip
    return mean.round().astype(np.uint8)


REPEATED = 6.0
"""Mean distance (of 255) from their cell's mean up to which pixels count as repeated."""


def write_mp4(clip: Clip, path: str | Path, fps: float = 8, *, side: int = 256) -> None:
    """H.264 (or MPEG-4 where no H.264 encoder is built in), yuv420p, so that browsers play it.

    Args:
        side: small clips are enlarged by whole factors to about this many pixels; 0 keeps their size.
    """
    av, rate = _av(), Fraction(check_fps(fps)).limit_denominator(1000)
    clip = check_clip(clip)
    clip = enlarge(clip, side) if side else clip
    # chroma is stored at half resolution, so odd sides get one repeated line
    clip = np.pad(clip, ((0, 0), (0, clip.shape[1] % 2), (0, clip.shape[2] % 2), (0, 0)), mode="edge")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"

    def write(part: Path) -> None:
        with av.open(str(part), "w", format="mp4") as container:
            stream = container.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = clip.shape[2], clip.shape[1], "yuv420p"
            if codec == "libx264":
                stream.options = {"crf": "12"}
            for frame in clip:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())

    write_atomic(Path(path), write)


def write_gif(clip: Clip, path: str | Path, fps: float = 8, *, side: int = 256) -> None:
    """Endless GIF; one palette for the whole clip, so that still parts do not flicker."""
    clip = check_clip(clip)
    clip = enlarge(clip, side) if side else clip
    strip = Image.fromarray(clip.reshape(-1, *clip.shape[2:]))
    palette = strip.quantize(256, method=Image.Quantize.MEDIANCUT)
    frames = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in clip]
    duration = max(20, round(1000 / check_fps(fps)))

    def write(part: Path) -> None:
        frames[0].save(part, format="GIF", save_all=True, append_images=frames[1:], duration=duration, loop=0)

    write_atomic(Path(path), write)


def frame_sheet(clips: list[Clip], *, columns: int = 9, side: int = 64, gap: int = 2) -> Image.Image:
    """One row per clip: up to ``columns`` frames, evenly spread, first and last included."""
    if not clips:
        raise ValueError("a frame sheet needs at least one clip")
    rows = []
    for clip in clips:
        clip = enlarge(check_clip(clip), side)
        pick = np.unique(np.linspace(0, len(clip) - 1, min(columns, len(clip))).round().astype(int))
        rows.append(clip[pick])
    height, width = rows[0].shape[1:3]
    if any(row.shape[1:3] != (height, width) for row in rows):
        raise ValueError("all clips of a frame sheet must have the same size")
    most = max(len(row) for row in rows)
    sheet = np.full((gap + len(rows) * (height + gap), gap + most * (width + gap), 3), 255, np.uint8)
    for y, row in enumerate(rows):
        for x, frame in enumerate(row):
            top, left = gap + y * (height + gap), gap + x * (width + gap)
            sheet[top : top + height, left : left + width] = frame
    return Image.fromarray(sheet)


def write_clip(clip: Clip, path: str | Path, fps: float = 8, *, side: int = 256) -> None:
    """Write by suffix: .mp4, .gif, or .png (a sheet of all frames)."""
    suffix = Path(path).suffix.lower()
    if suffix == ".mp4":
        write_mp4(clip, path, fps, side=side)
    elif suffix == ".gif":
        write_gif(clip, path, fps, side=side)
    elif suffix == ".png":
        save_image(frame_sheet([clip], columns=len(clip)), Path(path))
    else:
        raise ValueError(
            f"cannot write a clip as {suffix or 'a file without suffix'}; use one of {', '.join(SUFFIXES)}"
        )


def read_clip(path: str | Path) -> Clip:
    """Frames of an MP4 (or anything PyAV reads), a GIF, a picture, or a folder of pictures in name order."""
    path = Path(path)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in _IMAGES)
        if not files:
            raise ValueError(f"folder {path} holds no pictures")
        frames = []
        for file in files:
            frames.append(np.asarray(read_image(file)))
            _check_length(path, len(frames), frames[-1])
    elif not path.is_file():
        raise ValueError(f"clip {path} does not exist")
    elif path.suffix.lower() in (".gif", *_IMAGES):
        frames = _pictures(path)
    else:
        frames = _decode(path)
    if len({frame.shape for frame in frames}) != 1:
        raise ValueError(f"the frames of {path} differ in size")
    return np.stack(frames)


def _pictures(path: Path) -> list[Clip]:
    """Frames of a picture file. Writers merge equal frames of a GIF into a longer one, which is undone here."""
    first = read_image(path)  # refuses what is no picture, or too large a one
    frames: list[Clip] = []
    durations: list[float] = []
    try:
        with Image.open(path) as image:
            for frame in ImageSequence.Iterator(image):
                frames.append(np.asarray(rgb(frame)))
                durations.append(float(frame.info.get("duration", 0)))
                _check_length(path, len(frames), frames[-1])
    except Exception as error:  # decoders raise anything on damaged files
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"cannot read {path}: frame {len(frames)} is damaged ({error})") from error
    shortest = min((d for d in durations if d > 0), default=1.0)
    times = [max(1, round(d / shortest)) for d in durations]
    _check_length(path, sum(times), np.asarray(first))
    return [frame for frame, count in zip(frames, times, strict=True) for _ in range(count)]


def _decode(path: Path) -> list[Clip]:
    av = _av()
    try:
        with av.open(str(path)) as container:
            frames: list[Clip] = []
            for frame in container.decode(video=0):
                _check_length(
                    path, len(frames) + 1, np.broadcast_to(np.uint8(0), (frame.height, frame.width, 3))
                )
                frames.append(frame.to_ndarray(format="rgb24"))
    except (av.error.FFmpegError, IndexError, MemoryError, OverflowError) as error:
        raise ValueError(f"cannot decode {path}: truncated or not a video ({error})") from None
    if not frames:
        raise ValueError(f"{path} holds no frames: truncated video")
    return frames


def _check_length(path: Path, frames: int, frame: Clip) -> None:
    """A small file can hold hours of still picture: refuse it before it fills the memory."""
    if frames * frame.size > LONGEST:
        raise ValueError(
            f"{path} holds a clip of more than {LONGEST / 1e9:g} GB when decoded; cut or shrink it first"
        )


def to_frames(clip: Any) -> Tensor:
    """Float frames [T, 3, H, W] in [0, 1] from a float tensor of that form, a uint8 clip, or a list of PIL images."""
    if isinstance(clip, Tensor) and clip.is_floating_point():
        if clip.ndim != 4 or clip.shape[1] != 3:
            raise ValueError(f"frames must be float [T, 3, H, W] in [0, 1], got {tuple(clip.shape)}")
        return clip
    if isinstance(clip, Image.Image):
        clip = [clip]
    if isinstance(clip, (list, tuple)) and clip and all(isinstance(f, Image.Image) for f in clip):
        clip = np.stack([np.asarray(frame.convert("RGB")) for frame in clip])
    array = check_clip(clip.numpy() if isinstance(clip, Tensor) else clip)
    return torch.from_numpy(array.copy()).float().div(255).movedim(-1, 1)
