"""Every decoder on every family of next-token models: what the matrix of ``visacc list --matrix`` says is what happens."""

from __future__ import annotations

from typing import Any

import hf_tiny
import pytest
import torch
from tiny import tiny_llamagen

from visacc.cli import main
from visacc.drafters import DrafterConfig, EagleNetwork
from visacc.engine import DecodeResult, decode
from visacc.integrations.matrix import DRAFTER, EXACT, LOSSY, NO, adapter_class, matrix
from visacc.models.base import ImageModel
from visacc.models.hf import GlmImage, load_hf
from visacc.models.hf.glm_image import PreviewLayout
from visacc.models.llamagen import LlamaGen
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams

FAMILIES = ("llamagen", *hf_tiny.BUILDERS)
MARKS = matrix()
PAIRS = [(family, name, mark) for family in FAMILIES for name, mark in MARKS[family].items()]
# settings at which a lossy decoder is plain decoding, with greedy or seeded sampling
NEUTRAL: dict[str, dict[str, Any]] = {
    "zipar": {"window": 1000},
    "gsd": {"group_size": 1, "window": 8},
    "pjd": {"context": 1000},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageModel]:
    root = tmp_path_factory.mktemp("matrix")
    found: dict[str, ImageModel] = {"llamagen": tiny_llamagen(grid=4)}
    found |= {name: load_hf(build(root / name)) for name, build in hf_tiny.BUILDERS.items()}
    glm = found["glm-image"]
    assert isinstance(glm, GlmImage)
    # a real preview has about 256 codes; nine do here
    found["glm-image"] = glm.with_layout(PreviewLayout((1, 4, 3), hf_tiny.CODES, preview=(3, 3)))
    return found


def run(model: ImageModel, decoder: Any, greedy: bool, seeds: tuple[int, int] = (3, 4)) -> DecodeResult:
    scale = 1.0 if isinstance(model, GlmImage) else 2.5
    prompts = [3, 7] if isinstance(model, LlamaGen) else ["a red circle", "two"]
    sampling = SamplingParams(scale, temperature=0) if greedy else SamplingParams(scale, top_k=12)
    return decode(model, decoder, model.encode(prompts), sampling, list(seeds))


_PLAIN: dict[tuple[str, bool], torch.Tensor] = {}


def plain(model: ImageModel, greedy: bool) -> torch.Tensor:
    key = (model.name, greedy)
    if key not in _PLAIN:
        _PLAIN[key] = run(model, make_decoder("ar"), greedy).sequence
    return _PLAIN[key]


def test_rows_are_the_families() -> None:
    assert set(FAMILIES) == set(MARKS)
    for family in FAMILIES[1:]:
        assert adapter_class(family).family == family  # type: ignore[attr-defined]
        assert {"ar", "sjd", "mc-sjd"} <= {d for d, mark in MARKS[family].items() if mark == EXACT}


def test_command_line_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(["list", "--matrix"])
    assert stop.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    printed = {line[0]: line[1:] for line in lines if line and line[0] in MARKS["janus"]}
    assert printed == {d: [MARKS[f][d] for f in MARKS] for d in MARKS["janus"]}


@pytest.mark.parametrize(("family", "name", "mark"), PAIRS)
def test_pair(family: str, name: str, mark: str, models: dict[str, ImageModel]) -> None:
    model = models[family]
    if mark == NO:
        with pytest.raises(ValueError, match=r"requires|cannot be driven|without forced slots|drafter"):
            make_decoder(name).check(model)
        return
    if mark == DRAFTER:
        with pytest.raises(ValueError, match="without a drafter"):
            make_decoder(name).check(model)
        return
    assert mark in (EXACT, LOSSY)
    options = {} if mark == EXACT else NEUTRAL[name]
    result = run(model, make_decoder(name, **options), greedy=True)
    assert torch.equal(result.sequence, plain(model, True))
    if mark == LOSSY:
        result = run(model, make_decoder(name), greedy=False)
    assert not result.stats.unfinished
    assert result.codes.shape == (2, *model.layout.grid)
    assert 0 <= int(result.codes.min()) <= int(result.codes.max()) < model.layout.vocab


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm-image"])
@pytest.mark.parametrize(
    ("name", "options"), [("mc-sjd", {"coupling": "gumbel-exact", "window": 7}), ("zipar", {"window": 1000})]
)
def test_same_seed_same_picture_as_plain(
    family: str, name: str, options: dict[str, Any], models: dict[str, ImageModel]
) -> None:
    found = run(models[family], make_decoder(name, **options), greedy=False)
    assert torch.equal(found.sequence, plain(models[family], False))


@pytest.mark.parametrize("init", ["repeat_left", "repeat_above", "repeat_previous_frame", "sample_above"])
@pytest.mark.parametrize("family", ["lumina-mgpt", "glm-image"])
def test_window_initialisation(family: str, init: str, models: dict[str, ImageModel]) -> None:
    """Neighbours on grids with row ends and with a preview."""
    result = run(models[family], make_decoder("mc-sjd", window=16, init=init), greedy=True)
    assert torch.equal(result.sequence, plain(models[family], True))


DRAFTED = [
    ("eagle", {"rule": "gumbel-exact", "tree": "3x2"}),
    ("eagle", {"tree": "chain-3"}),
    ("lantern", {"delta": 0.0, "k": 4, "tree": "chain-3"}),
    ("lantern++", {"lam": 1.0, "k": 4, "tree": "chain-3"}),
]


def test_every_drafter_mark_is_run() -> None:
    marked = {(f, d) for f in FAMILIES for d, mark in MARKS[f].items() if mark == DRAFTER}
    assert marked == {(f, d) for f in ("llamagen", "janus") for d, _ in DRAFTED}


@pytest.mark.parametrize("family", ["llamagen", "janus"])
@pytest.mark.parametrize(("name", "options"), DRAFTED)
def test_drafted_trees(
    family: str, name: str, options: dict[str, Any], models: dict[str, ImageModel]
) -> None:
    """A random drafter (for prompts of this length) on the adapter's features; plain decoding's tokens."""
    model = models[family]
    prompt = 1 if family == "llamagen" else model.encode(["a red circle", "two"]).data["ids"].shape[1]
    torch.manual_seed(0)
    config = DrafterConfig("llamagen", 32, 64, 4, model.layout.vocab, prefix=prompt, grid=4)
    network = EagleNetwork(config)
    decoder = make_decoder(name, drafter=network, **options)
    decoder.check(model)
    seeded = options.get("rule") == "gumbel-exact"
    result = run(model, decoder, greedy=not seeded)
    assert torch.equal(result.sequence, plain(model, not seeded))
