"""Plots as inline SVG. Text and axes take the colour of the page, so one drawing serves light and dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from visacc.report.model import Number, Plot, Point

# Okabe and Ito's palette, darkened or lightened to stand on white and on near-black alike
COLOURS = (
    "#0b84c6",
    "#d55e00",
    "#009e73",
    "#c26fa3",
    "#b58900",
    "#7a6fd0",
    "#d1495b",
    "#5f8f3f",
    "#8c6d4f",
    "#3a9fa5",
)
_INK, _LINE = "#010203", "#040506"  # stand-ins, replaced by the page's own colours
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "visacc",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "text.parse_math": False,
    "legend.frameon": False,
}


def require() -> None:
    """Raise ``RuntimeError`` if the packages of the report are missing, before anything is read."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"the report needs {error.name}: pip install 'visacc[report]'") from error


def scatter(plot: Plot, name: str) -> str:
    """SVG of a trade-off plot. ``name`` keeps the ids of several drawings on one page apart."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        return _svg(_scatter(plot), name)


def _scatter(plot: Plot) -> Any:
    from matplotlib.lines import Line2D

    groups: dict[str, list[Point]] = {}
    for point in plot.points:
        groups.setdefault(point.group, []).append(point)
    rows = -(-(len(groups) + bool(plot.band)) // 2)
    figure, axes = _figure(4.2, 2.9 + 0.18 * rows)
    handles: list[Any] = []
    for i, (group, points) in enumerate(groups.items()):
        points = sorted(points, key=lambda p: p.x.value or 0)
        colour = COLOURS[i % len(COLOURS)]
        marker = {True: "o", False: "^", None: "s"}[points[0].lossless]
        line: Any = "-" if len(points) > 1 else "none"
        axes.errorbar(
            [p.x.value for p in points],
            [p.y.value for p in points],
            xerr=_bars([p.x for p in points]),
            yerr=_bars([p.y for p in points]),
            color=colour,
            marker=marker,
            linestyle=line,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            markersize=5.5,
        )
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle=line, markersize=5, label=group))
        for p in points:
            if p.short:
                place = (p.x.value or 0, p.y.value or 0)
                axes.annotate(p.short, place, fontsize=7, xytext=(4, 4), textcoords="offset points")
    if plot.band:
        low, high, label = plot.band
        handles.append(axes.axhspan(low, high, color=_LINE, alpha=0.6, linewidth=0, zorder=0, label=label))
    values = [p.y.value or 0.0 for p in plot.points]
    if plot.log_y and max(values) > 8 * min(values) > 0:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=8, handlelength=1.6)
    return figure


def bars(histogram: Sequence[int], longest: int, colour: str, name: str) -> str:
    """SVG of the share of steps that committed n tokens, n = 1 to ``longest``."""
    from matplotlib import rc_context

    total = sum(histogram)
    shares = [100 * histogram[n] / total if n < len(histogram) else 0.0 for n in range(1, longest + 1)]
    with rc_context({**_STYLE, "font.size": 8}):
        figure, axes = _figure(3.3, 1.6)
        axes.bar(range(1, longest + 1), shares, color=colour, width=0.85)
        axes.grid(axis="x", visible=False)
        axes.set_xlim(0.4, longest + 0.6)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=7)
        axes.set_xlabel("tokens a step commits")
        axes.set_ylabel("% of steps")
        return _svg(figure, name)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _bars(numbers: Sequence[Number]) -> list[list[float]] | None:
    """Distances down and up for matplotlib; None where no point has an interval."""
    down, up = [], []
    for n in numbers:
        value = n.value or 0.0
        down.append(value - n.low if n.low is not None else 0.0)
        up.append(n.high - value if n.high is not None else 0.0)
    bars = [[d if math.isfinite(d) and d > 0 else 0.0 for d in side] for side in (down, up)]
    return bars if any(map(any, bars)) else None


def _svg(figure: Any, name: str) -> str:
    sink = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's own fonts draw the text
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(sink, format="svg", transparent=True, metadata=nothing)
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]*)"', rf'href="#{name}-\1"', text)
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    return text.replace(_INK, "currentColor").replace(_LINE, "var(--line)")
