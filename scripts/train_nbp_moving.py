"""Reproduce the embedded video models: next-block model and next-token twin of the moving-shapes world.

    python scripts/train_nbp_moving.py --folder runs/moving encode
    python scripts/train_nbp_moving.py --folder runs/moving model --block 8
    python scripts/train_nbp_moving.py --folder runs/moving model --block 1
    python scripts/train_nbp_moving.py --folder runs/moving export

Frames are tokenized by the shipped tokenizer of the shapes world. Every stage resumes where it stopped.
``model --block 8 --from-ntp`` starts from the trained next-token twin instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from visacc.models.assets_io import save_asset
from visacc.models.fit import Fit
from visacc.models.nbp import train as moving_train
from visacc.models.nbp.embedded import load_tokenizer
from visacc.models.nbp.gpt import NBP
from visacc.models.shapes.train_util import load_checkpoint

app = typer.Typer(add_completion=False, help=__doc__)
_STATE: dict[str, Path] = {}


@app.callback()
def main(folder: Path = Path("runs/moving"), threads: int = 2) -> None:
    torch.set_num_threads(threads)
    _STATE["folder"] = folder


def _averaged(name: str, block: int) -> tuple[NBP, int]:
    """Model with the averaged weights of a run, and its step."""
    checkpoint = load_checkpoint(_STATE["folder"] / f"{name}.pt")
    if checkpoint is None:
        raise ValueError(f"{_STATE['folder']} holds no {name}.pt: train it first")
    model = NBP(replace(moving_train.MODEL, block=block))
    model.load_state_dict(checkpoint["average"])
    return model.eval(), int(checkpoint["step"])


@app.command()
def encode(count: int = 5000) -> None:
    """Render and encode the training clips."""
    moving_train.encode_clips(load_tokenizer(), moving_train.TRAIN_SEED, count, _STATE["folder"] / "codes")


@app.command()
def model(
    block: int = 8, steps: int = 1000, batch: int = 16, from_ntp: Annotated[bool, typer.Option()] = False
) -> None:
    """Train a next-block model, or the next-token twin (block 1)."""
    folder, start, name = _STATE["folder"], None, f"nbp{block}"
    settings = Fit(steps=steps, batch=batch)
    if from_ntp:
        start, _ = _averaged("nbp1", 1)
        settings = Fit(steps=steps, batch=batch, muon_lr=0.004, adam_lr=6e-4)
        name = f"nbp{block}-from-ntp"
    moving_train.train_nbp(folder, folder / "codes", settings, block=block, start=start, name=name)


@app.command()
def export(out: Path = Path("models/nbp/assets")) -> None:
    """Write the shipped weights of whatever is trained."""
    for block, name in ((8, "moving-nbp"), (1, "moving-ntp")):
        if (_STATE["folder"] / f"nbp{block}.pt").exists():
            net, steps = _averaged(f"nbp{block}", block)
            save_asset(net, net.config, out / f"{name}.safetensors", steps=steps)


if __name__ == "__main__":
    app()
