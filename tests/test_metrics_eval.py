"""Evaluation runs with a stand-in pipeline: refusals, summaries, what a run leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from eval_runs import (
    METRICS,
    TOTAL,
    ColourGrid,
    config,
    fingerprints,
)

from visacc.eval import lock
from visacc.eval.config import expand
from visacc.eval.files import read_json, write_atomic
from visacc.eval.generate import image_seed
from visacc.eval.run import run
from visacc.eval.world import World


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "out"
    run(config(output), world=World(), quiet=True)
    return output


def test_a_run_leaves_everything_needed(undisturbed: Path) -> None:
    summary = read_json(undisturbed / "summary.json")
    assert [r["name"] for r in summary["rows"]] == ["good", "sloppy"]
    good, sloppy = ({s["protocol"]["metric"]: s for s in r["scores"]} for r in summary["rows"])
    assert {"fd", "kid", "is", "precision", "recall", "density", "coverage", "geneval"} <= set(good)
    assert good["geneval"]["value"] > 0.95  # true scenes; the detector is exact on them
    assert sloppy["geneval"]["value"] < good["geneval"]["value"] - 0.2
    assert summary["rows"][0]["paired"] == {}
    assert summary["rows"][1]["paired"]["geneval"]["ci"][1] < 0
    assert good["fd"]["ci"][0] < good["fd"]["value"] < good["fd"]["ci"][1]
    assert good["fd"]["protocol_id"] == sloppy["fd"]["protocol_id"]
    assert good["fd"]["protocol"]["n_ref"] == 30
    text = (undisturbed / "summary.md").read_text()
    caption = text.splitlines()[0]
    assert "one after the other" in caption
    assert "`visacc bench decoders`" in caption
    assert "| speed-up, not interleaved |" in text
    assert f"| good | {TOTAL} |" in text
    assert good["fd"]["protocol_id"] in text
    rows = [
        row for p in sorted((undisturbed / "good" / "chunks").glob("*")) for row in read_json(p)["images"]
    ]
    assert [row["seed"] for row in rows] == [image_seed(5, i) for i in range(TOTAL)]
    assert all(row["steps"] == 10 + row["seed"] % 7 for row in rows)
    first = undisturbed / "good" / rows[0]["file"]
    assert rows[0]["sha256"] == hashlib.sha256(first.read_bytes()).hexdigest()
    results = next((undisturbed / "good").glob("geneval-*/results.jsonl")).read_text().splitlines()
    assert len(results) == TOTAL
    assert set(json.loads(results[0])) == {
        "filename",
        "tag",
        "prompt",
        "correct",
        "reason",
        "metadata",
        "details",
    }


def test_running_again_does_nothing(undisturbed: Path) -> None:
    before, built = fingerprints(undisturbed), ColourGrid.built

    def never(*args: Any) -> Any:
        raise AssertionError("a finished run must not load the model")

    run(config(undisturbed), world=World(), quiet=True, build=never)
    assert fingerprints(undisturbed) == before
    assert ColourGrid.built == built


def test_changed_settings_are_refused(undisturbed: Path) -> None:
    before = fingerprints(undisturbed)
    for change, named in (
        ({"seed": 6}, "seed: 5 -> 6"),
        ({"batch_size": 3}, "batch_size: 4 -> 3"),
        ({"limit": 5}, "prompts_digest"),
        ({"decoders": {"good": {"decoder": "a", "pause": 0.001}}}, "decoder_options"),
        ({"sampling": {"temperature": 0.5}}, "sampling"),
    ):
        with pytest.raises(ValueError, match="other settings") as error:
            run(config(undisturbed, **change), world=World(), quiet=True)
        assert named in str(error.value)
    assert fingerprints(undisturbed) == before


def test_new_cells_and_metrics_join_an_old_run(undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    decoders = {"good": {"decoder": "a"}, "third": {"decoder": "c", "wrong": 0.2}}
    metrics = [*METRICS, {"metric": "mind", "extractor": "colour-grid", "reference": "shapes:30", "batch": 8}]
    rows = run(config(output, decoders=decoders, metrics=metrics), world=World(), quiet=True)
    assert [r.name for r in rows] == ["good", "third"]
    assert "mind" in {s.name for s in rows[1].scores}


def test_damaged_images_are_made_again(undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    images = sorted((output / "good" / "images").rglob("*.png"))
    images[3].write_bytes(images[3].read_bytes()[:100])
    images[17].unlink()
    run(config(output), world=World(), quiet=True)
    assert fingerprints(output) == fingerprints(undisturbed)


def test_one_run_per_folder(tmp_path: Path) -> None:
    with (
        lock.claim(tmp_path / "out", World()),
        pytest.raises(ValueError, match=f"another run is working in .*process {os.getpid()}"),
        lock.claim(tmp_path / "out", World(), patience=0.0),
    ):
        pass
    with lock.claim(tmp_path / "out", World(), patience=0.0):
        pass  # free again


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    def broken(part: Path) -> None:
        part.write_text("half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_atomic(tmp_path / "a.json", broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": ["fd"]}, "needs `reference`"),
        ({"metrics": ["fidd"]}, "unknown metric 'fidd'"),
        ({"metrics": [{"metric": "fd", "reference": "shapes:4", "extractr": "x"}]}, "unknown key 'extractr'"),
        (
            {"metrics": [{"metric": "kid", "reference": "shapes:4"}]},
            "subsets of 1000 images, this run makes 24",
        ),
        ({"prompts": "labels:10", "metrics": ["geneval"]}, "no clauses|has none"),
        ({"prompts": "labels:10", "metrics": ["clip"]}, "class labels"),
        ({"limit": 1, "samples_per_prompt": 1}, "at least 2 images"),
        ({"prompts": "nowhere.txt"}, "no prompt file"),
    ],
)
def test_impossible_requests_fail_before_generating(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(config(tmp_path / "out", **change), world=World(), quiet=True)
    assert not (tmp_path / "out" / "good").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {}}, "unknown key 'decoder'"),
        ({"decoders": []}, "no decoders"),
        ({"decoders": {"a": 3}}, "needs `decoder: NAME`"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"baseline": "nobody"}, "is none of the cells"),
        ({"model": "x"}, "either `model` or `pipeline`"),
        ({"decoders": ["ar", "ar"]}, "two decoder entries"),
    ],
)
def test_bad_configurations(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **change)


def test_grid_of_options() -> None:
    cells = expand([{"decoder": "mc-sjd", "window": [8, 16], "coupling": "maximal"}, "ar"])
    assert [c.name for c in cells] == [
        "mc-sjd-window=8-coupling=maximal", "mc-sjd-window=16-coupling=maximal", "ar"
    ]  # fmt: skip
    assert cells[1].options == {"window": 16, "coupling": "maximal"}
    named = expand({"jacobi": {"decoder": "sjd", "window": [4, 8]}})
    assert [c.name for c in named] == ["jacobi-window=4", "jacobi-window=8"]


def test_nan_features_name_the_images(tmp_path: Path) -> None:
    metrics = [{"metric": "fd", "extractor": "colour-grid", "extractor_options": {"poison": True},
                "reference": "shapes:4", "batch": 8}]  # fmt: skip
    with pytest.raises(ValueError, match=r"NaN or infinite features for images 0\.\.7"):
        run(config(tmp_path / "out", metrics=metrics), world=World(), quiet=True)


def test_progress_lines_estimate_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    from visacc.eval.progress import Lines, _clock

    line = Lines("generate x", total=100, start=40, interval=0.0)
    line.begun -= 10  # ten seconds ago
    line(60)
    shown = capsys.readouterr().err
    assert shown.startswith("generate x: 60/100, 2.0")
    assert "0:00:2" in shown  # 40 left at 2 per second: the 40 of an earlier run do not count
    assert _clock(3725) == "1:02:05"
