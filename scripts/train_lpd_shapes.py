"""Reproduce the embedded LPD model: class- and caption-conditional pictures of the shapes world.

    python scripts/train_lpd_shapes.py --folder runs/lpd train --dataset runs/shapes-t2i/dataset --first-seed 0
    python scripts/train_lpd_shapes.py --folder runs/lpd export

The data set (codes.npy, captions.json) is the one that the shapes text-to-image model is trained on; training resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from visacc.models.assets_io import save_asset
from visacc.models.fit import Fit
from visacc.models.lpd.model import LPD
from visacc.models.lpd.train import SHAPES_MODEL, class_of, train_lpd
from visacc.models.shapes.captions import sample
from visacc.models.shapes.data import load_dataset
from visacc.models.shapes.text import build_tokenizer, tokenize
from visacc.models.shapes.train_util import load_checkpoint

_Dataset = Annotated[Path, typer.Option(help="Folder with codes.npy and captions.json.")]
_FirstSeed = Annotated[int, typer.Option(help="Seed of the data set's first picture.")]
app = typer.Typer(add_completion=False, help=__doc__)
_STATE: dict[str, Path] = {}


@app.callback()
def main(folder: Path = Path("runs/lpd"), threads: int = 2) -> None:
    torch.set_num_threads(threads)
    _STATE["folder"] = folder


@app.command()
def train(
    dataset: _Dataset, first_seed: _FirstSeed, steps: int = 3000, batch: int = 32, limit: int = 60000
) -> None:
    """Train on the encoded data set, whose pictures have consecutive seeds from ``first-seed``."""
    codes, captions = load_dataset(dataset)
    codes, captions = codes[:limit], captions[:limit]
    labels = []
    for i, caption in enumerate(captions):
        item = sample(first_seed + i)
        if item.caption != caption:
            raise ValueError(f"picture {i} of {dataset} is not seed {first_seed + i}: wrong --first-seed")
        labels.append(class_of(item.scene))
    words, _ = tokenize(build_tokenizer(), captions)
    torch.manual_seed(0)
    train_lpd(
        LPD(SHAPES_MODEL), codes, torch.tensor(labels), words, _STATE["folder"], Fit(steps=steps, batch=batch)
    )


@app.command()
def export(out: Path = Path("models/lpd/assets")) -> None:
    """Write the shipped weights."""
    checkpoint = load_checkpoint(_STATE["folder"] / "lpd.pt")
    if checkpoint is None:
        raise ValueError(f"{_STATE['folder']} holds no lpd.pt: train first")
    model = LPD(SHAPES_MODEL)
    model.load_state_dict(checkpoint["average"])
    save_asset(model, SHAPES_MODEL, out / "shapes-lpd.safetensors", steps=checkpoint["step"])


if __name__ == "__main__":
    app()
