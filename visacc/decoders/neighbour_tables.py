"""Neighbour tables: how a position's logits shift when the token at a neighbouring grid cell changes.

``B_o[a]`` (a row of V logits) is the average effect of token ``a`` at offset ``o``; if that neighbour changes from ``a`` to
``b``, the logits of this position move by about ``B_o[b] - B_o[a]``. Tables are kept as factors ``B_o = A_o C_o`` of a small
rank, so that nothing of size V x V is stored. They are a property of one model (and were measured at one guidance scale); a
wrong table costs speed, never exactness.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from visacc.models.base import ImageModel, Layout
from visacc.reading import naming
from visacc.weights import read_weights
from visacc.writing import write_safetensors

Offset = tuple[int, int, int]

#: (frame, row, column) of the neighbours that matter: left, two to the left, above, and the two diagonals above
IMAGE_OFFSETS: tuple[Offset, ...] = ((0, 0, -1), (0, 0, -2), (0, -1, 1), (0, -1, 0), (0, -1, -1))
TABLE_FILE = "neighbours.safetensors"


@dataclass
class NeighbourTables:
    """Low-rank tables for a set of offsets.

    Attributes:
        offsets: O grid offsets (frame, row, column), each pointing to an earlier slot.
        left: float32 [O, V, r] factors A.
        right: float32 [O, r, V] factors C.
        base: float32 [V] mean logits that no neighbour explains: the law of a position known by its neighbours alone.
        fingerprint: of the model that they were measured on.
        guidance_scale: at which they were measured.
    """

    offsets: tuple[Offset, ...]
    left: Tensor
    right: Tensor
    base: Tensor
    fingerprint: str
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        count, vocab, rank = self.left.shape
        if (
            self.right.shape != (count, rank, vocab)
            or self.base.shape != (vocab,)
            or len(self.offsets) != count
        ):
            raise ValueError(
                f"neighbour tables do not fit together: {len(self.offsets)} offsets, factors {list(self.left.shape)} and"
                f" {list(self.right.shape)}, base {list(self.base.shape)}"
            )
        for offset in self.offsets:
            if len(offset) != 3 or not offset < (0, 0, 0):
                raise ValueError(
                    f"offset {offset} must be (frame, row, column) of an earlier cell, such as (0, 0, -1)"
                )

    @property
    def rank(self) -> int:
        return self.left.shape[2]

    @property
    def vocab(self) -> int:
        return self.left.shape[1]

    @classmethod
    def from_full(
        cls,
        tables: Tensor,
        base: Tensor,
        offsets: tuple[Offset, ...],
        rank: int,
        fingerprint: str,
        guidance_scale: float,
    ) -> NeighbourTables:
        """Best rank-r factors of full tables [O, V, V] (see :func:`low_rank`)."""
        if not 1 <= rank <= tables.shape[1]:
            raise ValueError(f"rank must lie in 1..{tables.shape[1]} (the number of codes), got {rank}")
        left, right = low_rank(tables.float(), rank)
        return cls(offsets, left, right, base.float(), fingerprint, guidance_scale)

    @classmethod
    def zeros(cls, model: ImageModel, rank: int = 1) -> NeighbourTables:
        """Empty tables: the correction does nothing."""
        vocab, count = model.layout.vocab, len(IMAGE_OFFSETS)
        return cls(
            IMAGE_OFFSETS,
            torch.zeros(count, vocab, rank),
            torch.zeros(count, rank, vocab),
            torch.zeros(vocab),
            model.fingerprint(),
        )

    def to(self, device: torch.device | str) -> NeighbourTables:
        return replace(self, **{n: getattr(self, n).to(device) for n in ("left", "right", "base")})

    def check(self, model: ImageModel) -> None:
        """Raise ``ValueError`` unless the tables were measured on this model."""
        if self.vocab != model.layout.vocab:
            raise ValueError(
                f"neighbour tables are for {self.vocab} codes, {model.name} has {model.layout.vocab}"
            )
        if self.fingerprint != model.fingerprint():
            raise ValueError(
                f"neighbour tables belong to another model (fingerprint {self.fingerprint}, {model.name} has"
                f" {model.fingerprint()}); measure its own with 'visacc calibrate'"
            )

    def neighbours(self, layout: Layout) -> Tensor:
        """int64 [O, total]: slot of each neighbour, -1 where there is none."""
        return neighbour_slots(layout, self.offsets)

    def save(self, path: str | Path) -> None:
        """Write float16 safetensors, whole or not at all."""
        tensors = {n: getattr(self, n).half().contiguous().cpu() for n in ("left", "right", "base")}
        meta = {
            "format": "visacc-neighbours-1",
            "offsets": json.dumps(self.offsets),
            "fingerprint": self.fingerprint,
            "guidance_scale": str(self.guidance_scale),
        }
        write_safetensors(Path(path), tensors, meta)

    @classmethod
    def load(cls, path: str | Path) -> NeighbourTables:
        """Read what :meth:`save` wrote. Raises ``ValueError`` naming the file for anything else."""
        if not Path(path).is_file():
            raise ValueError(f"neighbour tables {path} do not exist")
        tensors, meta = read_weights(Path(path), safetensors=True)
        if meta.get("format") != "visacc-neighbours-1":
            raise ValueError(f"{path} holds no neighbour tables (write them with 'visacc calibrate')")
        with naming(path):
            left, right, base = (tensors[n].float() for n in ("left", "right", "base"))
            offsets = tuple(tuple(map(int, o)) for o in json.loads(meta["offsets"]))
            return cls(offsets, left, right, base, meta["fingerprint"], float(meta["guidance_scale"]))


def neighbour_slots(layout: Layout, offsets: tuple[Offset, ...]) -> Tensor:
    """int64 [O, total]: slot of the neighbour at each offset, -1 where there is none."""
    return torch.stack([layout.neighbour(*offset) for offset in offsets])


def low_rank(tables: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r factors [O, V, r] and [O, r, V] of full tables float32 [O, V, V], scale split evenly.

    Singular value decomposition; subspace iteration from a fixed start where that is much cheaper.
    """
    vocab = tables.shape[1]
    if vocab <= 128 or rank > vocab // 4:
        u, s, vh = torch.linalg.svd(tables, full_matrices=False)
    else:
        start = torch.randn(vocab, rank + 8, generator=torch.Generator().manual_seed(0))
        basis = torch.linalg.qr(tables @ start.to(tables))[0]
        for _ in range(4):
            basis = torch.linalg.qr(tables @ torch.linalg.qr(tables.mT @ basis)[0])[0]
        u, s, vh = torch.linalg.svd(basis.mT @ tables, full_matrices=False)
        u = basis @ u
    root = s[:, :rank].clamp(min=0).sqrt()
    return (u[..., :rank] * root[:, None]).contiguous(), (root[..., None] * vh[:, :rank]).contiguous()
