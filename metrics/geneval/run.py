"""Scoring a folder in GenEval's layout with any detector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from visacc.metrics.geneval.colours import ColourClassifier
from visacc.metrics.geneval.detectors import Detections, Detector
from visacc.metrics.geneval.layout import PromptImages
from visacc.metrics.geneval.logic import Found, Options, Verdict, evaluate, select, validate
from visacc.metrics.geneval.summary import record
from visacc.metrics.images import load_image
from visacc.metrics.protocol import Protocol, Score


@dataclass
class Judge:
    """Detector, colour step and thresholds. colours: None when the detector knows colours itself."""

    detector: Detector
    colours: ColourClassifier | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        self.options = self.options or self.detector.options

    @property
    def id(self) -> str:
        encoder = "" if self.colours is None else f"/{getattr(self.colours.encoder, 'id', 'custom-encoder')}"
        base, used = Options(), self.options or Options()
        changed = {k: v for k, v in vars(used).items() if v != getattr(base, k)}
        extra = "".join(f"/{k}={v:g}" for k, v in changed.items())
        return f"{self.detector.id}{encoder}{extra}"

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Refuse a prompt this judge cannot decide, before any image is made."""
        validate(metadata, self.detector.classes)
        coloured = any("color" in c for c in metadata.get("include", []))
        if coloured and self.colours is None and not self.detector.knows_colours:
            raise ValueError(
                f"prompt {metadata['prompt']!r} asks for a colour, detector {self.detector.id} knows none: "
                "give a CLIP model for the colour step"
            )

    def decide(self, image: Image.Image, detections: Detections, metadata: Mapping[str, Any]) -> Verdict:
        assert self.options is not None
        found = select(
            detections.boxes,
            metadata["tag"],
            self.options,
            masks=detections.masks,
            colours=detections.colours,
            classes=self.detector.classes,
        )

        def classify(name: str, objects: Sequence[Found]) -> list[str]:
            if detections.colours is not None:
                return [o.colour or "" for o in objects]
            assert self.colours is not None
            return self.colours(image, name, objects)

        return evaluate(found, metadata, classify, self.options)

    def __call__(self, images: Sequence[Image.Image], metadata: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        detections = self.detector(images)
        if len(detections) != len(images):
            raise ValueError(
                f"detector {self.detector.id} gave {len(detections)} results for {len(images)} images"
            )
        return [self.decide(*args) for args in zip(images, detections, metadata, strict=True)]


def pairs(prompts: Iterable[PromptImages]) -> list[tuple[Path, Mapping[str, Any]]]:
    """(file, metadata) of every image in order."""
    return [(file, p.metadata) for p in prompts for file in p.files]


def score_files(
    judge: Judge, items: Sequence[tuple[Path, Mapping[str, Any]]], *, root: Path, batch: int = 8
) -> Iterator[dict[str, Any]]:
    """Result records in order; `filename` is relative to root so that files can move."""
    for i in range(0, len(items), batch):
        part = items[i : i + batch]
        images = [load_image(file, exif=True) for file, _ in part]
        verdicts = judge(images, [m for _, m in part])
        for (file, metadata), verdict in zip(part, verdicts, strict=True):
            name = file.relative_to(root).as_posix()
            yield record(name, metadata, verdict.correct, verdict.reason, verdict.details)


def to_scores(
    records: Sequence[Mapping[str, Any]], judge_id: str, prompts: str, resolution: str = ""
) -> list[Score]:
    """Overall and per-task scores (fractions) with 95 % intervals. resolution: of the images, see Protocol."""
    from visacc.metrics.geneval.summary import summarise

    summary = summarise(records)
    base = Protocol("geneval", judge_id, "-", resolution=resolution, n_gen=summary.images).with_settings(
        prompts=prompts, n_prompts=summary.prompts
    )
    scores = [Score(summary.overall, base, ci=summary.ci["overall"])]
    for tag, (good, total) in summary.tasks.items():
        protocol = replace(base, metric=f"geneval/{tag}", n_gen=total)
        scores.append(Score(good / total, protocol, ci=summary.ci[tag]))
    return scores
