"""Acceptance rules: small objects that say how a draft is tested, and whether the output law stays the
target's.

| rule | a draft x passes if | lossless |
|---|---|---|
| `Exact` | u q(x) < p(x) | yes |
| `Greedy` | x is the arg-max of p | yes, for greedy decoding |
| `GumbelExact` | x is the arg-max of p / E, E the slot's exponential noise | yes, token for token |
| `Typical` | p(x) > min(eps, alpha exp(-H(p))) (Medusa, arXiv 2401.10774) | no |
| `Lantern` | u q(x) < p(x) + m(x), m the nearest codes' mass up to delta (arXiv 2410.03355) | no |
| `LanternPP` | the same with m up to (lambda - 1) p(x) (arXiv 2502.06352) | no |
| `Grouped` | u q(G) < p(G), G the ids of similar probability and embedding (GSD, arXiv 2508.07747) | no |

Relaxed rules change the test only; what follows a rejection is the ordinary residual max(p - q, 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from visacc.kernels import group_sums, neighbour_mass
from visacc.kernels.reference.chain import token_masses

OFFICIAL_RESIDUALS = ("official-llamagen", "official-lumina", "official-dynamic")


class Rule:
    """Base of the rules.

    Attributes:
        lossless: whether accepted tokens keep exactly the target's law. matches: whether drafts are
        compared with tokens drawn from p (arg-max, Gumbel) instead of a ratio test.
    """

    lossless: ClassVar[bool] = False
    matches: ClassVar[bool] = False

    def chain_ratio(
        self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What replaces p(x) and q(x) in the test ``u q(x) < p(x)`` of a chain; None leaves them.

        p, q: float32 [B, D, V]; drafts: int64 [B, D]; onehot: bool [B, D], drafts with a point-mass q.
        """
        raise ValueError(f"{type(self).__name__} has no ratio test; use verify_chain(match=True) or verify()")

    def accept(self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor | None, u: Tensor) -> Tensor:
        """bool [B, D]: which drafts of a chain pass on their own (arguments as in `chain_ratio`)."""
        numerator, denominator = self.chain_ratio(p, q, drafts, onehot)
        p_x, q_x = token_masses(p, q, drafts, onehot)
        return u * (q_x if denominator is None else denominator) < (p_x if numerator is None else numerator)


