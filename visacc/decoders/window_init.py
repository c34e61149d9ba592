"""How the fresh slots at the end of a Jacobi window get their first draft, and which draft law may be recorded.

A recorded law q must be the law the token was really drawn from given everything at earlier slots (the losslessness
argument of arXiv 2410.01699 and 2510.24211): a uniform draw may record the uniform law, a copied token must record a
one-hot law (the copied token is itself part of the context), a draw from a neighbour's stored law records that law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visacc.kernels import draw, rng
from visacc.models.base import Layout

if TYPE_CHECKING:
    from visacc.engine import Run

INITS = ("random", "repeat_left", "repeat_above", "repeat_previous_frame", "sample_left", "sample_above")


@dataclass
class Fresh:
    """Fresh drafts: codes [B, N], whether their law is one-hot [B, N], else their law [B, N, V] (``None``: all one-hot
    or the laws were not asked for)."""

    tokens: Tensor
    onehot: Tensor
    q: Tensor | None


class WindowInit:
    """Draft initialisation for one layout.

    Args:
        scheme: one of :data:`INITS`. ``left``/``above``/``previous_frame`` name the grid neighbour whose token is copied
            (``repeat``) or whose stored law is sampled (``sample``). A neighbour that is itself fresh is replaced by its
            own neighbour, and so on, until a slot with a known token or law; where the grid has no such neighbour, the
            slot before stands in.
        like: a law, for its device and dtype.
        uniform_q: whether ``random`` records the uniform law (better, and legal) or one-hot (as the original programs).
    """

    def __init__(self, scheme: str, layout: Layout, like: Tensor, *, uniform_q: bool = True) -> None:
        if scheme not in INITS:
            raise ValueError(f"unknown window initialisation {scheme!r}; choose one of {', '.join(INITS)}")
        self.scheme, self.uniform_q = scheme, uniform_q
        device, self.dtype = like.device, like.dtype
        self.forced = None
        if layout.forced_ids is not None:
            self.forced = (layout.forced_ids >= 0).to(device)
        self.jump = None if scheme == "random" else _ancestors(_source(scheme, layout)).to(device)

    @property
    def keeps_laws(self) -> bool:
        """Whether the law of every slot must be stored for later."""
        return self.scheme.startswith("sample")

    def __call__(
        self, run: Run, slots: Tensor, first: Tensor, known: Tensor, laws: Tensor | None, *, want_q: bool
    ) -> Fresh:
        """Drafts for fresh slots.

        Args:
            slots: int64 [B, N] slots to fill (already clamped to the layout).
            first: int64 [B] first slot without a known token; every slot before has one.
            known: int64 [B, total] tokens by slot, committed or drafted.
            laws: float [B, total, V] last law of each slot before ``first``, where :attr:`keeps_laws`.
        """
        tokens, onehot, q = self._propose(run, slots, first, known, laws, want_q)
        if self.forced is not None:
            forced = self.forced[slots]
            tokens = torch.where(forced, 0, tokens)
            onehot = onehot | forced
        return Fresh(tokens, onehot, q)

    def _propose(
        self, run: Run, slots: Tensor, first: Tensor, known: Tensor, laws: Tensor | None, want_q: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        vocab = run.layout.vocab
        none, every = torch.zeros_like(slots, dtype=torch.bool), torch.ones_like(slots, dtype=torch.bool)
        word = run.noise.integer(rng.INIT, slots, run.step)
        if self.scheme == "random":
            tokens = (word * vocab) >> 32
            if not (want_q and self.uniform_q):
                return tokens, every, None
            q = torch.full((1, 1, 1), 1 / vocab, dtype=self.dtype, device=slots.device).expand(
                *slots.shape, vocab
            )
            return tokens, none, q
        source = self._resolve(slots, first)
        if not self.keeps_laws:
            return known.gather(1, source), every, None
        assert laws is not None
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        q = laws[rows, source]
        tokens = draw(q.reshape(-1, vocab), word.reshape(-1)).view(slots.shape)
        return tokens, none, q

    def _resolve(self, slots: Tensor, first: Tensor) -> Tensor:
        """Follow the neighbour relation from each slot to the nearest one before ``first`` (binary lifting)."""
        assert self.jump is not None
        pointer, bound = slots, first[:, None]
        for level in self.jump.flip(0):
            further = level[pointer]
            pointer = torch.where(further >= bound, further, pointer)
        return torch.where(pointer >= bound, self.jump[0][pointer], pointer)


def _source(scheme: str, layout: Layout) -> Tensor:
    """int64 [total]: the slot whose token or law a fresh slot takes; always an earlier one."""
    before = torch.arange(layout.total) - 1
    left, above = layout.neighbour(dx=-1), layout.neighbour(dy=-1)
    order: tuple[Tensor, ...]
    if scheme.endswith("above"):
        order = (above, left)
    elif scheme.endswith("left"):
        order = (left, above)
    else:
        order = (layout.neighbour(dt=-1), left, above)
    result = torch.full_like(before, -1)
    for candidate in order:
        result = torch.where(result < 0, candidate, result)
    return torch.where(result < 0, before, result).clamp(min=0)


def _ancestors(source: Tensor) -> Tensor:
    """Powers 1, 2, 4, ... of the source map: int64 [levels, total]."""
    levels = [source]
    while 1 << len(levels) < len(source):
        levels.append(levels[-1][levels[-1]])
    return torch.stack(levels)
