"""Every decoder on every transformers family: what the matrix of ``visacc list --matrix`` says is what happens."""

from __future__ import annotations

from typing import Any

import hf_tiny
import pytest
import torch

from visacc.engine import DecodeResult, decode
from visacc.integrations.matrix import DRAFTER, EXACT, LOSSY, NO, adapter_class, matrix
from visacc.models.hf import HFImageModel, load_hf
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams

FAMILIES = tuple(hf_tiny.BUILDERS)
MARKS = matrix()
PAIRS = [(family, name, mark) for family in FAMILIES for name, mark in MARKS[family].items()]
# settings at which a lossy decoder is plain decoding, with greedy or seeded sampling
NEUTRAL: dict[str, dict[str, Any]] = {"zipar": {"window": 1000}, "gsd": {"group_size": 1, "window": 8}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFImageModel]:
    root = tmp_path_factory.mktemp("matrix")
    return {name: load_hf(build(root / name)) for name, build in hf_tiny.BUILDERS.items()}


def run(model: HFImageModel, decoder: Any, greedy: bool, seeds: tuple[int, int] = (3, 4)) -> DecodeResult:
    scale = 1.0 if model.family == "glm-image" else 2.5
    sampling = SamplingParams(scale, temperature=0) if greedy else SamplingParams(scale, top_k=12)
    return decode(model, decoder, model.encode(["a red circle", "two"]), sampling, list(seeds))


_PLAIN: dict[tuple[str, bool], torch.Tensor] = {}


def plain(model: HFImageModel, greedy: bool) -> torch.Tensor:
    key = (model.family, greedy)
    if key not in _PLAIN:
        _PLAIN[key] = run(model, make_decoder("ar"), greedy).sequence
    return _PLAIN[key]


def test_rows_are_the_families() -> None:
    assert set(FAMILIES) <= set(MARKS)
    for family in FAMILIES:
        assert adapter_class(family).family == family  # type: ignore[attr-defined]
        assert {"ar", "sjd", "mc-sjd"} <= {d for d, mark in MARKS[family].items() if mark == EXACT}


@pytest.mark.parametrize(("family", "name", "mark"), PAIRS)
def test_pair(family: str, name: str, mark: str, models: dict[str, HFImageModel]) -> None:
    model = models[family]
    if mark == NO:
        with pytest.raises(ValueError, match=r"requires|cannot be driven"):
            make_decoder(name).check(model)
        return
    if mark == DRAFTER:
        with pytest.raises(ValueError, match="drafter"):
            make_decoder(name).check(model)
        return
    if mark == EXACT:
        result = run(model, make_decoder(name), greedy=True)
        assert torch.equal(result.sequence, plain(model, True))
    else:
        assert mark == LOSSY
        neutral = make_decoder(name, **NEUTRAL[name])
        result = run(model, neutral, greedy=True)
        assert torch.equal(result.sequence, plain(model, True))
        result = run(model, make_decoder(name), greedy=False)
    assert not result.stats.unfinished
    assert result.codes.shape == (2, *model.layout.grid)
    assert 0 <= int(result.codes.min()) <= int(result.codes.max()) < model.layout.vocab


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm-image"])
@pytest.mark.parametrize(
    ("name", "options"), [("mc-sjd", {"coupling": "gumbel-exact", "window": 7}), ("zipar", {"window": 1000})]
)
def test_same_seed_same_picture_as_plain(
    family: str, name: str, options: dict[str, Any], models: dict[str, HFImageModel]
) -> None:
    found = run(models[family], make_decoder(name, **options), greedy=False)
    assert torch.equal(found.sequence, plain(models[family], False))


@pytest.mark.parametrize("init", ["repeat_left", "repeat_above", "repeat_previous_frame", "sample_above"])
@pytest.mark.parametrize("family", ["lumina-mgpt", "glm-image"])
def test_window_initialisation(family: str, init: str, models: dict[str, HFImageModel]) -> None:
    """Neighbours on grids with row ends and with a preview."""
    result = run(models[family], make_decoder("mc-sjd", window=16, init=init), greedy=True)
    assert torch.equal(result.sequence, plain(models[family], True))
