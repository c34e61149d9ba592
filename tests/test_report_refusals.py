"""What ``visacc report`` refuses: folders without a run, damaged files, places it cannot write to."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_page import page_of

from visacc.cli import main
from visacc.report.page import build


def copy_with(run: Path, folder: Path, name: str, change: Any) -> Path:
    """A copy of a run whose JSON text went through ``change``."""
    shutil.copytree(run, folder)
    text = (folder / name).read_text()
    (folder / name).write_text(change(text))
    return folder


def edited(change: Any) -> Any:
    def apply(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return apply


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, args)])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("visacc: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_folders_that_hold_no_run(capsys: pytest.CaptureFixture[str], bench: Path, tmp_path: Path) -> None:
    out = tmp_path / "page" / "report.html"
    (tmp_path / "empty").mkdir()
    assert "is empty; expected decoders.json" in refused(capsys, tmp_path / "empty", "-o", out)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "package.json").write_text('{"name": "x"}')
    assert "holds no run of visacc" in refused(capsys, tmp_path / "foreign", "-o", out)
    assert "not a file that visacc writes" in refused(
        capsys, tmp_path / "foreign" / "package.json", "-o", out
    )
    assert "no run at" in refused(capsys, tmp_path / "nowhere", "-o", out)
    both = tmp_path / "both"
    shutil.copytree(bench, both)
    (both / "stats.json").write_text("{}")
    assert "holds several runs (decoders.json, stats.json)" in refused(capsys, both, "-o", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "decoders.json is not valid JSON (line"),
        (lambda text: "", "decoders.json is not valid JSON (line 1, column 1"),
        (lambda text: "[" * 100_000, "decoders.json is nested too deeply"),
        (lambda text: "[1, 2]", "is not a file that visacc writes"),
        (
            edited(lambda d: d["decoders"][0].pop("tau")),
            "is damaged or of another version of visacc: no 'tau'",
        ),
        (edited(lambda d: d["decoders"][0].update(steps="many")), "is damaged"),
        (edited(lambda d: d.update(decoders=3)), "is damaged"),
        (
            edited(lambda d: d["decoders"][0]["pictures"][0].update(file="../../x.png")),
            "outside of its folder",
        ),
        (
            edited(lambda d: d["decoders"][0]["pictures"][0].update(file="/etc/hosts")),
            "outside of its folder",
        ),
        (edited(lambda d: d["decoders"][0].update(commit_mean=[["1 2", "3"]])), "decoders.json"),
        (edited(lambda d: d["decoders"][0].update(commit_mean=[["1 x"]])), "decoders.json"),
    ],
)
def test_damaged_files(
    capsys: pytest.CaptureFixture[str], bench: Path, tmp_path: Path, change: Any, message: str
) -> None:
    run = copy_with(bench, tmp_path / "run", "decoders.json", change)
    assert message in refused(capsys, run, "-o", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_damaged_pictures(
    capsys: pytest.CaptureFixture[str], bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(bench, run)
    file = run / json.loads((run / "decoders.json").read_text())["decoders"][0]["pictures"][0]["file"]
    whole = file.read_bytes()
    for content in (b"no picture", whole[:60]):
        file.write_bytes(content)
        assert "00000.png is not a readable picture" in refused(capsys, run, "-o", tmp_path / "report.html")
    file.write_bytes(whole)
    monkeypatch.setattr("visacc.report.pictures.LARGEST", 10)
    assert "more than a report takes" in refused(capsys, run, "-o", tmp_path / "report.html")


def test_unfinished_evaluation(capsys: pytest.CaptureFixture[str], evaluation: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(evaluation, run)
    (run / "summary.json").unlink()
    assert "is not finished (no summary.json)" in refused(capsys, run, "-o", tmp_path / "report.html")


def test_runs_that_cannot_stand_together(
    capsys: pytest.CaptureFixture[str], bench: Path, generated: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    assert "only runs of visacc generate" in refused(capsys, bench, generated[0], "-o", out)
    other = copy_with(
        generated[1], tmp_path / "other", "stats.json", edited(lambda d: d.update(model="another"))
    )
    assert "different models" in refused(capsys, generated[0], other, "-o", out)
    assert "pictures must not be negative" in refused(capsys, bench, "--pictures", "-1", "-o", out)
    assert "at least 16 pixels" in refused(capsys, bench, "--side", "4", "-o", out)


def test_places_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is a folder; --out takes a file" in refused(capsys, bench, "-o", tmp_path)
    (tmp_path / "file").write_text("x")
    assert "cannot write" in refused(capsys, bench, "-o", tmp_path / "file" / "report.html")
    out = tmp_path / "report.html"
    out.write_text("earlier")

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert "No space left on device" in refused(capsys, bench, "-o", out)
    assert out.read_text() == "earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "report.html"]


def test_missing_packages(bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(RuntimeError, match=r"pip install 'visacc\[report\]'"):
        build([bench], tmp_path / "report.html")


def test_command_line(capsys: pytest.CaptureFixture[str], bench: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(bench), "-o", str(tmp_path / "new" / "report.html")])
    assert not stop.value.code
    assert "report written to" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]


NUMBERS = (None, True, -3, 1e400, float("nan"), 10**30)


JUNK: tuple[Any, ...] = (*NUMBERS, "x", "", "../..", [], {}, [[]], [None], {"a": 1}, ["1 2"])


def spoil(data: Any, draw: random.Random) -> Any:
    """One place of a JSON value removed or replaced by junk."""
    if not isinstance(data, (dict, list)) or not data or draw.random() < 0.12:
        return draw.choice(JUNK)
    key = draw.choice(list(data)) if isinstance(data, dict) else draw.randrange(len(data))
    if draw.random() < 0.12:
        del data[key]
    else:
        data[key] = spoil(data[key], draw)
    return data


@pytest.mark.parametrize("kind", ["bench", "eval", "generate"])
def test_spoiled_files_never_end_in_a_traceback(
    bench: Path,
    evaluation: Path,
    generated: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Either a page, whole and alone, or one error that names the run."""
    monkeypatch.setattr("visacc.report.figures._svg", lambda figure, name: "<svg></svg>")  # the slow part
    source, name = {
        "bench": (bench, "decoders.json"),
        "eval": (evaluation, "summary.json"),
        "generate": (generated[0], "stats.json"),
    }[kind]
    run = tmp_path / "run"
    shutil.copytree(source, run)
    whole = (run / name).read_text()
    errors = 0
    for seed in range(30):
        (run / name).write_text(json.dumps(spoil(json.loads(whole), random.Random(seed))))
        message = _error(run, tmp_path / "report.html")
        assert message is None or str(run) in message, seed
        errors += message is not None
    assert 3 < errors < 27


def _error(run: Path, out: Path) -> str | None:
    """What a report of the run is refused with, ``None`` if it is written."""
    try:
        page_of(run, out=out, pictures=1)
    except ValueError as error:
        return str(error)
    return None
