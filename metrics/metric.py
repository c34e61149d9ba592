"""Metrics with torchmetrics' manners: `update` with batches, `compute` a Score, `reset`, `merge_state` across
parts.

    fid = FID(create("inception"), reference="coco-val2017")
    for real in loader: fid.update(real, real=True)
    for fake in samples: fid.update(fake)
    print(fid.compute())          # value, protocol, warnings

Images are uint8 [b, 3, h, w] or float in [0, 1]; lists of differently sized uint8 images are accepted too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visacc.metrics.extractors.base import Extractor
from visacc.metrics.images import resolution_name, to_uint8
from visacc.metrics.npz import load_stats
from visacc.metrics.protocol import Protocol, Score
from visacc.metrics.scores import (
    FeatureSet,
    base_protocol,
    cmmd_score,
    collected,
    expected_bias,
    frechet_score,
    inception_scores,
    kid_score,
    manifold_scores,
    mind_score,
)
from visacc.metrics.stats import FeatureStats, Gaussian

Images = Tensor | np.ndarray | Sequence[Tensor]


class Metric:
    """Common manners of feature metrics. Sub-classes set `metric` and `head` and write `compute`."""

    metric = ""
    head = "features"

    def __init__(self, extractor: Extractor, *, reference: str = "", encoding: str = "round"):
        if self.head not in extractor.heads:
            raise ValueError(
                f"{type(self).__name__} needs the head {self.head!r}; "
                f"{extractor.id} gives {sorted(extractor.heads)}"
            )
        self.extractor, self.reference, self.encoding = extractor, reference, encoding
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self.sizes: set[tuple[int, int]] = set()  # (width, height) of generated images
        self._reset()

    def _reset(self) -> None:
        raise NotImplementedError

    def _add(self, rows: Tensor, real: bool) -> None:
        raise NotImplementedError

    def _merge(self, other: Any) -> None:
        raise NotImplementedError

    def compute(self) -> Score | list[Score]:
        raise NotImplementedError

    def update(self, images: Images, real: bool = False) -> None:
        """Add images to the generated set, or with real=True to the reference set."""
        if isinstance(images, Tensor | np.ndarray):
            batch: Any = to_uint8(images, self.encoding)
        else:
            batch = [to_uint8(image, self.encoding)[0] for image in images]
        if len(batch):
            if not real:
                self.sizes |= {(int(image.shape[-1]), int(image.shape[-2])) for image in batch}
            self._add(self.extractor(batch)[self.head], real)

    def update_features(self, rows: Tensor, real: bool = False) -> None:
        """Add features made earlier by the same extractor."""
        if rows.ndim != 2 or rows.shape[1] != self.extractor.heads[self.head]:
            raise ValueError(
                f"expected rows of {self.extractor.heads[self.head]} features of {self.extractor.id}, "
                f"got {tuple(rows.shape)}"
            )
        self._add(rows, real)

    def merge_state(self, others: Metric | Iterable[Metric]) -> None:
        """Add the state of metrics that saw other parts of the data; give them in rank order."""
        for other in [others] if isinstance(others, Metric) else others:
            if type(other) is not type(self) or other.extractor.id != self.extractor.id:
                raise ValueError(
                    f"cannot merge {type(other).__name__} of {other.extractor.id} into this metric"
                )
            self._merge(other)
            self.sizes |= other.sizes

    @property
    def resolution(self) -> str:
        """Of the generated images, as protocols state it."""
        return resolution_name(self.sizes)


class FID(Metric):
    """Fréchet distance with O(d^2) memory. statistics: reference file or Gaussian instead of reference
    images.
    """

    metric = "fid"

    def __init__(
        self,
        extractor: Extractor,
        *,
        statistics: str | Path | Gaussian | None = None,
        reference: str = "",
        encoding: str = "round",
    ):
        self.statistics = (
            load_stats(statistics, spatial=self.head == "spatial")
            if isinstance(statistics, str | Path)
            else statistics
        )
        super().__init__(extractor, reference=reference, encoding=encoding)
        if self.statistics is not None and self.statistics.dim != extractor.heads[self.head]:
            raise ValueError(
                f"the reference statistics have {self.statistics.dim} dimensions, {extractor.id} gives "
                f"{extractor.heads[self.head]}: they were made with another extractor"
            )

    def _reset(self) -> None:
        d = self.extractor.heads[self.head]
        self.gen = FeatureStats(d, extractor=self.extractor.id)
        self.ref = FeatureStats(d, extractor=self.extractor.id)

    def _add(self, rows: Tensor, real: bool) -> None:
        if real and self.statistics is not None:
            raise ValueError("reference statistics are given already; do not add reference images to them")
        (self.ref if real else self.gen).update(rows)

    def _merge(self, other: FID) -> None:
        self.gen.merge(other.gen)
        self.ref.merge(other.ref)

    def compute(self) -> Score:
        ref = self.statistics or self.ref.gaussian(self.reference)
        gen = {self.head: self.gen.gaussian("generated set")}
        a = FeatureSet(self.gen.n, self.extractor.id, given=gen, resolution=self.resolution)
        b = FeatureSet(ref.n, ref.extractor, self.reference or ref.source, given={self.head: ref})
        return frechet_score(a, b, base_protocol(self.metric, self.extractor, a, b), head=self.head)


class SFID(FID):
    """sFID: Fréchet distance of spatial Inception features."""

    metric, head = "sfid", "spatial"


class _Stored(Metric):
    """Metrics that need every row: memory n * d * 4 bytes."""

    def _reset(self) -> None:
        self.parts: dict[bool, list[Tensor]] = {False: [], True: []}

    def _add(self, rows: Tensor, real: bool) -> None:
        self.parts[real].append(rows.detach().float().cpu())

    def _merge(self, other: _Stored) -> None:
        for real in (False, True):
            self.parts[real] += other.parts[real]

    def _set(self, real: bool) -> FeatureSet:
        if not self.parts[real]:
            raise ValueError(f"no {'reference' if real else 'generated'} images were added")
        rows = torch.cat(self.parts[real])
        if real:
            return FeatureSet(len(rows), self.extractor.id, self.reference, {self.head: rows})
        return FeatureSet(len(rows), self.extractor.id, "", {self.head: rows}, resolution=self.resolution)

    def _pair(self) -> tuple[FeatureSet, FeatureSet, Protocol]:
        gen, ref = self._set(False), self._set(True)
        return gen, ref, base_protocol(self.metric, self.extractor, gen, ref)


class KernelDistance(_Stored):
    """KID; subsets drawn as torch-fidelity draws them."""

    metric = "kid"

    def __init__(self, extractor: Extractor, *, subsets: int = 100, subset_size: int = 1000, **options: Any):
        self.settings = {"subsets": subsets, "subset_size": subset_size}
        super().__init__(extractor, **options)

    def compute(self) -> Score:
        gen, ref, protocol = self._pair()
        return kid_score(gen, ref, protocol, **self.settings)


class InceptionScore(_Stored):
    """Inception Score over the extractor's logits; adm=True keeps file order and chunks of 5000."""

    metric, head = "is", "logits"

    def __init__(self, extractor: Extractor, *, splits: int = 10, adm: bool = False, **options: Any):
        self.settings = {"splits": splits, "adm": adm}
        super().__init__(extractor, **options)

    def compute(self) -> Score:
        gen = self._set(False)
        metric = "is-adm" if self.settings["adm"] else "is"
        return inception_scores(gen, base_protocol(metric, self.extractor, gen, None), **self.settings)  # type: ignore[arg-type]


class Manifold(_Stored):
    """Precision, recall, density and coverage (a list of four scores)."""

    metric = "prdc"

    def __init__(self, extractor: Extractor, *, k: int = 3, strict: bool = False, **options: Any):
        self.k, self.strict = k, strict
        super().__init__(extractor, **options)

    def compute(self) -> list[Score]:
        gen, ref, protocol = self._pair()
        return manifold_scores(gen, ref, protocol, k=self.k, strict=self.strict)


class CMMD(_Stored):
    """CMMD; needs an extractor with unit-norm rows (`create("clip-cmmd")`)."""

    metric = "cmmd"

    def compute(self) -> Score:
        return cmmd_score(*self._pair())


class MIND(_Stored):
    """Sliced Wasserstein distance of features."""

    metric = "mind"

    def compute(self) -> Score:
        return mind_score(*self._pair())


__all__ = [
    "CMMD",
    "FID",
    "MIND",
    "SFID",
    "InceptionScore",
    "KernelDistance",
    "Manifold",
    "Metric",
    "collected",
    "expected_bias",
]
