"""Reports of ``visacc generate`` and ``visacc video generate``: one run, or several decoders side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visacc.report.columns import COMPRESSION, STEPS, TAU
from visacc.report.model import (
    Column,
    Method,
    Number,
    Picture,
    Point,
    Report,
    Table,
    comparison,
    mean_map,
    mean_of,
    middle_frame,
    sweeps,
)
from visacc.report.read import NamedError, inside
from visacc.traces import decode_grid

FED = Column("fed/step", ".1f", note="tokens per row that a step runs through the model")
SECONDS = Column("s/image", ".3g", note="decoding alone; runs of different moments, so compare with care")
Run = tuple[Path, Mapping[str, Any]]


def read(runs: Sequence[Run]) -> Report:
    """Raises ``ValueError`` for runs of different models, whose pictures have nothing in common."""
    models = list(dict.fromkeys(str(data["model"]) for _, data in runs))
    if len(models) > 1:
        raise NamedError(f"runs of different models cannot be compared: {', '.join(models)}")
    labels = _labels(runs)
    methods = [_method(label, path.parent, data) for label, (path, data) in zip(labels, runs, strict=True)]
    first = runs[0][1]
    cells = [_cells(data) for _, data in runs]
    report = Report(
        f"Pictures of {models[0]}",
        f"{first['stats']['images']} pictures, {', '.join(labels)}",
        models[0],
        methods,
        [Table("Speed", [Column("output"), STEPS, COMPRESSION, TAU, FED, SECONDS], cells)],
        settings={"model": models[0], **_settings(runs)},
        environment=dict(first.get("environment", {})),
        notes=_notes(runs),
    )
    names = sweeps([(data["decoder"], data["decoder_options"]) for _, data in runs], labels)
    points = []
    for (_, data), label, (group, short), row in zip(runs, labels, names, cells, strict=True):
        x, y = row[2], row[5]
        assert isinstance(x, Number) and isinstance(y, Number)
        points.append(Point(label, group, x, y, data["lossless"], short))
    report.plots = comparison("Time against tokens/step", COMPRESSION, SECONDS, points)
    for path, data in runs:
        sheet = path.parent / "frames.png"
        if "videos" in data and sheet.is_file():
            report.figures.append((sheet, f"Frames of the clips, {data['decoder']}"))
    return report


def _labels(runs: Sequence[Run]) -> list[str]:
    """Decoder names, with the options in which runs of one decoder differ; folder names where that is not enough."""
    everything = [(data["decoder"], data["decoder_options"]) for _, data in runs]
    labels = []
    for decoder, options in everything:
        peers = [o for d, o in everything if d == decoder]
        varied = {k: v for k, v in options.items() if any(p.get(k) != v for p in peers)}
        shown = ", ".join(f"{k}={v}" for k, v in varied.items())
        labels.append(f"{decoder} ({shown})" if shown else str(decoder))
    folders = [path.parent.name for path, _ in runs]
    named = [
        f"{label} [{folder}]" if labels.count(label) > 1 else label
        for label, folder in zip(labels, folders, strict=True)
    ]
    return [f"{label} #{i}" if named.count(label) > 1 else label for i, label in enumerate(named, 1)]


def _method(label: str, folder: Path, data: Mapping[str, Any]) -> Method:
    stats = data["stats"]
    method = Method(
        label,
        data["decoder"],
        data["lossless"],
        stats["committed_histogram"],
        stats["mean_committed_per_step"],
    )
    for image in data.get("images", []):
        steps = image.get("commit_steps")
        grid = middle_frame(decode_grid(steps)) if steps else None
        path = inside(folder, image["file"])
        picture = Picture(str(image["prompt"]), image["seed"], path, image["steps"], grid)
        method.pictures[picture.prompt, picture.seed] = picture
    method.mean_grid = mean_map(method.pictures.values())
    return method


def _cells(data: Mapping[str, Any]) -> list[Number | str | None]:
    stats = data["stats"]
    return [
        "exact" if data["lossless"] else "lossy",
        mean_of(stats["steps"]),
        Number(stats["step_compression"]),
        Number(stats["mean_committed_per_step"]),
        Number(stats["tokens_fed_per_step"]),
        Number(stats["seconds"] / max(stats["images"], 1)),
    ]


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Sampling, and the options of each decoder; where runs differ, all values."""
    found: dict[str, Any] = {}
    for key in runs[0][1]["sampling"]:
        values = [data["sampling"].get(key) for _, data in runs]
        found[key] = values[0] if all(v == values[0] for v in values) else values
    for label, (_, data) in zip(_labels(runs), runs, strict=True):
        if data["decoder_options"]:
            found[label] = data["decoder_options"]
    return found


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    samplings = [data["sampling"] for _, data in runs]
    if any(s != samplings[0] for s in samplings):
        notes.append("These runs differ in their sampling settings: their pictures follow different laws.")
    pairs = [{(i["prompt"], i["seed"]) for i in data.get("images", [])} for _, data in runs]
    if len(pairs) > 1 and not set.intersection(*pairs):
        notes.append("These runs share no prompt with the same seed, so no pictures stand side by side.")
    if any(data["stats"].get("unfinished") for _, data in runs):
        notes.append("A run was stopped before its pictures were finished.")
    return notes
