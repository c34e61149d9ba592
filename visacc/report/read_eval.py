"""Reports of ``visacc eval run`` and of the score files of ``visacc eval fid``, ``kid``, ``clip`` and ``geneval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visacc.eval.table import TIMES
from visacc.reading import naming
from visacc.report.columns import COMPRESSION, STEPS
from visacc.report.model import (
    Column,
    Method,
    Number,
    Picture,
    Plot,
    Point,
    Report,
    Table,
    check_counts,
    comparison,
    mean_length,
    mean_map,
    middle_frame,
    sweeps,
)
from visacc.report.read import inside, read_json
from visacc.traces import TRACED, decode_grid

IMAGES = Column("images", "d")
SECONDS = Column("s/image", ".3g", note="generation alone")
MOST_PLOTS = 6
Group = dict[str, list[Mapping[str, Any]]]


def read(data: Mapping[str, Any], folder: Path) -> Report:
    rows, baseline = data["rows"], data["baseline"]
    everything = _columns([s for row in rows for s in row["scores"]])
    groups = {k: v for k, v in everything.items() if "/" not in v[0]["protocol"]["metric"]}
    tasks = {k: v for k, v in everything.items() if k not in groups}
    heads = _heads(groups)
    base = next((r["speed"]["seconds"] for r in rows if r["name"] == baseline), None)
    speed = Column(
        "speed-up", ".2f", "x", f"seconds per image of {baseline} divided by seconds per image. {TIMES}"
    )
    methods: list[Method] = []
    settings: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    notes: list[str] = []
    for row in rows:
        cell = inside(folder, row["name"])
        if not (cell / "manifest.json").is_file():
            notes.append(f"{row['name']}: its folder is gone, so there are no pictures of it")
            methods.append(Method(row["name"], row["decoder"], tokens=row["speed"]["compression"]))
            continue
        settings = settings or _settings(cell)
        environment = environment or _environment(cell)
        methods.append(_method(row, cell))
    columns = [Column("output"), IMAGES, STEPS, COMPRESSION, SECONDS, speed, *heads]
    cells = []
    for row, method in zip(rows, methods, strict=True):
        n = _numbers(row, base)
        output = {True: "exact", False: "lossy", None: None}[method.lossless]
        scores = _scores(row["scores"], groups)
        cells.append([output, n["images"], n["steps"], n["compression"], n["seconds"], n["speed"], *scores])
    report = Report(
        f"Evaluation on {data['prompts']}",
        f"{len(rows)} settings, the same prompts and seeds for all; compared with {baseline}",
        str(settings.get("model", "")),
        methods,
        [Table("Speed and quality", columns, cells, _protocols(heads, groups))],
        _plots(rows, methods, groups, heads, base, speed),
        settings=settings,
        environment=environment,
        notes=notes + _warnings([s for row in rows for s in row["scores"]]),
        metrics=[c[0]["protocol"]["metric"] for c in groups.values()],
    )
    if settings.get("model"):
        report.title = f"Evaluation of {settings['model']} on {data['prompts']}"
    if tasks:
        task_cells = [_scores(row["scores"], tasks) for row in rows]
        report.tables.append(
            Table("Task scores", _heads(tasks), task_cells, _protocols(_heads(tasks), tasks))
        )
    paired = _paired(rows, baseline)
    if paired:
        report.tables.append(paired)
    return report


def read_scores(data: Sequence[Mapping[str, Any]], _folder: Path) -> Report:
    """A list of scores of one image set."""
    groups = _columns(data)
    heads = _heads(groups)
    table = Table("Scores", heads, [_scores(data, groups)], _protocols(heads, groups))
    return Report(
        "Scores of an image set",
        ", ".join(h.title for h in heads),
        methods=[Method("images", "")],
        tables=[table],
        notes=_warnings(data),
        metrics=[c[0]["protocol"]["metric"] for c in groups.values()],
    )


# ---- scores -----------------------------------------------------------------------------------------------
def _columns(scores: Sequence[Mapping[str, Any]]) -> Group:
    """Scores by protocol id: numbers of different protocols never share a column."""
    groups: Group = {}
    for s in scores:
        groups.setdefault(s["protocol_id"], []).append(s)
    return groups


def _heads(groups: Group) -> list[Column]:
    counts: dict[str, int] = {}
    heads = []
    for scores in groups.values():
        name = scores[0]["protocol"]["metric"].rpartition("/")[2].replace("_", " ")
        counts[name] = counts.get(name, 0) + 1
        heads.append(Column(name if counts[name] == 1 else f"{name} ({counts[name]})", ".4g"))
    return heads


def _protocols(heads: Sequence[Column], groups: Group) -> str:
    return "\n".join(f"{head.title}: {key}" for head, key in zip(heads, groups, strict=True))


def _score(s: Mapping[str, Any]) -> Number:
    if s.get("ci"):
        return Number(s["value"], s["ci"][0], s["ci"][1])
    return Number(s["value"], spread=s.get("std") or None)


def _scores(scores: Sequence[Mapping[str, Any]], groups: Group) -> list[Number | str | None]:
    by_id = {s["protocol_id"]: _score(s) for s in scores}
    return [by_id.get(key) for key in groups]


def _warnings(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(w) for s in scores for w in s.get("warnings", ())))


def _paired(rows: Sequence[Mapping[str, Any]], baseline: str) -> Table | None:
    names = list(dict.fromkeys(name for row in rows for name in row["paired"]))
    if not names:
        return None
    cells: list[list[Number | str | None]] = []
    for row in rows:
        found = row["paired"]
        cells.append([Number(found[n]["difference"], *found[n]["ci"]) if n in found else None for n in names])
    note = "Same prompts and seeds, 95 % intervals."
    return Table(f"Paired difference from {baseline}", [Column(n, "+.4f") for n in names], cells, note)


# ---- cells ------------------------------------------------------------------------------------------------
def _settings(cell: Path) -> dict[str, Any]:
    path = cell / "manifest.json"
    with naming(path):
        found = dict(read_json(path)["settings"])
        for key in ("decoder", "decoder_options"):  # these differ from row to row
            found.pop(key, None)
        sampling = found.pop("sampling", {})
        return {**found, **{f"sampling: {k}": v for k, v in sampling.items()}}


def _environment(cell: Path) -> dict[str, Any]:
    for path in sorted((cell / "timing").glob("*.json")):
        with naming(path):
            return dict(read_json(path).get("environment", {}))
    return {}


def _method(row: Mapping[str, Any], cell: Path) -> Method:
    method = Method(row["name"], row["decoder"], tokens=row["speed"]["compression"])
    for path in sorted((cell / "chunks").glob("*.json")):
        with naming(path):
            chunk = read_json(path)
            method.lossless = chunk.get("lossless", method.lossless)
            _add(method.histogram, chunk.get("committed_histogram", []))
            for image in chunk["images"]:
                if len(method.pictures) < TRACED:
                    picture = _picture(image, cell)
                    method.pictures[picture.prompt, picture.seed] = picture
    method.mean_grid = mean_map(method.pictures.values())
    method.tokens = mean_length(method.histogram) or method.tokens
    return method


def _add(total: list[int], more: Sequence[int]) -> None:
    check_counts(more)
    total += [0] * (len(more) - len(total))
    for n, count in enumerate(more):
        total[n] += count


def _picture(image: Mapping[str, Any], cell: Path) -> Picture:
    steps = image.get("commit_steps")
    grid = middle_frame(decode_grid(steps)) if steps else None
    return Picture(str(image["prompt"]), image["seed"], inside(cell, image["file"]), image.get("steps"), grid)


def _numbers(row: Mapping[str, Any], base: float | None) -> dict[str, Number]:
    v = row["speed"]
    steps, half, seconds = v["steps"], v["steps_half"], v["seconds"]
    return {
        "images": Number(v["images"]),
        "steps": Number(steps, steps - half, steps + half) if steps and half else Number(steps),
        "compression": Number(v["compression"]),
        "seconds": Number(seconds),
        "speed": Number(base / seconds if base and seconds else None),
    }


def _plots(
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[Method],
    groups: Group,
    heads: Sequence[Column],
    base: float | None,
    speed: Column,
) -> list[Plot]:
    names = sweeps([(row["decoder"], row["options"]) for row in rows], [row["name"] for row in rows])
    numbers = [_numbers(row, base) for row in rows]
    ours = [_scores(row["scores"], groups) for row in rows]

    def points(x: str, metric: int) -> list[Point]:
        found = []
        for row, method, n, scores, (group, short) in zip(rows, methods, numbers, ours, names, strict=True):
            y = scores[metric]
            value = y if isinstance(y, Number) else Number(None)
            found.append(Point(row["name"], group, n[x], value, method.lossless, short))
        return found

    plots: list[Plot] = []
    for i, head in enumerate(heads[:MOST_PLOTS]):
        for x, column in (("compression", COMPRESSION), ("speed", speed))[: 2 if i == 0 else 1]:
            plots += comparison(f"{head.title} against {column.title}", column, head, points(x, i))
    return plots
