"""The shipped drafter and the relaxed decoders on the embedded text-to-image model."""

from __future__ import annotations

import pytest

from visacc.decoders import SJD
from visacc.decoders.eagle import Eagle
from visacc.decoders.eagle_relaxed import LanternPPDecoder
from visacc.decoders.gsd import GSD
from visacc.decoders.zipar import ZipAR
from visacc.engine import decode
from visacc.models.shapes import ASSETS
from visacc.sampling import SamplingParams

pytestmark = pytest.mark.slow
FOLDER = ASSETS / "t2i" / "drafter"
PROMPTS = ["two red circles", "a blue square", "a green star and a yellow triangle", "three crosses"]


@pytest.fixture(scope="module")
def model():
    if not (ASSETS / "t2i" / "gpt.safetensors").is_file():
        pytest.skip("the embedded weights are not installed")
    from visacc.loading import load_model

    return load_model("shapes-t2i", device="cpu")


def run(model, decoder):
    sampling = SamplingParams.merge(model.defaults, {})
    return decode(model, decoder, model.encode(PROMPTS), sampling, [1, 2, 3, 4]).stats


def test_accepted_length(model, tmp_path, monkeypatch):
    """The exact rule commits at least 1.8 tokens a step, the relaxed one more."""
    monkeypatch.setenv("VISACC_CACHE", str(tmp_path))
    exact = run(model, Eagle())
    assert exact.tau >= 1.8
    relaxed = run(model, LanternPPDecoder())
    assert relaxed.tau > exact.tau + 0.1
    assert relaxed.nfe < exact.nfe


def test_size_and_card():
    if not FOLDER.is_dir():
        pytest.skip("the embedded weights are not installed")
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 3_000_000
    assert "Measured" in (FOLDER / "README.md").read_text()


def test_grouping_saves_steps(model):
    assert run(model, GSD()).nfe < run(model, SJD()).nfe


def test_zipar_passes(model):
    height, width = model.layout.grid[1:]
    assert run(model, ZipAR(width // 2)).forwards == width + (height - 1) * (width // 2)
