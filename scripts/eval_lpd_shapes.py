"""Figures of the embedded LPD model beside raster models of the same world: GenEval tasks, classes, distance, steps.

    python scripts/eval_lpd_shapes.py --per-task 48 --folder runs/lpd

Every run draws the same prompts with the same seeds. Prompts are GenEval's six tasks over the shapes world, judged from
pixels by the exact detector; the distance is a Fréchet distance to true scenes of the same prompts in the space of the
world's tokenizer. Rows: the LPD model at every ``--steps`` under constant guidance, and at the first under the published
schedule; its raster twin (the same network, one code a step) where ``--folder`` holds ``shapes-raster.safetensors``;
shapes-t2i with plain decoding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from visacc.loading import load
from visacc.metrics.extractors import create
from visacc.metrics.frechet import expected_bias, frechet
from visacc.metrics.intervals import wilson
from visacc.metrics.scores import bootstrap_frechet
from visacc.metrics.stats import FeatureStats, Gaussian
from visacc.models.assets_io import read_asset
from visacc.models.lpd.loading import ASSETS, load_shapes
from visacc.models.lpd.train import CLASS_NAMES
from visacc.models.shapes.captions import Metadata, all_prompts, compose, heldout_prompts, scene_for
from visacc.models.shapes.judge import score
from visacc.models.shapes.world import render
from visacc.pipeline import TextToImagePipeline

TOKENS = 256


def _pipes(
    folder: Path, weights: Path | None, steps: list[int], plain: bool
) -> Iterator[tuple[str, Any, int | None]]:
    """Name, pipeline and training steps of every row."""
    model = load_shapes() if weights is None else load_shapes(weights)
    trained = _trained(weights)
    for n in steps:
        pipe = TextToImagePipeline(model, "lpd", steps=n, guidance_schedule="constant")
        yield f"shapes-lpd, {n} steps", pipe, trained
    name = f"shapes-lpd, {steps[0]} steps, guidance growing as published"
    yield name, TextToImagePipeline(model, "lpd", steps=steps[0]), trained
    twin = folder / "shapes-raster.safetensors"
    if twin.is_file():
        raster: dict[str, Any] = {"group_sizes": (1,) * TOKENS, "orders": torch.arange(TOKENS)}
        raster["guidance_schedule"] = "constant"
        pipe = TextToImagePipeline(load_shapes(twin, name="shapes-raster"), "lpd", **raster)
        yield "raster twin", pipe, _trained(twin)
    if plain:
        yield "shapes-t2i, `ar`", load("shapes-t2i", "ar", device="cpu"), None


def _trained(path: Path | None) -> int:
    """Training steps of the weights in ``path``; of the shipped LPD model's by default."""
    return int(read_asset(path or ASSETS / "shapes-lpd.safetensors")[2]["steps"])


def _share(right: list[bool]) -> tuple[float, list[float]]:
    return float(np.mean(right)), [round(bound, 4) for bound in wilson(sum(right), len(right))]


def _tasks(prompts: list[Metadata], right: list[bool]) -> dict[str, Any]:
    tasks = {}
    for tag in dict.fromkeys(p["tag"] for p in prompts):
        share, interval = _share([r for p, r in zip(prompts, right, strict=True) if p["tag"] == tag])
        tasks[tag] = {"score": share, "interval": interval}
    # GenEval's overall score is the mean of the tasks; its standard error adds those of independent tasks
    counts = {tag: sum(p["tag"] == tag for p in prompts) for tag in tasks}
    overall = float(np.mean([entry["score"] for entry in tasks.values()]))
    variance = 0.0
    for (
        tag,
        entry,
    ) in tasks.items():  # two successes and two failures more keep a task of 0 or 1 from having none
        n = counts[tag] + 4
        share = (entry["score"] * counts[tag] + 2) / n
        variance += share * (1 - share) / n
    half = 1.96 * variance**0.5 / len(tasks)
    interval = [max(0.0, overall - half), min(1.0, overall + half)]
    return {"overall": overall, "overall interval": interval, "tasks": tasks}


