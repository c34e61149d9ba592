"""``visacc report``: what is on the page, that it is alone, and what it says about runs it cannot read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_page import page_of, pixels
from report_runs import bench_run, generate_run, score_file, video_run, vlm_run

from visacc.pictures import colourise
from visacc.report.model import Column, Number, mean_of, sweeps
from visacc.report.page import interval, number, plain
from visacc.report.read import load
from visacc.report.sources import address, sources
from visacc.traces import decode_grid, encode_grid, environment, spaced


# ---- what is on the page ----------------------------------------------------------------------------------
def test_bench(bench: Path, tmp_path: Path) -> None:
    data = json.loads((bench / "decoders.json").read_text())
    page = page_of(bench, out=tmp_path / "report.html")
    for d in data["decoders"]:
        assert d["label"] in page.text
        assert f"{d['steps']:.1f}" in page.text
        low, high = d["overall_interval"]
        assert f"{d['overall']:.3f} {low:.3f} to {high:.3f}" in page.text
    assert "eagle did not run: tiny comes without a drafter" in page.text
    assert len(page.all("figure", "plot")) == 3 + 4  # trade-offs, a histogram per decoder
    assert "arXiv 2510.24211" in page.text
    assert data["environment"]["torch"] in page.text
    assert "guidance scale" in page.text
    # four pictures per decoder, lossless, and the maps drawn from the recorded steps
    shown = page.all("img", "picture")[: 4 * 4]
    for i, p in enumerate(data["decoders"][0]["pictures"]):
        want = np.asarray(Image.open(bench / p["file"]).convert("RGB"))
        assert np.array_equal(pixels(shown[4 * i]["src"]), want)
    grid = decode_grid(data["decoders"][1]["pictures"][0]["commit_steps"])[0]
    heat = page.all("img", "heat")[1]
    assert np.array_equal(pixels(heat["src"]), colourise((grid - grid.min()) / (grid.max() - grid.min())))
    assert heat["data-last"] == str(int(grid.max()))
    files = [[(bench / p["file"]).read_bytes() for p in d["pictures"]] for d in data["decoders"]]
    assert files[1] == files[0]  # mc-sjd draws the pictures of ar
    equal = [a == b for other in files[1:] for a, b in zip(files[0], other, strict=True)]
    assert [t.strip() for t in page.texts].count("as ar") == sum(equal) < len(equal)


def test_bench_records_what_happened(bench: Path) -> None:
    """The run's own file: lengths, order and intervals agree with the steps."""
    data = json.loads((bench / "decoders.json").read_text())
    for d in data["decoders"]:
        tokens = sum(n * count for n, count in enumerate(d["committed_histogram"]))
        assert tokens == data["images"] * (16 - 1)  # all but the prompt's own token
        assert tokens / sum(d["committed_histogram"]) == pytest.approx(d["tau"])
        low, high = d["steps_interval"]
        assert low <= d["steps"] <= high
        for p in d["pictures"]:
            grid = decode_grid(p["commit_steps"])
            assert grid.shape == (1, 4, 4)
            assert grid.max() == p["steps"]
            assert grid.min() == 1
        assert decode_grid(d["commit_mean"]).shape == (1, 4, 4)
    plain = data["decoders"][0]
    assert decode_grid(plain["commit_mean"]).ravel().tolist() == list(range(1, 17))
    assert {p["seed"] for p in plain["pictures"]} == {p["seed"] for p in data["decoders"][2]["pictures"]}


def test_bench_without_judge(tmp_path: Path) -> None:
    run = bench_run(tmp_path / "bench", judged=False)
    page = page_of(run / "decoders.json", out=tmp_path / "report.html", pictures=2)
    assert "task score" not in page.text
    assert "Fréchet to ar" in page.text
    assert len(page.all("article", "item")) == 2
    assert not page_of(run, out=tmp_path / "none.html", pictures=0).all("article", "item")


