"""Figures of the embedded LPD model beside the raster model of the same world: GenEval tasks, classes, distance, steps.

    python scripts/eval_lpd_shapes.py --per-task 20

Prompts are GenEval's six tasks over the shapes world, judged from pixels; the feature space of the distance is fixed and
untrained (`RandomVideoFeatures` on single frames), so distances compare these models with each other only.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import numpy as np
import torch
import typer

from visacc.loading import load
from visacc.metrics.fvd import FVD, RandomVideoFeatures
from visacc.models.lpd.train import CLASS_NAMES
from visacc.models.shapes.captions import all_prompts, sample
from visacc.models.shapes.detector import detect
from visacc.models.shapes.judge import score
from visacc.models.shapes.world import render


def _half_width(share: float, count: int) -> float:
    return 1.96 * (share * (1 - share) / max(count, 1)) ** 0.5


def main(
    per_task: int = 20,
    threads: int = 1,
    guidance: float = 3.0,
    steps: Annotated[list[int], typer.Option()] = [20, 64],  # noqa: B006 - typer reads the default only
    raster: bool = True,
) -> None:
    """Print one JSON line per run."""
    torch.set_num_threads(threads)
    prompts = all_prompts(per_task)
    real = torch.from_numpy(np.stack([render(sample(30_000_000 + i).scene) for i in range(256)])).movedim(
        -1, 1
    )
    fvd = FVD(RandomVideoFeatures(), None).update(real[:, None], real=True)
    runs: list[tuple[str, str, str, dict[str, Any]]] = [
        (f"lpd {n} steps", "shapes-lpd", "lpd", {"steps": n}) for n in steps
    ]
    if raster:
        runs.append(("raster ar", "shapes-t2i", "ar", {}))
    for name, model, decoder, options in runs:
        pipe = load(model, decoder, device="cpu", **options)
        started = time.perf_counter()
        call: dict[str, Any] = {"seed": 1, "batch_size": 20, "output_type": "pt", "guidance_scale": guidance}
        result = pipe([p["prompt"] for p in prompts], **call)
        images = result.images.movedim(1, -1).numpy()
        right = [score(p, image) for p, image in zip(prompts, images, strict=True)]
        fvd.fake = None
        fvd.update(result.images[:, None], real=False)
        share = float(np.mean(right))
        row: dict[str, Any] = {
            "tasks": share,
            "+-": _half_width(share, len(right)),
            "distance": fvd.compute(),
        }
        for task in sorted({p["tag"] for p in prompts}):
            row[task] = float(np.mean([r for r, p in zip(right, prompts, strict=True) if p["tag"] == task]))
        if model == "shapes-lpd":
            picked = list(range(0, len(CLASS_NAMES)))
            made = pipe(picked, **call).images.movedim(1, -1).numpy()
            found = [detect(image, 0.7) for image in made]
            names = [f"{f[0].colour} {f[0].shape}" if f else "" for f in found]
            row["class accuracy"] = float(
                np.mean([n == CLASS_NAMES[i] for n, i in zip(names, picked, strict=True)])
            )
        row |= {"steps": result.stats.nfe, "seconds": time.perf_counter() - started}
        print(
            json.dumps(
                {"run": name} | {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            )
        )


if __name__ == "__main__":
    typer.run(main)