def _distance(pixels: Tensor, extractor: Any, real: Gaussian) -> dict[str, Any]:
    rows = extractor(pixels)["features"]
    stats = FeatureStats.of(rows).gaussian()
    return {
        "distance": frechet(stats, real, warn=False),
        "distance interval": [round(bound, 5) for bound in bootstrap_frechet(rows, real)],
        "distance bias": expected_bias(real.cov, len(rows), real.n),
    }


def main(
    per_task: Annotated[int, typer.Option(help="Prompts of every task.")] = 48,
    per_class: Annotated[int, typer.Option(help="Pictures of every class.")] = 4,
    scenes: Annotated[int, typer.Option(help="True scenes for the distance.")] = 1000,
    steps: Annotated[list[int], typer.Option(help="Steps of the LPD model.")] = [20, 64],  # noqa: B006
    guidance: Annotated[float | None, typer.Option(help="Scale; the models' own (3) by default.")] = None,
    temperature: Annotated[float | None, typer.Option(help="The models' own by default.")] = None,
    heldout: Annotated[bool, typer.Option(help="Prompts with combinations unseen in training.")] = False,
    plain: Annotated[bool, typer.Option(help="Measure shapes-t2i, too.")] = True,
    folder: Annotated[Path, typer.Option(help="Run with the twin's weights.")] = Path("runs/lpd"),
    weights: Annotated[Path | None, typer.Option(help="LPD weights other than the shipped ones.")] = None,
    batch: int = 24,
    threads: int = 1,
    out: Annotated[Path | None, typer.Option(help="File for the lines, replaced.")] = None,
) -> None:
    """Print one JSON line per run."""
    torch.set_num_threads(threads)
    prompts = heldout_prompts(per_task) if heldout else all_prompts(per_task)
    colours = [name.split() for name in CLASS_NAMES]
    wanted = [compose("colors", [shape], [colour]) for colour, shape in colours for _ in range(per_class)]
    extractor = create("shapes-vq", device="cpu")
    true = [render(scene_for(prompts[i % len(prompts)], 10_000_000 + i)) for i in range(scenes)]
    pixels = torch.from_numpy(np.round(np.stack(true) * 255).astype(np.uint8)).movedim(-1, 1)
    real = FeatureStats.of(torch.cat([extractor(part)["features"] for part in pixels.split(100)])).gaussian()
    lines: list[str] = []
    for name, pipe, trained in _pipes(folder, weights, steps, plain):
        call: dict[str, Any] = {"seed": 1, "batch_size": batch, "output_type": "np"}
        call |= {"guidance_scale": guidance, "temperature": temperature}
        began = time.perf_counter()
        result = pipe([p["prompt"] for p in prompts], **call)
        seconds = (time.perf_counter() - began) / len(prompts)
        right = [score(p, image) for p, image in zip(prompts, result.images, strict=True)]
        by_class = pipe.model.name != "shapes-t2i"
        asked: list[Any] = [i for i in range(len(CLASS_NAMES)) for _ in range(per_class)]
        made = pipe(asked if by_class else [text for text, _ in wanted], **call).images
        found = [score(metadata, image) for (_, metadata), image in zip(wanted, made, strict=True)]
        accuracy, interval = _share(found)
        row = {
            "run": name,
            "steps": result.stats.nfe,
            **_tasks(prompts, right),
            "class accuracy": accuracy,
            "class interval": interval,
            **_distance(torch.from_numpy(result.images).movedim(-1, 1), extractor, real),
            "seconds a picture": seconds,
            "prompts": len(prompts),
            "classes": len(wanted),
            "scenes": scenes,
            "training steps": trained,
            "guidance": result.settings["sampling"]["guidance_scale"],
            "temperature": result.settings["sampling"]["temperature"],
        }
        lines.append(json.dumps(_rounded(row)))
        print(lines[-1], flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("\n".join(lines) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    typer.run(main)
