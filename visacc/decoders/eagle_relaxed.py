"""LANTERN and LANTERN++: drafted trees whose drafts also count the probability of near codes (lossy).

Image codes are nearly interchangeable with their neighbours in the codebook, so a draft x is tested with
``min(1, (p(x) + m(x)) / q(x))``, m(x) the mass of its nearest codes up to a bound: ``delta`` (LANTERN, arXiv 2410.03355)
or ``(lam - 1) p(x)`` (LANTERN++, arXiv 2502.06352). After a rejection the ordinary residual ``max(p - q, 0)`` is drawn,
which keeps the output no further from p than the drafter is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from visacc.decoders.eagle import Eagle, Tree
from visacc.drafters import EagleNetwork
from visacc.drafters.neighbours import METRICS, cached_table
from visacc.models.base import ImageModel
from visacc.verify import Greedy, Lantern, LanternPP, Rule

if TYPE_CHECKING:
    from visacc.engine import Run


class _Relaxed(Eagle):
    """Shared part of the two relaxed decoders."""

    lossless = False
    requires = frozenset({"hidden", "tree_mask", "codebook"})

    def __init__(
        self,
        k: int,
        drafter: str | Path | EagleNetwork | None,
        tree: Tree | None,
        metric: str,
        padding: str | None,
    ) -> None:
        super().__init__(drafter, tree, padding=padding)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be an integer of at least 1 (neighbours per code), got {k!r}")
        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}; choose one of {', '.join(METRICS)}")
        self.k, self.metric = k, metric

    def check(self, model: ImageModel) -> None:
        fresh = self._model is not model
        super().check(model)
        if fresh:
            book = model.codebook
            if book is None or book.shape[0] != model.layout.vocab:
                raise ValueError(
                    f"{self.name} needs the codebook of {model.name}'s {model.layout.vocab} codes"
                )
            if self.k >= book.shape[0]:
                raise ValueError(
                    f"k={self.k} neighbours need more codes than the {book.shape[0]} of {model.name}"
                )
            self._neighbours = cached_table(book, self.k, self.metric).neighbours
            self._relaxed = self._rule(self._neighbours)
            self._relaxed_rule = Greedy(relaxed=self._relaxed)

    def _rule(self, neighbours: Tensor) -> Lantern | LanternPP:
        raise NotImplementedError

    def acceptance(self, run: Run) -> Rule:
        return self._relaxed_rule if run.sampling.temperature == 0 else self._relaxed


class LanternDecoder(_Relaxed):
    """LANTERN: a draft x is tested with p(x) plus its nearest codes' mass, as long as that stays within ``delta``.

    ``delta`` bounds the mass moved per token, not the distance of the output law; ``delta=0`` is exact.

    Args:
        delta: 0.1 to 0.4 in the paper when sampling, 0.05 to 0.2 when greedy.
        k: nearest codes that may be aggregated.
        metric: see :func:`visacc.drafters.neighbours.nearest_codes`.
        drafter, tree, padding: see :class:`Eagle`.
    """

    name = "lantern"
    summary = "a drafted tree, near codes count as the same up to a bound (lossy)"

    def __init__(
        self,
        delta: float = 0.1,
        k: int = 1000,
        drafter: str | Path | EagleNetwork | None = None,
        tree: Tree | None = None,
        metric: str = "given",
        padding: str | None = None,
    ) -> None:
        super().__init__(k, drafter, tree, metric, padding)
        if not 0 <= delta <= 1:
            raise ValueError(
                f"delta must lie in [0, 1], got {delta!r}; a multiplicative bound is lantern++'s lam"
            )
        self.delta = delta
        self.lossless = delta == 0

    def options(self) -> dict[str, Any]:
        return super().options() | {"delta": self.delta, "k": self.k, "metric": self.metric}

    def _rule(self, neighbours: Tensor) -> Lantern:
        return Lantern(neighbours, self.k, delta=self.delta)


class LanternPPDecoder(_Relaxed):
    """LANTERN++: as LANTERN with a bound relative to the draft's own probability, ``(lam - 1) p(x)``.

    Args:
        lam: p(x) grows at most ``lam``-fold; 1 is exact. The published runs use (k, lam) = (10, 5), (5, 10), (5, 20).
        k: nearest codes that may be aggregated.
        metric: see :func:`visacc.drafters.neighbours.nearest_codes`.
        drafter, tree, padding: see :class:`Eagle`.
    """

    name = "lantern++"
    summary = "a drafted tree, near codes count as the same relative to the draft (lossy)"

    def __init__(
        self,
        lam: float = 5.0,
        k: int = 10,
        drafter: str | Path | EagleNetwork | None = None,
        tree: Tree | None = None,
        metric: str = "given",
        padding: str | None = None,
    ) -> None:
        super().__init__(k, drafter, tree, metric, padding)
        if not lam >= 1:
            raise ValueError(f"lam must be at least 1, got {lam!r}")
        self.lam = lam
        self.lossless = lam == 1

    def options(self) -> dict[str, Any]:
        return super().options() | {"lam": self.lam, "k": self.k, "metric": self.metric}

    def _rule(self, neighbours: Tensor) -> LanternPP:
        return LanternPP(neighbours, self.k, lam=self.lam)


LanternPlusPlus = LanternPPDecoder
"""Earlier name."""
