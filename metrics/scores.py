"""From two feature sets to `Score` objects with protocol, warnings and intervals: what the metric
classes, the folder commands and evaluation runs all call.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from visacc.metrics.extractors.base import Extractor
from visacc.metrics.frechet import expected_bias, fd_infinity, frechet
from visacc.metrics.inception_score import inception_score, inception_score_adm
from visacc.metrics.mmd import cmmd, kid, mind
from visacc.metrics.prdc import prdc
from visacc.metrics.protocol import Protocol, Score
from visacc.metrics.stats import ArrayLike, FeatureStats, Gaussian, as_features

BOOTSTRAP_DIM = 512  # above this a bootstrap of a covariance distance costs minutes
BOOTSTRAP_NUMBERS = 20_000_000  # rows times dimensions: what a bootstrap may hold in memory
BLOCK = 4096


@dataclass
class FeatureSet:
    """Features of one set of images. rows: head -> [n, d] (array, tensor or memory map), possibly none for a
    reference known by its statistics only. `extractor` is the id; `source` names the set in protocols."""

    n: int | None
    extractor: str | None
    source: str = ""
    rows: Mapping[str, ArrayLike] = field(default_factory=dict)
    given: Mapping[str, Gaussian] = field(default_factory=dict)  # statistics of heads without rows
    resolution: str = ""  # of the image files, see Protocol
    _cache: dict[str, Gaussian] = field(default_factory=dict, repr=False)

    def gaussian(self, head: str = "features") -> Gaussian:
        """Statistics of one head, streamed in blocks of rows."""
        if head in self.given:
            return self.given[head]
        if head not in self._cache:
            x = self.need(head)
            stats = FeatureStats(x.shape[1], extractor=self.extractor)
            for i in range(0, len(x), BLOCK):
                stats.update(x[i : i + BLOCK])
            self._cache[head] = stats.gaussian(self.source)
        return self._cache[head]

    def need(self, head: str) -> ArrayLike:
        if head not in self.rows:
            what = "only its statistics are given" if self.given else f"it holds {sorted(self.rows)}"
            raise ValueError(
                f"this metric needs the {head} of every image of {self.source or 'the set'}: {what}"
            )
        return self.rows[head]

    def digest(self, length: int = 8) -> str:
        """Identity of the set: hash of count and mean at seven digits."""
        g = self.gaussian(next(iter(self.given), None) or next(iter(self.rows)))
        text = f"{g.n}|" + ",".join(f"{v:.7e}" for v in g.mean.tolist())
        return hashlib.sha256(text.encode()).hexdigest()[:length]


@contextmanager
def collected() -> Iterator[list[str]]:
    """Warnings raised inside, as texts, to be kept with the score."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def base_protocol(
    metric: str, extractor: Extractor, gen: FeatureSet, ref: FeatureSet | None, images: str = "as-is"
) -> Protocol:
    reference = "" if ref is None else f"{ref.source or 'set'}#{ref.digest()}"
    return Protocol(
        metric,
        extractor.name,
        extractor.weights,
        extractor.preprocess,
        images,
        gen.resolution,
        reference,
        None if ref is None else ref.n,
        gen.n,
    )


