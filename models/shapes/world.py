"""The embedded world: coloured shapes on textured backgrounds, drawn from a seed.

A scene is exact metadata (which object, which colour, where, how large) plus a background recipe; `render`
turns it into pixels with analytic edge coverage. Backgrounds are nearly grey and carry noise, stripes or a
checker pattern, so that the next token of an image model has many plausible values, as in photographs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

SIZE = 64
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
#: The ten colour names GenEval uses, in its order, with the RGB each one is drawn in.
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.10, 0.12),
    "orange": (1.00, 0.54, 0.04),
    "yellow": (0.98, 0.90, 0.16),
    "green": (0.12, 0.64, 0.22),
    "blue": (0.12, 0.32, 0.88),
    "purple": (0.50, 0.14, 0.68),
    "pink": (1.00, 0.55, 0.76),
    "brown": (0.44, 0.24, 0.10),
    "black": (0.05, 0.05, 0.06),
    "white": (0.97, 0.97, 0.96),
}
TEXTURES = ("noise", "blobs", "stripes", "checker")
#: Extent of a shape (half the larger side of its box) in units of its nominal radius.
EXTENT = {"circle": 1.0, "square": 0.88, "triangle": 1.13, "star": 1.25, "cross": 1.05, "diamond": 1.22}
OBJECT_MARGIN = 3.0


@dataclass(frozen=True)
class SceneObject:
    """One drawn shape: centre (`cx`, `cy`) and nominal radius `r`, in pixels (x right, y down)."""

    shape: str
    colour: str
    cx: float
    cy: float
    r: float


@dataclass(frozen=True)
class Background:
    """Recipe of a background: grey level, tint, linear gradient and a texture with its own random seed."""

    level: float
    tint: tuple[float, float, float]
    gradient: float
    angle: float
    texture: str
    amplitude: float
    period: float
    seed: int


@dataclass(frozen=True)
class Scene:
    """Everything needed to draw one picture again."""

    objects: tuple[SceneObject, ...]
    background: Background
    size: int = SIZE


def _polygon(shape: str) -> NDArray[np.float64]:
    """Corner points [K, 2] of a polygonal shape for radius 1, y down."""
    if shape == "triangle":
        # Centred on its box, not on its centroid, so that the object's centre is the detector's box centre.
        return np.array([[0.0, -1.13], [1.13, 1.0], [-1.13, 1.0]])
    if shape == "star":
        turn = np.arange(10) * np.pi / 5
        radius = np.where(np.arange(10) % 2 == 0, 1.3, 0.58)
        return np.stack([np.sin(turn) * radius, -np.cos(turn) * radius + 0.12], axis=1)
    if shape == "cross":
        a, b = 1.05, 0.38
        arm = [[-b, -a], [b, -a], [b, -b]]
        quarter = np.array([[0.0, -1.0], [1.0, 0.0]])  # (x, y) -> (-y, x), a quarter turn
        return np.concatenate([np.array(arm) @ np.linalg.matrix_power(quarter.T, k) for k in range(4)])
    raise ValueError(f"{shape!r} is not a polygonal shape")


_POLYGONS = {name: _polygon(name) for name in ("triangle", "star", "cross")}


def signed_distance(
    shape: str, x: NDArray[np.floating], y: NDArray[np.floating], r: float
) -> NDArray[np.float64]:
    """Distance in pixels of points (x, y), relative to the centre, to the outline; negative inside."""
    if shape == "circle":
        return np.hypot(x, y) - r
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.88 * r
    if shape == "diamond":
        return (np.abs(x) + np.abs(y) - 1.22 * r) / np.sqrt(2.0)
    if shape not in _POLYGONS:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    corners = _POLYGONS[shape] * r
    points = np.stack(np.broadcast_arrays(x, y), axis=-1)[..., None, :].astype(np.float64)
    start, end = corners, np.roll(corners, -1, axis=0)
    edge = end - start
    rel = points - start
    along = np.clip((rel * edge).sum(-1) / (edge**2).sum(-1), 0.0, 1.0)
    distance = np.sqrt((((rel - along[..., None] * edge) ** 2).sum(-1)).min(-1))
    above_start, above_end = points[..., 1] >= start[:, 1], points[..., 1] < end[:, 1]
    cross = edge[:, 0] * rel[..., 1] - edge[:, 1] * rel[..., 0]
    winding = (above_start & above_end & (cross > 0)).sum(-1)
    winding = winding - (~above_start & ~above_end & (cross < 0)).sum(-1)
    return np.where(winding != 0, -distance, distance)


def coverage(shape: str, cx: float, cy: float, r: float, size: int = SIZE) -> Array:
    """Fraction of every pixel that the shape covers, [size, size] float32 (pixel centres at +0.5)."""
    reach = 1.4 * r + 2
    x0, x1 = (int(np.clip(v, 0, size)) for v in (np.floor(cx - reach), np.ceil(cx + reach)))
    y0, y1 = (int(np.clip(v, 0, size)) for v in (np.floor(cy - reach), np.ceil(cy + reach)))
    out = np.zeros((size, size), np.float32)
    y, x = np.mgrid[y0:y1, x0:x1] + 0.5
    out[y0:y1, x0:x1] = np.clip(0.5 - signed_distance(shape, x - cx, y - cy, r), 0.0, 1.0)
    return out


def _blur(field: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Periodic Gaussian blur of [H, W], rescaled to unit variance."""
    fy = np.fft.fftfreq(field.shape[0])[:, None]
    fx = np.fft.rfftfreq(field.shape[1])[None, :]
    spectrum = np.fft.rfft2(field) * np.exp(-2 * (np.pi * sigma) ** 2 * (fx**2 + fy**2))
    out = np.fft.irfft2(spectrum, s=field.shape)
    return (out - out.mean()) / (out.std() + 1e-6)


