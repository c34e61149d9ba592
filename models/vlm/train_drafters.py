"""Training of the embedded captioner's drafters: one per method, on the captions it writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visacc.models.vlm.captioner import chat, load_captioner
from visacc.models.vlm.scenes import PROMPTS, draw_scene, picture
from visacc.models.vlm.target import VLMTarget
from visacc.speculate.api import Speculator
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.speculate.harvest import OnlineHarvester
from visacc.speculate.losses import DraftBatch, LossSpec
from visacc.speculate.params import TextParams
from visacc.speculate.train import DrafterTraining, resampled, train_drafter

FIRST_TEST = 10_000
"""Held-out scenes from this seed on measure drafters; training never sees their combinations of shapes."""

SPECS = {
    # the captioner is tiny and its texts regular: agreement of laws matters more than features
    "eagle": LossSpec(smooth_l1=1.0, soft_ce=1.0, again=1, noise=0.02),
    "msd": LossSpec(smooth_l1=1.0, soft_ce=1.0, again=1, noise=0.02),
    "flash": LossSpec(smooth_l1=1.0, soft_ce=1.0, noise=0.02),
    "dream": LossSpec(smooth_l1=0.2, soft_ce=1.0, mid_smooth_l1=1.0, again=1, noise=0.02),
}
TREES: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "dynamic", "depth": 4, "top_k": 2, "budget": 14},
    "msd": {"kind": "dynamic", "depth": 4, "top_k": 2, "budget": 14},
    "dream": {"kind": "dynamic", "depth": 4, "top_k": 2, "budget": 14},
    "flash": {"kind": "block", "ahead": 5, "top_k": 3, "budget": 14},
}


def drafter_config(method: str, target: VLMTarget) -> DrafterConfig:
    """Shapes that keep every drafter below 1.5 MB in float16."""
    values: dict[str, Any] = {
        "method": method,
        "hidden_size": target.hidden_size,
        "intermediate_size": 128,
        "num_heads": 4,
        "kv_heads": 4,
        "head_dim": target.hidden_size // 4,
        "vocab_size": target.vocab_size,
        "eps": 1e-5,
        "target": target.describe(),
        "tree": TREES[method],
    }
    if method == "flash":
        values.update(heads_ahead=5, latents=8, intermediate_size=256)
    return DrafterConfig(**values)


def inputs_of(processor: Any, seeds: range, prompt: int, held_out: bool) -> dict[str, Any]:
    """The processor's output for the scenes of ``seeds``."""
    pictures = [picture(draw_scene(seed, held_out)) for seed in seeds]
    texts = [chat(PROMPTS[prompt])] * len(pictures)
    return dict(processor(images=pictures, text=texts, return_tensors="pt", padding=True))


def harvest(target: VLMTarget, processor: Any, images: Any, batch: int = 40) -> list[DraftBatch]:
    """Features of the captions the target writes for ``images`` uint8 [N, 64, 64, 3]; one in five is the
    short one.
    """
    harvester = OnlineHarvester(target, max_new_tokens=64, eos=(2,), pad=0, mid=True)
    stored = []
    for i, first in enumerate(range(0, len(images) - batch + 1, batch)):
        texts = [chat(PROMPTS[int(i % 5 == 4)])] * batch
        inputs = processor(
            images=list(images[first : first + batch]), text=texts, return_tensors="pt", padding=True
        )
        done = harvester(dict(inputs))
        stored.append(done.to(torch.device("cpu"), torch.bfloat16))
    return stored


def tau(model: Any, drafter: Drafter, inputs: list[dict[str, Any]]) -> dict[str, float]:
    """Committed tokens per target step at temperature 0 on held-out pictures."""
    speculator = Speculator(model, drafter)
    tokens = steps = 0
    for given in inputs:
        result = speculator.run(given, TextParams(max_new_tokens=64, eos=(2,)), [0] * len(given["input_ids"]))
        tokens += int((result.stats.tokens - 1).sum())
        steps += int(result.stats.steps.sum())
    return {"tau": tokens / steps}


def train_all(
    captioner: Path, images: Any, folder: Path, methods: tuple[str, ...], options: DrafterTraining
) -> None:
    """Train the drafters of a captioner folder one after the other; each ends up in
    ``captioner/drafters/METHOD``.
    """
    from visacc.speculate.checkpoints import save_drafter

    model, processor = load_captioner(captioner)
    target = VLMTarget(model)
    batches = resampled(harvest(target, processor, images))
    first = range(FIRST_TEST, FIRST_TEST + 40)
    held = [inputs_of(processor, first, 0, True)]
    for method in methods:
        drafter = train_drafter(
            target,
            drafter_config(method, target),
            batches,
            folder / method,
            options,
            spec=SPECS[method],
            evaluate=lambda d: tau(model, d, held),
        )
        save_drafter(drafter, captioner / "drafters" / method, dtype=torch.float16)
