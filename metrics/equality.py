"""Are two sets of samples from one distribution? For decoders that claim to be lossless.

A distance of 5000 images cannot prove equality. These tests have a stated false-alarm level: if both sets do
come from one distribution, p < alpha happens with probability at most (permutation) or about (chi-square)
alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visacc.metrics.mmd import Kernel, polynomial_kernel
from visacc.metrics.stats import ArrayLike, as_features


@dataclass(frozen=True)
class Test:
    """statistic and p-value; `rejects(alpha)` has false-alarm level alpha."""

    statistic: float
    p_value: float
    details: dict[str, float]

    __test__ = False  # not a pytest class

    def rejects(self, alpha: float = 0.01) -> bool:
        return self.p_value < alpha


def mmd_permutation_test(
    x: ArrayLike, y: ArrayLike, *, permutations: int = 499, seed: int = 0, kernel: Kernel | None = None
) -> Test:
    """Two-sample test on features [n, d], [m, d] with the unbiased kernel distance; exact level by
    permutation.
    """
    a, b = as_features(x, "x"), as_features(y, "y")
    n, m = len(a), len(b)
    if min(n, m) < 2:
        raise ValueError(f"a two-sample test needs at least 2 rows per set, got {n} and {m}")
    both = torch.cat([a, b])
    gram = (kernel or polynomial_kernel())(both, both)
    gram = gram - torch.diag(gram.diagonal())
    rng = np.random.default_rng(seed)
    labels = np.zeros((permutations + 1, n + m))
    labels[0, :n] = 1
    for i in range(1, permutations + 1):
        labels[i, rng.permutation(n + m)[:n]] = 1
    u = torch.from_numpy(labels)
    v = 1 - u
    gu, gv = u @ gram, v @ gram
    values = (gu * u).sum(1) / (n * (n - 1)) + (gv * v).sum(1) / (m * (m - 1)) - 2 * (gu * v).sum(1) / (n * m)
    p = float((values[1:] >= values[0] - 1e-12).sum() + 1) / (permutations + 1)
    return Test(float(values[0]), p, {"n": n, "m": m, "permutations": permutations})


def _chi2_tail(statistic: float, dof: int) -> float:
    return float(
        torch.special.gammaincc(
            torch.tensor(dof / 2, dtype=torch.float64), torch.tensor(statistic / 2).double()
        )
    )


def token_test(
    x: Tensor, y: Tensor, vocabulary: int, *, positions: Sequence[int] | None = None, smallest: float = 5.0
) -> Test:
    """Chi-square homogeneity of token marginals, codes [n, L] against [m, L], one table per position.

    Tokens with an expected count below `smallest` in either set are pooled. Statistics and degrees of freedom
    add up over positions as if positions were independent; dependence within a sample only makes the level
    approximate, so for a strict test give few far-apart positions or use Bonferroni on single ones.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"codes must be [n, L] and [m, L], got {tuple(x.shape)} and {tuple(y.shape)}")
    if min(int(x.min()), int(y.min())) < 0 or max(int(x.max()), int(y.max())) >= vocabulary:
        raise ValueError(f"codes outside 0..{vocabulary - 1}")
    n, m = len(x), len(y)
    statistic, dof = 0.0, 0
    for position in range(x.shape[1]) if positions is None else positions:
        a = torch.bincount(x[:, position].cpu(), minlength=vocabulary).double()
        b = torch.bincount(y[:, position].cpu(), minlength=vocabulary).double()
        share = (a + b) / (n + m)
        rare = share * min(n, m) < smallest
        a = torch.cat([a[~rare], a[rare].sum()[None]])
        b = torch.cat([b[~rare], b[rare].sum()[None]])
        used = (a + b) > 0
        a, b = a[used], b[used]
        if len(a) < 2:
            continue
        share = (a + b) / (n + m)
        statistic += float(((a - n * share) ** 2 / (n * share) + (b - m * share) ** 2 / (m * share)).sum())
        dof += len(a) - 1
    if dof == 0:
        raise ValueError("no position has two token groups with enough counts; give more samples")
    return Test(statistic, _chi2_tail(statistic, dof), {"dof": dof, "n": n, "m": m})
