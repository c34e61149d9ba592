"""DPG-Bench (ELLA, arXiv 2403.05135): layout and scoring with any yes/no question answerer.

1065 long prompts, one text file each; per prompt one image that is a grid of up to four samples. Questions
depend on each other: a question counts as no when a parent question was answered no. Image score = mean over
questions, the benchmark = mean over images times 100. Crops of one grid are averaged (the original's answers
of several crops overwrite each other) and the first row of the question table counts (the original skips it).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from visacc.metrics.images import list_images, load_image
from visacc.metrics.protocol import Protocol, Score
from visacc.reading import naming, read_text

Answer = Callable[[Image.Image, str], bool]


@dataclass(frozen=True)
class Question:
    id: int
    text: str
    parents: tuple[int, ...]
    category: str = ""


@dataclass
class Item:
    id: str
    prompt: str
    questions: list[Question] = field(default_factory=list)


def read_prompts(folder: str | Path) -> dict[str, str]:
    """id -> prompt, from a folder of one text file per prompt."""
    files = sorted(Path(folder).glob("*.txt"))
    if not files:
        raise ValueError(f"no prompt files (*.txt) in {folder}")
    return {f.stem: read_text(f).strip() for f in files}


def read_questions(path: str | Path) -> dict[str, Item]:
    """The question table: item_id, text, proposition_id, dependency, category_broad,
    question_natural_language.
    """
    items: dict[str, Item] = {}
    try:
        with naming(path):
            _read_table(path, items)
    except csv.Error as error:
        raise ValueError(f"{path} is no DPG question table: {error}") from error
    if not items:
        raise ValueError(f"{path} holds no questions")
    return items


def _read_table(path: str | Path, items: dict[str, Item]) -> None:
    needed = ("item_id", "text", "proposition_id", "dependency", "question_natural_language")
    with open(path, newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        missing = [c for c in needed if c not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(f"{path} is no DPG question table: column {missing[0]!r} is missing")
        for row in reader:
            absent = [c for c in needed if row[c] is None]
            if absent:
                raise ValueError(f"{path}, line {reader.line_num}: column {absent[0]!r} is missing")
            item = items.setdefault(row["item_id"], Item(row["item_id"], row["text"]))
            parents = tuple(int(p) for p in row["dependency"].split(",") if p.strip() not in ("", "0"))
            text, category = row["question_natural_language"], row.get("category_broad") or ""
            item.questions.append(Question(int(row["proposition_id"]), text, parents, category))
    for item in items.values():
        _check_tree(item)


def _check_tree(item: Item) -> None:
    ids = {q.id for q in item.questions}
    for q in item.questions:
        unknown = [p for p in q.parents if p not in ids]
        if unknown:
            raise ValueError(
                f"item {item.id}: question {q.id} depends on question {unknown[0]}, which is missing"
            )


def grid_crops(image: Image.Image, resolution: int, samples: int = 4) -> list[Image.Image]:
    """The samples of a grid image: left to right, top to bottom; a single image of that size is one
    sample.
    """
    w, h = image.size
    if (w, h) == (resolution, resolution):
        return [image]
    if w % resolution or h % resolution:
        raise ValueError(f"a grid of {resolution} px samples cannot be {w} x {h}")
    boxes = [
        (x, y, x + resolution, y + resolution)
        for y in range(0, h, resolution)
        for x in range(0, w, resolution)
    ]
    return [image.crop(box) for box in boxes[:samples]]


def make_grid(images: Sequence[Image.Image], columns: int = 2) -> Image.Image:
    """Grid image of equal-sized samples, row by row."""
    if not images or len({i.size for i in images}) != 1:
        raise ValueError("a grid needs at least one image, all of one size")
    w, h = images[0].size
    grid = Image.new("RGB", (w * min(columns, len(images)), h * -(-len(images) // columns)))
    for i, image in enumerate(images):
        grid.paste(image, (i % columns * w, i // columns * h))
    return grid


def score_answers(questions: Sequence[Question], answers: Mapping[int, bool]) -> dict[int, float]:
    """Question -> 1 or 0 after zeroing questions whose parent was answered no."""
    values = {q.id: float(answers[q.id]) for q in questions}
    return {q.id: 0.0 if any(not answers[p] for p in q.parents) else values[q.id] for q in questions}


def score_image(
    image: Image.Image, item: Item, answer: Answer, resolution: int
) -> tuple[float, dict[str, float]]:
    """(score of one grid, category -> mean), averaged over its crops."""
    totals: list[float] = []
    categories: dict[str, list[float]] = {}
    for crop in grid_crops(image, resolution):
        values = score_answers(item.questions, {q.id: bool(answer(crop, q.text)) for q in item.questions})
        totals.append(float(np.mean(list(values.values()))))
        for q in item.questions:
            categories.setdefault(q.category, []).append(values[q.id])
    return float(np.mean(totals)), {k: float(np.mean(v)) for k, v in categories.items()}


def score_folder(
    folder: str | Path, items: Mapping[str, Item], answer: Answer, *, resolution: int, answerer: str
) -> Score:
    """DPG score (0..100) of a folder of grid images named after the prompt ids; every prompt must be
    there.
    """
    files = {f.stem: f for f in list_images(folder)}
    missing = [i for i in items if i not in files]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(items)} prompts have no image, first {missing[0]!r}"
        )
    scores: list[float] = []
    categories: dict[str, list[float]] = {}
    for key, item in items.items():
        value, parts = score_image(load_image(files[key]), item, answer, resolution)
        scores.append(value)
        for name, part in parts.items():
            categories.setdefault(name, []).append(part)
    protocol = Protocol("dpg", answerer, "-", n_gen=len(scores)).with_settings(resolution=resolution)
    details = {"categories": {k: 100 * float(np.mean(v)) for k, v in categories.items()}}
    half = 1.96 * 100 * float(np.std(scores, ddof=1)) / len(scores) ** 0.5 if len(scores) > 1 else None
    mean = 100 * float(np.mean(scores))
    return Score(mean, protocol, ci=None if half is None else (mean - half, mean + half), details=details)
