"""Training data of the shapes world: rendered pictures and, once a tokenizer exists, captions with image codes."""

from __future__ import annotations

import json
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visacc.models.llamagen.vq import VQModel
from visacc.models.shapes.captions import sample
from visacc.models.shapes.world import SIZE, Scene, render
from visacc.writing import write_atomic, write_text

CHUNK = 500
BACKGROUND_SEED = 90_000_000


def _render_chunk(first: int) -> tuple[NDArray[np.uint8], list[str]]:
    items = [sample(seed) for seed in range(first, first + CHUNK)]
    images = np.stack([np.round(render(item.scene) * 255).astype(np.uint8) for item in items])
    return images, [item.caption for item in items]


def render_images(first_seed: int, count: int, processes: int = 2) -> tuple[NDArray[np.uint8], list[str]]:
    """Pictures uint8 [count, 64, 64, 3] and captions of `count` consecutive seeds (a multiple of 500)."""
    if count % CHUNK:
        raise ValueError(f"count must be a multiple of {CHUNK}, got {count}")
    starts = range(first_seed, first_seed + count, CHUNK)
    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    captions: list[str] = []
    with get_context("spawn").Pool(processes) as pool:
        for i, (chunk, texts) in enumerate(pool.imap(_render_chunk, starts)):
            images[i * CHUNK : (i + 1) * CHUNK] = chunk
            captions += texts
    return images, captions


def to_input(images: NDArray[np.uint8] | Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W] in [-1, 1], channels last in memory."""
    return (torch.as_tensor(images).float() / 127.5 - 1).movedim(-1, 1)


@torch.no_grad()
def encode_dataset(vq: VQModel, first_seed: int, count: int, folder: Path, batch: int = 100) -> None:
    """Writes codes.npy (uint16 [count, 256]) and captions.json of the given seeds; does nothing if they exist.

    background.npy are the codes of 400 bare backgrounds, from which `object_codes` tells what codes show.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "codes.npy").exists():
        return
    codes, captions = [], []
    for start in range(first_seed, first_seed + count, 20 * CHUNK):
        size = min(20 * CHUNK, first_seed + count - start)
        images, texts = render_images(start, size)
        captions += texts
        codes += [
            vq.encode(to_input(images[i : i + batch])).numpy().astype(np.uint16)
            for i in range(0, size, batch)
        ]
        print(f"encoded {len(captions)} / {count}", flush=True)
    scenes = [Scene((), sample(BACKGROUND_SEED + i).scene.background) for i in range(400)]
    bare = np.stack([np.round(render(scene) * 255).astype(np.uint8) for scene in scenes])
    parts = [vq.encode(to_input(part)).numpy().astype(np.uint16) for part in np.array_split(bare, 8)]
    write_atomic(folder / "background.npy", lambda part: np.save(part, np.concatenate(parts)))
    write_text(folder / "captions.json", json.dumps(captions))
    # last, because it says that the others are there
    write_atomic(folder / "codes.npy", lambda part: np.save(part, np.concatenate(codes)))


def load_dataset(folder: Path) -> tuple[Tensor, list[str]]:
    """Codes int64 [count, 256] and captions written by `encode_dataset`."""
    codes = torch.from_numpy(np.load(folder / "codes.npy").astype(np.int64))
    return codes, json.loads((folder / "captions.json").read_text())


def object_codes(folder: Path, codes: Tensor, vocabulary: int) -> Tensor:
    """bool [vocabulary]: codes at least five times as frequent in scenes as on bare backgrounds."""
    bare = torch.from_numpy(np.load(folder / "background.npy").astype(np.int64))
    shares = [torch.bincount(c.flatten(), minlength=vocabulary).float() / c.numel() for c in (bare, codes)]
    return shares[0] < 0.2 * shares[1]


def beside_objects(codes: Tensor, is_object: Tensor) -> Tensor:
    """bool [B, N]: tokens whose left, upper left, upper or upper right neighbour is an object code.

    Depends on earlier tokens only, so weighting a loss by it leaves the law that minimises it unchanged.
    """
    side = int(codes.shape[1] ** 0.5)
    mark = is_object[codes].view(-1, side, side)
    out = torch.zeros_like(mark)
    out[:, :, 1:] |= mark[:, :, :-1]
    out[:, 1:] |= mark[:, :-1]
    out[:, 1:, 1:] |= mark[:, :-1, :-1]
    out[:, 1:, :-1] |= mark[:, :-1, 1:]
    return out.flatten(1)
