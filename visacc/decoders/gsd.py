"""Grouped speculative decoding (arXiv 2508.07747): a Jacobi window whose drafts are tested by the mass of a
group.

Image codes are redundant: many ids look alike, and none of them has much probability of its own. A draft x
    passes with
probability ``min(1, p(C) / q(C))``, C the ids whose target probability is close to that of x and whose
embedding is close to that of x; a rejected draft is replaced by a draw from the ordinary residual ``max(p -
q, 0)``. Lossy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from visacc.decoders.jacobi import Jacobi
from visacc.models.base import ImageModel
from visacc.verify import Grouped

if TYPE_CHECKING:
    from visacc.engine import Run


class GSD(Jacobi):
    """Jacobi window with grouped acceptance.

    The defaults of the group are the constants of the published program; the paper varies ``group_size`` (3,
    25, 50).

    Args:
        window: tokens read per pass.
        group_size: ids around the draft in the order of the target's probabilities; 1 is the exact rule
            (``sjd``).
        prob_threshold: group members differ from the draft by less than this in probability.
        distance_threshold: and by less than this in squared embedding distance.
        coupling: how surviving drafts are redrawn: ``independent`` as published, ``maximal`` or ``gumbel`` as
            in mc-sjd.
        init: first draft of fresh slots.
        uniform_q: fresh random drafts are tested against the uniform law they were drawn from; ``False``
            treats them as certain, as the published program does.
        official_edges: at the ends of the order cut groups as the published program does.

    Raises:
        ValueError: unknown switch, group size below 1, a threshold that is not positive.
    """

    name = "gsd"
    summary = "Jacobi window, drafts tested by the mass of similar codes (lossy)"
    lossless = False
    requires = frozenset({"codebook"})

    def __init__(
        self,
        window: int = 16,
        group_size: int = 14,
        prob_threshold: float = 0.15,
        distance_threshold: float = 0.5,
        coupling: str = "independent",
        init: str = "random",
        uniform_q: bool = True,
        official_edges: bool = False,
    ) -> None:
        super().__init__(window, coupling, init, uniform_q=uniform_q)
        if coupling == "gumbel-exact":
            raise ValueError("gsd needs a ratio test: 'gumbel-exact' has none, use coupling='gumbel'")
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ValueError(f"group_size must be an integer of at least 1, got {group_size!r}")
        for label, value in (("prob_threshold", prob_threshold), ("distance_threshold", distance_threshold)):
            if not value > 0:
                raise ValueError(f"{label} must be positive, got {value!r}; group_size=1 is the exact rule")
        self.group_size, self.official_edges = group_size, official_edges
        self.prob_threshold, self.distance_threshold = prob_threshold, distance_threshold
        # with one id the group is the draft itself, and the published edges cut it to nothing
        self.lossless = group_size == 1 and not official_edges

    def options(self) -> dict[str, Any]:
        names = ("group_size", "prob_threshold", "distance_threshold")
        return super().options() | {name: getattr(self, name) for name in names}

    def check(self, model: ImageModel) -> None:
        super().check(model)
        book = model.codebook
        if book is None or book.shape[0] != model.layout.vocab:
            found = "none" if book is None else f"one of {book.shape[0]} codes"
            need = f"a codebook of the {model.layout.vocab} codes of {model.name}"
            raise ValueError(f"gsd needs {need}, which has {found}")

    def begin(self, run: Run, law: Tensor) -> Tensor:
        book = run.model.codebook
        assert book is not None
        self.rule = Grouped(
            book.to(run.device).float(),
            min(self.group_size, len(book)),
            self.prob_threshold,
            self.distance_threshold,
            self.official_edges,
        )
        return super().begin(run, law)
