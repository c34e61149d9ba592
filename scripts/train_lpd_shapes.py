"""Reproduce the embedded LPD model: class- and caption-conditional pictures of the shapes world.

    python scripts/train_lpd_shapes.py --folder runs/lpd train --dataset runs/shapes-t2i/dataset --first-seed 0
    python scripts/train_lpd_shapes.py --folder runs/lpd train --dataset runs/shapes-t2i/dataset --first-seed 0 --raster
    python scripts/train_lpd_shapes.py --folder runs/lpd export
    python scripts/eval_lpd_shapes.py --folder runs/lpd --out runs/lpd/figures.jsonl
    python scripts/train_lpd_shapes.py --folder runs/lpd card

The data set (codes.npy, captions.json) is the one that the shapes text-to-image model is trained on. ``--raster`` trains
the twin that LPD is measured against: the same network and data, one code a step, row by row; it stays in the run's
folder. Training resumes where it stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from visacc.models.assets_io import read_asset, save_asset
from visacc.models.fit import Fit
from visacc.models.lpd.model import LPD
from visacc.models.lpd.train import CLASS_NAMES, SHAPES_MODEL, class_of, train_lpd
from visacc.models.shapes.captions import sample
from visacc.models.shapes.data import load_dataset
from visacc.models.shapes.text import build_tokenizer, tokenize
from visacc.models.shapes.train_util import load_checkpoint

_Dataset = Annotated[Path, typer.Option(help="Folder with codes.npy and captions.json.")]
_FirstSeed = Annotated[int, typer.Option(help="Seed of the data set's first picture.")]
_Raster = Annotated[bool, typer.Option(help="Train the raster twin instead.")]
_Figures = Annotated[
    Path | None, typer.Option(help="What eval_lpd_shapes.py wrote; figures.jsonl of the run.")
]
app = typer.Typer(add_completion=False, help=__doc__)
_STATE: dict[str, Path] = {}


@app.callback()
def main(folder: Path = Path("runs/lpd"), threads: int = 2) -> None:
    torch.set_num_threads(threads)
    _STATE["folder"] = folder


@app.command()
def train(
    dataset: _Dataset,
    first_seed: _FirstSeed,
    steps: int = 3000,
    batch: int = 32,
    limit: int = 80000,
    raster: _Raster = False,
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
    name = "raster" if raster else "lpd"
    facts = {"pictures": len(codes), "batch": batch}
    _STATE["folder"].mkdir(parents=True, exist_ok=True)
    (_STATE["folder"] / f"{name}.json").write_text(json.dumps(facts) + "\n")
    train_lpd(
        LPD(SHAPES_MODEL),
        codes,
        torch.tensor(labels),
        words,
        _STATE["folder"],
        Fit(steps=steps, batch=batch),
        name=name,
        raster=raster,
    )


def _export(name: str, path: Path, defaults: dict[str, float]) -> bool:
    folder = _STATE["folder"]
    checkpoint = load_checkpoint(folder / f"{name}.pt")
    if checkpoint is None:
        return False
    model = LPD(SHAPES_MODEL)
    model.load_state_dict(checkpoint["average"])
    facts = json.loads((folder / f"{name}.json").read_text())
    save_asset(model, SHAPES_MODEL, path, steps=checkpoint["step"], defaults=defaults, **facts)
    print(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB, {checkpoint['step']} steps")
    return True


@app.command()
def export(
    out: Path = Path("models/lpd/assets"),
    guidance: Annotated[float, typer.Option(help="Default guidance scale of the model.")] = 3.0,
    twin_guidance: Annotated[float, typer.Option(help="Default guidance scale of its twin.")] = 3.0,
    temperature: Annotated[float, typer.Option(help="Default temperature of both.")] = 0.9,
) -> None:
    """Write the weights: those of the LPD model to ``out``, those of its twin to the run's folder."""
    folder = _STATE["folder"]
    defaults = {"guidance_scale": guidance, "temperature": temperature}
    twins = {**defaults, "guidance_scale": twin_guidance}
    if not _export("lpd", out / "shapes-lpd.safetensors", defaults):
        raise ValueError(f"{folder} holds no lpd.pt: train first")
    _export("raster", folder / "shapes-raster.safetensors", twins)


def _percent(share: float, interval: list[float]) -> str:
    return f"{100 * share:.0f} ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})"


