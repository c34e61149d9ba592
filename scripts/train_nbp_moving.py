"""Reproduce the embedded video models: tokenizer, next-block model and next-token twin of the moving-shapes world.

    python scripts/train_nbp_moving.py --folder runs/moving tokenizer
    python scripts/train_nbp_moving.py --folder runs/moving encode
    python scripts/train_nbp_moving.py --folder runs/moving model --block 8
    python scripts/train_nbp_moving.py --folder runs/moving model --block 1
    python scripts/train_nbp_moving.py --folder runs/moving export

Every stage resumes where it stopped. ``model --block 8 --from-ntp`` starts from the trained next-token twin instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from visacc.models.assets_io import save_asset
from visacc.models.fit import Fit
from visacc.models.nbp import train as moving_train
from visacc.models.nbp.gpt import NBP
from visacc.models.nbp.magvit2 import Magvit2
from visacc.models.shapes.train_util import load_checkpoint

app = typer.Typer(add_completion=False, help=__doc__)
_STATE: dict[str, Path] = {}


@app.callback()
def main(folder: Path = Path("runs/moving"), threads: int = 2) -> None:
    torch.set_num_threads(threads)
    _STATE["folder"] = folder


def _averaged(name: str, model: torch.nn.Module) -> int:
    """Load the averaged weights of a run; returns its step."""
    checkpoint = load_checkpoint(_STATE["folder"] / f"{name}.pt")
    if checkpoint is None:
        raise ValueError(f"{_STATE['folder']} holds no {name}.pt: run that stage first")
    model.load_state_dict(checkpoint["average"])
    model.eval()
    return int(checkpoint["step"])


def _tokenizer() -> Magvit2:
    model = Magvit2(moving_train.TOKENIZER)
    _averaged("tokenizer", model)
    return model


@app.command()
def tokenizer(steps: int = 3000, batch: int = 8, lr: float = 2e-3) -> None:
    """Train the tokenizer."""
    settings = Fit(steps=steps, batch=batch, adam_lr=lr, muon_lr=0, weight_decay=0.0, ema=0.995)
    moving_train.train_tokenizer(_STATE["folder"], settings)


@app.command()
def encode(count: int = 12000) -> None:
    """Render and encode the training clips."""
    moving_train.encode_clips(_tokenizer(), moving_train.MODEL_SEED, count, _STATE["folder"] / "codes")


@app.command()
def model(
    block: int = 8, steps: int = 2000, batch: int = 32, from_ntp: Annotated[bool, typer.Option()] = False
) -> None:
    """Train a next-block model, or the next-token twin (block 1)."""
    folder, start, name = _STATE["folder"], None, f"nbp{block}"
    settings = Fit(steps=steps, batch=batch)
    if from_ntp:
        start = NBP(moving_train.replace(moving_train.MODEL, block=1))
        _averaged("nbp1", start)
        settings = Fit(steps=steps, batch=batch, muon_lr=0.004, adam_lr=6e-4)
        name = f"nbp{block}-from-ntp"
    moving_train.train_nbp(folder, folder / "codes", settings, block=block, start=start, name=name)


@app.command()
def export(out: Path = Path("models/nbp/assets")) -> None:
    """Write the shipped weights of whatever is trained."""
    tok = Magvit2(moving_train.TOKENIZER)
    save_asset(tok, tok.config, out / "moving-tokenizer.safetensors", steps=_averaged("tokenizer", tok))
    for block, name in ((8, "moving-nbp"), (1, "moving-ntp")):
        if (_STATE["folder"] / f"nbp{block}.pt").exists():
            net = NBP(moving_train.replace(moving_train.MODEL, block=block))
            save_asset(net, net.config, out / f"{name}.safetensors", steps=_averaged(f"nbp{block}", net))


if __name__ == "__main__":
    app()
