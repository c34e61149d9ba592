"""The files of an evaluation run: written whole or not at all (:mod:`visacc.writing`)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from visacc.reading import read_json
from visacc.writing import sweep, write_atomic, write_text
from visacc.writing import write_json as _write_json

__all__ = ["file_sha256", "read_json", "sweep", "write_atomic", "write_json", "write_png", "write_text"]


def write_json(path: Path, data: Any) -> None:
    """Keys in order, so that equal results are equal bytes."""
    _write_json(path, data, sort_keys=True)


def write_png(path: Path, image: Any) -> None:
    """A PIL image, losslessly."""
    write_atomic(path, lambda p: image.save(p, format="PNG"))


def file_sha256(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()