def _table(rows: list[dict[str, Any]]) -> str:
    tasks = list(rows[0]["tasks"])
    head = ["model", "steps", "tasks", *(t.replace("_", " ") for t in tasks), "class", "Fréchet distance"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        low, high = row["distance interval"]
        cells = [row["run"], f"{row['steps']:.0f}", _percent(row["overall"], row["overall interval"])]
        cells += [_percent(entry["score"], entry["interval"]) for entry in row["tasks"].values()]
        cells += [
            _percent(row["class accuracy"], row["class interval"]),
            f"{row['distance']:.3f} ({low:.3f} to {high:.3f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gap(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Differences of two rows with the 95 % interval of two independent samples."""

    def part(key: str, interval: str, scale: float, digits: int) -> str:
        widths = [(row[interval][1] - row[interval][0]) / 2 for row in (first, other)]
        half = (widths[0] ** 2 + widths[1] ** 2) ** 0.5
        gap = first[key] - other[key]
        word = "within" if abs(gap) <= half else "outside"
        return f"{scale * gap:+.{digits}f} ± {scale * half:.{digits}f} ({word} the interval)"

    tasks, classes = (
        part("overall", "overall interval", 100, 0),
        part("class accuracy", "class interval", 100, 0),
    )
    distance = part("distance", "distance interval", 1, 3)
    return f"- {first['run']}, less {other['run']}: tasks {tasks}, classes {classes} points, distance {distance}."


@app.command()
def card(out: Path = Path("models/lpd/assets"), figures: _Figures = None) -> None:
    """Write the model card from the exported weights and the measured figures."""
    source = figures or _STATE["folder"] / "figures.jsonl"
    if not source.is_file():
        raise ValueError(f"{source} does not exist: run scripts/eval_lpd_shapes.py --out {source}")
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    state, config, facts = read_asset(out / "shapes-lpd.safetensors")
    first = rows[0]
    gaps = "\n".join(_gap(first, row) for row in rows if "lpd" not in row["run"])
    numbers = {
        "parameters": f"{sum(t.numel() for t in state.values()):,}",
        "pictures": f"{facts['pictures']:,}",
        "steps": f"{facts['steps']:,}",
        "bias": f"{first['distance bias']:.2f}",
        "scenes": f"{first['scenes']:,}",
        "twin": next(
            (f"{row['training steps']:,}" for row in rows if row["run"] == "raster twin"), "the same"
        ),
    }
    text = f"""# shapes-lpd

An LPD model (arXiv 2507.01957) of the embedded world of coloured shapes (`visacc.models.shapes.world`),
conditioned on a class (one of {len(CLASS_NAMES)}: a colour and a shape) or on a caption. 64 x 64 pixels, 256 codes of
the tokenizer of shapes-t2i. For tests, demonstrations and measurements of the decoder `lpd`.

```python
import visacc

pipe = visacc.load("shapes-lpd", decoder="lpd", steps=20)
pipe("red circle").images[0].save("circle.png")  # a class, by name or number
pipe("a red circle left of a blue square").images[0].save("two.png")
```

- Network: {numbers["parameters"]} parameters, width {config["dim"]}, {config["depth"]} layers,
  {config["heads"]} heads, {config["text_len"]} caption slots.
- Data: {numbers["pictures"]} scenes drawn from seeds, those of shapes-t2i; no photographs, no external data.
- Training: {numbers["steps"]} steps of {facts["batch"]} scenes, with a random order and one of the nine published
  lists of group sizes a step, the condition dropped in one scene of ten; a picture of one object shows the model
  its class or its caption. Muon and AdamW, averaged weights (`scripts/train_lpd_shapes.py`, commands in its head).
- Files: safetensors, float16. Apache-2.0.

## Measured

{first["prompts"]} prompts of GenEval's six tasks, one picture each, and {first["classes"]} pictures of the
classes (shapes-t2i is given them as captions), at every model's own guidance and temperature, read by the exact
detector; per cent with 95 % intervals. The Fréchet distance is that of the prompts' pictures to {numbers["scenes"]} true
scenes of the same prompts in the space of the tokenizer (`shapes-vq-128`, not comparable with a FID), with a 95 %
bootstrap interval; the number of pictures alone makes it about {numbers["bias"]} too large. "raster twin" is the same
network, trained on the same data ({numbers["twin"]} steps) to draw one code a step, row by row; it does not ship.
Guidance of shapes-lpd is constant where the row does not say otherwise. Command: `python scripts/eval_lpd_shapes.py`.

{_table(rows)}

{gaps}
"""
    (out / "README.md").write_text(text)
    print(f"wrote {out / 'README.md'}")


if __name__ == "__main__":
    app()
