"""CaptionPipeline and ``visacc caption`` on an untrained model of the embedded captioner's shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner
from vlm_tiny import save_untrained_captioner

from visacc.models.vlm.captioner import build_processor
from visacc.models.vlm.scenes import caption, draw_scene, mirrored, picture, sample
from visacc.speculate.cli import app
from visacc.speculate.pipeline import CaptionPipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_untrained_captioner(path)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("pictures")
    files = []
    for i in range(3):
        files.append(path / f"{i}.png")
        Image.fromarray(picture(draw_scene(i))).save(files[-1])
    broken = tmp_path_factory.mktemp("broken") / "broken.png"
    broken.write_bytes(b"no picture")
    return [*files, broken]


def test_rows_fail_alone(folder: Path, pictures: list[Path]) -> None:
    """An unreadable and a missing file fail with their names; text-only and two-picture rows share the
    batch.
    """
    pipeline = CaptionPipeline(str(folder), speculator="ngram", device="cpu")
    first, second, _, broken = pictures
    rows = [first, broken, None, [first, second], "nowhere.png", Image.open(second)]
    done = pipeline(rows, "describe the image .", batch_size=6, max_new_tokens=8)
    assert [c.error is None for c in done] == [True, False, True, True, False, True]
    assert "broken.png" in str(done[1].error)
    assert "nowhere.png: no such file" in str(done[4].error)
    alone = pipeline([first], "describe the image .", max_new_tokens=8)
    assert alone[0].text == done[0].text
    assert done[0].tokens == 8
    assert done[5].source == "#5"


def test_placeholders_must_match(folder: Path, pictures: list[Path]) -> None:
    pipeline = CaptionPipeline(str(folder), speculator=None, device="cpu")
    rows = pipeline(
        [pictures[0], pictures[1]], ["<image> <image> describe .", "describe ."], max_new_tokens=4
    )
    assert "2 image placeholders" in str(rows[0].error)
    assert rows[1].error is None
    with pytest.raises(ValueError, match="2 images but 1 prompts"):
        pipeline([pictures[0], pictures[1]], ["describe ."])


def test_stop_strings(folder: Path, pictures: list[Path]) -> None:
    pipeline = CaptionPipeline(str(folder), speculator="ngram", device="cpu")
    full = pipeline([pictures[0]], "describe the image .", max_new_tokens=12)[0].text
    assert full is not None
    word = full.split()[3]
    cut = pipeline([pictures[0]], "describe the image .", max_new_tokens=12, stop_strings=(word,))[0].text
    assert cut is not None
    assert full.startswith(cut)
    assert cut.split()[-1] == word
    assert len(cut.split()) <= 4


def test_command_line(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    """JSONL out, failures reported, and a second run only answers what is missing."""
    out = tmp_path / "captions.jsonl"
    options = ["-m", str(folder), "-o", str(out), "--max-new-tokens", "6", "--no-progress", "--device", "cpu"]
    files = [str(p) for p in pictures]
    first = CliRunner().invoke(app, ["caption", *files[:2], *options])
    assert first.exit_code == 0, first.output
    second = CliRunner().invoke(app, ["caption", *files, *options])
    assert second.exit_code == 1  # one picture is broken
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["image"] for r in rows] == [*files[:2], *files[2:]]
    assert "error" in rows[-1]
    assert all(r["tokens"] == 6 for r in rows[:-1])


def test_a_resumed_file_is_the_uninterrupted_one(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    """Sampled answers belong to a picture's place in the list, not to what was left; other settings are refused."""
    files = [str(p) for p in pictures[:2]]
    options = [
        "-m",
        str(folder),
        "--max-new-tokens",
        "6",
        "-q",
        "--device",
        "cpu",
        "--temperature",
        "1",
        "--stop",
        "@@",
    ]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert CliRunner().invoke(app, ["caption", *files, *options, "-o", str(whole)]).exit_code == 0
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    parts.write_text(lines[0])
    whole.with_name("whole.jsonl.settings.json").rename(tmp_path / "parts.jsonl.settings.json")
    assert CliRunner().invoke(app, ["caption", *files, *options, "-o", str(parts)]).exit_code == 0
    assert parts.read_text() == "".join(lines)
    for other in (["--temperature", "0.5"], ["--seed", "3"], ["-s", "none"]):
        refused = CliRunner().invoke(app, ["caption", *files, *options, "-o", str(parts), *other])
        assert "made with other settings" in str(refused.exception)
        assert parts.read_text() == "".join(lines)


def test_scenes_and_captions() -> None:
    """Captions are functions of the scene, test scenes hold unseen combinations, mirroring mirrors."""
    train = {frozenset((o.shape, o.colour) for o in draw_scene(i).objects) for i in range(60)}
    test = {frozenset((o.shape, o.colour) for o in draw_scene(i, True).objects) for i in range(30)}
    assert not {s for s in train if len(s) > 1} & {s for s in test if len(s) > 1}
    scene = draw_scene(4)
    flipped = picture(mirrored(scene))
    assert flipped.shape == picture(scene).shape
    assert caption(mirrored(mirrored(scene))) == caption(scene)
    assert sample(3).prompt.endswith("briefly .")
    words = set(build_processor().tokenizer.get_vocab())
    for i in range(40):
        assert set(caption(draw_scene(i)).split()) <= words


def test_train_drafter_from_files(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    """``visacc train vlm-drafter``: harvest online, train, save; the result drafts for the same model."""
    rows = [{"image": str(p), "prompt": "describe the image ."} for p in pictures[:3]] + [{"prompt": "red ."}]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    options = [
        "--target",
        str(folder),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ]
    options += ["--steps", "2", "--batch-size", "2", "--held-out", "1", "--max-new-tokens", "6"]
    done = CliRunner().invoke(app, ["train-drafter", "--method", "msd", *options])
    assert done.exit_code == 0, done.output
    log = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert log[-1]["tau"] >= 1
    pipeline = CaptionPipeline(str(folder), speculator=tmp_path / "run" / "drafter", device="cpu")
    row = pipeline([pictures[0]], "describe the image .", max_new_tokens=6)[0]
    plain = CaptionPipeline(str(folder), speculator=None, device="cpu")
    assert row.text == plain([pictures[0]], "describe the image .", max_new_tokens=6)[0].text
