"""A stand-in pipeline and extractor, and a small evaluation run made of them."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from visacc.eval.config import Config, parse
from visacc.metrics import extractors
from visacc.metrics.extractors.base import Extractor

N_PROMPTS, SAMPLES, BATCH = 6, 4, 4
TOTAL = N_PROMPTS * SAMPLES


@cache
def prompts() -> list[dict[str, Any]]:
    """One held-out prompt of each task."""
    from visacc.models.shapes.captions import heldout_prompts

    return heldout_prompts(1)


@dataclass
class Stats:
    steps: torch.Tensor
    tokens: int = 64
    seconds: float = 0.0


@dataclass
class Output:
    images: list[Image.Image]
    stats: Stats


class StandIn:
    """Draws one true scene of the prompt per image; which one depends on the seed alone. Slow enough to be killed."""

    def __init__(self, decoder: str, pause: float = 0.0, wrong: float = 0.0):
        self.decoder, self.pause, self.wrong = decoder, pause, wrong
        self.metadata = {m["prompt"]: m for m in prompts()}
        self.calls: list[list[int]] = []

    def __call__(self, prompt: list[Any], *, seed: list[int], output_type: str, **options: Any) -> Output:
        from visacc.models.shapes.captions import scene_for
        from visacc.models.shapes.world import render

        assert output_type == "pil"
        assert len(prompt) == len(seed)
        self.calls.append(list(seed))
        time.sleep(self.pause)
        images = []
        for text, s in zip(prompt, seed, strict=True):
            key = s % 2**31
            shown = list(self.metadata)[key % len(self.metadata)] if key % 100 < 100 * self.wrong else text
            pixels = render(scene_for(self.metadata[shown], key))
            images.append(Image.fromarray(np.round(pixels * 255).astype(np.uint8)))
        return Output(images, Stats(torch.tensor([10 + s % 7 for s in seed])))


def build(**options: Any) -> StandIn:
    options.pop("device")
    return StandIn(**options)


class ColourGrid(Extractor):
    """Mean colour of 2 x 2 areas: 12 features."""

    name, preprocess, weights, heads = "colour-grid", "area-2", "none", {"features": 12, "logits": 12}
    built, pause = 0, 0.0

    def __init__(self, device: Any = None, poison: bool = False):
        self.device, self.poison = torch.device("cpu"), poison
        type(self).built += 1

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self.pause)
        rows = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
        if self.poison:
            rows[0, 0] = torch.nan
        return {"features": rows, "logits": 8 * rows}


if "colour-grid" not in extractors.names():
    extractors.register("colour-grid", ColourGrid)

METRICS = [
    {"metric": ["fd", "kid", "is", "prdc"], "extractor": "colour-grid", "reference": "shapes:30", "batch": 8,
     "kid": {"subset_size": 10, "subsets": 5}, "is": {"splits": 2}},
    {"metric": "geneval", "detector": "shapes", "batch": 8},
]  # fmt: skip


def config(output: Path, **changes: Any) -> Config:
    source = output.parent / "prompts.jsonl"
    if not source.exists():
        source.write_text("".join(json.dumps(m) + "\n" for m in prompts()))
    data: dict[str, Any] = {
        "pipeline": f"{__name__}:build",
        "prompts": str(source),
        "samples_per_prompt": SAMPLES,
        "batch_size": BATCH,
        "seed": 5,
        "decoders": {"good": {"decoder": "a"}, "sloppy": {"decoder": "b", "wrong": 0.5}},
        "metrics": METRICS,
    }
    return parse({**data, **changes}, output=output)


def fingerprints(output: Path) -> dict[str, str]:
    """Hash of every file a run leaves, except clocks and locks."""
    skip = ("timing", ".lock", "summary.json", "summary.md")
    return {
        f.relative_to(output).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(output.rglob("*"))
        if f.is_file() and not any(part in skip for part in f.relative_to(output).parts)
    }
