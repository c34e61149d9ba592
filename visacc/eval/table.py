"""The summary of a run: speed and quality of every cell side by side, one column per protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visacc.eval.files import read_json
from visacc.metrics.protocol import Score, columns
from visacc.reading import naming

TIMES = (
    "Seconds and speed-ups are of runs one after the other: under a changing load of the machine they cannot be compared."
    " For comparable speeds use `visacc bench decoders`, which interleaves the decoders. Steps do not depend on the load."
)


@dataclass(frozen=True)
class Speed:
    """steps: target forwards per image (mean, 95 % half-width); seconds per image, generation alone."""

    images: int
    steps: float | None
    steps_half: float | None
    compression: float | None
    seconds: float | None

    @classmethod
    def read(cls, cell: Path) -> Speed:
        steps: list[int] = []
        tokens, images = None, 0
        for path in sorted((cell / "chunks").glob("*.json")):
            with naming(path):
                chunk = read_json(path)
                tokens = chunk.get("tokens", tokens)
                images += len(chunk["images"])
                steps += [row["steps"] for row in chunk["images"] if "steps" in row]
        timing = [read_json(p) for p in sorted((cell / "timing").glob("*.json"))]
        timed = sum(t["images"] for t in timing)
        seconds = sum(t["seconds"] for t in timing) / timed if timed else None
        if not steps:
            return cls(images, None, None, None, seconds)
        mean = float(np.mean(steps))
        half = 1.96 * float(np.std(steps, ddof=1)) / len(steps) ** 0.5 if len(steps) > 1 else None
        return cls(images, mean, half, tokens / mean if tokens else None, seconds)


@dataclass
class Row:
    name: str
    decoder: str
    options: Mapping[str, Any]
    speed: Speed
    scores: Sequence[Score]
    paired: Mapping[str, Any] = field(
        default_factory=dict
    )  # metric -> {"difference", "ci"} against the baseline

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "decoder": self.decoder,
            "options": dict(self.options),
            "speed": vars(self.speed),
            "scores": [s.to_json() for s in self.scores],
            "paired": dict(self.paired),
        }


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _cell(score: Score | None) -> str:
    if score is None:
        return "–"
    if score.ci is not None:
        return f"{score.value:.4g} [{score.ci[0]:.4g}, {score.ci[1]:.4g}]"
    return f"{score.value:.4g}" + (f" ± {score.std:.2g}" if score.std else "")


def markdown(rows: Sequence[Row], baseline: str) -> str:
    """Table with a caption on its times and with footnotes: what each column was measured with, every warning once."""
    groups = columns([s for row in rows for s in row.scores])
    counts: dict[str, int] = {}
    heads = []
    for scores in groups.values():
        name = scores[0].name
        counts[name] = counts.get(name, 0) + 1
        heads.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    base = next((r.speed.seconds for r in rows if r.name == baseline), None)
    title = ["decoder", "images", "steps", "tokens/step", "s/image", "speed-up, not interleaved", *heads]
    lines = [TIMES, "", "| " + " | ".join(title) + " |", "|" + "---|" * len(title)]
    for row in rows:
        by_id = {s.protocol.id: s for s in row.scores}
        v = row.speed
        steps = _number(v.steps) + (f" ± {v.steps_half:.2g}" if v.steps_half else "")
        gain = f"{base / v.seconds:.2f}x" if base and v.seconds else "–"
        cells = [row.name, str(v.images), steps, _number(v.compression, 3), _number(v.seconds, 3), gain]
        cells += [_cell(by_id.get(key)) for key in groups]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Measured with:", ""]
    lines += [f"- {head}: `{key}`" for head, key in zip(heads, groups, strict=True)]
    paired = [
        f"- {row.name}: {name} {p['difference']:+.4f} [{p['ci'][0]:+.4f}, {p['ci'][1]:+.4f}]"
        for row in rows
        for name, p in row.paired.items()
    ]
    if paired:
        lines += [
            "",
            f"Paired difference from {baseline}, same prompts and seeds, 95 % interval:",
            "",
            *paired,
        ]
    notes = dict.fromkeys(w for row in rows for s in row.scores for w in s.warnings)
    if notes:
        lines += ["", "Warnings:", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"
