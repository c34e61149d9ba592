"""Training on the moving-shapes world: next-block models and their next-token twins."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visacc.models.fit import Fit, fit
from visacc.models.nbp import moving
from visacc.models.nbp.frames import FrameTokenizer
from visacc.models.nbp.gpt import NBP, NBPConfig
from visacc.models.nbp.released import to_next_block
from visacc.writing import write_atomic

MODEL = NBPConfig(
    dim=128,
    layers=4,
    heads=4,
    grid=(moving.FRAMES, 8, 8),
    block=8,
    video_vocab=512,
    text_vocab=moving.TEXT_VOCAB,
    cond_tokens=moving.TEXT_TOKENS,
    positions=400,
    dropout=0.0,
    cond_drop=0.1,
)
#: first seeds of the training clips and of the clips for evaluation (never trained on)
TRAIN_SEED, TEST_SEED = 20_000_000, 0
_PART = 1000


def render_clips(first: int, count: int) -> NDArray[np.uint8]:
    """Clips of consecutive seeds, uint8 [count, T, H, W, 3]."""
    clips = (moving.render(moving.sample(seed)) for seed in range(first, first + count))
    return np.stack([np.round(clip * 255).astype(np.uint8) for clip in clips])


def to_video(pixels: NDArray[np.uint8] | Tensor) -> Tensor:
    """uint8 [B, T, H, W, 3] -> float32 [B, T, 3, H, W] in [0, 1]."""
    return (torch.as_tensor(pixels).float() / 255).movedim(-1, 2)


def encode_clips(tokenizer: FrameTokenizer, first: int, count: int, folder: Path) -> None:
    """Write codes_<seed>.npy (uint16 [1000, N]) files; resumes file by file."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(first, first + count, _PART):
        file = folder / f"codes_{start}.npy"
        if file.exists():
            continue
        pixels = render_clips(start, min(_PART, first + count - start))
        codes = [tokenizer.encode(to_video(pixels[i : i + 20])).flatten(1) for i in range(0, len(pixels), 20)]
        array = torch.cat(codes).numpy().astype(np.uint16)
        write_atomic(file, partial(np.save, arr=array))
        print(f"encoded {start + len(pixels) - first} / {count}", flush=True)


def load_codes(first: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Codes int64 [count, N] and text ids int64 [count, 6] of an encoded set."""
    files = sorted(folder.glob("codes_*.npy"), key=lambda p: int(p.stem.split("_")[1]))
    if not files:
        raise ValueError(f"{folder} holds no encoded clips: run the encode stage first")
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
    codes, texts = load_codes(TRAIN_SEED, dataset)

    def loss(pick: Tensor) -> Tensor:
        return model.loss(codes[pick], texts[pick])

    fit(model, loss, len(codes), folder, name or f"nbp{block}", settings, matrices=model.blocks)
    return model