def bootstrap_frechet(
    gen: ArrayLike, ref: Gaussian, *, resamples: int = 100, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a Fréchet distance for resampled generated images: value ± 1.96 bootstrap standard
    errors.

    Percentiles are not used: a resample repeats images and its distance is biased upwards.
    """
    x = as_features(gen)
    rng = np.random.default_rng(seed)
    values = [
        frechet(FeatureStats.of(x[torch.from_numpy(rng.integers(0, len(x), len(x)))]), ref, warn=False)
        for _ in range(resamples)
    ]
    half = 1.96 * float(np.std(values, ddof=1))
    value = frechet(FeatureStats.of(x), ref, warn=False)
    return value - half, value + half


def frechet_score(
    gen: FeatureSet, ref: FeatureSet, protocol: Protocol, *, head: str = "features", bootstrap: bool = False
) -> Score:
    """FID / FD / sFID. details: expected bias from finite counts, and the n -> infinity extrapolation if
    rows are known and there are enough of them.
    """
    with collected() as notes:
        a, b = gen.gaussian(head), ref.gaussian(head)
        value = frechet(a, b)
    details: dict[str, Any] = {"expected_bias": expected_bias(a.cov, a.n or 0, b.n) if a.n else None}
    ci = None
    small = head in gen.rows and a.dim <= BOOTSTRAP_DIM and len(gen.rows[head]) * a.dim <= BOOTSTRAP_NUMBERS
    if bootstrap and small:
        ci = bootstrap_frechet(gen.rows[head], b)
        if len(gen.rows[head]) >= 20:
            details["fd_infinity"] = fd_infinity(gen.rows[head], b)[0]
    return Score(value, protocol, ci=ci, details=details, warnings=tuple(notes))


def kid_score(
    gen: FeatureSet, ref: FeatureSet, protocol: Protocol, *, subsets: int = 100, subset_size: int = 1000
) -> Score:
    result = kid(gen.need("features"), ref.need("features"), subsets=subsets, subset_size=subset_size)
    settings = protocol.with_settings(subsets=subsets, size=subset_size, seed=2020)
    return Score(result.mean, settings, std=result.std)


def inception_scores(gen: FeatureSet, protocol: Protocol, *, splits: int = 10, adm: bool = False) -> Score:
    logits = gen.need("logits")
    if adm:
        with collected() as notes:
            value = inception_score_adm(logits)
        return Score(value, protocol.with_settings(order="file", chunk=5000), warnings=tuple(notes))
    mean, std = inception_score(logits, splits=splits)
    return Score(mean, protocol.with_settings(splits=splits, shuffle=2020), std=std)


def manifold_scores(
    gen: FeatureSet, ref: FeatureSet, protocol: Protocol, *, k: int = 3, strict: bool = False
) -> list[Score]:
    """Precision, recall, density, coverage."""
    result = prdc(gen.need("features"), ref.need("features"), k=k, strict=strict)
    base = protocol.with_settings(k=k, border="<" if strict else "<=")
    return [
        Score(getattr(result, name), replace(base, metric=name))
        for name in ("precision", "recall", "density", "coverage")
    ]


def cmmd_score(gen: FeatureSet, ref: FeatureSet, protocol: Protocol) -> Score:
    value = cmmd(gen.need("features"), ref.need("features"))
    return Score(value, protocol.with_settings(sigma=10, scale=1000))


def mind_score(gen: FeatureSet, ref: FeatureSet, protocol: Protocol, *, projections: int = 1000) -> Score:
    value = mind(gen.need("features"), ref.need("features"), projections=projections)
    return Score(value, protocol.with_settings(projections=projections, seed=2020))


# metric name -> (heads it needs, whether it needs a reference)
NEEDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "fid": (("features",), True),
    "fd": (("features",), True),
    "sfid": (("spatial",), True),
    "kid": (("features",), True),
    "is": (("logits",), False),
    "is-adm": (("logits",), False),
    "prdc": (("features",), True),
    "cmmd": (("features",), True),
    "mind": (("features",), True),
}


def heads_for(metrics: Sequence[str]) -> tuple[str, ...]:
    """Extractor heads that a list of metrics needs, each once."""
    unknown = [m for m in metrics if m not in NEEDS]
    if unknown:
        raise ValueError(f"unknown metrics {', '.join(unknown)}; known: {', '.join(NEEDS)}")
    heads: list[str] = []
    for metric in metrics:
        heads += [h for h in NEEDS[metric][0] if h not in heads]
    return tuple(heads)


def compute(
    metrics: Sequence[str],
    extractor: Extractor,
    gen: FeatureSet,
    ref: FeatureSet | None,
    *,
    images: str = "as-is",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    bootstrap: bool = False,
) -> list[Score]:
    """All named metrics of one pair of feature sets. options: metric -> its settings (kid: subsets, ...)."""
    heads_for(metrics)
    options = options or {}
    if gen.n is not None and gen.n < 2:
        raise ValueError(f"at least 2 images are needed, got {gen.n}")
    scores: list[Score] = []
    for metric in metrics:
        if NEEDS[metric][1] and ref is None:
            raise ValueError(f"{metric} compares with a reference set, and none was given")
        protocol = base_protocol(metric, extractor, gen, ref if NEEDS[metric][1] else None, images)
        scores += _call(metric, gen, ref, protocol, dict(options.get(metric, {})), bootstrap)
    return scores


def _call(
    metric: str,
    gen: FeatureSet,
    ref: FeatureSet | None,
    protocol: Protocol,
    settings: dict[str, Any],
    bootstrap: bool,
) -> list[Score]:
    pair: dict[str, Callable[..., Score | list[Score]]] = {
        "kid": kid_score,
        "prdc": manifold_scores,
        "cmmd": cmmd_score,
        "mind": mind_score,
    }
    try:
        if metric in ("is", "is-adm"):
            return [inception_scores(gen, protocol, adm=metric == "is-adm", **settings)]
        assert ref is not None
        if metric in ("fid", "fd", "sfid"):
            head = "spatial" if metric == "sfid" else "features"
            return [frechet_score(gen, ref, protocol, head=head, bootstrap=bootstrap, **settings)]
        found = pair[metric](gen, ref, protocol, **settings)
        return found if isinstance(found, list) else [found]
    except TypeError as error:
        raise ValueError(f"settings {sorted(settings)} do not fit metric {metric!r}: {error}") from error
