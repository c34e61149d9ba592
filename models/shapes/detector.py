"""Detector of the shapes world: finds, names and boxes the objects of a picture from its pixels alone.

Foreground is what is coloured, very dark or very light (backgrounds are nearly grey by construction). Cores of
one palette colour grow into objects, and an object's shape is the ideal outline, matched in area and centroid,
that overlaps it best. Works on rendered, reconstructed and generated pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from visacc.models.shapes.world import COLOURS, SHAPES, coverage

Mask = NDArray[np.bool_]
Labels = NDArray[np.int64]

CHROMA = 0.20
DARK, LIGHT = 0.20, 0.82
MIN_CORE, MIN_AREA = 6, 40
_TEMPLATE_SIZE, _TEMPLATE_RADIUS = 96, 24.0


@dataclass(frozen=True)
class Detection:
    """One found object. `box` = (x0, y0, x1, y1) in pixels, exclusive ends; `score` = overlap with its outline."""

    shape: str
    colour: str
    box: tuple[int, int, int, int]
    score: float


def as_pixels(image: object) -> NDArray[np.float64]:
    """[H, W, 3] float in [0, 1] from a PIL image, a uint8 array or a float array in [0, 1]."""
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"expected an RGB picture [H, W, 3], got shape {array.shape}")
    if array.dtype == np.uint8:
        return array / 255.0
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"expected uint8 or floating pixels, got {array.dtype}")
    if not np.isfinite(array).all() or array.min() < -1e-3 or array.max() > 1 + 1e-3:
        raise ValueError("floating pixels must be finite and lie in [0, 1]")
    return array.astype(np.float64)


def _smooth(image: NDArray[np.float64]) -> NDArray[np.float64]:
    """[1 2 1] binomial blur along both axes with replicated borders."""
    for axis in (0, 1):
        pad = [(1, 1) if a == axis else (0, 0) for a in range(3)]
        wide = np.pad(image, pad, mode="edge")
        n = image.shape[axis]
        parts = [np.take(wide, range(k, k + n), axis=axis) for k in range(3)]
        image = (parts[0] + 2 * parts[1] + parts[2]) / 4
    return image


def _neighbours(field: NDArray, fill: int) -> list[NDArray]:
    """The four shifted copies of a 2-D field."""
    wide = np.pad(field, 1, constant_values=fill)
    return [wide[:-2, 1:-1], wide[2:, 1:-1], wide[1:-1, :-2], wide[1:-1, 2:]]


def components(labels: Labels) -> Labels:
    """4-connected components of equal non-negative labels: ids 1, 2, … (0 where the label is negative)."""
    ids = np.where(labels >= 0, np.arange(1, labels.size + 1).reshape(labels.shape), 0)
    same = [near == labels for near in _neighbours(labels, -1)]
    while True:
        best = ids
        for near, equal in zip(_neighbours(ids, 0), same, strict=True):
            best = np.maximum(best, np.where(equal, near, 0))
        best = np.where(labels >= 0, best, 0)
        # Pointer jumping: an id is the position of a pixel of the same component, so follow it.
        best = np.where(best > 0, np.append(0, best.ravel())[best], 0)
        if (best == ids).all():
            break
        ids = best
    return np.unique(ids, return_inverse=True)[1].reshape(ids.shape) + (0 if (ids == 0).any() else 1)


def _grow(seeds: Labels, inside: Mask, rounds: int) -> Labels:
    """Extends seed ids into `inside`, one pixel per round; the larger neighbour id wins a contested pixel."""
    for _ in range(rounds):
        near = np.maximum.reduce(_neighbours(seeds, 0))
        seeds = np.where((seeds == 0) & inside, near, seeds)
    return seeds


@cache
def _templates() -> tuple[tuple[str, NDArray[np.float64], float, NDArray[np.float64]], ...]:
    """Per shape: coverage image, its area and its centroid (x, y) relative to the centre."""
    out = []
    half = _TEMPLATE_SIZE / 2
    grid = np.arange(_TEMPLATE_SIZE) + 0.5 - half
    for shape in SHAPES:
        image = coverage(shape, half, half, _TEMPLATE_RADIUS, _TEMPLATE_SIZE).astype(np.float64)
        area = float(image.sum())
        centroid = np.array([(image.sum(0) * grid).sum(), (image.sum(1) * grid).sum()]) / area
        out.append((shape, image, area, centroid))
    return tuple(out)


def _soft_mask(pixels: NDArray[np.float64], owner: Labels, label: int, seed: Mask) -> NDArray[np.float64]:
    """Coverage [H, W] of one object: how far each pixel lies on the way from the local background to its colour.

    Between the two colours a pixel of the rim is a mixture; a quarter and below counts as background (texture),
    three quarters and above as object.
    """
    mask = owner == label
    near = mask
    for _ in range(2):
        near = near | np.logical_or.reduce(_neighbours(near, 0))
    ring = near
    for _ in range(3):
        ring = ring | np.logical_or.reduce(_neighbours(ring, 0))
    outside = ring & (owner == 0) & ~near
    if not outside.any():
        return mask.astype(np.float64)
    back, front = pixels[outside].mean(0), pixels[seed].mean(0)
    axis = front - back
    share = (pixels - back) @ axis / (axis @ axis)
    return np.where(near & (mask | (owner == 0)), np.clip(2 * share - 0.5, 0, 1), 0.0)


def classify_shape(alpha: NDArray[np.float64]) -> tuple[str, float]:
    """Best matching shape of a coverage image [H, W] and its overlap (soft intersection over union)."""
    y, x = np.mgrid[0 : alpha.shape[0], 0 : alpha.shape[1]] + 0.5
    area = alpha.sum()
    cx, cy = (alpha * x).sum() / area, (alpha * y).sum() / area
    best = ("", -1.0)
    for shape, image, full, centroid in _templates():
        zoom = np.sqrt(full / area)
        u = np.floor((x - cx) * zoom + centroid[0] + _TEMPLATE_SIZE / 2).astype(int)
        v = np.floor((y - cy) * zoom + centroid[1] + _TEMPLATE_SIZE / 2).astype(int)
        valid = (u >= 0) & (v >= 0) & (u < _TEMPLATE_SIZE) & (v < _TEMPLATE_SIZE)
        ideal = np.where(valid, image[v.clip(0, _TEMPLATE_SIZE - 1), u.clip(0, _TEMPLATE_SIZE - 1)], 0.0)
        iou = float(np.minimum(alpha, ideal).sum() / np.maximum(alpha, ideal).sum())
        if iou > best[1]:
            best = (shape, iou)
    return best


def detect(image: object, min_score: float = 0.0) -> list[Detection]:
    """Objects of a picture, largest first, whose shape score is at least `min_score`."""
    pixels = _smooth(as_pixels(image))
    light = pixels.mean(-1)
    foreground = (pixels.max(-1) - pixels.min(-1) > CHROMA) | (light < DARK) | (light > LIGHT)
    palette = np.array(list(COLOURS.values()))
    nearest = ((pixels[:, :, None] - palette) ** 2).sum(-1).argmin(-1)
    colour = np.where(foreground, nearest, -1)
    # Rims mix object and background and may look like a third colour: only pixels whose four neighbours
    # have their colour count as a core, rims are then given to the core they touch.
    core = foreground & np.logical_and.reduce([near == colour for near in _neighbours(colour, -1)])
    seeds = components(np.where(core, colour, -1))
    sizes = np.bincount(seeds.ravel())
    seeds = np.where(sizes[seeds] >= MIN_CORE, seeds, 0)
    owner = _grow(seeds, foreground, rounds=4)
    found = []
    for label in np.unique(owner[owner > 0]):
        mask = owner == label
        area = int(mask.sum())
        if area < MIN_AREA:
            continue
        shape, score = classify_shape(_soft_mask(pixels, owner, label, seeds == label))
        if score < min_score:
            continue
        ys, xs = np.nonzero(mask)
        name = list(COLOURS)[int(nearest[seeds == label][0])]
        box = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1)
        found.append((area, Detection(shape, name, box, score)))
    return [detection for _, detection in sorted(found, key=lambda pair: -pair[0])]
