"""GenEval's decision for one image (arXiv 2310.11513): which detections count, and whether they satisfy the
prompt.

Comparisons are float32, as in the original (the detector's boxes and scores are). Two things the original
leaves to chance are fixed: equal scores are ordered by later index first (numpy 1.23, which it pins), and the
two relations of one sentence are named in alphabetical order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Metadata = Mapping[str, Any]
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
_DATA = Path(__file__).parent / "data"
# COCO's 80 things in contiguous order, with GenEval's own spelling of nine of them
CLASSES = tuple((_DATA / "object_names.txt").read_text(encoding="utf-8").splitlines())


@dataclass(frozen=True)
class Options:
    """The original's options under its names. max_overlap 1 = no suppression."""

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    position_threshold: float = 0.1


OFFICIAL = Options()


@dataclass(frozen=True)
class Found:
    """A kept object: box [x1, y1, x2, y2, score] float32, its index among the class's detections, mask and
    colour.
    """

    box: NDArray[np.float32]
    index: int
    mask: NDArray[np.bool_] | None = None
    colour: str | None = None


@dataclass(frozen=True)
class Verdict:
    correct: bool
    reason: str
    details: dict[str, list[list[float]]]


Classify = Callable[[str, Sequence[Found]], Sequence[str]]


def iou(a: NDArray[np.float32], b: NDArray[np.float32]) -> np.floating | float:
    """Intersection over union with the "+1" pixel convention."""

    def area(x1: Any, y1: Any, x2: Any, y2: Any) -> Any:
        return max(x2 - x1 + 1, 0) * max(y2 - y1 + 1, 0)

    both = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    union = area(*a[:4]) + area(*b[:4]) - both
    return both / union if union else 0.0


def select(
    boxes: Mapping[str, NDArray[np.float32]],
    tag: str,
    options: Options = OFFICIAL,
    *,
    masks: Mapping[str, Sequence[NDArray[np.bool_] | None]] | None = None,
    colours: Mapping[str, Sequence[str]] | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, list[Found]]:
    """Objects that count, per class, best first; boxes: class -> [n, 5] in the detector's order."""
    cut = np.float32(options.counting_threshold if tag == "counting" else options.threshold)
    kept: dict[str, list[Found]] = {}
    for name in boxes if classes is None else [c for c in classes if c in boxes]:
        table = np.asarray(boxes[name], dtype=np.float32).reshape(-1, 5)
        if not np.isfinite(table).all():
            raise ValueError(f"the detector gave non-finite boxes for class {name!r}")
        order = np.argsort(table[:, 4], kind="stable")[::-1]
        order = order[table[order, 4] > cut][: options.max_objects]
        queue, chosen = order.tolist(), []
        while queue:
            best = queue.pop(0)
            chosen.append(best)
            if options.max_overlap != 1:
                queue = [i for i in queue if iou(table[best], table[i]) < np.float32(options.max_overlap)]
        if chosen:
            kept[name] = [
                Found(
                    table[i],
                    i,
                    masks[name][i] if masks is not None and name in masks else None,
                    colours[name][i] if colours is not None and name in colours else None,
                )
                for i in chosen
            ]
    return kept


def relations(a: NDArray[np.float32], b: NDArray[np.float32], threshold: float = 0.1) -> list[str]:
    """Relations of box a to box b, alphabetical; zero, one or two of left of, right of, above, below."""
    corners = np.array([a, b])[:, :4].reshape(2, 2, 2)
    centre = corners.mean(axis=-2)
    size = np.abs(corners[:, 1] - corners[:, 0])
    offset = centre[0] - centre[1]
    reduced = np.maximum(np.abs(offset) - threshold * (size[0] + size[1]), 0) * np.sign(offset)
    if np.all(np.abs(reduced) < 1e-3):
        return []
    dx, dy = reduced / np.linalg.norm(offset)  # the norm of the offset before it was reduced
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return sorted(name for name, true in holds.items() if true)


