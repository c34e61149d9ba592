"""What a score was computed from: files that changed since make an earlier result another one's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_FILES = ("reference", "weights", "colour_weights")
_OPTIONS = ("extractor_options", "detector_options")

Stamp = list[Any]


def stamp(path: str | Path) -> Stamp:
    """Names, sizes and times of change of a file, or of all files below a folder; empty if there is none."""
    root = Path(path)
    if root.is_dir():
        return sorted(_below(root, ""))
    return _entry(root.name, root.stat()) if root.is_file() else []


def stamps(files: Sequence[Path]) -> Stamp:
    """The same of files in their order."""
    return [_entry(f.name, f.stat()) for f in files]


def inputs_of(spec: Mapping[str, Any]) -> dict[str, Stamp]:
    """Stamps of the files that a metric entry names: reference, weights, those among the options of its network."""
    named = {key: spec[key] for key in _FILES if key in spec}
    for key in _OPTIONS:
        options = spec.get(key) or {}
        named |= {
            f"{key}.{name}": value for name, value in options.items() if isinstance(value, (str, os.PathLike))
        }
    found = {key: stamp(value) for key, value in named.items()}
    return {key: value for key, value in found.items() if value}


def _entry(name: str, found: os.stat_result) -> Stamp:
    return [name, found.st_size, found.st_mtime_ns]


def _below(folder: Path, prefix: str) -> Iterator[Stamp]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield _entry(prefix + entry.name, entry.stat())
