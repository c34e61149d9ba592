"""``visacc train drafter --method ...``: from a file of rows to a drafter, online, from stored features, in two stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from visacc.cli import main
from visacc.models.vlm.captioner import build_model, build_processor
from visacc.models.vlm.scenes import draw_scene, picture
from visacc.speculate import train_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A captioner with random weights, and rows: three with pictures, three without, one held out."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("vlm")
    build_model().save_pretrained(folder / "model")
    build_processor().save_pretrained(folder / "model")
    rows: list[dict[str, Any]] = []
    for i in range(3):
        Image.fromarray(picture(draw_scene(i))).save(folder / f"{i}.png")
        rows.append({"image": f"{i}.png", "prompt": "describe the image ."})
        rows.append({"prompt": "red .", "image": None})
    rows.append(rows[0])
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "model", folder / "train.jsonl"


def train(data: tuple[Path, Path], out: Path, method: str, *more: str) -> int:
    model, rows = data
    line = [
        "train",
        "drafter",
        "--method",
        method,
        "--target",
        str(model),
        "--data",
        str(rows),
        "--out",
        str(out),
    ]
    line += [
        "--device",
        "cpu",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--held-out",
        "1",
        "--max-new-tokens",
        "6",
    ]
    with pytest.raises(SystemExit) as stop:
        main([*line, *more])
    return int(str(stop.value.code))


def test_stored_features(data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written once with their target, read afterwards without it; the drafter learns the same from them."""
    assert train(data, tmp_path / "online", "eagle") == 0
    store = ["--store", str(tmp_path / "store")]
    assert train(data, tmp_path / "first", "eagle", *store) == 0
    assert json.loads((tmp_path / "store" / "header.json").read_text())["samples"] == 6
    monkeypatch.setattr(train_run, "_harvested", lambda *a: pytest.fail)
    assert train(data, tmp_path / "second", "eagle", *store) == 0
    states = [
        torch.load(tmp_path / run / "state.pt", weights_only=True)["drafter"]
        for run in ("online", "first", "second")
    ]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-4, rtol=1e-3)
        assert torch.equal(states[1][name], states[2][name])


def test_store_of_other_rows(
    data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "store")]
    assert train(data, tmp_path / "run", "msd", *store, "--steps", "0") == 0
    assert train(data, tmp_path / "run", "msd", *store, "--held-out", "2") == 2
    assert "holds features of 6 rows, 5 are to be trained on" in capsys.readouterr().err
    assert train(data, tmp_path / "dream", "dream", *store) == 2
    assert "lacks the intermediate states" in capsys.readouterr().err


def test_a_store_is_written_by_one_process(
    data: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_run, "several", lambda: True)
    assert train(data, tmp_path / "run", "msd", "--store", str(tmp_path / "store")) == 2
    assert "let one process write them" in capsys.readouterr().err


def test_two_stages_of_msd() -> None:
    """Texts alone in the first half, pictures alone at the end; other methods mix from the start."""
    rows = [{"prompt": "", "image": "a.png" if i % 2 else None} for i in range(8)]
    asked: list[list[int]] = []
    features: Any = lambda numbers: asked.append(list(numbers))  # noqa: E731
    batch = train_run._batches(features, rows, 2, "msd", 400)
    for number in range(400):
        batch(number)
    kinds = [{i % 2 for i in numbers} for numbers in asked]
    assert kinds[:200] == [{0}] * 200
    assert kinds[-10:] == [{1}] * 10
    assert sorted(asked[0] + asked[1]) == [0, 2, 4, 6]
    asked.clear()
    batch = train_run._batches(features, rows, 2, "eagle", 400)
    assert sorted(i for n in range(4) for i in (batch(n), asked[n])[1]) == list(range(8))


def test_deep_targets_show_dream_their_attention(
    data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DREAM chooses among layers by their attention maps, which need eager attention: the command switches it on."""
    monkeypatch.setattr(train_run, "candidate_layers", lambda n: (1, 2))
    monkeypatch.setattr("visacc.speculate.harvest.candidate_layers", lambda n: (1, 2))
    assert train(data, tmp_path / "run", "dream") == 0


def test_image_drafters_keep_their_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "drafter", "--prompts", str(tmp_path / "no.txt"), "-o", str(tmp_path)])
    assert stop.value.code == 2
    assert "no.txt does not exist" in capsys.readouterr().err
