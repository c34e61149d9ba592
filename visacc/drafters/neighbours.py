"""Nearest codes of every code in codebook space, for the relaxed acceptance rules of LANTERN (arXiv 2410.03355).

A table is computed once per codebook on the model's device and kept as safetensors, keyed by the codebook's
contents, in ``$VISACC_CACHE`` (default ``~/.cache/visacc``).
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visacc.weights import read_weights
from visacc.writing import write_safetensors

K_MAX = 1024
METRICS = ("given", "normalised")
_ROWS = 1 << 22  # distances computed at a time


@dataclass(frozen=True)
class NeighbourTable:
    """``neighbours`` int32 [V, K] nearest first, the code itself excluded; ``distances`` float32 [V, K]."""

    neighbours: Tensor
    distances: Tensor


def nearest_codes(codebook: Tensor, k: int = K_MAX, metric: str = "given") -> NeighbourTable:
    """The k nearest codes (Euclidean) of every row of ``codebook`` [V, d], capped at V - 1.

    Args:
        metric: ``given`` compares the rows as they are (adapters give them in the space their tokenizer compares
            them), ``normalised`` compares directions.
    """
    if codebook.ndim != 2 or codebook.shape[0] < 2:
        raise ValueError(f"a codebook must be [V, d] with at least two codes, got {list(codebook.shape)}")
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; choose one of {', '.join(METRICS)}")
    book = codebook.detach().float()
    if metric == "normalised":
        book = torch.nn.functional.normalize(book, dim=1)
    vocab = book.shape[0]
    k = min(k, vocab - 1)
    chunk = max(1, _ROWS // vocab)
    ids, distances = [], []
    for start in range(0, vocab, chunk):
        rows = torch.arange(start, min(start + chunk, vocab), device=book.device)
        # not |a|^2 + |b|^2 - 2ab: its cancellation reorders close codes
        d = torch.cdist(book[rows], book, compute_mode="donot_use_mm_for_euclid_dist")
        d[torch.arange(len(rows), device=book.device), rows] = torch.inf
        near = d.topk(k, dim=1, largest=False)
        ids.append(near.indices.to(torch.int32))
        distances.append(near.values)
    return NeighbourTable(torch.cat(ids), torch.cat(distances))


def codebook_hash(codebook: Tensor) -> str:
    data = np.ascontiguousarray(codebook.detach().float().cpu().numpy())
    return hashlib.sha256(repr(data.shape).encode() + data.tobytes()).hexdigest()


def cache_folder() -> Path:
    return Path(os.environ.get("VISACC_CACHE") or Path.home() / ".cache" / "visacc") / "neighbours"


def cached_table(codebook: Tensor, k: int, metric: str = "given") -> NeighbourTable:
    """:func:`nearest_codes` with at least ``k`` columns, from the cache where it has them."""
    want = min(max(k, K_MAX), codebook.shape[0] - 1)
    if k > codebook.shape[0] - 1:
        raise ValueError(f"k={k} neighbours need more than {k} codes, the codebook has {codebook.shape[0]}")
    digest = codebook_hash(codebook)
    path = cache_folder() / f"{digest[:16]}-{metric}.safetensors"
    table = _read(path, digest, codebook.shape[0], want)
    if table is None:
        table = nearest_codes(codebook, want, metric)
        _write(path, digest, table)
    device = codebook.device
    return NeighbourTable(table.neighbours.to(device), table.distances.to(device))


def _read(path: Path, digest: str, codes: int, want: int) -> NeighbourTable | None:
    if not path.is_file():
        return None
    try:
        tensors, metadata = read_weights(path)
        table = NeighbourTable(tensors["neighbours"], tensors["distances"])
        if metadata.get("codebook") != digest or not _sound(table, codes, want):
            return None
    except (ValueError, KeyError):  # an interrupted write: compute it again
        return None
    return table


def _sound(table: NeighbourTable, codes: int, want: int) -> bool:
    """Whether a table from the cache is one of ``codes`` rows with at least ``want`` valid neighbours each."""
    ids, distances = table.neighbours, table.distances
    if ids.dtype != torch.int32 or distances.dtype != torch.float32 or ids.shape != distances.shape:
        return False
    if ids.ndim != 2 or ids.shape[0] != codes or ids.shape[1] < want:
        return False
    return 0 <= int(ids.min()) <= int(ids.max()) < codes


def _write(path: Path, digest: str, table: NeighbourTable) -> None:
    """Atomically; a cache that cannot be written costs a recomputation next time and nothing else."""
    tensors = {"neighbours": table.neighbours.cpu(), "distances": table.distances.cpu()}
    with suppress(OSError):
        write_safetensors(path, tensors, {"codebook": digest})
