"""The embedded captioner and its drafters: same text as ``model.generate``, accepted lengths, sizes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from visacc.models.vlm.captioner import ASSETS, chat, load_captioner
from visacc.models.vlm.scenes import PROMPTS, caption, draw_scene, picture
from visacc.speculate.api import Speculator
from visacc.speculate.params import TextParams
from visacc.speculate.pipeline import CaptionPipeline

if not (ASSETS / "model.safetensors").exists():
    pytest.skip("the embedded captioner is not trained yet", allow_module_level=True)

METHODS = sorted(p.name for p in (ASSETS / "drafters").glob("*"))
COUNT, BATCH, LENGTH = 200, 50, 64
EXACT = 0.8  # 92 % of 500 scenes when the weights were made
"""Share of exactly right captions that the shipped weights must reach."""


@functools.lru_cache(maxsize=1)
def captioner() -> tuple[Any, Any]:
    return load_captioner()


@functools.lru_cache(maxsize=1)
def held_out() -> list[tuple[dict[str, Any], Tensor]]:
    """Batches of held-out pictures with what ``model.generate`` says."""
    model, processor = captioner()
    result = []
    for first in range(30_000, 30_000 + COUNT, BATCH):
        images = [picture(draw_scene(seed, held_out=True)) for seed in range(first, first + BATCH)]
        inputs = dict(
            processor(images=images, text=[chat(PROMPTS[0])] * BATCH, return_tensors="pt", padding=True)
        )
        out = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        result.append((inputs, out[:, inputs["input_ids"].shape[1] :]))
    return result


@pytest.mark.parametrize("method", [*METHODS, "ngram"])
def test_text_is_generates(method: str) -> None:
    """200 captions per drafter are token for token those of ``model.generate``; trained ones accept a lot."""
    model, _ = captioner()
    speculator = Speculator(model, method)
    tokens = steps = 0
    for inputs, expected in held_out():
        result = speculator.run(inputs, TextParams(max_new_tokens=LENGTH, eos=(2,)), [0] * BATCH)
        assert torch.equal(result.ids, expected)
        tokens += int((result.stats.tokens - 1).sum())
        steps += int(result.stats.steps.sum())
    assert tokens / steps > (2.5 if method != "ngram" else 1.5)


def test_captions_are_right_as_often_as_stated() -> None:
    _, processor = captioner()
    right = 0
    for batch, (_, out) in enumerate(held_out()):
        for row, text in enumerate(processor.batch_decode(out, skip_special_tokens=True)):
            scene = draw_scene(30_000 + batch * BATCH + row, held_out=True)
            right += text.strip() == caption(scene)
    assert right / COUNT >= EXACT


def test_sizes() -> None:
    assert sum(p.stat().st_size for p in ASSETS.glob("*") if p.is_file()) <= 8e6
    assert METHODS == ["dream", "eagle", "flash", "msd"]
    for method in METHODS:
        assert sum(p.stat().st_size for p in (ASSETS / "drafters" / method).iterdir()) <= 1.5e6


def test_pipeline_by_name() -> None:
    from PIL import Image

    pipeline = CaptionPipeline("shapes-captioner", speculator="msd")
    scene = draw_scene(31_000, held_out=True)
    row = pipeline([Image.fromarray(picture(scene))], PROMPTS[0])[0]
    assert row.error is None
    assert row.text is not None
    assert row.text.startswith("the image shows")
    assert row.steps < row.tokens / 2
