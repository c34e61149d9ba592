"""The captioner's task: scenes of the shapes world whose caption is a function of the scene, so it can be
checked exactly.

A caption names the number of shapes, each shape's colour, kind and place (nine zones, read from left to
right and top to bottom) and the texture of the background. Two prompts ask for the full caption or for the
short one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from visacc.models.shapes.world import (
    COLOURS,
    SHAPES,
    SIZE,
    Scene,
    SceneObject,
    place,
    random_background,
    render,
)

PROMPTS = ("describe the image .", "describe the image briefly .")
ZONES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the center", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
COUNTS = ("one shape", "two shapes", "three shapes", "four shapes")
BACKGROUNDS = {
    "noise": "plain and grainy",
    "blobs": "covered with soft blobs",
    "stripes": "covered with stripes",
    "checker": "a checker pattern",
}
GAP = 2.5
"""Pixels that every centre keeps from the borders between zones, so that no caption hangs on a rounding."""


def zone(item: SceneObject, size: int = SIZE) -> tuple[int, int]:
    """(row, column) of the zone that holds an object's centre."""
    return min(int(item.cy * 3 / size), 2), min(int(item.cx * 3 / size), 2)


def clear(item: SceneObject, size: int = SIZE) -> bool:
    """Whether the centre is at least ``GAP`` pixels away from every border between zones."""
    borders = (size / 3, 2 * size / 3)
    return all(abs(v - b) >= GAP for v in (item.cx, item.cy) for b in borders)


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def phrase(item: SceneObject, where: bool) -> str:
    row, column = zone(item)
    words = f"{article(item.colour)} {item.colour} {item.shape}"
    return f"{words} {ZONES[row][column]}" if where else words


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else " , ".join(parts[:-1]) + " and " + parts[-1]


def caption(scene: Scene, prompt: int = 0) -> str:
    """The one right answer to ``PROMPTS[prompt]``; words are separated by single spaces."""
    items = sorted(scene.objects, key=lambda o: (zone(o), o.cx, o.cy))
    parts = [phrase(item, where=prompt == 0) for item in items]
    count = COUNTS[len(items) - 1]
    if prompt == 1:
        return f"{count} : {listed(parts)} ."
    verb = "is" if len(items) == 1 else "are"
    ground = BACKGROUNDS[scene.background.texture]
    return f"the image shows {count} . there {verb} {listed(parts)} . the background is {ground} ."


def words() -> list[str]:
    """Every word of prompts and captions, sorted."""
    found = {"user", "assistant", ":", ",", ".", "and", "there", "is", "are", "the", "image", "shows"}
    found |= {"background", "a", "an"}
    texts: Iterable[str] = (*PROMPTS, *(z for row in ZONES for z in row), *COUNTS, *BACKGROUNDS.values())
    for text in texts:
        found.update(text.split())
    return sorted(found | set(COLOURS) | set(SHAPES))


def _held(kinds: list[tuple[str, str]]) -> bool:
    """Whether the set of shapes belongs to the test split; a fixed hash, the same on every machine."""
    digest = hashlib.sha256("|".join(sorted(map(str, kinds))).encode()).digest()
    return digest[0] < 26  # a tenth


def draw_scene(seed: int, held_out: bool = False) -> Scene:
    """The scene of a seed. Held-out scenes hold combinations of shapes that no training scene holds."""
    rng = np.random.default_rng([seed, int(held_out), 77])
    colours = list(COLOURS)
    count = int(rng.integers(1, 5))  # outside of the loop: crowded scenes are rejected more often
    while True:
        kinds = [(SHAPES[int(i)], colours[int(j)]) for i, j in rng.integers((6, 10), size=(count, 2))]
        # single shapes are too few combinations to hold out
        if count > 1 and _held(kinds) != held_out:
            continue
        objects = place(rng, kinds)
        zones = {zone(item) for item in objects}
        if all(map(clear, objects)) and len(zones) == len(objects):
            return Scene(objects, random_background(rng))


def picture(scene: Scene) -> NDArray[np.uint8]:
    """Pixels uint8 [64, 64, 3]."""
    return np.round(render(scene) * 255).astype(np.uint8)


def mirrored(scene: Scene) -> Scene:
    """Left and right exchanged (every shape is symmetric); the picture is the mirrored picture."""
    objects = tuple(replace(o, cx=scene.size - o.cx) for o in scene.objects)
    return replace(scene, objects=objects)


@dataclass(frozen=True)
class CaptionSample:
    """One picture uint8 [64, 64, 3] with a prompt and its answer."""

    image: NDArray[np.uint8]
    prompt: str
    answer: str
    scene: Scene


def sample(seed: int, held_out: bool = False) -> CaptionSample:
    """The training or test sample of a seed; one in four asks for the short caption."""
    scene = draw_scene(seed, held_out)
    kind = int(seed % 4 == 3)
    return CaptionSample(picture(scene), PROMPTS[kind], caption(scene, kind), scene)
