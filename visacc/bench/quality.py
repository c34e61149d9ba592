"""How good are a decoder's images: task scores with intervals, distance to plain decoding in a fixed feature space."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.metrics.intervals import wilson

Judge = Callable[[Mapping[str, Any], Any], bool]
FEATURES = 64


def fixed_features(pixels: Tensor) -> Tensor:
    """float64 [B, 64] of images [B, 3, H, W] in [0, 1]: a small convolutional network with fixed random weights.

    No download and no training; the same numbers for everybody. 32 means over the whole picture and 8 channels in each
    quadrant. Distances in it compare decoders on one model; they are no FID.
    """
    x = F.interpolate(pixels.float(), size=(64, 64), mode="area") - 0.5
    g = torch.Generator().manual_seed(20_240_601)
    width = 3
    for out in (24, 48, 40):
        weight = torch.randn(out, width, 3, 3, generator=g) / math.sqrt(9 * width)
        x = F.leaky_relu(F.conv2d(x, weight.to(x.device), stride=2, padding=1), 0.2)
        width = out
    whole, quarters = x[:, :32].mean((2, 3)), F.adaptive_avg_pool2d(x[:, 32:], 2).flatten(1)
    return torch.cat([whole, quarters], dim=1).double().cpu()


@dataclass(frozen=True)
class Scores:
    """Verdicts of one decoder: ``right[i]`` for image i, whose task is ``tags[i]``."""

    tags: tuple[str, ...]
    right: tuple[bool, ...]

    def tasks(self) -> dict[str, dict[str, Any]]:
        """Score, count and 95 % interval of every task."""
        found: dict[str, dict[str, Any]] = {}
        for tag in dict.fromkeys(self.tags):
            verdicts = [r for t, r in zip(self.tags, self.right, strict=True) if t == tag]
            low, high = wilson(sum(verdicts), len(verdicts))
            found[tag] = {"score": sum(verdicts) / len(verdicts), "n": len(verdicts), "interval": [low, high]}
        return found

    @property
    def overall(self) -> float:
        """Mean of the task scores, as GenEval takes it."""
        return float(np.mean([task["score"] for task in self.tasks().values()]))

    def interval(self) -> tuple[float, float]:
        """95 % interval of the overall score (normal, tasks as strata)."""
        tasks = self.tasks().values()
        # (k + 1) / (n + 2) keeps the variance of perfect and hopeless tasks positive
        smooth = [((t["score"] * t["n"] + 1) / (t["n"] + 2), t["n"]) for t in tasks]
        half = 1.96 * math.sqrt(sum(p * (1 - p) / n for p, n in smooth)) / len(smooth)
        return max(0.0, self.overall - half), min(1.0, self.overall + half)

    def difference(self, other: Scores) -> tuple[float, float, float]:
        """Overall score minus the other's on the same prompts and seeds, with a paired 95 % interval.

        Normal, from the spread of the per-picture differences (-1, 0 or 1) within the tasks, pooled over them; across the
        tasks where each has one picture only. Where every pair is equal nothing is uncertain: (0, 0, 0).
        """
        if self.tags != other.tags:
            raise ValueError("a paired comparison needs the same prompts in the same order")
        delta = np.array(self.right, float) - np.array(other.right, float)
        if not delta.any():
            return 0.0, 0.0, 0.0
        tags = np.array(self.tags)
        parts = [delta[tags == tag] for tag in dict.fromkeys(self.tags)]
        mean = float(np.mean([part.mean() for part in parts]))
        half = 1.96 * math.sqrt(_pooled(parts) * sum(1 / len(part) for part in parts)) / len(parts)
        return mean, max(-1.0, mean - half), min(1.0, mean + half)


def _pooled(parts: Sequence[np.ndarray]) -> float:
    """Variance within the parts; over all of them where each is a single number, infinite for one number alone."""
    free = sum(len(part) - 1 for part in parts)
    if free:
        return float(sum(((part - part.mean()) ** 2).sum() for part in parts)) / free
    every = np.concatenate(parts)
    return float(every.var(ddof=1)) if len(every) > 1 else math.inf


def shapes_scores(prompts: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> Scores:
    """Judge pictures of the shapes world (bytes [H, W, 3]) against their prompts' metadata."""
    from visacc.models.shapes.judge import score

    verdicts = tuple(score(dict(p), image) for p, image in zip(prompts, images, strict=True))
    return Scores(tuple(p["tag"] for p in prompts), verdicts)


# ---- distance to plain decoding ---------------------------------------------------------------------------
def frechet_distance(x: Tensor, y: Tensor) -> float:
    """Fréchet distance of two feature sets [n, d] (their Gaussian fits)."""
    mean = float((x.mean(0) - y.mean(0)).square().sum())
    a, b = (_covariance(z) for z in (x, y))
    root = _root(a)
    cross = torch.linalg.eigvalsh(root @ b @ root).clamp(min=0).sqrt().sum()
    return mean + float(a.trace() + b.trace() - 2 * cross)


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred.T @ centred / (len(x) - 1)


def _root(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


@dataclass(frozen=True)
class DistanceTest:
    """Fréchet distance to the reference, and how often relabelled sets are as far apart (``p_value``).

    ``typical``: median distance of relabelled sets, i.e. what sample size alone gives.
    """

    distance: float
    typical: float
    p_value: float
    permutations: int


def distance_test(x: Tensor, reference: Tensor, *, permutations: int = 199, seed: int = 0) -> DistanceTest:
    """Permutation test of equality by the Fréchet distance; its false-alarm rate is exact."""
    both, n = torch.cat([x, reference]), len(x)
    if min(n, len(reference)) < 2:
        raise ValueError(f"a distance needs at least 2 images per set, got {n} and {len(reference)}")
    g = torch.Generator().manual_seed(seed)
    found = frechet_distance(x, reference)
    null = []
    for _ in range(permutations):
        order = torch.randperm(len(both), generator=g)
        null.append(frechet_distance(both[order[:n]], both[order[n:]]))
    beyond = sum(value >= found for value in null)
    return DistanceTest(found, float(np.median(null)), (beyond + 1) / (permutations + 1), permutations)
