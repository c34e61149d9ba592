"""Neighbour tables: how a position's logits shift when the token at a neighbouring grid cell changes.

``B_o[a]`` (a row of V logits) is the effect of token ``a`` at offset ``o``; if that neighbour changes from ``a`` to ``b``,
the logits of this position move by about ``B_o[b] - B_o[a]``. Tables are kept as factors ``B_o = A_o C_o`` of a small rank,
so that nothing of size V x V is stored. What a change does depends on what the position was about to become, so each
direction of the factors has a gate that looks at the position's law before the change:

    shift = ((A_o[b] - A_o[a]) * g_o) C_o,      g = 1 + tanh(sqrt(p) P) M.

Tables are a property of one model (and were fitted at one guidance scale); wrong ones cost speed, never exactness.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.models.base import ImageModel, Layout
from visacc.reading import naming
from visacc.weights import read_weights
from visacc.writing import write_safetensors

Offset = tuple[int, int, int]

#: (frame, row, column) of the neighbours that matter: left, two to the left, above, and the two diagonals above
IMAGE_OFFSETS: tuple[Offset, ...] = ((0, 0, -1), (0, 0, -2), (0, -1, 1), (0, -1, 0), (0, -1, -1))
#: in a video also the same place in the frame before
VIDEO_OFFSETS: tuple[Offset, ...] = (*IMAGE_OFFSETS, (-1, 0, 0))
TABLE_FILE = "neighbours.safetensors"


@dataclass
class NeighbourTables:
    """Low-rank tables for a set of offsets.

    Attributes:
        offsets: O grid offsets (frame, row, column), each pointing to an earlier slot.
        left: float32 [O, V, r] factors A.
        right: float32 [O, r, V] factors C.
        base: float32 [V] logits that no neighbour explains: with the neighbours' table rows they give a position that no
            forward has read its first law.
        fingerprint: of the model that they were fitted to.
        guidance_scale: at which they were fitted.
        probe: float32 [V, m] P, what the gates look for in a law, or ``None`` for gates of 1.
        mixer: float32 [m, O, r] M, with ``probe``.
        fresh_gate: float32 [O, r] the gate of positions without a law, with ``probe``.
    """

    offsets: tuple[Offset, ...]
    left: Tensor
    right: Tensor
    base: Tensor
    fingerprint: str
    guidance_scale: float = 1.0
    probe: Tensor | None = None
    mixer: Tensor | None = None
    fresh_gate: Tensor | None = None

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
        if self.probe is not None:
            looks = self.probe.shape[-1]
            mixer, fresh = (None if t is None else t.shape for t in (self.mixer, self.fresh_gate))
            if (self.probe.shape, mixer, fresh) != ((vocab, looks), (looks, count, rank), (count, rank)):
                raise ValueError(
                    f"gates {list(self.probe.shape)}, {mixer}, {fresh} do not fit the neighbour tables"
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

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        names = ("left", "right", "base", "probe", "mixer", "fresh_gate")
        return {n: t for n in names if (t := getattr(self, n)) is not None}

    def to(self, device: torch.device | str) -> NeighbourTables:
        moved: dict[str, Any] = {n: t.to(device) for n, t in self.tensors.items()}
        return replace(self, **moved)

    def gates(self, law: Tensor) -> Tensor | None:
        """Gates [..., O, r] of positions whose laws [..., V] are corrected."""
        if self.probe is None or self.mixer is None:
            return None
        return gates(law, self.probe, self.mixer)

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
        tensors = {n: t.half().contiguous().cpu() for n, t in self.tensors.items()}
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
            gating = {n: tensors[n].float() for n in ("probe", "mixer", "fresh_gate") if n in tensors}
            offsets = tuple((int(t), int(y), int(x)) for t, y, x in json.loads(meta["offsets"]))
            return cls(
                offsets, left, right, base, meta["fingerprint"], float(meta["guidance_scale"]), **gating
            )


def offsets_of(layout: Layout) -> tuple[Offset, ...]:
    """The offsets that matter on a layout's grid."""
    return VIDEO_OFFSETS if layout.grid[0] > 1 else IMAGE_OFFSETS


def gates(law: Tensor, probe: Tensor, mixer: Tensor) -> Tensor:
    """``1 + tanh(sqrt(law) probe) mixer``: laws [..., V] -> gates [..., O, r]."""
    seen = (law.sqrt() @ probe.to(law.dtype)).tanh()
    return (seen @ mixer.flatten(1).to(law.dtype)).add_(1).unflatten(-1, mixer.shape[1:])


def neighbour_slots(layout: Layout, offsets: tuple[Offset, ...]) -> Tensor:
    """int64 [O, total]: slot of the neighbour at each offset, -1 where there is none."""
    return torch.stack([layout.neighbour(*offset) for offset in offsets])
