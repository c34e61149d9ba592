"""What a number was measured with. A distance without this is not comparable with anything.

Five incompatible "FID" recipes are in use for visual autoregressive models alone; `PAPERS` names them. Every
result is a `Score` that carries its `Protocol`, and tables give every protocol a column of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Protocol:
    """metric, network and its weights (hash), how images reach it, the reference set, and the counts."""

    metric: str  # fid, kid, is, precision, ...
    extractor: str  # id of the network, e.g. inception-2015-12-05
    weights: str = "unknown"  # first 12 hex digits of the sha256 of its parameters
    preprocess: str = ""  # resize rule and value scale, e.g. tf1-299
    images: str = "as-is"  # what was done to the generated images before, e.g. center-crop-lanczos-256
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
        parts += [p for p in (self.preprocess, self.images if self.images != "as-is" else "") if p]
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


@dataclass(frozen=True)
class Recipe:
    """A protocol of the literature: which extractor with which preprocessing, how many images, which
    reference.
    """

    name: str
    source: str  # where it is written down
    metrics: tuple[str, ...]
    extractor: str  # a key of visacc.metrics.extractors
    options: tuple[tuple[str, str], ...]  # options of that extractor
    images: str  # preparation of generated images, see visacc.metrics.images.PREPARE
    reference_images: str  # preparation of reference images
    reference: str
    n_gen: int
    n_ref: int | None
    note: str = ""

    def check_counts(self, n_gen: int, n_ref: int | None) -> str | None:
        """A sentence if the counts are not the recipe's, else None."""
        wrong = []
        if n_gen != self.n_gen:
            wrong.append(f"{n_gen} generated images instead of {self.n_gen}")
        if self.n_ref is not None and n_ref is not None and n_ref != self.n_ref:
            wrong.append(f"{n_ref} reference images instead of {self.n_ref}")
        return f"not the protocol {self.name!r}: {', '.join(wrong)}" if wrong else None


_INCEPTION_FID = (("flavour", "pytorch-fid"),)
PAPERS: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "sjd-coco5k",
            "SJD arXiv 2410.01699, evaluation_metrics.py; GSD and MC-SJD print the same baselines",
            ("fid",),
            "inception",
            _INCEPTION_FID,
            "as-is",
            "as-is",
            "COCO val2017 folder, original aspect ratios",
            5000,
            5000,
            "squares against un-cropped photos: lands near 30 and is not the COCO-30k FID",
        ),
        Recipe(
            "gigagan-coco5k",
            "LANTERN arXiv 2410.03355, entrypoints/eval_fid.py (GigaGAN's preparation)",
            ("fid",),
            "inception",
            (("flavour", "clean-fid"),),
            "center-crop-lanczos-256",
            "center-crop-lanczos-256",
            "COCO val2017, longest caption per image",
            5000,
            5000,
        ),
        Recipe(
            "gigagan-coco30k",
            "LlamaGen arXiv 2406.06525, evaluations/t2i",
            ("fid",),
            "inception",
            (("flavour", "clean-fid"),),
            "center-crop-lanczos-256",
            "center-crop-lanczos-256",
            "COCO val2014, 30 000 captions",
            30000,
            None,
        ),
        Recipe(
            "adm-in256",
            "OpenAI guided-diffusion evaluations/evaluator.py; LlamaGen class-conditional, ZipAR",
            ("fid", "sfid", "is-adm", "precision", "recall"),
            "inception",
            (("flavour", "torch-fidelity"),),
            "bicubic-256",
            "as-is",
            "VIRTUAL_imagenet256_labeled.npz",
            50000,
            None,
            "uniformly random labels; Inception Score in file order; precision/recall on its 10 000 images",
        ),
        Recipe(
            "fidelity-in256",
            "LPD arXiv 2507.01957, engine.py (torch-fidelity with given statistics)",
            ("fid", "is"),
            "inception",
            (("flavour", "torch-fidelity"),),
            "as-is",
            "as-is",
            "adm_in256_stats.npz",
            50000,
            None,
            "exactly 50 per class in class order, bytes rounded",
        ),
        Recipe(
            "fidelity-in512",
            "LPD arXiv 2507.01957, engine.py",
            ("fid", "is"),
            "inception",
            (("flavour", "torch-fidelity"),),
            "as-is",
            "as-is",
            "adm_in512_stats.npz",
            50000,
            None,
        ),
        Recipe(
            "dinov2-fd",
            "Stein et al. arXiv 2306.04675 (dgm-eval)",
            ("fd",),
            "dinov2",
            (),
            "as-is",
            "as-is",
            "any",
            50000,
            None,
        ),
        Recipe(
            "cmmd-coco30k",
            "Jayasumana et al. arXiv 2401.09603",
            ("cmmd",),
            "clip-cmmd",
            (),
            "as-is",
            "as-is",
            "COCO-30k",
            30000,
            30000,
        ),
    )
}


def recipe(name: str) -> Recipe:
    if name not in PAPERS:
        raise ValueError(f"unknown protocol {name!r}; known: {', '.join(PAPERS)}")
    return PAPERS[name]


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
