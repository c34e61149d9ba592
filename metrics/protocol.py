"""What a number was measured with. A distance without this is not comparable with anything.

Five incompatible "FID" recipes are in use for visual autoregressive models alone; `PAPERS` names them. Every
result is a `Score` that carries its `Protocol`, and tables give every protocol a column of its own. The recipes of papers
are in `visacc.metrics.recipes`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from visacc.metrics.recipes import PAPERS, Recipe, recipe

__all__ = ["PAPERS", "Protocol", "Recipe", "Score", "columns", "difference", "digest", "recipe"]


@dataclass(frozen=True)
class Protocol:
    """metric, network and its weights (hash), how images reach it, the reference set, and the counts."""

    metric: str  # fid, kid, is, precision, ...
    extractor: str  # id of the network, e.g. inception-2015-12-05
    weights: str = "unknown"  # first 12 hex digits of the sha256 of its parameters
    preprocess: str = ""  # resize rule and value scale, e.g. tf1-299
    images: str = "as-is"  # what was done to the generated images before, e.g. center-crop-lanczos-256
    resolution: str = (
        ""  # of the generated images as they lie in their files, e.g. 512x512; "mixed"; "" if unknown
    )
    reference: str = ""  # name and hash of the reference set or statistics file
    n_ref: int | None = None
    n_gen: int | None = None
    settings: tuple[tuple[str, str], ...] = ()  # metric settings (k, subsets, splits, scale, ...)
    name: str = "custom"  # a key of PAPERS when all of that recipe's fields are met

    @property
    def id(self) -> str:
        """Readable and complete: equal ids mean comparable numbers."""
        counts = (
            f"{self.n_gen if self.n_gen is not None else '?'}v{self.n_ref if self.n_ref is not None else '?'}"
        )
        parts = [self.metric, f"{self.extractor}@{self.weights}"]
        shown = (self.preprocess, self.images if self.images != "as-is" else "", self.resolution)
        parts += [p for p in shown if p]
        if self.reference:
            parts += [f"ref={self.reference}", counts]
        elif self.n_gen is not None:
            parts.append(f"n={self.n_gen}")
        parts += [f"{k}={v}" for k, v in self.settings]
        return ("" if self.name == "custom" else f"{self.name}:") + "/".join(parts)

    def with_settings(self, **settings: object) -> Protocol:
        return replace(self, settings=tuple(sorted((k, str(v)) for k, v in settings.items())))


@dataclass(frozen=True)
class Score:
    """One number with its protocol, spread and warnings. `ci` is a 95 % interval, `std` the metric's own
    spread.
    """

    value: float
    protocol: Protocol
    std: float | None = None
    ci: tuple[float, float] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.protocol.metric

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        out["protocol"]["settings"] = dict(self.protocol.settings)
        out["protocol_id"] = self.protocol.id
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Score:
        fields = dict(data["protocol"])
        fields["settings"] = tuple(sorted((k, str(v)) for k, v in fields.get("settings", {}).items()))
        ci = tuple(data["ci"]) if data.get("ci") else None
        return cls(
            float(data["value"]),
            Protocol(**fields),
            data.get("std"),
            ci,  # type: ignore[arg-type]
            data.get("details", {}),
            tuple(data.get("warnings", ())),
        )

    def __str__(self) -> str:
        spread = (
            f" [{self.ci[0]:.4g}, {self.ci[1]:.4g}]" if self.ci else f" ± {self.std:.3g}" if self.std else ""
        )
        return f"{self.name} {self.value:.6g}{spread}  ({self.protocol.id})"


def digest(obj: object, length: int = 12) -> str:
    """Hex digest of a JSON-able object, independent of key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def columns(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Scores grouped by protocol id, in order of first appearance: one table column per key."""
    grouped: dict[str, list[Score]] = {}
    for score in scores:
        grouped.setdefault(score.protocol.id, []).append(score)
    return grouped


def difference(a: Score, b: Score) -> float:
    """a - b, refused when the protocols differ."""
    if a.protocol.id != b.protocol.id:
        raise ValueError(
            f"these numbers are not comparable:\n  {a.protocol.id}\n  {b.protocol.id}\n"
            "measure both with one protocol"
        )
    return a.value - b.value
