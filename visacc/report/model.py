"""What a page shows, whatever kind of run it comes from. Readers fill it in, :mod:`visacc.report.page` draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Number:
    """A value with its 95 % interval or range, or with a spread of its own (a standard deviation), where there is one."""

    value: float | None
    low: float | None = None
    high: float | None = None
    spread: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.value, self.low, self.high, self.spread)


@dataclass(frozen=True)
class Column:
    """``form`` is a format specification (".2f"), ``unit`` stands behind the value, ``note`` explains the column."""

    title: str
    form: str = ".3g"
    unit: str = ""
    note: str = ""


@dataclass
class Table:
    """Rows of numbers or texts, one per method; ``None`` where a method has no such value."""

    title: str
    columns: list[Column]
    rows: list[list[Number | str | None]]
    note: str = ""


@dataclass(frozen=True)
class Point:
    """A method in a plot. Points of one ``group`` share a colour and, if there are several, a line."""

    label: str
    group: str
    x: Number
    y: Number
    lossless: bool | None = None
    short: str = ""  # stands beside the point


@dataclass
class Plot:
    """``band``: low, high and meaning of a shaded range of y."""

    title: str
    x: str
    y: str
    points: list[Point]
    log_y: bool = False
    band: tuple[float, float, str] | None = None


@dataclass(frozen=True)
class Picture:
    """An image file with the step that committed each token (float [H, W]), where that was recorded."""

    prompt: str
    seed: int
    path: Path
    steps: float | None = None
    grid: np.ndarray | None = None
    verdict: str = ""

    def __post_init__(self) -> None:
        _check_numbers(self.steps)


@dataclass
class Method:
    """A decoder (or drafter) with its options.

    Attributes:
        name: registered name, from which sources are found.
        lossless: ``None`` where the run does not say.
        histogram: ``h[n]`` steps that committed n tokens.
        tokens: mean tokens a step.
        pictures: by (prompt, seed), in the order of the run.
        mean_grid: float [H, W] mean step that committed each token, over all images.
    """

    label: str
    name: str
    lossless: bool | None = None
    histogram: list[int] = field(default_factory=list)
    tokens: float | None = None
    pictures: dict[tuple[str, int], Picture] = field(default_factory=dict)
    mean_grid: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not isinstance(self.name, str):
            raise TypeError(f"expected a name, got {self.label!r} and {self.name!r}"[:120])
        _check_numbers(self.tokens)
        check_counts(self.histogram)


@dataclass
class Report:
    """Everything on the page.

    Attributes:
        model: name of the model, empty where the run has none.
        settings, environment: shown as tables of names and values.
        figures: further image files with a caption.
        notes: remarks of the run: slower than plain decoding and why, did not run, protocol warnings.
        metrics: names of metrics, from which sources are found.
    """

    title: str
    summary: str
    model: str = ""
    methods: list[Method] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    figures: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)


def mean_of(values: Iterable[float]) -> Number:
    """Mean with its 95 % interval (normal), none for fewer than two values."""
    given = np.array(list(values), dtype=np.float64)
    if not given.size:
        return Number(None)
    mean = float(given.mean())
    if given.size < 2 or given.min() == given.max():
        return Number(mean)  # plain decoding takes the same steps for every image
    half = 1.96 * float(given.std(ddof=1)) / math.sqrt(given.size)
    return Number(mean, mean - half, mean + half)


def inverse(number: Number) -> Number:
    """1 / x of a positive ratio and its bounds."""
    value, low, high = (
        None if v is None or v <= 0 else 1 / v for v in (number.value, number.low, number.high)
    )
    return Number(value, high, low)


def middle_frame(grid: np.ndarray) -> np.ndarray:
    """[H, W] of [T, H, W]: the frame that pictures of a video are taken from."""
    return grid[len(grid) // 2]


def mean_map(pictures: Iterable[Picture]) -> np.ndarray | None:
    """Mean of the maps of pictures of one size; ``None`` if fewer than two were kept."""
    grids = [p.grid for p in pictures if p.grid is not None]
    if len(grids) < 2 or len({g.shape for g in grids}) > 1:
        return None
    return np.mean(grids, axis=0)


def mean_length(histogram: Sequence[int]) -> float | None:
    """Tokens a step, from how many steps committed n tokens."""
    steps = sum(histogram)
    return sum(n * count for n, count in enumerate(histogram)) / steps if steps else None


def comparison(title: str, x: Column, y: Column, points: list[Point], **more: Any) -> list[Plot]:
    """A plot of the points that have both values; none if fewer than two do."""
    shown = [p for p in points if _finite(p.x.value) and _finite(p.y.value)]
    return [Plot(title, x.title, y.title, shown, **more)] if len(shown) > 1 else []


def sweeps(entries: Sequence[tuple[str, Mapping[str, Any]]], labels: Sequence[str]) -> list[tuple[str, str]]:
    """(group, short label) of every entry: settings of one decoder that differ in one number form a group."""
    found = []
    for (decoder, options), label in zip(entries, labels, strict=True):
        peers = [o for d, o in entries if d == decoder]
        varied = sorted({k for o in peers for k in o if any(p.get(k) != o[k] for p in peers)})
        knob = varied[0] if len(varied) == 1 else ""
        number = all(isinstance(o.get(knob), (int, float)) for o in peers) if knob else False
        found.append((decoder, f"{options[knob]:g}") if number else (label, ""))
    return found


def _check_numbers(*values: Any) -> None:
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"expected a number, got {value!r}"[:120])


def check_counts(values: Any) -> None:
    """Raise ``TypeError`` unless it is a list of counts."""
    good = isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
    if not good or len(values) > 1_000_000:
        raise TypeError(f"expected a list of counts, got {values!r}"[:120])


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
