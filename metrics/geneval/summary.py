"""GenEval result files and the scores computed from them.

Result lines and the summary text have the original's format byte for byte. Added: confidence intervals over
prompts and a paired comparison of two runs on the same prompts and seeds, which is what decides between
decoders: with four samples per prompt the standard error is about 2.5 points per task and 1 point overall,
larger than most differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visacc.reading import read_objects

Record = Mapping[str, Any]
FIELDS = ("filename", "tag", "prompt", "correct", "reason", "metadata", "details")


def record(filename: str, metadata: Mapping[str, Any], correct: bool, reason: str, details: Mapping) -> dict:
    """One result in the official format; metadata and details are JSON texts inside it."""
    return {
        "filename": filename,
        "tag": metadata["tag"],
        "prompt": metadata["prompt"],
        "correct": bool(correct),
        "reason": reason,
        "metadata": json.dumps(metadata),
        "details": json.dumps(details),
    }


def to_line(item: Record) -> str:
    """As pandas writes it: no spaces, ASCII, `/` as `\\/`."""
    return json.dumps({k: item[k] for k in FIELDS}, separators=(",", ":")).replace("/", "\\/")


def read_results(path: str | Path) -> list[dict]:
    """Records of a result file; a broken line is named."""
    out = []
    for number, item in read_objects(path):
        missing = [k for k in FIELDS if k not in item]
        if missing:
            raise ValueError(
                f"{path}, line {number}: no field {missing[0]!r}; is this a GenEval result file?"
            )
        wrong = [k for k in FIELDS if not isinstance(item[k], bool if k == "correct" else str)]
        if wrong:
            raise ValueError(f"{path}, line {number}: field {wrong[0]!r} cannot be {item[wrong[0]]!r}")
        out.append(item)
    if not out:
        raise ValueError(f"{path} holds no results")
    return out


@dataclass(frozen=True)
class Summary:
    """Task scores are means over images; overall is their unweighted mean, the figure papers print."""

    images: int
    prompts: int
    correct_images: float
    correct_prompts: float
    tasks: dict[str, tuple[int, int]]  # tag -> (correct, images), in order of appearance
    overall: float
    ci: dict[str, tuple[float, float]]  # 95 % bootstrap over prompts, per tag and "overall"

    def text(self) -> str:
        """What the original's summary script prints (its lines only)."""
        lines = [
            "Summary",
            "=======",
            f"Total images: {self.images}",
            f"Total prompts: {self.prompts}",
            f"% correct images: {self.correct_images:.2%}",
            f"% correct prompts: {self.correct_prompts:.2%}",
            "",
            "Task breakdown",
            "==============",
            *(
                f"{tag:<16} = {good / total:.2%} ({good} / {total})"
                for tag, (good, total) in self.tasks.items()
            ),
            "",
            f"Overall score (avg. over tasks): {self.overall:.5f}",
        ]
        return "\n".join(lines)


def _by_prompt(records: Sequence[Record]) -> dict[str, dict[str, list[bool]]]:
    """tag -> metadata text -> verdicts, in order of appearance."""
    table: dict[str, dict[str, list[bool]]] = {}
    for r in records:
        table.setdefault(r["tag"], {}).setdefault(r["metadata"], []).append(bool(r["correct"]))
    return table


def _bootstrap(
    per_tag: Mapping[str, np.ndarray], resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """per_tag: [prompts, 2] of (sum, count). Percentile interval of each tag's ratio and of their mean."""
    rng = np.random.default_rng(seed)
    draws = []
    for table in per_tag.values():
        rows = rng.integers(0, len(table), size=(resamples, len(table)))
        sums = table[rows].sum(axis=1)
        draws.append(sums[:, 0] / sums[:, 1])
    drawn = dict(zip(per_tag, draws, strict=True))
    drawn["overall"] = np.mean(draws, axis=0)
    return {k: (float(np.quantile(v, 0.025)), float(np.quantile(v, 0.975))) for k, v in drawn.items()}


def summarise(records: Sequence[Record], *, resamples: int = 2000, seed: int = 0) -> Summary:
    """Scores of a list of result records."""
    if not records:
        raise ValueError("no GenEval results to summarise")
    table = _by_prompt(records)
    tasks = {tag: (sum(map(sum, p.values())), sum(map(len, p.values()))) for tag, p in table.items()}
    prompts = {text: any(v) for p in table.values() for text, v in p.items()}
    counts = {tag: np.array([[sum(v), len(v)] for v in p.values()], float) for tag, p in table.items()}
    good = sum(c for c, _ in tasks.values())
    return Summary(
        len(records),
        len(prompts),
        good / len(records),
        sum(prompts.values()) / len(prompts),
        tasks,
        float(np.mean([c / n for c, n in tasks.values()])),
        _bootstrap(counts, resamples, seed),
    )


@dataclass(frozen=True)
class Paired:
    """Difference a - b of the overall score on the same prompts, with a 95 % bootstrap interval over
    prompts.
    """

    difference: float
    ci: tuple[float, float]
    tasks: dict[str, float]


def compare(a: Sequence[Record], b: Sequence[Record], *, resamples: int = 2000, seed: int = 0) -> Paired:
    """Paired comparison; both files must hold the same prompts with the same number of samples each."""
    ta, tb = _by_prompt(a), _by_prompt(b)
    shape = lambda t: {(tag, m): len(v) for tag, p in t.items() for m, v in p.items()}  # noqa: E731
    if shape(ta) != shape(tb):
        raise ValueError(
            "a paired comparison needs the same prompts and samples per prompt in both result files"
        )
    per_tag = {
        tag: np.array([[sum(v) - sum(tb[tag][m]), len(v)] for m, v in p.items()], float)
        for tag, p in ta.items()
    }
    tasks = {tag: float(t[:, 0].sum() / t[:, 1].sum()) for tag, t in per_tag.items()}
    return Paired(
        float(np.mean(list(tasks.values()))), _bootstrap(per_tag, resamples, seed)["overall"], tasks
    )