@dataclass(frozen=True)
class Exact(Rule):
    """Speculative sampling: accept with probability min(1, p(x)/q(x)) (arXiv 2211.17192, 2302.01318)."""

    lossless: ClassVar[bool] = True

    def chain_ratio(
        self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, None


@dataclass(frozen=True)
class GumbelExact(Rule):
    """Accept what plain sampling with the same noise would have drawn: arg-max of p / E."""

    lossless: ClassVar[bool] = True
    matches: ClassVar[bool] = True


@dataclass(frozen=True)
class Typical(Rule):
    """Medusa's typical acceptance: p(x) > min(eps, alpha exp(-H(p))), longest accepted path."""

    eps: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        if not (0 < self.eps <= 1 and self.alpha > 0):
            raise ValueError(f"Typical needs 0 < eps <= 1 and alpha > 0, got {self.eps} and {self.alpha}")

    def threshold(self, p: Tensor) -> Tensor:
        """min(eps, alpha exp(-H)) of laws p [..., V] -> [...]."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.alpha * (-entropy).exp()).clamp(max=self.eps)


@dataclass(frozen=True, eq=False)
class _Neighbours(Rule):
    """Shared part of LANTERN and LANTERN++.

    Args:
        neighbours: int32 [codes, K] nearest codes of every code, nearest first, the code itself excluded.
        k: how many of them may be aggregated. offset: vocabulary id of code 0; ids without a code get no
        neighbours. residual: "ordinary", or an "official-..." variant of the original programs (parity
        checks only: farther
            from p, CPU reference only).
    """

    neighbours: Tensor
    k: int
    offset: int = 0
    residual: str = "ordinary"

    def __post_init__(self) -> None:
        if self.neighbours.ndim != 2 or self.neighbours.is_floating_point():
            raise ValueError(
                f"neighbours must be an integer tensor [codes, K], got {list(self.neighbours.shape)}"
            )
        if not 1 <= self.k <= self.neighbours.shape[1]:
            raise ValueError(
                f"k must be in 1..{self.neighbours.shape[1]} (columns of the table), got {self.k}"
            )
        if self.residual != "ordinary" and self.residual not in OFFICIAL_RESIDUALS:
            names = ", ".join(("ordinary", *OFFICIAL_RESIDUALS))
            raise ValueError(f"residual must be one of {names}, got {self.residual!r}")

    def companions(self, tokens: Tensor, extra: int = 0) -> Tensor:
        """Vocabulary ids int32 [..., k] of the codes near `tokens` [...], -1 where there are none."""
        code = tokens - self.offset
        known = (code >= 0) & (code < self.neighbours.shape[0])
        rows = self.neighbours[code.clamp(0, self.neighbours.shape[0] - 1), : self.k + extra].to(torch.int32)
        return torch.where(known[..., None], rows + self.offset, -1)

    @property
    def slack(self) -> tuple[float, float]:
        """(a, b): a draft x may gain neighbour mass up to a + b r(x)."""
        raise NotImplementedError

    def bound(self, mass: Tensor) -> Tensor:
        """Largest neighbour mass that may be added to masses r(x), r normalised."""
        a, b = self.slack
        return a + b * mass

    def chain_ratio(
        self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        p_x = p.gather(2, drafts[..., None]).squeeze(2)
        return p_x + neighbour_mass(p, self.companions(drafts), self.bound(p_x)), None


@dataclass(frozen=True, eq=False)
class Lantern(_Neighbours):
    """LANTERN: neighbours are added while their mass stays within ``delta``. delta = 0 is the exact rule."""

    delta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.delta <= 1:
            raise ValueError(
                f"delta must lie in [0, 1], got {self.delta}; a multiplicative bound is LanternPP's lam"
            )

    @property
    def slack(self) -> tuple[float, float]:
        return self.delta, 0.0


@dataclass(frozen=True, eq=False)
class LanternPP(_Neighbours):
    """LANTERN++: neighbours are added while r(x) grows at most ``lam``-fold. lam = 1 is the exact rule."""

    lam: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lam >= 1:
            raise ValueError(f"lam must be at least 1, got {self.lam}")

    @property
    def slack(self) -> tuple[float, float]:
        return 0.0, self.lam - 1


@dataclass(frozen=True, eq=False)
class Greedy(Rule):
    """Accept the arg-max of p (lowest id on ties), longest path: the output is plain greedy decoding.

    With `relaxed` a draft also passes when its neighbours' mass makes it the arg-max (greedy LANTERN; lossy).
    """

    relaxed: Lantern | LanternPP | None = None
    matches: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.relaxed is None


@dataclass(frozen=True, eq=False)
class Grouped(Rule):
    """GSD: a draft is tested by the mass of its dynamic group, arXiv 2508.07747. group_size = 1 is the
    exact rule.

    Args:
        embedding: float [V, d] codebook or token embeddings of the image vocabulary.
        group_size: ids around x in the order of p, half of them below it.
        prob_threshold: members satisfy |p(y) - p(x)| below it.
        distance_threshold: members satisfy |e(y) - e(x)|^2 below it.
        official_edges: group windows at the ends of the order as in the original program (parity checks).
    """

    embedding: Tensor
    group_size: int = 14
    prob_threshold: float = 0.15
    distance_threshold: float = 0.5
    official_edges: bool = False

    def __post_init__(self) -> None:
        if self.embedding.ndim != 2:
            raise ValueError(f"embedding must be [V, d], got {list(self.embedding.shape)}")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")

    def chain_ratio(
        self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.embedding.shape[0] != p.shape[-1]:
            raise ValueError(
                f"embedding has {self.embedding.shape[0]} rows but the vocabulary has {p.shape[-1]} ids:"
                " pass the rows of the image vocabulary"
            )
        numerator, denominator = group_sums(
            p.flatten(0, 1),
            None if q is None else q.flatten(0, 1),
            drafts.flatten(),
            None if onehot is None else onehot.flatten(),
            self.embedding,
            self.group_size,
            self.prob_threshold,
            self.distance_threshold,
            official_edges=self.official_edges,
        )
        return numerator.view(drafts.shape), denominator.view(drafts.shape)


EXACT = Exact()
GREEDY = Greedy()
GUMBEL_EXACT = GumbelExact()
