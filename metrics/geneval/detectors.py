"""Detectors behind one protocol. The number a GenEval run gives depends on the detector, so its id is in the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visacc.metrics.geneval.logic import CLASSES, Options


@dataclass
class Detections:
    """Objects of one image: class -> boxes [n, 5] float32 (x1, y1, x2, y2, score), in the detector's order.

    masks: class -> n masks [h, w] (None where the detector kept none). colours: class -> n names, for
    detectors that know colours themselves; CLIP is not asked then.
    """

    boxes: dict[str, NDArray[np.float32]]
    masks: dict[str, list[NDArray[np.bool_] | None]] | None = None
    colours: dict[str, list[str]] | None = None


class Detector(Protocol):
    """id: network, weights and preprocessing. options: GenEval thresholds this detector is calibrated for."""

    id: str
    options: Options
    knows_colours: bool

    @property
    def classes(self) -> Sequence[str]: ...

    def __call__(self, images: Sequence[Image.Image]) -> list[Detections]: ...


@dataclass
class ShapesDetector:
    """The shapes world's exact detector: shape is the class, colours are known, score is outline overlap."""

    id: str = "shapes-exact"
    classes: Sequence[str] = field(default_factory=tuple)
    options: Options = field(default_factory=Options)
    knows_colours: bool = True

    def __post_init__(self) -> None:
        from visacc.models.shapes.judge import MIN_SCORE
        from visacc.models.shapes.world import SHAPES

        self.classes = tuple(SHAPES)
        self.options = Options(threshold=MIN_SCORE, counting_threshold=MIN_SCORE)

    def __call__(self, images: Sequence[Image.Image]) -> list[Detections]:
        return [self._one(image) for image in images]

    def _one(self, image: Image.Image) -> Detections:
        from visacc.models.shapes.detector import detect

        boxes: dict[str, list[list[float]]] = {}
        colours: dict[str, list[str]] = {}
        for d in detect(image):
            boxes.setdefault(d.shape, []).append([*map(float, d.box), float(d.score)])
            colours.setdefault(d.shape, []).append(d.colour)
        return Detections({k: np.array(v, np.float32) for k, v in boxes.items()}, None, colours)


def _mask2former(**options: Any) -> Detector:
    from visacc.metrics.geneval.mask2former import Mask2FormerDetector

    return Mask2FormerDetector.official(**options)


def _facebook(**options: Any) -> Detector:
    from visacc.metrics.geneval.mask2former import Mask2FormerDetector

    return Mask2FormerDetector.facebook(**options)


def _yolo(**options: Any) -> Detector:
    from visacc.metrics.geneval.yolo import YoloV3Tiny

    return YoloV3Tiny(**options)


_FACTORIES: dict[str, Callable[..., Detector]] = {
    "mask2former": _mask2former,
    "fb-mask2former": _facebook,
    "shapes": lambda **options: ShapesDetector(**options),
    "yolov3-tiny": _yolo,
}


def names() -> list[str]:
    return sorted(_FACTORIES)


def register(name: str, factory: Callable[..., Detector]) -> None:
    """Make a detector selectable by name."""
    if name in _FACTORIES:
        raise ValueError(f"a detector named {name!r} exists already")
    _FACTORIES[name] = factory


def create(name: str, **options: Any) -> Detector:
    """`create("mask2former", weights="...pth")`, `create("shapes")`."""
    if name not in _FACTORIES:
        raise ValueError(f"unknown detector {name!r}; known: {', '.join(names())}")
    try:
        return _FACTORIES[name](**options)
    except TypeError as error:
        raise ValueError(f"options {sorted(options)} do not fit detector {name!r}: {error}") from error


def group(
    labels: NDArray[np.int64],
    boxes: NDArray[np.float32],
    masks: Sequence[NDArray[np.bool_] | None] | None,
    classes: Sequence[str] = CLASSES,
) -> Detections:
    """Per-class tables from flat detections: labels [n], boxes [n, 5], masks n."""
    by_class: dict[str, NDArray[np.float32]] = {}
    by_mask: dict[str, list[NDArray[np.bool_] | None]] = {}
    for label in sorted(set(labels.tolist())):
        rows = np.flatnonzero(labels == label)
        by_class[classes[label]] = boxes[rows]
        if masks is not None:
            by_mask[classes[label]] = [masks[i] for i in rows.tolist()]
    return Detections(by_class, by_mask if masks is not None else None)
