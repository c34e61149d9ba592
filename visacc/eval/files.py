"""Files that survive a kill: written whole or not at all, leftovers swept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PART = ".part"


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a temporary neighbour, which then replaces `path`. A kill leaves a hidden `.part`
    file at most.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}{_PART}{path.suffix}")
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_png(path: Path, image: Any) -> None:
    """A PIL image, losslessly."""
    write_atomic(path, lambda p: image.save(p, format="PNG"))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def sweep(folder: Path) -> int:
    """Remove what killed writers left in a folder and below; returns how many files."""
    leftovers = [f for f in folder.rglob(f".*{_PART}*") if f.is_file()]
    for f in leftovers:
        f.unlink(missing_ok=True)
    return len(leftovers)


def file_sha256(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()
