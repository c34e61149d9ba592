"""Where prompts come from: GenEval's list, the shapes world, text files, JSON lines, class labels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visacc.metrics.protocol import digest
from visacc.reading import naming, read_lines, read_objects

Metadata = dict[str, Any]
MOST = 10_000_000
"""Prompts beyond which class labels are taken for a slip of the pen."""


@dataclass(frozen=True)
class PromptSet:
    """texts (or class labels) in order; metadata: GenEval clauses per prompt, None if there are none; ids: names of
    the prompts where they come from a folder (DPG-Bench).
    """

    name: str
    texts: tuple[str | int, ...]
    metadata: tuple[Metadata, ...] | None = None
    ids: tuple[str, ...] | None = None

    @property
    def digest(self) -> str:
        parts: list[Any] = [list(self.texts), list(self.metadata or ())]
        return digest(parts if self.ids is None else [*parts, list(self.ids)])

    def __len__(self) -> int:
        return len(self.texts)


def _from_metadata(name: str, items: list[Metadata]) -> PromptSet:
    return PromptSet(name, tuple(m["prompt"] for m in items), tuple(items))


def _labels(source: str) -> PromptSet:
    """labels:1000x50 -> classes 0..999, 50 each in class order; labels:207 -> class 207 is not meant, see
    error.
    """
    count, _, each = source.removeprefix("labels:").partition("x")
    if not count.isdecimal() or (each and not each.isdecimal()):
        raise ValueError(f"class labels are given as labels:CLASSES or labels:CLASSESxEACH, got {source!r}")
    repeat = int(each[:20]) if each else 1
    if int(count[:20]) * repeat > MOST:
        raise ValueError(f"{source} asks for more than {MOST:,} images")
    return PromptSet(source, tuple(label for label in range(int(count)) for _ in range(repeat)))


def load_prompts(source: str, limit: int | None = None) -> PromptSet:
    """geneval | shapes | shapes-heldout | labels:1000x50 | FILE.txt (one a line) | FILE.jsonl ({"prompt":
    ...}) | FOLDER of one .txt per prompt (DPG-Bench).
    """
    if source == "geneval":
        from visacc.metrics.geneval import official_prompts

        found = _from_metadata("geneval", [dict(m) for m in official_prompts()])
    elif source in ("shapes", "shapes-heldout"):
        from visacc.models.shapes.captions import all_prompts, heldout_prompts

        found = _from_metadata(source, heldout_prompts() if source == "shapes-heldout" else all_prompts())
    elif source.startswith("labels:"):
        found = _labels(source)
    else:
        found = _from_file(Path(source))
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        metadata = found.metadata[:limit] if found.metadata else None
        ids = found.ids[:limit] if found.ids else None
        found = PromptSet(f"{found.name}[:{limit}]", found.texts[:limit], metadata, ids)
    return found


def _from_folder(path: Path) -> PromptSet:
    from visacc.metrics.dpg import read_prompts

    found = read_prompts(path)
    empty = [key for key, text in found.items() if not text]
    if empty:
        raise ValueError(f"{path / empty[0]}.txt holds no prompt")
    return PromptSet(path.name, tuple(found.values()), ids=tuple(found))


def _from_file(path: Path) -> PromptSet:
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise ValueError(
            f"no prompt file {path}; known sets: geneval, shapes, shapes-heldout, labels:CLASSES[xEACH]"
        )
    if path.suffix != ".jsonl":
        lines = read_lines(path)
        if not lines:
            raise ValueError(f"{path} holds no prompts")
        return PromptSet(path.name, tuple(lines))
    from visacc.metrics.geneval.logic import validate

    items, numbers = [], []
    for number, item in read_objects(path):
        if not isinstance(item.get("prompt"), str | int) or not str(item["prompt"]).strip():
            raise ValueError(f"{path}, line {number}: no `prompt`")
        with naming(f"{path}, line {number}"):
            json.dumps(item, ensure_ascii=False).encode(
                "utf-8"
            )  # half a surrogate pair can be in no file of a run
            if "include" in item:
                validate(item, None)
        items.append(item)
        numbers.append(number)
    if not items:
        raise ValueError(f"{path} holds no prompts")
    judged = [i for i, item in enumerate(items) if "include" in item]
    if judged and len(judged) != len(items):
        odd = next(i for i, item in enumerate(items) if "include" not in item)
        raise ValueError(
            f"{path}: line {numbers[odd]} has no GenEval clauses while line {numbers[judged[0]]} has"
        )
    if not judged:
        return PromptSet(path.name, tuple(str(item["prompt"]) for item in items))
    return _from_metadata(path.name, items)
