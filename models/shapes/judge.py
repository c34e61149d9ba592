"""GenEval's decision logic (arXiv 2310.11513) on the detections of the shapes world.

Clause by clause as in the original evaluator: enough objects of the class, enough of them in the colour asked
for, the position relation to every target object, then the exclusions. `judge` returns the verdict and reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visacc.models.shapes.captions import RELATIONS, Metadata
from visacc.models.shapes.detector import Detection, detect
from visacc.models.shapes.world import COLOURS, SHAPES

#: Blobs that match no outline at least this well are not counted as objects.
MIN_SCORE = 0.70
POSITION_THRESHOLD = 0.1


@dataclass(frozen=True)
class Verdict:
    """Whether a picture shows what was asked, and why not (one reason per failed clause)."""

    correct: bool
    reasons: tuple[str, ...]


def relations(a: Detection, b: Detection) -> set[str]:
    """Relations in which `a` stands to `b`: none, one or two of left of, right of, above, below."""
    boxes = np.array([a.box, b.box], np.float32).reshape(2, 2, 2)
    centres, sizes = boxes.mean(1), boxes[:, 1] - boxes[:, 0]
    offset = centres[0] - centres[1]
    reduced = np.maximum(np.abs(offset) - POSITION_THRESHOLD * sizes.sum(0), 0) * np.sign(offset)
    if (np.abs(reduced) < 1e-3).all():
        return set()
    dx, dy = reduced / np.linalg.norm(offset)
    checks = (dx < -0.5, dx > 0.5, dy < -0.5, dy > 0.5)
    return {name for name, holds in zip(RELATIONS, checks, strict=True) if holds}


def _colour_failure(clause: Metadata, group: Sequence[Detection]) -> str | None:
    want, count = clause["color"], clause["count"]
    seen = Counter(item.colour for item in group)
    if seen[want] >= count:
        return None
    listed = ", ".join(f"{seen[name]} {name}" for name in COLOURS if seen[name])
    return f"expected {want} {clause['class']}>={count}, found {seen[want]} {want}; and {listed}"


def _position_failure(
    clause: Metadata, group: Sequence[Detection], groups: Sequence[Sequence[Detection] | None]
) -> str | None:
    relation, index = clause["position"]
    if not 0 <= index < len(groups):
        raise ValueError(f"position refers to clause {index}, but only {len(groups)} stand before it")
    targets = groups[index]
    if targets is None:
        return f"no target for {clause['class']} to be {relation}"
    for item in group:
        for target in targets:
            found = relations(item, target)
            if relation not in found:
                listed = " and ".join(sorted(found)) or "no relation to"
                return f"expected {clause['class']} {relation} target, found {listed} target"
    return None


def judge_detections(metadata: Metadata, found: Sequence[Detection]) -> Verdict:
    """Verdict on a list of detections; `metadata` has GenEval's fields `include` and `exclude`."""
    if not metadata.get("include"):
        raise ValueError("prompt metadata needs a non-empty `include` list, as in GenEval's metadata")
    for clause in [*metadata["include"], *metadata.get("exclude", [])]:
        if clause["class"] not in SHAPES:
            raise ValueError(f"unknown class {clause['class']!r}; known: {', '.join(SHAPES)}")
    reasons: list[str] = []
    groups: list[Sequence[Detection] | None] = []
    for clause in metadata["include"]:
        of_class = [item for item in found if item.shape == clause["class"]]
        group = of_class[: clause["count"]]
        failure = None
        if len(group) < clause["count"]:
            failure = f"expected {clause['class']}>={clause['count']}, found {len(group)}"
        if failure is None and "color" in clause:
            failure = _colour_failure(clause, group)
        if failure is None and "position" in clause:
            failure = _position_failure(clause, group, groups)
        if failure is not None:
            reasons.append(failure)
        groups.append(None if failure is not None else group)
    for clause in metadata.get("exclude", []):
        number = sum(item.shape == clause["class"] for item in found)
        if number >= clause["count"]:
            reasons.append(f"expected {clause['class']}<{clause['count']}, found {number}")
    return Verdict(not reasons, tuple(reasons))


def judge(metadata: Metadata, image: object) -> Verdict:
    """Verdict on a picture (PIL image, uint8 or [0, 1] float array [H, W, 3])."""
    return judge_detections(metadata, detect(image, MIN_SCORE))


def score(metadata: Metadata, image: object) -> bool:
    """Whether `image` shows what `metadata` asks for."""
    return judge(metadata, image).correct
