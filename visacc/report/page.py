"""The page: a template, its style and script, and everything of the run inside one file."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from visacc import __version__
from visacc.report import figures
from visacc.report.model import Column, Method, Number, Report
from visacc.report.pictures import embed, gallery, heat, load
from visacc.report.read import load as read_runs
from visacc.report.sources import address, sources
from visacc.writing import write_atomic

PICTURES, SIDE = 12, 384


def build(
    runs: Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    pictures: int = PICTURES,
    side: int = SIDE,
    title: str | None = None,
) -> Path:
    """Write the page of a run (or of several ``visacc generate`` runs) and return where it lies.

    Args:
        pictures: prompts whose pictures are shown, evenly spread over the run; 0 for none.
        side: largest side of an embedded picture in pixels; larger ones are scaled down.
        title: headline instead of the run's own.

    Raises:
        ValueError: no run there, a damaged one, or a place that cannot be written to.
        RuntimeError: matplotlib or jinja2 is missing.
    """
    if pictures < 0:
        raise ValueError(f"pictures must not be negative, got {pictures}")
    if side < 16:
        raise ValueError(f"side must be at least 16 pixels, got {side}")
    figures.require()
    target = _writable(Path(out))
    report = read_runs(runs)
    if title:
        report.title = title
    _write(target, render(report, pictures=pictures, side=side))
    return target


def render(report: Report, *, pictures: int = PICTURES, side: int = SIDE) -> str:
    """HTML text of a report. Raises ``ValueError`` for damaged picture files."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    room = Environment(
        loader=PackageLoader("visacc.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    room.filters |= {"number": number, "interval": interval, "value": plain, "address": address}
    parts = files("visacc.report") / "templates"
    items, remarks = gallery(report.methods, pictures, side) if pictures else ([], [])
    return room.get_template("report.html.j2").render(
        report=report,
        version=__version__,
        style=Markup((parts / "style.css").read_text(encoding="utf-8")),
        script=Markup((parts / "script.js").read_text(encoding="utf-8")),
        plots=[
            {"title": plot.title, "svg": Markup(figures.scatter(plot, f"plot{i}"))}
            for i, plot in enumerate(report.plots)
        ],
        known_laws=any(m.lossless is not None for m in report.methods),
        lengths=_lengths(report.methods),
        items=items,
        means=[heat(m.mean_grid) if m.mean_grid is not None else None for m in report.methods],
        shared_mean=any(m.mean_grid is not None for m in report.methods),
        extra=[{"image": embed(load(path), 1024), "caption": caption} for path, caption in report.figures],
        notes=[*report.notes, *remarks],
        sources=sources([m.name for m in report.methods], report.model, report.metrics),
    )


def _lengths(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Histogram of each method that has one, all on one axis."""
    from markupsafe import Markup

    shown = [(i, m) for i, m in enumerate(methods) if sum(m.histogram)]
    longest = max((_most(m.histogram) for _, m in shown), default=0)
    drawn = []
    for i, m in shown:
        colour = figures.COLOURS[i % len(figures.COLOURS)]
        svg = figures.bars(m.histogram, longest, colour, f"bars{i}")
        drawn.append({"label": m.label, "tokens": m.tokens, "steps": sum(m.histogram), "svg": Markup(svg)})
    return drawn


def _most(histogram: Sequence[int]) -> int:
    """Longest step worth an axis: beyond it lie less than 0.2 % of the steps."""
    rest, total = sum(histogram), sum(histogram)
    for n, count in enumerate(histogram):
        rest -= count
        if rest <= 0.002 * total:
            return max(n, 1)
    return 1


# ---- texts of numbers -------------------------------------------------------------------------------------
def number(value: float | None, column: Column) -> str:
    """A value in its column's form."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if math.isnan(value):
        return "not a number"
    text = format(int(value) if column.form == "d" else value, column.form)
    return (text + column.unit).replace("-", "−")


def interval(cell: Number, column: Column) -> str:
    """ "low to high" or "± spread", empty where the value has neither."""
    if cell.low is not None and cell.high is not None:
        return f"{number(cell.low, column)} to {number(cell.high, column)}"
    return f"± {cell.spread:.2g}" if cell.spread else ""


def plain(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={plain(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


# ---- file -------------------------------------------------------------------------------------------------
def _writable(path: Path) -> Path:
    """Refuse a place that cannot be written to before any work is done."""
    if path.is_dir():
        raise ValueError(f"output {path} is a folder; --out takes a file, e.g. {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to the folder of {path}: {error.strerror or error}") from None
    return path


def _write(path: Path, text: str) -> None:
    """The whole page or none: an earlier page stays until the new one is complete."""
    # a prompt may hold half a surrogate pair, which no file can
    data = text.encode("utf-8", errors="replace")
    try:
        write_atomic(path, lambda part: part.write_bytes(data))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
