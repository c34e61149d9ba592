"""The scripts of the embedded LPD model: train, resume, export, load by name, figures, model card."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import visacc
from visacc.loading import known_models
from visacc.models.lpd import loading
from visacc.models.lpd.train import CLASS_NAMES, SHAPES_MODEL
from visacc.models.shapes.captions import sample

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
TINY = replace(SHAPES_MODEL, dim=32, depth=1, heads=2)
FIRST = 500


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data set, checkpoints of the model (halted and resumed) and its twin, exported weights of a tiny network."""
    folder = tmp_path_factory.mktemp("lpd")
    data = folder / "data"
    data.mkdir()
    codes = np.random.default_rng(0).integers(0, 512, (24, 256)).astype(np.uint16)
    np.save(data / "codes.npy", codes)
    (data / "captions.json").write_text(json.dumps([sample(FIRST + i).caption for i in range(24)]))
    module = script("train_lpd_shapes")
    module.SHAPES_MODEL = TINY  # type: ignore[attr-defined]

    def call(*words: Any) -> None:
        line = ["--folder", folder, "--threads", 1, *words]
        result = CliRunner().invoke(module.app, [str(w) for w in line], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    train = ["train", "--dataset", data, "--first-seed", FIRST, "--batch", 4]
    call(*train, "--steps", 2)
    first = torch.load(folder / "lpd.pt", weights_only=True)
    call(*train, "--steps", 3)
    second = torch.load(folder / "lpd.pt", weights_only=True)
    assert [first["step"], second["step"]] == [2, 3]
    call(*train, "--steps", 2, "--raster")
    call("export", "--out", folder / "assets", "--temperature", 0.8)
    with pytest.raises(ValueError, match="wrong --first-seed"):
        call("train", "--dataset", data, "--first-seed", FIRST + 1)
    return folder


def test_exported_weights_load_by_name(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "ASSETS", run_folder / "assets")
    assert "shapes-lpd" in known_models()
    pipe = visacc.load("shapes-lpd", decoder="lpd", steps=5, device="cpu")
    out = pipe(["red circle", CLASS_NAMES.index("red circle"), "a photo of two stars"], seed=[4, 4, 5])
    assert out.stats.nfe == 5
    assert out.images[0].size == (64, 64)
    assert torch.equal(out.codes[0], out.codes[1])  # a class by name is the class by number
    assert out.settings["sampling"]["temperature"] == 0.8
    with pytest.raises(ValueError, match="does not know"):
        pipe("a red dragon")
    with pytest.raises(ValueError, match=r"classes 0\.\.59"):
        pipe(60)


def test_missing_weights_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "ASSETS", tmp_path)
    assert "shapes-lpd" not in known_models()
    with pytest.raises(ValueError, match=r"train_lpd_shapes\.py"):
        visacc.load("shapes-lpd", decoder="lpd")


def test_figures_and_card(run_folder: Path) -> None:
    measure = script("eval_lpd_shapes")
    measure.main(
        per_task=1,
        per_class=1,
        scenes=20,
        steps=[4],
        guidance=None,
        temperature=None,
        heldout=False,
        plain=False,
        folder=run_folder,
        weights=run_folder / "assets" / "shapes-lpd.safetensors",
        batch=30,
        threads=1,
        out=run_folder / "figures.jsonl",
    )
    rows = [json.loads(line) for line in (run_folder / "figures.jsonl").read_text().splitlines()]
    assert [(row["run"], row["steps"]) for row in rows] == [
        ("shapes-lpd, 4 steps", 4),
        ("shapes-lpd, 4 steps, guidance growing as published", 4),
        ("raster twin", 256),
    ]
    for row in rows:
        assert len(row["tasks"]) == 6
        assert row["overall interval"][0] <= row["overall"] < row["overall interval"][1]
        assert row["class interval"][0] <= row["class accuracy"] < row["class interval"][1]
        assert row["distance interval"][0] < row["distance"] < row["distance interval"][1]
        assert (row["prompts"], row["classes"], row["scenes"]) == (6, 60, 20)
    module = script("train_lpd_shapes")
    line = ["--folder", str(run_folder), "--threads", "1", "card", "--out", str(run_folder / "assets")]
    result = CliRunner().invoke(module.app, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    text = (run_folder / "assets" / "README.md").read_text()
    assert f"| raster twin | 256 | {100 * rows[1]['overall']:.0f} (" in text
    assert "3 steps of 4 scenes" in text
    assert "less raster twin: tasks" in text
    assert max(map(len, text.split("| model |")[0].splitlines())) <= 125
