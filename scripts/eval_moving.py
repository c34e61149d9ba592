"""Figures of the embedded video models: what the judge reads, Fréchet video distance, steps and frames per second.

    python scripts/eval_moving.py --clips 64 --speed-clips 8

Quality is measured at ``--batch`` clips at a time, speed at one clip at a time (where a step costs about the same whatever
it commits) and again at ``--batch``: medians of passes in which the runs take turns clip by clip. "frames per second" counts
everything from text to pixels, "decoding" leaves the tokenizer out.

Clips of unseen seeds give the texts and the real set. The feature space is `RandomVideoFeatures` (fixed, untrained), so
distances compare these models with each other only. "reconstruction" is the tokenizer's own loss: the best any model can do.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from visacc.metrics.fvd import FVD, RandomVideoFeatures
from visacc.models.nbp import moving
from visacc.models.nbp.embedded import load, load_tokenizer
from visacc.models.nbp.train import TEST_SEED, to_video
from visacc.video import TextToVideoPipeline, VideoContinuationPipeline

RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nbp": ("moving-nbp", "nbp", {}),
    "ntp ar": ("moving-ntp", "ar", {}),
    "ntp mc-sjd 32": ("moving-ntp", "mc-sjd", {"window": 32}),
    "ntp mc-sjd 64": ("moving-ntp", "mc-sjd", {"window": 64}),
    "ntp mc-sjd 128": ("moving-ntp", "mc-sjd", {"window": 128}),
}


def _scores(name: str, videos: torch.Tensor, clips: list[moving.Clip], fvd: FVD) -> dict[str, float]:
    seen = [moving.judge(video.movedim(1, -1).numpy()) for video in videos]
    fvd.fake = None
    fvd.update(videos, real=False)
    parts = {
        part: float(np.mean([getattr(j, part) == getattr(c, part) for j, c in zip(seen, clips, strict=True)]))
        for part in ("colour", "shape", "motion")
    }
    return {
        **parts,
        "all three": float(np.mean([j.agrees(c) for j, c in zip(seen, clips, strict=True)])),
        "distance": fvd.compute(),
    }


def _speeds(
    runs: dict[str, tuple[str, str, dict[str, Any]]], texts: list[str], size: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Frames per second of every run, ``size`` clips at a time, and the quotient to plain decoding of the twin."""
    pipes = {
        name: TextToVideoPipeline(load(model), decoder, **o) for name, (model, decoder, o) in runs.items()
    }
    parts = [texts[i : i + size] for i in range(0, len(texts), size)]
    call: dict[str, Any] = {"seed": 1, "batch_size": size}
    for pipe in pipes.values():
        pipe(parts[0], output_type="pt", **call)
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in pipes}
    for _ in range(repeats):
        spent = {name: {"pt": 0.0, "codes": 0.0} for name in pipes}
        for part in parts:
            for name, pipe in pipes.items():
                for kind in spent[name]:
                    began = time.perf_counter()
                    pipe(part, output_type=kind, **call)
                    spent[name][kind] += time.perf_counter() - began
        frames = len(texts) * moving.FRAMES
        for name, seconds in spent.items():
            passes[name].append(
                {
                    "frames per second": frames / seconds["pt"],
                    "frames per second, decoding": frames / seconds["codes"],
                }
            )
    found = {
        name: {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
        for name, rows in passes.items()
    }
    base = found.get("ntp ar")
    for row in found.values():
        if base is not None:
            row |= {f"{key}, against ntp ar": row[key] / base[key] for key in list(base)[:2]}
    return found


def main(
    clips: int = 64,
    batch: int = 16,
    threads: int = 1,
    speed_clips: Annotated[
        int, typer.Option(help="Clips per pass of the speed runs; 0 leaves them out.")
    ] = 8,
    repeats: Annotated[int, typer.Option(help="Passes of the speed runs.")] = 3,
    only: Annotated[list[str] | None, typer.Option()] = None,
    out: Path | None = None,
) -> None:
    """Print one JSON line per run."""
    torch.set_num_threads(threads)
    items = [moving.sample(TEST_SEED + i) for i in range(clips)]
    pixels = np.round(np.stack([moving.render(item) for item in items]) * 255).astype(np.uint8)
    real = to_video(pixels)
    fvd = FVD(RandomVideoFeatures(), None).update(real, real=True)
    tokenizer, lines = load_tokenizer(), []

    def report(name: str, row: dict[str, Any]) -> None:
        lines.append(
            json.dumps(
                {"run": name} | {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            )
        )
        print(lines[-1], flush=True)

    with torch.no_grad():
        codes = torch.cat([tokenizer.encode(part) for part in real.split(20)])
        recon = torch.cat([tokenizer.decode(part) for part in codes.split(20)])
    mse = float((recon - real).square().mean())
    used = int((torch.bincount(codes.flatten(), minlength=512) > 0).sum())
    report(
        "reconstruction", {**_scores("", recon, items, fvd), "psnr": -10 * np.log10(mse), "codes used": used}
    )
    for name, (model, decoder, options) in RUNS.items():
        if only and name not in only:
            continue
        pipe = TextToVideoPipeline(load(model), decoder, **options)
        result = pipe([item.text for item in items], seed=1, batch_size=batch, output_type="pt")
        row = _scores(name, result.videos, items, fvd)
        stats = result.stats
        report(name, {**row, "steps": stats.nfe, "tokens per step": stats.step_compression})
    for name in ("moving-nbp", "moving-ntp"):
        if only and f"continue {name}" not in only:
            continue
        model = load(name, given_frames=2)
        pipe2 = VideoContinuationPipeline(model, "nbp" if model.block > 1 else "ar")
        result = pipe2(list(real[:, : pipe2.frames_needed]), seed=1, batch_size=batch, output_type="pt")
        row = _scores(name, result.videos, items, fvd)
        report(f"continue {name}", {**row, "steps": result.stats.nfe})
    runs = {name: run for name, run in RUNS.items() if not only or name in only}
    texts = [item.text for item in items[:speed_clips]]
    for size in dict.fromkeys((1, min(batch, len(texts)))) if texts else ():
        for name, row in _speeds(runs, texts, size, repeats).items():
            report(f"speed of {name}", {"clips at a time": size, **row})
    if out is not None:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
