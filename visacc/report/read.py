"""Finding out what a folder or file holds, and reading it into a :class:`Report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from visacc import reading
from visacc.report.model import Report

NAMES = {
    "decoders.json": "visacc bench decoders",
    "summary.json": "visacc eval run",
    "stats.json": "visacc generate",
}
_EXPECTED = (
    "decoders.json (visacc bench decoders), summary.json (visacc eval run), stats.json (visacc generate), or the JSON"
    " file of visacc bench vlm or visacc eval fid, kid, clip, fvd, geneval"
)
Reader = Callable[[Any, Path], Report]


class NamedError(ValueError):
    """Says already which file or folder is at fault."""


def read_json(path: Path) -> Any:
    """Content of a JSON file. Raises ``ValueError`` naming the file and the place where it breaks."""
    try:
        return reading.read_json(path)
    except ValueError as error:
        broken = isinstance(error.__cause__, json.JSONDecodeError)
        raise NamedError(f"{error}; was the run interrupted?" if broken else str(error)) from error


def kind_of(data: Any) -> str:
    """Name of the run that writes such a file; empty if none does."""
    if isinstance(data, list) and data and all(isinstance(d, dict) and "protocol" in d for d in data):
        return "scores"
    if not isinstance(data, dict):
        return ""
    marks = {
        "bench": {"decoders", "sampling", "images"},
        "eval": {"baseline", "rows", "prompts"},
        "generate": {"stats", "decoder", "sampling"},
        "vlm": {"tau", "rows", "pictures"},
    }
    return next((kind for kind, keys in marks.items() if keys <= set(data)), "")


def find(run: Path) -> Path:
    """The JSON file of a run given as folder or file."""
    if run.is_file():
        return run
    if not run.exists():
        raise ValueError(f"no run at {run}: give the folder or JSON file that a visacc command wrote")
    if not run.is_dir():
        raise ValueError(f"{run} is neither a folder nor a file")
    try:
        entries = sorted(run.iterdir())
    except OSError as error:
        raise ValueError(f"cannot read {run}: {error.strerror or error}") from None
    if not entries:
        raise ValueError(f"{run} is empty; expected {_EXPECTED}")
    known = [run / name for name in NAMES if (run / name).is_file()]
    if not known:
        files = [e for e in entries if e.suffix == ".json" and e.is_file()]
        known = [f for f in files if kind_of(read_json(f))]
    if len(known) > 1:
        names = ", ".join(f.name for f in known)
        raise ValueError(f"{run} holds several runs ({names}): name one of these files")
    if known:
        return known[0]
    if any((e / "manifest.json").is_file() for e in entries):
        raise ValueError(
            f"the evaluation in {run} is not finished (no summary.json); run the same 'visacc eval run' again"
        )
    raise ValueError(f"{run} holds no run of visacc: found no {_EXPECTED}")


def load(runs: Sequence[str | Path]) -> Report:
    """Report of one run, or of several ``visacc generate`` runs side by side.

    Raises:
        ValueError: nothing there, a folder of something else, a damaged file, or runs that cannot be compared.
    """
    from visacc.report import read_bench, read_eval, read_generate, read_vlm

    if not runs:
        raise ValueError("give at least one run")
    readers: dict[str, Reader] = {
        "bench": read_bench.read,
        "eval": read_eval.read,
        "vlm": read_vlm.read,
        "scores": read_eval.read_scores,
    }
    files = [find(Path(run)) for run in runs]
    found = [(path, read_json(path)) for path in files]
    kinds = [kind_of(data) for _, data in found]
    for path, kind in zip(files, kinds, strict=True):
        if not kind:
            raise ValueError(f"{path} is not a file that visacc writes; expected {_EXPECTED}")
    if len(set(files)) < len(files):
        raise ValueError("a run is given twice")
    if len(files) > 1 and set(kinds) != {"generate"}:
        raise ValueError("only runs of visacc generate can be put on one page; give one run of another kind")
    try:
        if kinds[0] == "generate":
            return read_generate.read(found)
        return readers[kinds[0]](found[0][1], found[0][0].parent)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        if isinstance(error, NamedError):
            raise
        names = ", ".join(map(str, files))
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{names} is damaged or of another version of visacc: {reason}") from error


def inside(folder: Path, name: Any) -> Path:
    """A file of the run. Raises ``ValueError`` for names that lead out of its folder."""
    if not isinstance(name, str) or "\0" in name:
        raise NamedError(f"the run in {folder} names a file {name!r}, which is no file name")
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise NamedError(f"the run in {folder} names a file outside of its folder: {name}")
    return path