def render_background(background: Background, size: int = SIZE) -> Array:
    """Background pixels [size, size, 3] float32 in [0, 1]."""
    rng = np.random.default_rng(background.seed)
    y, x = (np.mgrid[0:size, 0:size] + 0.5) / size - 0.5
    scale = size / SIZE
    slope = np.cos(background.angle) * x + np.sin(background.angle) * y
    grain = rng.standard_normal((size, size))
    if background.texture == "noise":
        pattern = _blur(grain, 1.3 * scale)
    elif background.texture == "blobs":
        pattern = _blur(grain, background.period / 3 * scale)
    else:
        turn, phase = rng.uniform(0, np.pi), rng.uniform(0, 2 * np.pi, 2)
        u = (np.cos(turn) * x + np.sin(turn) * y) * SIZE * 2 * np.pi / background.period + phase[0]
        v = (np.cos(turn) * y - np.sin(turn) * x) * SIZE * 2 * np.pi / background.period + phase[1]
        wave = np.sin(u) if background.texture == "stripes" else np.sin(u) * np.sin(v) * 1.4
        pattern = 0.85 * np.tanh(2 * wave) + 0.5 * _blur(grain, 1.3 * scale)
    value = (
        background.level + background.gradient * slope + background.amplitude * np.clip(pattern, -2.2, 2.2)
    )
    return np.clip(value[..., None] + np.array(background.tint), 0.0, 1.0).astype(np.float32)


def render(scene: Scene) -> Array:
    """Pixels [size, size, 3] float32 in [0, 1] of a scene; objects later in the list lie on top."""
    image = render_background(scene.background, scene.size)
    rng = np.random.default_rng([scene.background.seed, 1])
    scale = scene.size / SIZE
    for item in scene.objects:
        alpha = coverage(item.shape, item.cx * scale, item.cy * scale, item.r * scale, scene.size)[..., None]
        y, x = np.mgrid[0 : scene.size, 0 : scene.size] + 0.5
        # Light from the upper left and a fine grain: interiors are not one repeated token either.
        light = -0.05 * ((x / scale - item.cx) + (y / scale - item.cy)) / item.r
        grain = 0.03 * _blur(rng.standard_normal((scene.size, scene.size)), 1.3 * scale)
        paint = np.array(COLOURS[item.colour]) + (light + grain)[..., None]
        image = image * (1 - alpha) + np.clip(paint, 0, 1).astype(np.float32) * alpha
    return np.clip(image, 0.0, 1.0).astype(np.float32)


def random_background(rng: np.random.Generator) -> Background:
    """A nearly grey background between object black and object white."""
    tint = rng.uniform(-0.03, 0.03, 3)
    return Background(
        level=float(rng.uniform(0.42, 0.58)),
        tint=(float(tint[0]), float(tint[1]), float(tint[2])),
        gradient=float(rng.uniform(0.0, 0.14)),
        angle=float(rng.uniform(0, 2 * np.pi)),
        texture=str(rng.choice(TEXTURES)),
        amplitude=float(rng.uniform(0.03, 0.065)),
        period=float(rng.uniform(7.0, 13.0)),
        seed=int(rng.integers(2**31)),
    )


def extent(item: SceneObject) -> float:
    """Half of the larger side of the object's box, in pixels."""
    return EXTENT[item.shape] * item.r


def _clash(a: SceneObject, b: SceneObject) -> bool:
    gap_x = abs(a.cx - b.cx) - extent(a) - extent(b)
    gap_y = abs(a.cy - b.cy) - extent(a) - extent(b)
    return max(gap_x, gap_y) < OBJECT_MARGIN


_RADII = {1: (11.0, 18.0), 2: (9.0, 13.0), 3: (8.0, 11.0), 4: (8.0, 10.0)}
_OFFSETS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}


def place(
    rng: np.random.Generator,
    kinds: Sequence[tuple[str, str]],
    relation: str | None = None,
) -> tuple[SceneObject, ...]:
    """Random non-touching positions for `kinds` = (shape, colour) pairs.

    With `relation`, the first object stands in that relation to the second: their offset lies within about
    27 degrees of the axis, clear of the 60 degrees at which the judge would stop to agree.
    """
    if not 1 <= len(kinds) <= 4:
        raise ValueError(f"a scene holds 1 to 4 objects, not {len(kinds)}")
    low, high = _RADII[len(kinds)]
    while True:
        placed: list[SceneObject] = []
        for shape, colour in kinds:
            for _ in range(30):
                r = float(rng.uniform(low, high))
                pad = EXTENT[shape] * r + 1.5
                cx, cy = rng.uniform(pad, SIZE - pad, 2)
                item = SceneObject(shape, colour, float(cx), float(cy), r)
                if not any(_clash(item, other) for other in placed):
                    placed.append(item)
                    break
        if len(placed) < len(kinds):
            continue
        if relation is not None:
            a, b = placed[0], placed[1]
            ox, oy = _OFFSETS[relation]
            along = (a.cx - b.cx) * ox + (a.cy - b.cy) * oy
            across = abs((a.cx - b.cx) * oy) + abs((a.cy - b.cy) * ox)
            if along <= 0 or across > 0.5 * along:
                continue
        return tuple(placed)
