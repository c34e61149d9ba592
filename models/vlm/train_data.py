"""Rendered training pictures of the captioner, with what lies under every patch of the vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visacc.models.shapes.world import COLOURS, SHAPES, SIZE, TEXTURES, Scene, coverage
from visacc.models.vlm.captioner import PATCH
from visacc.models.vlm.scenes import caption, draw_scene, mirrored, picture
from visacc.writing import write_atomic

CHUNK = 250
_COLOURS = list(COLOURS)


def patch_labels(scene: Scene) -> NDArray[np.uint8]:
    """What lies under every patch, uint8 [3, 4, 4].

    Colour and kind of the shape that covers most of the patch, at least an eighth of it (0 = background, else
    1 + index), and 1 where a shape's centre lies.
    """
    n = SIZE // PATCH
    labels = np.zeros((3, n, n), np.uint8)
    most = np.full((n, n), 0.125, np.float32)
    for item in scene.objects:
        share = coverage(item.shape, item.cx, item.cy, item.r).reshape(n, PATCH, n, PATCH).mean((1, 3))
        here = share > most
        most[here] = share[here]
        labels[0][here] = 1 + _COLOURS.index(item.colour)
        labels[1][here] = 1 + SHAPES.index(item.shape)
        labels[2, int(item.cy) // PATCH, int(item.cx) // PATCH] = 1
    return labels


@dataclass
class Rendered:
    """Pictures uint8 [N, 64, 64, 3], patch labels uint8 [N, 3, 4, 4], textures uint8 [N], and for both
    mirrorings and both prompts the captions ``text[mirror][prompt]``."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    textures: NDArray[np.uint8]
    text: list[list[list[str]]]

    def batch(
        self, index: NDArray[np.int64], mirror: bool, prompt: int, shift: tuple[int, int] = (0, 0)
    ) -> tuple[Tensor, Tensor, Tensor, list[str]]:
        """Pixels float32 [B, 3, 64, 64] in [-1, 1], labels int64 [B, 3, 4, 4], textures int64 [B], captions.

        A ``shift`` of up to two pixels (down, right) changes no caption: centres keep their distance from
        borders.
        """
        images, labels = self.images[index], self.labels[index]
        if mirror:
            images, labels = images[:, :, ::-1], labels[..., ::-1]
        images = np.roll(images, shift, axis=(1, 2))
        pixels = (torch.from_numpy(np.ascontiguousarray(images)).float() / 127.5 - 1).movedim(-1, 1)
        known = torch.from_numpy(np.ascontiguousarray(labels)).long()
        texts = [self.text[int(mirror)][prompt][i] for i in index]
        return pixels, known, torch.from_numpy(self.textures[index]).long(), texts


Chunk = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], list[list[list[str]]]]


def _chunk(job: tuple[int, bool]) -> Chunk:
    first, held_out = job
    scenes = [draw_scene(seed, held_out) for seed in range(first, first + CHUNK)]
    text = [
        [[caption(s, p) for s in group] for p in (0, 1)] for group in (scenes, list(map(mirrored, scenes)))
    ]
    textures = np.array([TEXTURES.index(s.background.texture) for s in scenes], np.uint8)
    return np.stack(list(map(picture, scenes))), np.stack(list(map(patch_labels, scenes))), textures, text


def _write(path: Path, done: Chunk) -> None:
    images, labels, textures, text = done
    parts = {"images": images, "labels": labels, "textures": textures, "text": np.array(text)}
    write_atomic(path, lambda part: np.savez(part, allow_pickle=False, **parts))


def render_chunks(folder: Path, count: int, *, held_out: bool = False, processes: int = 2) -> Rendered:
    """The first ``count`` scenes (a multiple of 250), rendered once and kept in ``folder`` chunk by chunk."""
    if count % CHUNK:
        raise ValueError(f"count must be a multiple of {CHUNK}, got {count}")
    folder.mkdir(parents=True, exist_ok=True)
    name = "test" if held_out else "train"
    paths = [folder / f"{name}-{first:06d}.npz" for first in range(0, count, CHUNK)]
    jobs = [(i * CHUNK, held_out) for i, path in enumerate(paths) if not path.exists()]
    if jobs and processes < 2:
        for job in jobs:
            _write(paths[job[0] // CHUNK], _chunk(job))
    elif jobs:
        with get_context("spawn").Pool(processes) as pool:
            for job, done in zip(jobs, pool.imap(_chunk, jobs), strict=True):
                _write(paths[job[0] // CHUNK], done)
    parts = [np.load(path) for path in paths]
    texts = [[[str(t) for part in parts for t in part["text"][m][p]] for p in (0, 1)] for m in (0, 1)]
    images, labels, textures = (
        np.concatenate([p[k] for p in parts]) for k in ("images", "labels", "textures")
    )
    return Rendered(images, labels, textures, texts)
