"""The feature stage: rows of an image set on disk, extracted in chunks, then joined into one memory-mapped
file.

Memory is one batch of images and one chunk of rows, whatever the size of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.format import open_memmap

from visacc.eval.chunks import Chunks, run_chunks
from visacc.eval.files import read_json, write_atomic, write_json
from visacc.eval.world import World
from visacc.metrics.extractors.base import Extractor
from visacc.metrics.scores import FeatureSet
from visacc.reading import naming, read_array, read_arrays

BATCH = 32


class Source(Protocol):
    """ImageFolder or NpzImages."""

    def __len__(self) -> int: ...

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[Any]: ...


@dataclass
class ExtractorInfo(Extractor):
    """What is remembered of an extractor: enough for protocols when every row is on disk already."""

    name: str
    preprocess: str
    weights: str
    heads: dict[str, int]

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")

    @classmethod
    def read(cls, path: Path) -> ExtractorInfo:
        with naming(path):
            return cls(**read_json(path))

    @classmethod
    def of(cls, extractor: Extractor) -> ExtractorInfo:
        return cls(extractor.name, extractor.preprocess, extractor.weights, dict(extractor.heads))

    def save(self, path: Path) -> None:
        write_json(
            path,
            {"name": self.name, "preprocess": self.preprocess, "weights": self.weights, "heads": self.heads},
        )


def _guard(folder: Path, extractor: Extractor) -> None:
    path, info = folder / "extractor.json", ExtractorInfo.of(extractor)
    if not path.exists():
        info.save(path)
        return
    old = ExtractorInfo.read(path)
    if (old.id, old.heads) != (info.id, info.heads):
        raise ValueError(f"{folder} holds features of {old.id}, not of {info.id}; use another work folder")


def extract(
    world: World,
    source: Source,
    folder: Path,
    build: Callable[[], Extractor],
    label: str,
    *,
    name: str = "",
    batch: int = BATCH,
    quiet: bool = False,
) -> tuple[FeatureSet, Extractor]:
    """Rows of all images under `folder`, made if they are not there. Returns memory-mapped rows and the
    extractor.

    build() is called only when something is left to do.
    """
    done = folder / "rows.json"
    if not done.exists():
        _extract_chunks(world, source, folder, build, label, batch, quiet)
        if world.main:
            _join(folder, Chunks(folder / "chunks", len(source), batch, ".npz"))
    if world.main:
        _drop_chunks(folder)
    world.barrier()
    summary, info = read_json(done), ExtractorInfo.read(folder / "extractor.json")
    if not isinstance(summary, dict) or not {"images", "rows"} <= summary.keys():
        raise ValueError(f"{done} is damaged: remove {folder} and run again")
    if summary["images"] != len(source):
        raise ValueError(
            f"{folder} holds features of {summary['images']} images, the set has {len(source)} now"
        )
    rows = {head: read_array(folder / f"{head}.npy", mapped=True) for head in info.heads}
    for head, width in info.heads.items():
        if rows[head].shape != (summary["rows"], width):
            raise ValueError(f"{folder / head}.npy is damaged: remove {folder} and run again")
    return FeatureSet(summary["rows"], info.id, name, rows), info


def _extract_chunks(
    world: World,
    source: Source,
    folder: Path,
    build: Callable[[], Extractor],
    label: str,
    batch: int,
    quiet: bool,
) -> None:
    chunks = Chunks(folder / "chunks", len(source), batch, ".npz")
    extractor = build() if chunks.pending() else None
    if world.main and extractor is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _guard(folder, extractor)
    world.barrier()

    def work(chunk: int, start: int, stop: int) -> None:
        assert extractor is not None
        skipped: list[str] = getattr(source, "skipped", [])
        before = len(skipped)
        out: dict[str, np.ndarray] = {}
        for images in source.batches(batch, start, stop):
            out = {head: rows.numpy() for head, rows in extractor(images).items()}
        for head, rows in out.items():
            if not np.isfinite(rows).all():
                raise ValueError(
                    f"{extractor.id} gave NaN or infinite {head} for images {start}..{stop - 1} of {label}"
                )
        names = np.array(skipped[before:], dtype=np.str_)
        chunks.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(chunks.path(chunk), lambda p: np.savez(p, allow_pickle=False, skipped=names, **out))

    run_chunks(world, chunks, work, label, quiet=quiet)


def _join(folder: Path, chunks: Chunks) -> None:
    """One .npy per head from the chunk files; rows.json comes last."""
    heads = ExtractorInfo.read(folder / "extractor.json").heads
    counts, skipped = [], []
    for path in chunks.paths():
        data = read_arrays(path)
        counts.append(len(data[next(iter(heads))]) if next(iter(heads)) in data else 0)
        skipped += [str(s) for s in data["skipped"]]
    total = sum(counts)
    if total == 0:
        raise ValueError(f"no image of the set could be read (first: {skipped[0] if skipped else '?'})")
    for head, width in heads.items():

        def fill(part: Path, head: str = head, width: int = width) -> None:
            table = open_memmap(part, mode="w+", dtype=np.float32, shape=(total, width))
            at = 0
            for path, count in zip(chunks.paths(), counts, strict=True):
                if count:
                    table[at : at + count] = read_arrays(path)[head]
                at += count
            table.flush()

        write_atomic(folder / f"{head}.npy", fill)
    write_json(folder / "rows.json", {"images": chunks.total, "rows": total, "skipped": skipped})


def _drop_chunks(folder: Path) -> None:
    """Remove the chunks of joined rows; a kill may have come between joining and removing."""
    chunks = folder / "chunks"
    if chunks.is_dir():
        for path in chunks.iterdir():
            path.unlink()
        chunks.rmdir()
