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

BLOCK = 4096


def _score(logits: ArrayLike, rows: np.ndarray) -> float:
    """exp of the mean KL of softmax(logits[rows]) against their mean: mean sum p log p minus sum m log m.

    One pass in blocks, so logits may be a memory-mapped file.
    """
    negative_entropy, marginal = 0.0, torch.zeros(logits.shape[1], dtype=torch.float64)
    for i in range(0, len(rows), BLOCK):
        index = rows[i : i + BLOCK]
        x = as_features(
            logits[torch.from_numpy(index)] if isinstance(logits, Tensor) else logits[index], "logits"
        )
        log_p = torch.log_softmax(x, dim=1)
        p = log_p.exp()
        negative_entropy += float((p * log_p).sum())
        marginal += p.sum(dim=0).cpu()
    m = marginal / len(rows)
    return float(np.exp(negative_entropy / len(rows) - float(torch.special.xlogy(m, m).sum())))


def inception_score(
    logits: ArrayLike, *, splits: int = 10, shuffle: bool = True, seed: int = 2020
) -> tuple[float, float]:
    """(mean, std with ddof 0) over splits of logits [n, c]; torch-fidelity's rule."""
    n = len(logits)
    if splits < 1 or n < 2 * splits:
        raise ValueError(
            f"an Inception Score over {splits} splits needs at least {2 * splits} images, got {n}"
        )
    order = np.random.RandomState(seed).permutation(n) if shuffle else np.arange(n)
    scores = [_score(logits, np.sort(order[i * n // splits : (i + 1) * n // splits])) for i in range(splits)]
    return float(np.mean(scores)), float(np.std(scores))


def inception_score_adm(
    logits: ArrayLike, *, split_size: int = 5000, labels: ArrayLike | None = None
) -> float:
    """ADM's rule: chunks of split_size in file order, mean over chunks.

    labels [n], if known, only serve a warning: sorted labels make this number incomparable.
    """
    n = len(logits)
    if n < 2:
        raise ValueError(f"an Inception Score needs at least 2 images, got {n}")
    if labels is not None and n > split_size:
        y = np.asarray(labels)
        if len(y) == n and bool((np.diff(y) >= 0).all()) and y[0] != y[-1]:
            warnings.warn(
                "the samples are sorted by class: ADM's Inception Score cuts chunks in file order and "
                "will be far too low; shuffle the file, or use the torch-fidelity rule",
                stacklevel=2,
            )
    chunks = (np.arange(i, min(i + split_size, n)) for i in range(0, n, split_size))
    return float(np.mean([_score(logits, rows) for rows in chunks]))
