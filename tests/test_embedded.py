"""The embedded text-to-image model through the pipeline: seed-exactness, step counts, pictures that show what was asked."""

from __future__ import annotations

import json

import pytest
import torch

import visacc
from visacc.cli import main
from visacc.models.shapes.captions import heldout_prompts
from visacc.models.shapes.judge import judge

PROMPTS = [
    "a red circle left of a blue square",
    "three green triangles",
    "a yellow star",
    "a photo of a cross",
]


@pytest.fixture(scope="module")
def pipe():
    return visacc.load("shapes-t2i")


@pytest.fixture(scope="module")
def plain(pipe):
    return pipe(PROMPTS, seed=[5, 6, 7, 8], decoder="ar", output_type="np")


@pytest.mark.exact
@pytest.mark.parametrize("window", [8, 16, 32])
def test_mc_sjd_draws_the_ar_picture(pipe, plain, window):
    """Token for token, with guidance on: the same seed gives the AR picture, at every window, in fewer steps."""
    fast = pipe(PROMPTS, seed=[5, 6, 7, 8], decoder="mc-sjd", window=window, output_type="np")
    assert torch.equal(fast.codes, plain.codes)
    assert (fast.images == plain.images).all()
    assert fast.stats.step_compression > 2
    assert plain.stats.nfe == 256


@pytest.mark.parametrize("decoder", ["sjd", "mc-sjd"])
def test_same_picture_alone_and_in_a_batch(pipe, decoder):
    together = pipe(PROMPTS, seed=3, decoder=decoder, output_type="codes", window=16)
    alone = pipe(PROMPTS[2], seed=together.seeds[2], decoder=decoder, output_type="codes", window=16)
    assert torch.equal(alone.codes[0], together.codes[2])


def test_step_counts_of_the_jacobi_decoders(pipe):
    """Mean over four pictures; the figures over many prompts stand in the README."""
    steps = {
        name: pipe(PROMPTS, seed=1, decoder=name, output_type="codes", **options).stats.nfe
        for name, options in (("sjd", {}), ("mc-sjd", {"window": 32}))
    }
    assert steps["mc-sjd"] < steps["sjd"] < 256 / 1.4
    assert steps["mc-sjd"] < 256 / 2.2


@pytest.mark.slow
def test_pictures_show_what_was_asked(pipe):
    """Single objects, held-out prompts, judged from pixels. The model card has the rates; fewer than half right by
    chance has probability below 1e-3 at a true rate of 80 %."""
    asked = [p for p in heldout_prompts() if p["tag"] == "single_object"][:24]
    out = pipe([p["prompt"] for p in asked], seed=0, decoder="mc-sjd", batch_size=24, output_type="np")
    right = sum(judge(p, image).correct for p, image in zip(asked, out.images, strict=True))
    assert right >= len(asked) / 2


def test_prompts_it_cannot_take(pipe):
    with pytest.raises(ValueError, match="text prompts"):
        pipe(3)
    with pytest.raises(ValueError, match="empty"):
        pipe("")


def test_default_command(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "generate",
                PROMPTS[0],
                "--decoder",
                "mc-sjd",
                "-o",
                str(tmp_path),
                "-q",
                "--seed",
                "1",
                "--trace",
            ]
        )
    assert not stop.value.code
    assert "step compression" in capsys.readouterr().out
    record = json.loads((tmp_path / "stats.json").read_text())
    assert record["model"] == "shapes-t2i"
    assert record["lossless"] is True
    assert record["sampling"]["guidance_scale"] > 1
    assert (tmp_path / "trace_000.png").is_file()


def test_a_drawn_seed_is_named_and_draws_the_picture_again(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", "a yellow star", "-d", "mc-sjd", "-q", "-o", str(tmp_path / "a")])
    assert stop.value.code == 0
    seed = capsys.readouterr().out.split()[-1]
    with pytest.raises(SystemExit):
        main(["generate", "a yellow star", "-d", "mc-sjd", "-q", "-o", str(tmp_path / "b"), "--seed", seed])
    assert (tmp_path / "a" / "000.png").read_bytes() == (tmp_path / "b" / "000.png").read_bytes()


def test_embedded_models_load_without_bars(capfd):
    from transformers.utils import logging

    from visacc.models.vlm.captioner import load_captioner

    logging.enable_progress_bar()  # --quiet of an earlier test switches them off
    visacc.load("shapes-t2i")
    load_captioner()
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()  # those of other models are the user's business
