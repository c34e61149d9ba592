"""GenEval around the decision logic: prompts, folders, results, the command."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from visacc.eval.cli import app
from visacc.metrics.geneval import (
    CLASSES,
    TAGS,
    Detections,
    Judge,
    Options,
    compare,
    create_detector,
    detector_names,
    official_prompts,
    pairs,
    read_prompts,
    read_results,
    register_detector,
    sample_path,
    scan,
    score_files,
    summarise,
    to_line,
    to_scores,
)
from visacc.metrics.geneval.logic import iou, relations, select, validate
from visacc.metrics.geneval.summary import record


def scenes(prompts: list[dict[str, Any]], seed: int = 0) -> list[Image.Image]:
    from visacc.models.shapes.captions import scene_for
    from visacc.models.shapes.world import render

    return [
        Image.fromarray(np.round(render(scene_for(m, seed + i)) * 255).astype(np.uint8))
        for i, m in enumerate(prompts)
    ]


def shapes_prompts(per_task: int) -> list[dict[str, Any]]:
    from visacc.models.shapes.captions import heldout_prompts

    return heldout_prompts(per_task)


def write_folder(root: Path, prompts: list[dict[str, Any]], samples: int = 2) -> Path:
    for s in range(samples):
        for i, image in enumerate(scenes(prompts, 100 * s)):
            path = sample_path(root, i, s)
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            (path.parent.parent / "metadata.jsonl").write_text(json.dumps(prompts[i]))
    return root


# ---------------------------------------------------------------- prompts


def test_official_prompts() -> None:
    prompts = official_prompts()
    counts = Counter(p["tag"] for p in prompts)
    assert counts == {"single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100,
                      "color_attr": 100}  # fmt: skip
    assert [p["tag"] for p in prompts] == sorted((p["tag"] for p in prompts), key=TAGS.index)
    assert len({p["prompt"] for p in prompts}) == 553
    relation = Counter(c["position"][0] for p in prompts for c in p["include"] if "position" in c)
    assert relation == {"left of": 19, "right of": 27, "above": 26, "below": 28}
    assert Counter(p["include"][0]["count"] for p in prompts if p["tag"] == "counting") == {
        2: 26,
        3: 28,
        4: 26,
    }
    assert all(p["exclude"][0]["count"] == p["include"][0]["count"] + 1 for p in prompts if "exclude" in p)
    assert not any(c["class"] == "person" and "color" in c for p in prompts for c in p["include"])
    assert prompts[0]["prompt"] == "a photo of a bench"
    for p in prompts:
        validate(p)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tag": None}, "needs a `tag`"),
        ({"include": [{"class": "unicorn", "count": 1}]}, "class 'unicorn' is unknown"),
        ({"include": [{"class": "dog", "count": 0}]}, "positive integer `count`"),
        ({"include": [{"class": "dog", "count": 1, "position": ["beside", 0]}]}, "unknown relation 'beside'"),
        ({"include": [{"class": "dog", "count": 1, "position": ["above", 0]}]}, "does not stand before it"),
    ],
)
def test_prompts_that_cannot_be_judged(tmp_path: Path, change: dict, message: str) -> None:
    prompt = {"tag": "colors", "prompt": "p", "include": [{"class": "dog", "count": 1}], **change}
    prompt = {k: v for k, v in prompt.items() if v is not None}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(prompt) + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(path, CLASSES)
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        read_prompts(path)


# ---------------------------------------------------------------- logic


def test_relations_of_boxes() -> None:
    def box(x: float, y: float, size: float = 10) -> np.ndarray:
        return np.array([x, y, x + size, y + size, 1], np.float32)

    assert relations(box(0, 0), box(100, 0)) == ["left of"]
    assert relations(box(100, 100), box(0, 0)) == ["below", "right of"]
    assert relations(box(0, 0), box(1, 1)) == []  # smaller than the tolerance
    assert relations(box(0, 0), box(0, 0)) == []
    assert relations(box(0, 100), box(0, 0), threshold=20.0) == []


def test_overlap_convention() -> None:
    a = np.array([0, 0, 9, 9, 1], np.float32)
    assert iou(a, a) == 1
    assert iou(a, np.array([10, 0, 19, 9, 1], np.float32)) == 0
    assert float(iou(a, np.array([0, 0, 9, 4, 1], np.float32))) == pytest.approx(0.5)


def test_non_finite_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="non-finite boxes for class 'dog'"):
        select({"dog": np.array([[0, 0, np.nan, 1, 0.9]], np.float32)}, "colors")


# ---------------------------------------------------------------- folders


def test_folders_are_complete_or_refused(tmp_path: Path) -> None:
    prompts = shapes_prompts(1)
    root = write_folder(tmp_path / "run", prompts)
    found = scan(root, prompts=prompts, samples=2)
    assert [p.index for p in found] == list(range(6))
    assert [f.name for f in found[0].files] == ["00000.png", "00001.png"]
    with pytest.raises(ValueError, match=r"00000 has 2 images instead of 4"):
        scan(root, samples=4)
    with pytest.raises(ValueError, match="was made for"):
        scan(root, prompts=prompts[::-1])
    with pytest.raises(ValueError, match="no folder 00006"):
        scan(root, prompts=[*prompts, prompts[0]])
    with pytest.raises(ValueError, match="prompt list has 3 entries"):
        scan(root, prompts=prompts[:3])
    (root / "00002" / "samples" / "00001.png").unlink()
    with pytest.raises(ValueError, match=r"incomplete: 00002 has 1 images instead of 2"):
        scan(root)
    assert len(pairs(scan(root, partial=True))) == 11
    (root / "00003" / "metadata.jsonl").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*00003.metadata"):
        scan(root)
    with pytest.raises(ValueError, match="no prompt folders"):
        scan(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        scan(tmp_path / "nowhere")


# ---------------------------------------------------------------- the shapes world


def test_shapes_detector_agrees_with_the_worlds_own_judge() -> None:
    from visacc.models.shapes.judge import judge as own

    prompts = shapes_prompts(6)
    judge = Judge(create_detector("shapes"))
    right, wrong = scenes(prompts), scenes(prompts[1:] + prompts[:1], 50)
    for images in (right, wrong):
        verdicts = judge(images, prompts)
        assert [v.correct for v in verdicts] == [
            own(m, i).correct for m, i in zip(prompts, images, strict=True)
        ]
    assert all(v.correct for v in judge(right, prompts))
    assert not any(
        v.correct for v, p in zip(judge(wrong, prompts), prompts, strict=True) if p["tag"] == "color_attr"
    )
    with pytest.raises(ValueError, match="class 'dog' is unknown"):
        judge.check(official_prompts()[0] | {"include": [{"class": "dog", "count": 1}]})  # type: ignore[operator]


def test_a_detector_without_colours_needs_a_colour_step() -> None:
    class Blind:
        id, classes, options, knows_colours = "blind", CLASSES, Options(), False

        def __call__(self, images: Any) -> list[Detections]:
            return []

    judge = Judge(Blind())
    judge.check(official_prompts()[0])
    coloured = next(p for p in official_prompts() if p["tag"] == "colors")
    with pytest.raises(ValueError, match="asks for a colour"):
        judge.check(coloured)
    with pytest.raises(ValueError, match="gave 0 results for 1 images"):
        judge([Image.new("RGB", (4, 4))], [official_prompts()[0]])
    assert {"mask2former", "fb-mask2former", "shapes", "yolov3-tiny"} <= set(detector_names())
    with pytest.raises(ValueError, match="unknown detector 'detr'"):
        create_detector("detr")
    with pytest.raises(ValueError, match="exists already"):
        register_detector("shapes", Blind)
    with pytest.raises(ValueError, match="do not fit detector 'yolov3-tiny'"):
        create_detector("yolov3-tiny")


def test_scores_of_a_folder_and_the_command(tmp_path: Path) -> None:
    prompts = shapes_prompts(2)
    root = write_folder(tmp_path / "run", prompts)
    bad = sample_path(root, 0, 1)
    Image.new("RGB", (64, 64), "gray").save(bad)
    records = list(score_files(Judge(create_detector("shapes")), pairs(scan(root)), root=root, batch=5))
    assert [r["correct"] for r in records] == [True, False] + [True] * (2 * len(prompts) - 2)
    assert records[1]["filename"] == "00000/samples/00001.png"
    scores = {s.name: s for s in to_scores(records, "shapes-exact", "toy")}
    assert scores["geneval"].value == pytest.approx(1 - 1 / 4 / 6)
    assert scores["geneval/single_object"].value == 0.75
    done = CliRunner().invoke(
        app,
        ["geneval", str(root), "--detector", "shapes", "--quiet", "--results", str(tmp_path / "r.jsonl"),
         "--out", str(tmp_path / "s.json"), "--work", str(tmp_path / "work")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "Overall score (avg. over tasks): 0.95833" in done.output
    assert read_results(tmp_path / "r.jsonl") == [json.loads(to_line(r)) for r in records]
    saved = json.loads((tmp_path / "s.json").read_text())
    assert saved[0]["protocol"]["extractor"] == "shapes-exact/threshold=0.7/counting_threshold=0.7"
    Image.new("RGB", (64, 64), "red").save(sample_path(root, 1, 1))
    again = CliRunner().invoke(
        app, ["geneval", str(root), "--detector", "shapes", "--work", str(tmp_path / "work")]
    )
    assert "images changed" in str(again.exception)


# ---------------------------------------------------------------- results


def results(rng: np.random.Generator, p: float, prompts: int = 60, samples: int = 4) -> list[dict]:
    out = []
    for tag in TAGS:
        for i in range(prompts):
            metadata = {"tag": tag, "prompt": f"{tag} {i}", "include": []}
            q = np.clip(p + 0.2 * np.sin(7 * i), 0, 1)  # prompts differ in difficulty
            out += [record(f"{i}", metadata, rng.random() < q, "", {}) for _ in range(samples)]
    return out


def test_intervals_cover_and_pairs_are_tighter() -> None:
    """95 % intervals of 60 runs cover the truth: fewer than 50 hits has probability below 1e-3 (binomial
    0.95; the bootstrap over prompts is slightly conservative here). Seeds are fixed.
    """
    rng = np.random.default_rng(0)
    truth = float(np.clip(0.5 + 0.2 * np.sin(7 * np.arange(60)), 0, 1).mean())
    hits = 0
    for _ in range(60):
        low, high = summarise(results(rng, 0.5), resamples=300).ci["overall"]
        hits += low <= truth <= high
    assert hits >= 50
    a, b = results(rng, 0.55), results(rng, 0.45)
    pair = compare(a, b)
    assert pair.ci[0] > 0
    assert pair.difference == pytest.approx(summarise(a).overall - summarise(b).overall)
    assert compare(a, a).ci == (0, 0)
    with pytest.raises(ValueError, match="same prompts"):
        compare(a, b[:-1])


def test_result_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"filename": "a"}\n')
    with pytest.raises(ValueError, match="line 1: no field 'tag'"):
        read_results(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no results"):
        read_results(path)
    path.write_text("{\n")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        read_results(path)
    with pytest.raises(ValueError, match="no GenEval results"):
        summarise([])