def validate(metadata: Metadata, classes: Sequence[str] | None = CLASSES) -> None:
    """Refuse prompt metadata the logic cannot judge, saying what is wrong with it."""
    prompt = metadata.get("prompt", "?")
    if not isinstance(metadata.get("tag"), str):
        raise ValueError(f"prompt {prompt!r}: metadata needs a `tag`")
    parts = [metadata.get(key, []) for key in ("include", "exclude")]
    if not all(isinstance(part, list | tuple) for part in parts):
        raise ValueError(f"prompt {prompt!r}: `include` and `exclude` must be lists of clauses")
    for i, clause in enumerate([*parts[0], *parts[1]]):
        fits = isinstance(clause, Mapping) and isinstance(clause.get("class"), str)
        if not fits or type(clause.get("count")) is not int or clause["count"] < 1:
            raise ValueError(f"prompt {prompt!r}: clause {i} needs `class` and a positive integer `count`")
        if classes is not None and clause["class"] not in classes:
            raise ValueError(f"prompt {prompt!r}: class {clause['class']!r} is unknown to this detector")
        if "position" in clause:
            place = clause["position"]
            if not isinstance(place, list | tuple) or len(place) != 2 or type(place[1]) is not int:
                raise ValueError(
                    f"prompt {prompt!r}: clause {i}: `position` must be [relation, clause number]"
                )
            relation, target = place
            if relation not in RELATIONS:
                raise ValueError(
                    f"prompt {prompt!r}: unknown relation {relation!r}; known: {', '.join(RELATIONS)}"
                )
            if not 0 <= target < i:
                raise ValueError(
                    f"prompt {prompt!r}: clause {i} refers to clause {target}, which does not stand before it"
                )


def _colour_reason(want: str, clause: Metadata, colours: Sequence[str]) -> str | None:
    hits = list(colours).count(want)
    if hits >= clause["count"]:
        return None
    seen = ", ".join(f"{list(colours).count(c)} {c}" for c in COLORS if c in colours)
    return f"expected {want} {clause['class']}>={clause['count']}, found {hits} {want}; and {seen}"


def _position_reason(
    clause: Metadata, found: Sequence[Found], groups: Sequence[Sequence[Found] | None], threshold: float
) -> str | None:
    wanted, target = clause["position"]
    group = groups[target]
    if group is None:
        return f"no target for {clause['class']} to be {wanted}"
    for item in found:
        for other in group:
            true = relations(item.box, other.box, threshold)
            if wanted not in true:
                return f"expected {clause['class']} {wanted} target, found {' and '.join(true)} target"
    return None


def evaluate(
    objects: Mapping[str, Sequence[Found]],
    metadata: Metadata,
    classify: Classify,
    options: Options = OFFICIAL,
) -> Verdict:
    """All `include` clauses must hold and no `exclude` clause; colour and position look at the best objects
    only.

    classify(class, objects) names one colour per object; it is called only for clauses with enough objects.
    """
    validate(metadata, classes=None)
    reasons: list[str] = []
    groups: list[Sequence[Found] | None] = []
    for clause in metadata.get("include", []):
        name, count = clause["class"], clause["count"]
        found = list(objects.get(name, []))[:count]
        reason = f"expected {name}>={count}, found {len(found)}" if len(found) < count else None
        if reason is None and "color" in clause:
            reason = _colour_reason(clause["color"], clause, classify(name, found))
        if reason is None and "position" in clause:
            reason = _position_reason(clause, found, groups, options.position_threshold)
        if reason is not None:
            reasons.append(reason)
        groups.append(found if reason is None else None)
    for clause in metadata.get("exclude", []):
        number = len(objects.get(clause["class"], []))
        if number >= clause["count"]:
            reasons.append(f"expected {clause['class']}<{clause['count']}, found {number}")
    details = {name: [item.box.tolist() for item in items] for name, items in objects.items()}
    return Verdict(not reasons, "\n".join(reasons), details)


@cache
def official_prompts() -> tuple[Metadata, ...]:
    """The 553 prompts with their metadata, in official order (MIT licence, see data/NOTICE)."""
    text = (_DATA / "evaluation_metadata.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())
