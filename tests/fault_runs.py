"""The command line as the fault tests start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from visacc.cli import main


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"ballast"}


def visacc(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return int(stop.value.code or 0), capsys.readouterr().err


def generate(model: Path, out: Path, *more: str) -> list[str]:
    line = ["generate", "1", "2", "3", "-m", str(model), "-d", "mc-sjd", "--window", "4", "--seed", "5", "-q"]
    return [*line, "-o", str(out), *more]
