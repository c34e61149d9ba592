"""Reports of ``visacc bench decoders``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visacc.report.columns import COMPRESSION, STEPS, TAU
from visacc.report.model import (
    Column,
    Method,
    Number,
    Picture,
    Plot,
    Point,
    Report,
    Table,
    comparison,
    inverse,
    middle_frame,
    sweeps,
)
from visacc.report.read import inside
from visacc.traces import decode_grid

SPEED = Column(
    "speed-up", ".2f", "x", "seconds of ar divided by seconds, same batches, same run; range over batches"
)
SCORE = Column("task score", ".3f", note="mean of the task scores, 95 % interval")
DELTA = Column("difference to ar", "+.3f", note="on the same prompts and seeds, paired 95 % interval")
FRECHET = Column(
    "Fréchet to ar", ".4g", note="distance in fixed features to plain decoding with other seeds (not an FID)"
)
CHANCE = Column("p", ".3f", note="how often two equally distributed sets of this size are as far apart")
SAME = Column("tokens as ar", ".1%", note="share of tokens equal to plain decoding with the same seed")


def read(data: Mapping[str, Any], folder: Path) -> Report:
    rows = data["decoders"]
    methods = [_method(d, folder) for d in rows]
    judged = any("overall" in d for d in rows)
    columns = [Column("output"), STEPS, COMPRESSION, TAU, SPEED]
    columns += [SCORE, DELTA] if judged else []
    columns += [FRECHET, CHANCE, SAME]
    report = Report(
        f"Decoders on {data['model']}",
        f"{data['images']} images per decoder, the same prompts and seeds for all, {data['batch']} decoded together",
        str(data["model"]),
        methods,
        [Table("Speed and quality", columns, [_cells(d, judged) for d in rows])],
        _plots(rows, judged),
        settings={
            "model": data["model"],
            "images": data["images"],
            "batch": data["batch"],
            **data["sampling"],
        },
        environment=dict(data.get("environment", {})) or {k: data[k] for k in ("visacc", "torch", "device")},
        metrics=["geneval"] if judged else [],
    )
    if judged:
        report.tables.append(_task_table(rows))
    report.notes = [f"{d['label']}: {d['note']}." for d in rows if d.get("note")]
    report.notes += [f"{label} did not run: {reason}" for label, reason in data["skipped"].items()]
    return report


def _method(d: Mapping[str, Any], folder: Path) -> Method:
    found = Method(
        d["label"], d["decoder"], bool(d["lossless"]), list(d.get("committed_histogram", [])), d["tau"]
    )
    for p in d.get("pictures", []):
        grid = middle_frame(decode_grid(p["commit_steps"])) if "commit_steps" in p else None
        verdict = (
            "" if "right" not in p else f"{p['task'].replace('_', ' ')}: {'right' if p['right'] else 'wrong'}"
        )
        picture = Picture(str(p["prompt"]), p["seed"], inside(folder, p["file"]), p["steps"], grid, verdict)
        found.pictures[picture.prompt, picture.seed] = picture
    if "commit_mean" in d:
        found.mean_grid = middle_frame(decode_grid(d["commit_mean"]))
    return found


def _pair(interval: Any) -> tuple[float | None, float | None]:
    return (None, None) if not interval or interval[0] == interval[1] else (interval[0], interval[1])


def _numbers(d: Mapping[str, Any]) -> dict[str, Number | None]:
    frechet, delta = d.get("frechet"), d.get("difference_to_ar")
    ratio = Number(d["seconds_ratio"], *_pair(d.get("seconds_ratio_range")))
    return {
        "steps": Number(d["steps"], *_pair(d.get("steps_interval"))),
        "compression": Number(d["step_compression"]),
        "tau": Number(d["tau"]),
        "speed": inverse(ratio),
        "score": Number(d["overall"], *_pair(d["overall_interval"])) if "overall" in d else None,
        "delta": Number(delta[0], delta[1], delta[2]) if delta else None,
        "frechet": Number(frechet["distance"]) if frechet else None,
        "chance": Number(frechet["p_value"]) if frechet else None,
        "same": Number(d["same_codes_as_ar"]),
    }


def _cells(d: Mapping[str, Any], judged: bool) -> list[Number | str | None]:
    n = _numbers(d)
    keys = ["steps", "compression", "tau", "speed", *(["score", "delta"] if judged else [])]
    return ["exact" if d["lossless"] else "lossy", *(n[k] for k in [*keys, "frechet", "chance", "same"])]


def _task_table(rows: list[Mapping[str, Any]]) -> Table:
    tasks = list(dict.fromkeys(task for d in rows for task in d.get("tasks", {})))
    cells: list[list[Number | str | None]] = []
    for d in rows:
        found = d.get("tasks", {})
        cells.append(
            [Number(found[t]["score"], *_pair(found[t]["interval"])) if t in found else None for t in tasks]
        )
    return Table(
        "Task scores", [Column(t.replace("_", " "), ".2f") for t in tasks], cells, "95 % intervals (Wilson)."
    )


def _points(rows: list[Mapping[str, Any]], x: str, y: str) -> list[Point]:
    names = sweeps([(d["decoder"], d["options"]) for d in rows], [d["label"] for d in rows])
    points = []
    for d, (group, short) in zip(rows, names, strict=True):
        n = _numbers(d)
        points.append(
            Point(d["label"], group, n[x] or Number(None), n[y] or Number(None), d["lossless"], short)
        )
    return points


def _plots(rows: list[Mapping[str, Any]], judged: bool) -> list[Plot]:
    plots: list[Plot] = []
    plain = next((d for d in rows if d["label"] == "ar"), None)
    if judged:
        band = (*plain["overall_interval"], "ar, 95 %") if plain and "overall" in plain else None
        for x, column in (("compression", COMPRESSION), ("speed", SPEED)):
            title = f"Task score against {column.title}"
            plots += comparison(title, column, SCORE, _points(rows, x, "score"), band=band)
    title = "Distance to plain decoding against tokens/step"
    plots += comparison(title, COMPRESSION, FRECHET, _points(rows, "compression", "frechet"), log_y=True)
    if not judged:
        plots += comparison(
            "Speed-up against tokens/step", COMPRESSION, SPEED, _points(rows, "compression", "speed")
        )
    return plots
