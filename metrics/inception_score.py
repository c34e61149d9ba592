"""Inception Score (Salimans et al. 2016, arXiv 1606.03498): exp E[KL(p(y|x) || p(y))], per split.

Three conventions are in print. torch-fidelity permutes the samples with a fixed seed, works in float64 and
divides by the number of splits. ADM's evaluator keeps file order, cuts chunks of 5000 and works in float32:
on class-ordered files its chunks hold few classes and the score drops, which is why order is part of the
protocol.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from visacc.metrics.stats import ArrayLike, as_features


def _score(logits: Tensor) -> float:
    """exp of the mean KL of softmax(logits) [n, c] against their mean."""
    log_p = torch.log_softmax(logits, dim=1)
    p = log_p.exp()
    marginal = torch.logsumexp(log_p, dim=0) - float(np.log(len(logits)))
    return float(torch.exp((p * (log_p - marginal)).sum(dim=1).mean()))


def inception_score(
    logits: ArrayLike, *, splits: int = 10, shuffle: bool = True, seed: int = 2020
) -> tuple[float, float]:
    """(mean, std with ddof 0) over splits of logits [n, c]; torch-fidelity's rule."""
    x = as_features(logits, "logits")
    n = len(x)
    if splits < 1 or n < 2 * splits:
        raise ValueError(
            f"an Inception Score over {splits} splits needs at least {2 * splits} images, got {n}"
        )
    if shuffle:
        x = x[torch.from_numpy(np.random.RandomState(seed).permutation(n)).to(x.device)]
    scores = [_score(x[i * n // splits : (i + 1) * n // splits]) for i in range(splits)]
    return float(np.mean(scores)), float(np.std(scores))


def inception_score_adm(
    logits: ArrayLike, *, split_size: int = 5000, labels: ArrayLike | None = None
) -> float:
    """ADM's rule: chunks of split_size in file order, mean over chunks.

    labels [n], if known, only serve a warning: sorted labels make this number incomparable.
    """
    x = as_features(logits, "logits")
    if len(x) < 2:
        raise ValueError(f"an Inception Score needs at least 2 images, got {len(x)}")
    if labels is not None and len(x) > split_size:
        y = np.asarray(labels)
        if len(y) == len(x) and bool((np.diff(y) >= 0).all()) and y[0] != y[-1]:
            warnings.warn(
                "the samples are sorted by class: ADM's Inception Score cuts chunks in file order and "
                "will be far too low; shuffle the file, or use the torch-fidelity rule",
                stacklevel=2,
            )
    return float(np.mean([_score(x[i : i + split_size]) for i in range(0, len(x), split_size)]))