def test_evaluation(evaluation: Path, tmp_path: Path) -> None:
    summary = json.loads((evaluation / "summary.json").read_text())
    page = page_of(evaluation, out=tmp_path / "report.html")
    for row in summary["rows"]:
        assert row["name"] in page.text
        assert f"{row['speed']['steps']:.1f}" in page.text
        for s in row["scores"]:
            assert s["protocol_id"] in page.text
            assert f"{s['value']:.4g}".replace("-", "−") in page.text
    assert "Paired difference from ar" in page.text
    assert "Task scores" in page.text
    assert len(page.all("article", "item")) == 6
    assert len(page.all("figure", "order")) == 3
    assert page.text.count("as ar") >= 12  # the default coupling, two windows
    assert "arXiv 2310.11513" in page.text
    report = load([evaluation])
    assert [m.lossless for m in report.methods] == [True] * 3
    assert [p.short for p in report.plots[0].points] == ["", "3", "6"]
    assert report.environment["torch"] == environment()["torch"]
    assert sum(report.methods[0].histogram) == 6 * 15


def test_evaluation_without_its_folders(evaluation: Path, tmp_path: Path) -> None:
    """The summary alone still makes a page; what is gone is said."""
    (tmp_path / "run").mkdir()
    shutil.copy(evaluation / "summary.json", tmp_path / "run")
    page = page_of(tmp_path / "run", out=tmp_path / "report.html")
    assert "ar: its folder is gone" in page.text
    assert not page.all("article")


def test_generated_side_by_side(generated: list[Path], tmp_path: Path) -> None:
    page = page_of(*generated, out=tmp_path / "report.html", title="Two decoders")
    assert page.all("title")
    assert "Two decoders" in page.text
    assert len(page.all("article", "item")) == 4
    assert page.text.count("as ar") == 4
    records = [json.loads((run / "stats.json").read_text()) for run in generated]
    for record in records:
        assert f"{record['stats']['mean_steps']:.1f}" in page.text
    alone = page_of(generated[1], out=tmp_path / "one.html")
    assert "as ar" not in alone.text
    assert [o["value"] for o in alone.all("option")].count("mean") == 1


