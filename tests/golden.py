"""Where the reference vectors are: the folder named by VISACC_GOLDEN, else a checkout beside the repository,
and file by file the small subset kept in ``tests/data/golden``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from visacc.verify import TreeShape

_TESTS = Path(__file__).resolve().parent
_KEPT = _TESTS / "data" / "golden"


class GoldenDir:
    """Files of one golden folder: ``golden_dir("llamagen") / "vq.pt"`` exists, or the test is skipped."""

    def __init__(self, name: str) -> None:
        root = Path(os.environ.get("VISACC_GOLDEN") or _TESTS.parent.parent / "shared" / "golden")
        self.name = name
        self.roots = (root / name, _KEPT / name)

    def find(self, file: str) -> Path | None:
        return next((root / file for root in self.roots if (root / file).exists()), None)

    def __truediv__(self, file: str) -> Path:
        path = self.find(file)
        if path is None:
            pytest.skip(f"golden file {self.name}/{file} not found (set VISACC_GOLDEN)")
        return path

    def glob(self, pattern: str) -> list[Path]:
        """Matching files, the full folder's first, each name once; empty when there are none."""
        found: dict[str, Path] = {}
        for root in self.roots:
            for path in sorted(root.glob(pattern)):
                found.setdefault(path.name, path)
        return list(found.values())


def golden_dir(name: str) -> GoldenDir:
    return GoldenDir(name)


def as_released(folder: Path, weights: Path, config: Path) -> Path:
    """Golden files under the names that released folders use."""
    folder.mkdir(exist_ok=True)
    shutil.copy(weights, folder / "model.safetensors")
    shutil.copy(config, folder / "config.json")
    return folder


def leaf_paths(shape: TreeShape) -> list[list[int]]:
    """Slots from the root to every leaf, padded with -1, in lexicographic order (the originals' retrieve
    rows)."""
    rows = []
    for slot in range(shape.slots):
        if shape.children[slot]:
            continue
        path, at = [], slot
        while at >= 0:
            path.append(at)
            at = shape.parent[at]
        rows.append(path[::-1])
    rows.sort()
    return [row + [-1] * (shape.max_depth + 1 - len(row)) for row in rows]
