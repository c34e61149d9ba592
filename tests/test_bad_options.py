"""Option values of the wrong kind: refused by name, before anything is loaded, never read as their opposite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_llamagen

import visacc
from visacc.cli_options import named_values
from visacc.eval import config as eval_config
from visacc.pipeline import TextToImagePipeline, image_seeds
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams
from visacc.video_io import write_clip
from visacc.video_models import load_video_model


@pytest.mark.parametrize(
    ("decoder", "options", "said"),
    [
        ("sjd", {"uniform_q": "false"}, "uniform_q of decoder 'sjd' must be true or false, got 'false'"),
        ("gsd", {"official_edges": 1}, "official_edges of decoder 'gsd' must be true or false"),
        ("gsd", {"prob_threshold": "x"}, "prob_threshold of decoder 'gsd' must be a finite number, got 'x'"),
        ("lantern", {"delta": None}, "delta of decoder 'lantern' must be a finite number"),
        ("lantern++", {"lam": float("nan")}, "lam of decoder 'lantern\\+\\+' must be a finite number"),
        ("eagle", {"tree": -1}, "decoder 'eagle' refuses its options \\(tree=-1\\)"),
        ("eagle", {"rule": []}, "rule of decoder 'eagle' must be a text"),
        ("nc-sjd", {"tables": 3}, "tables must be 'auto', 'online', a file or tables, got 3"),
        ("sjd-pac", {"depth": 10**9}, "a tree of depth 1000000000 does not fit"),
        ("sjd-pac", {"window": 10**30}, "window must be at most"),
        ("lpd", {"repulsion": -1}, "repulsion must be a finite number of at least 0"),
        ("mc-sjd", {"windw": 4}, "did you mean 'window'"),
        ("ar", {"temprature": 0.5}, "did you mean 'temperature'"),
    ],
)
def test_values_that_a_decoder_cannot_take(decoder: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_decoder(decoder, **options)


def test_mistakes_cost_no_loading(tmp_path: Path) -> None:
    """The decoder is checked before the model is looked for."""
    with pytest.raises(ValueError, match="did you mean 'mc-sjd'"):
        visacc.load(tmp_path / "nothing", decoder="mc-sdj")


def test_values_of_the_command_line() -> None:
    values = named_values(["a=false", "b=True", "c=none", "d=3", "e=text", "f-g=[1, 2]"])
    assert values == {"a": False, "b": True, "c": None, "d": 3, "e": "text", "f_g": [1, 2]}
    with pytest.raises(ValueError, match="window is given twice in the decoder options: 9 and 4"):
        named_values(["window=9", "window=4"])


def test_numbers_of_numpy_and_torch() -> None:
    assert make_decoder("mc-sjd", window=np.int64(5)).options()["window"] == 5
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))
    assert (params.temperature, params.top_k) == (0.5, 3)
    assert type(params.top_k) is int
    for seeds in (np.array([3, 4]), torch.tensor([3, 4]), [np.int64(3), 4]):
        assert image_seeds(seeds, None, 2) == [3, 4]
    with pytest.raises(ValueError, match="a seed or a generator, not both"):
        image_seeds(1, torch.Generator(), 1)


def test_negative_prompts_are_texts() -> None:
    with pytest.raises(ValueError, match="negative_prompt must be a text or a list of texts, got 5"):
        TextToImagePipeline(tiny_llamagen(grid=4))(1, negative_prompt=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"seed": 3}, "unknown sampling option 'seed'"),
        ({"window": 4}, "unknown sampling option 'window'"),
        ({"temperature": -1}, "temperature must be 0"),
    ],
)
def test_sampling_of_a_run_is_checked_with_its_file(sampling: dict[str, Any], said: str) -> None:
    data = {"prompts": "shapes", "decoders": ["ar"], "sampling": sampling}
    with pytest.raises(ValueError, match=said):
        eval_config.parse(data, output="x")


@pytest.mark.parametrize("fps", [0, -3, float("nan"), float("inf"), "8"])
@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_frame_rates(tmp_path: Path, fps: Any, suffix: str) -> None:
    if suffix == "mp4":
        pytest.importorskip("av")
    with pytest.raises(ValueError, match=r"fps must lie between 0\.01 and 1000"):
        write_clip(np.zeros((2, 8, 8, 3), np.uint8), tmp_path / f"a.{suffix}", fps)
    assert not list(tmp_path.iterdir())


def test_embedded_models_take_no_files() -> None:
    with pytest.raises(
        ValueError, match="moving-nbp is embedded and brings everything along: leave tokenizer"
    ):
        load_video_model("moving-nbp", tokenizer="/nonexistent")