def test_generate_keeps_the_order_of_the_first_pictures(
    generated: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("visacc.generate_files.TRACED", 1)
    model = generated[0].parent / "model"
    few = generate_run(tmp_path / "few", model, "ar")
    every = generate_run(tmp_path / "every", model, "ar", "--trace")
    counts = [
        sum("commit_steps" in i for i in json.loads((run / "stats.json").read_text())["images"])
        for run in (few, every)
    ]
    assert counts == [1, 4]


def test_same_names_are_told_apart(generated: list[Path], tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(generated[0], twin)
    report = load([generated[0], twin])
    assert [m.label for m in report.methods] == ["ar [ar]", "ar [twin]"]
    with pytest.raises(ValueError, match="given twice"):
        load([generated[0], generated[0]])


def test_other_sampling_is_remarked(generated: list[Path], tmp_path: Path) -> None:
    other = generate_run(
        tmp_path / "hot", generated[0].parent / "model", "ar", "--temperature", "0.5", "--seed", "9"
    )
    page = page_of(generated[0], other, out=tmp_path / "report.html")
    assert "differ in their sampling settings" in page.text
    assert "share no prompt with the same seed" in page.text
    assert "1.0, 0.5" in page.text


def test_speculators(tmp_path: Path) -> None:
    file = vlm_run(tmp_path / "vlm.json")
    data = json.loads(file.read_text())
    page = page_of(file, out=tmp_path / "report.html")
    for row in data["rows"]:
        if "failed" in row:
            assert f"does not run with this model: {row['failed']}"[:80] in page.text
            continue
        assert f"{row['method']}, T={row['temperature']:g}" in page.text
        if "tau" in row:
            histogram = row["committed_histogram"]
            committed = sum(n * count for n, count in enumerate(histogram))
            assert committed == row["tokens"] - data["pictures"]
            assert committed / sum(histogram) == pytest.approx(row["tau"])
            low, high = row["tokens_per_second_range"]
            assert low <= row["tokens_per_second"] <= high
    assert not page.all("article")
    assert page_of(tmp_path, out=tmp_path / "by-folder.html").text == page.text


def test_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = video_run(tmp_path / "run", monkeypatch)
    page = page_of(run, out=tmp_path / "report.html")
    record = json.loads((run / "stats.json").read_text())
    assert f"{record['stats']['mean_steps']:.1f}" in page.text
    sheet = np.asarray(Image.open(run / "frames.png").convert("RGB"))
    assert len(page.all("figure", "sheet")) == 1
    assert pixels(page.all("img")[0]["src"]).shape == sheet.shape


def test_score_files(generated: list[Path], tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for i in range(4):
        shutil.copy(generated[0] / f"00{i}.png", images)
    file = score_file(tmp_path / "scores.json", images)
    page = page_of(file, out=tmp_path / "report.html")
    score = json.loads(file.read_text())[0]
    assert score["protocol_id"] in page.text
    assert all(w in page.text for w in score["warnings"])


def test_files_of_earlier_versions(
    bench: Path, evaluation: Path, generated: list[Path], tmp_path: Path
) -> None:
    """Without order, lengths, pictures and environment the table and the plots remain."""
    old = tmp_path / "old"
    old.mkdir()
    data = json.loads((bench / "decoders.json").read_text())
    new = {"steps_interval", "committed_histogram", "commit_mean", "pictures"}
    data["decoders"] = [{k: v for k, v in d.items() if k not in new} for d in data["decoders"]]
    del data["environment"]
    (old / "decoders.json").write_text(json.dumps(data))
    page = page_of(old, out=tmp_path / "report.html")
    assert len(page.all("figure", "plot")) == 3
    assert data["device"] in page.text
    run = tmp_path / "generated"
    shutil.copytree(generated[0], run)
    record = json.loads((run / "stats.json").read_text())
    del record["environment"]
    for image in record["images"]:
        del image["commit_steps"]
    (run / "stats.json").write_text(json.dumps(record))
    page = page_of(run, out=tmp_path / "generated.html")
    assert len(page.all("article", "item")) == 4
    assert not page.all("figure", "order")


def test_hostile_texts_stay_texts(generated: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(generated[0], run)
    record = json.loads((run / "stats.json").read_text())
    bad = "</script></style><script>alert(1)</script>\"' onload=x <img src=http://x.example/> $a_b$ \ud800"
    record["model"] = record["decoder"] = bad
    record["decoder_options"] = {bad: bad}
    for image in record["images"]:
        image["prompt"] = bad
    (run / "stats.json").write_text(json.dumps(record))
    page = page_of(run, out=tmp_path / "report.html")
    assert len(page.all("script")) == 1
    assert "<script>alert(1)</script>" in page.text
    assert not [a for _, a in page.elements if "onload" in a]


def test_hostile_labels_in_plots(bench: Path, tmp_path: Path) -> None:
    data = json.loads((bench / "decoders.json").read_text())
    for i, d in enumerate(data["decoders"]):
        d["label"] = f"<script>alert({i})</script> $x_{{{i}}}$ & 'q' \""
    run = tmp_path / "run"
    shutil.copytree(bench, run)
    (run / "decoders.json").write_text(json.dumps(data))
    page = page_of(run, out=tmp_path / "report.html")
    assert len(page.all("script")) == 1
    assert page.text.count("<script>alert(0)</script> $x_{0}$ & 'q' \"") > 3


def test_missing_and_large_pictures(bench: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(bench, run)
    data = json.loads((run / "decoders.json").read_text())
    (run / data["decoders"][1]["pictures"][0]["file"]).unlink()
    big = run / data["decoders"][0]["pictures"][0]["file"]
    Image.effect_noise((600, 300), 50).convert("RGB").save(big)
    page = page_of(run, out=tmp_path / "report.html", side=200)
    assert "1 picture files of this run are missing" in page.text
    first = page.all("img", "picture")[0]["src"]
    assert first.startswith("data:image/webp")
    assert pixels(first).shape == (100, 200, 3)


# ---- parts ------------------------------------------------------------------------------------------------
def test_grids_survive_their_text() -> None:
    steps = torch.arange(24).reshape(2, 3, 4)
    assert encode_grid(steps)[1][0] == "12 13 14 15"
    assert np.array_equal(decode_grid(encode_grid(steps)), steps.numpy())
    assert encode_grid(torch.tensor([[[1.25, 2.0]]])) == [["1.2 2.0"]]
    for bad in ([], [[]], [["1 2", "3"]], [["nan"]], [["-1"]], [["x"]], [[3]], 3, "12"):
        with pytest.raises(ValueError, match="a grid of steps is a list of frames"):
            decode_grid(bad)
    assert spaced(10, 3) == [0, 4, 9]
    assert spaced(2, 5) == [0, 1]
    assert spaced(0, 5) == spaced(5, 0) == []


def test_numbers_as_text() -> None:
    column = Column("x", ".2f", "x")
    assert number(1.234, column) == "1.23x"
    assert number(-1.0, column) == "−1.00x"
    assert number(None, column) == "–"
    assert number(float("inf"), column) == "∞"
    assert number(float("nan"), column) == "not a number"
    assert number(3.0, Column("n", "d")) == "3"
    assert interval(Number(1, 0.5, 2), column) == "0.50x to 2.00x"
    assert interval(Number(1, spread=0.25), column) == "± 0.25"
    assert interval(Number(1), column) == ""
    mean = mean_of([1, 2, 3, 4])
    assert mean.value == 2.5
    assert mean.high == pytest.approx(2.5 + 1.96 * np.std([1, 2, 3, 4], ddof=1) / 2)
    assert mean_of([]).value is None
    assert mean_of([2, 2, 2]) == Number(2.0)
    assert plain({"a": [1, True, None], "b": "c"}) == "a=1, yes, none, b=c"


def test_groups_of_a_sweep() -> None:
    entries = [
        ("ar", {}),
        ("gsd", {"g": 3, "w": 1}),
        ("gsd", {"g": 9, "w": 1}),
        ("x", {"r": "a"}),
        ("x", {"r": "b"}),
    ]
    assert sweeps(entries, list("abcde")) == [("a", ""), ("gsd", "3"), ("gsd", "9"), ("d", ""), ("e", "")]


def test_sources() -> None:
    found = dict(
        sources(["ar", "mc-sjd", "out/msd", "nowhere"], "llamagen-t2i-xl-512", ["geneval", "fid (2)"])
    )
    assert found == {
        "mc-sjd": ("2510.24211",),
        "out/msd": ("2505.14260",),
        "llamagen-t2i-xl-512": ("2406.06525",),
        "geneval": ("2310.11513",),
        "fid (2)": ("1706.08500",),
    }
    assert address("2410.01699") == "https://arxiv.org/abs/2410.01699"
    assert address("https://example.org") == "https://example.org"
    assert address("javascript:alert(1)") == ""
    from visacc.registry import decoder_entries
    from visacc.report.sources import DECODERS

    assert {e.name for e in decoder_entries() if e.package == "visacc"} - set(DECODERS) == {"ar", "nc-sjd"}


def test_sources_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from visacc.decoders import AR
    from visacc.registry import DecoderEntry

    class Mine(AR):
        name, sources = "mine", ("2401.00001", "https://example.org/mine")

    monkeypatch.setattr("visacc.registry.decoder_entry", lambda name: DecoderEntry(name, Mine, "mine"))
    assert sources(["mine"], "", []) == [("mine", ("2401.00001", "https://example.org/mine"))]
