"""Progress with an estimate of the time left: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    def __call__(self, done: int) -> None: ...


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


class Lines:
    """One line at most every `interval` seconds: done / total, rate, time left."""

    def __init__(self, label: str, total: int, start: int, interval: float = 30.0):
        self.label, self.total, self.start, self.interval = label, total, start, interval
        self.begun = self.last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if done < self.total and now - self.last < self.interval:
            return
        self.last, fresh = now, done - self.start
        rate = fresh / max(now - self.begun, 1e-9)
        left = _clock((self.total - done) / rate) if rate > 0 else "unknown"
        print(f"{self.label}: {done}/{self.total}, {rate:.2f}/s, {left} left", file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int, start: int = 0, *, quiet: bool = False) -> Iterator[Report]:
    """Yields report(done). start: what an earlier run had finished, so that the estimate counts only new
    work.
    """
    if quiet or total <= start:
        yield lambda done: None
    elif not sys.stderr.isatty():
        yield Lines(label, total, start)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
            task = bar.add_task(label, total=total, completed=start)
            yield lambda done: bar.update(task, completed=done)
