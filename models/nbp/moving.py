"""The moving-shapes world: one coloured shape of the shapes world in motion, with an exact description of each clip.

A class is a colour, a shape and a motion ("red circle moves left"). Clips have 6 frames of 32x32 pixels: a still
background, an object on a smooth path that stays inside the picture. The judge reads shape, colour and motion back from
pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visacc.models.nbp.gpt import PAD
from visacc.models.shapes.detector import detect
from visacc.models.shapes.world import (
    COLOURS,
    EXTENT,
    SHAPES,
    SIZE,
    coverage,
    random_background,
    render_background,
)

Array = NDArray[np.float32]

FRAMES, SIDE = 6, 32
MOTIONS = ("moves left", "moves right", "moves up", "moves down", "circles", "bounces", "grows", "shrinks")
TEXT_TOKENS = 6
_WORDS = (*COLOURS, *SHAPES, *sorted({word for motion in MOTIONS for word in motion.split()}))
#: word -> text id; 0 unknown, 1 begin, 2 padding
WORD_IDS = {word: i + 3 for i, word in enumerate(_WORDS)}
TEXT_VOCAB = -(-(len(_WORDS) + 3) // 8) * 8


@dataclass(frozen=True)
class Clip:
    """Description of a clip."""

    colour: str
    shape: str
    motion: str
    seed: int

    @property
    def text(self) -> str:
        return f"{self.colour} {self.shape} {self.motion}"


def read_text(text: str) -> Tensor:
    """Text ids int64 [6]: begin, words, padding on the right. Raises ``ValueError`` for words of another world."""
    words = [word for word in text.lower().replace(",", " ").split() if word not in ("a", "an", "the")]
    unknown = [word for word in words if word not in WORD_IDS]
    if unknown:
        raise ValueError(
            f"the moving-shapes world has no word {unknown[0]!r}; it knows {', '.join(WORD_IDS)}"
        )
    if not 0 < len(words) < TEXT_TOKENS:
        raise ValueError(
            f"describe a clip in 1 to {TEXT_TOKENS - 1} words, e.g. 'red circle moves left', got {text!r}"
        )
    ids = [1, *(WORD_IDS[word] for word in words)]
    return torch.tensor(ids + [PAD] * (TEXT_TOKENS - len(ids)))


def sample(seed: int) -> Clip:
    """Clip number ``seed``."""
    rng = np.random.default_rng([seed, 77])
    return Clip(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), str(rng.choice(MOTIONS)), seed)


def _path(clip: Clip, rng: np.random.Generator, frames: int) -> NDArray[np.float64]:
    """(x, y, r) of every frame [frames, 3] in units of a 64-pixel picture."""
    time = np.linspace(0, 1, frames)
    r = rng.uniform(9.0, 13.0)
    reach = EXTENT[clip.shape] * r + 2
    low, high = reach, SIZE - reach
    x, y = (np.full(frames, rng.uniform(low, high)) for _ in range(2))
    radius = np.full(frames, r)
    travel = rng.uniform(0.75, 1.0) * (high - low)
    slide = (low + rng.uniform(0, 1) * (high - low - travel)) + time * travel
    if clip.motion == "moves right":
        x = slide
    elif clip.motion == "moves left":
        x = SIZE - slide
    elif clip.motion == "moves down":
        y = slide
    elif clip.motion == "moves up":
        y = SIZE - slide
    elif clip.motion == "circles":
        size = rng.uniform(0.6, 1.0) * (high - low) / 2
        angle = rng.uniform(0, 2 * np.pi) + 2 * np.pi * time
        x, y = SIZE / 2 + size * np.cos(angle), SIZE / 2 + size * np.sin(angle)
    elif clip.motion == "bounces":
        # up and down twice: a triangle wave
        wave = np.abs((rng.uniform(0, 1) + 2 * time) % 1 * 2 - 1)
        y = low + wave * (high - low)
    else:
        small, big = rng.uniform(6.0, 7.5), rng.uniform(14.0, 17.0)
        pace = time if clip.motion == "grows" else 1 - time
        radius = small + pace * (big - small)
        margin = EXTENT[clip.shape] * big + 2
        x, y = (np.full(frames, rng.uniform(margin, max(SIZE - margin, margin + 1e-6))) for _ in range(2))
    return np.stack([x, y, radius], axis=1)


def render(clip: Clip, frames: int = FRAMES, side: int = SIDE) -> Array:
    """Pixels float32 [frames, side, side, 3] in [0, 1]."""
    rng = np.random.default_rng([clip.seed, 78])
    background = random_background(rng)
    background = replace(background, amplitude=0.5 * background.amplitude)
    still = render_background(background, side)
    scale = side / SIZE
    paint = np.array(COLOURS[clip.colour], np.float32)
    out = np.empty((frames, side, side, 3), np.float32)
    for i, (x, y, r) in enumerate(_path(clip, rng, frames)):
        alpha = coverage(clip.shape, x * scale, y * scale, r * scale, side)[..., None]
        out[i] = still * (1 - alpha) + paint * alpha
    return out


def _largest(frame: NDArray[np.floating]) -> tuple[str, str, float, float, float] | None:
    """Shape, colour, centre and box size (in 64-pixel units) of a frame's largest object, or ``None``."""
    picture = torch.from_numpy(np.ascontiguousarray(frame)).float().movedim(-1, 0)[None]
    big = torch.nn.functional.interpolate(picture, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    found = detect(big[0].movedim(0, -1).clamp(0, 1).numpy(), 0.5)
    if not found:
        return None
    best = found[0]
    x0, y0, x1, y1 = best.box
    return best.shape, best.colour, (x0 + x1) / 2, (y0 + y1) / 2, (x1 - x0 + y1 - y0) / 2


@dataclass(frozen=True)
class Judgement:
    """What a clip shows: colour and shape by majority over frames, motion by its path ("" where none is found)."""

    colour: str
    shape: str
    motion: str

    def agrees(self, clip: Clip) -> bool:
        return (self.colour, self.shape, self.motion) == (clip.colour, clip.shape, clip.motion)


def _motion(x: NDArray[np.float64], y: NDArray[np.float64], size: NDArray[np.float64]) -> str:
    half = max(len(x) // 4, 1)
    dx, dy = x[-half:].mean() - x[:half].mean(), y[-half:].mean() - y[:half].mean()
    growth = size[-half:].mean() / max(size[:half].mean(), 1e-6)
    spread_x, spread_y = np.ptp(x), np.ptp(y)
    if max(growth, 1 / max(growth, 1e-6)) > 1.35 and max(spread_x, spread_y) < 12:
        return "grows" if growth > 1 else "shrinks"
    if min(spread_x, spread_y) > 10:
        return "circles"
    if max(spread_x, spread_y) < 8:
        return ""
    if spread_x > spread_y:
        return "moves right" if dx > 0 else "moves left"
    steps = np.diff(y)
    forward = np.abs(steps.sum()) / max(np.abs(steps).sum(), 1e-6)
    if forward < 0.6:
        return "bounces"
    return "moves down" if dy > 0 else "moves up"


def judge(frames: NDArray[np.floating]) -> Judgement:
    """Read a clip [T, H, W, 3] in [0, 1] back."""
    seen = [item for item in (_largest(frame) for frame in frames) if item is not None]
    if len(seen) < 3:
        return Judgement("", "", "")
    shapes, colours = [item[0] for item in seen], [item[1] for item in seen]
    x, y, size = (np.array([item[k] for item in seen]) for k in (2, 3, 4))
    return Judgement(
        max(set(colours), key=colours.count), max(set(shapes), key=shapes.count), _motion(x, y, size)
    )
