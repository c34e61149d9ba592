"""Training on the moving-shapes world: tokenizer, next-block models and their next-token twins."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visacc.models.fit import Fit, fit
from visacc.models.nbp import moving
from visacc.models.nbp.gpt import NBP, NBPConfig
from visacc.models.nbp.magvit2 import Magvit2, Magvit2Config
from visacc.models.nbp.released import to_next_block

TOKENIZER = Magvit2Config(
    widths=(16, 32, 48, 48),
    units=(1, 1, 1, 2),
    strides=((1, 2, 2), (2, 2, 2), (2, 1, 1)),
    groups=4,
    levels=(8, 5, 5, 5),
)
MODEL = NBPConfig(
    dim=128,
    layers=4,
    heads=4,
    grid=(5, 8, 8),
    block=8,
    video_vocab=1000,
    text_vocab=moving.TEXT_VOCAB,
    cond_tokens=moving.TEXT_TOKENS,
    positions=336,
    dropout=0.0,
    cond_drop=0.1,
)
#: seeds of the clips: tokenizer, language models, and (never trained on) evaluation
TOKENIZER_SEED, MODEL_SEED, TEST_SEED = 10_000_000, 20_000_000, 0
_CHUNK = 100


def _render(first: int) -> NDArray[np.uint8]:
    clips = [moving.render(moving.sample(seed)) for seed in range(first, first + _CHUNK)]
    return np.round(np.stack(clips) * 255).astype(np.uint8)


def render_clips(first: int, count: int, processes: int = 1) -> NDArray[np.uint8]:
    """Clips of consecutive seeds, uint8 [count, 17, 32, 32, 3]; ``count`` is a multiple of 100."""
    if count % _CHUNK:
        raise ValueError(f"count must be a multiple of {_CHUNK}, got {count}")
    starts = range(first, first + count, _CHUNK)
    if processes == 1:
        return np.concatenate([_render(start) for start in starts])
    with get_context("spawn").Pool(processes) as pool:
        return np.concatenate(pool.map(_render, starts))


def to_video(pixels: NDArray[np.uint8] | Tensor) -> Tensor:
    """uint8 [B, T, H, W, 3] -> float32 [B, T, 3, H, W] in [0, 1]."""
    return (torch.as_tensor(pixels).float() / 255).movedim(-1, 2)


def reconstruction_loss(recon: Tensor, target: Tensor) -> Tensor:
    """L1, squared error, and L1 of differences along rows, columns and time. Videos [B, T, 3, H, W]."""
    diff = recon.float() - target
    edges = diff.diff(dim=3).abs().mean() + diff.diff(dim=4).abs().mean() + diff.diff(dim=1).abs().mean()
    return diff.abs().mean() + 2 * diff.square().mean() + 0.5 * edges


def train_tokenizer(folder: Path, settings: Fit, *, clips: int = 4000, frames: int = 9) -> Magvit2:
    """Train, or resume, the tokenizer on random stretches of ``frames`` frames."""
    model = Magvit2(TOKENIZER)
    cache = folder / "tokenizer_clips.npy"
    if not cache.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.save(cache, render_clips(TOKENIZER_SEED, clips))
    pixels = np.load(cache, mmap_mode="r")

    def loss(pick: Tensor) -> Tensor:
        start = int(torch.randint(moving.FRAMES - frames + 1, (1,)))
        target = to_video(pixels[pick.numpy()][:, start : start + frames])
        return reconstruction_loss(model(target), target)

    fit(model, loss, len(pixels), folder, "tokenizer", settings)
    return model


@torch.no_grad()
def encode_clips(tokenizer: Magvit2, first: int, count: int, folder: Path) -> None:
    """Write codes.npy (uint16 [count, 320]) and texts.npy (int64 [count, 6]); resumes by parts of 2000 clips."""
    folder.mkdir(parents=True, exist_ok=True)
    part = 2000
    for start in range(first, first + count, part):
        file = folder / f"codes_{start}.npy"
        if file.exists():
            continue
        size = min(part, first + count - start)
        pixels, codes = render_clips(start, size), []
        for i in range(0, size, 50):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                codes.append(tokenizer.encode(to_video(pixels[i : i + 50])).flatten(1))
        np.save(file, torch.cat(codes).numpy().astype(np.uint16))
        print(f"encoded {start + size - first} / {count}", flush=True)


def load_codes(first: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Codes int64 [count, 320] and text ids int64 [count, 6] of an encoded set."""
    files = sorted(folder.glob("codes_*.npy"), key=lambda p: int(p.stem.split("_")[1]))
    if not files:
        raise ValueError(f"{folder} holds no encoded clips")
    codes = torch.from_numpy(np.concatenate([np.load(f) for f in files]).astype(np.int64))
    texts = [moving.read_text(moving.sample(first + i).text) for i in range(len(codes))]
    return codes, torch.stack(texts)


def train_nbp(
    folder: Path,
    dataset: Path,
    settings: Fit,
    *,
    block: int,
    start: NBP | None = None,
    name: str | None = None,
) -> NBP:
    """Train, or resume, a next-block model (``block=1``: its next-token twin) on encoded clips.

    Args:
        start: a trained next-token model to turn into a next-block one.
    """
    torch.manual_seed(settings.seed)
    model = NBP(replace(MODEL, block=block)) if start is None else to_next_block(start, block)
    codes, texts = load_codes(MODEL_SEED, dataset)

    def loss(pick: Tensor) -> Tensor:
        return model.loss(codes[pick], texts[pick])

    fit(model, loss, len(codes), folder, name or f"nbp{block}", settings, matrices=model.blocks)
    return model
