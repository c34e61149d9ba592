"""Acceptance of a chain of drafts: speculative and Jacobi windows (arXiv 2211.17192, 2410.01699, 2510.24211).

The chain is the width-one case of the token tree; it has an entry of its own because a Jacobi window also wants the
tests behind the first rejection (*unbroken*: every slot is kept or redrawn, which is the maximal coupling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from visacc.kernels import draw


class ChainRule(Protocol):
    """How a draft is tested. ``lossless`` says whether the accepted law stays exactly the target's."""

    lossless: bool

    def accept(self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor, u: Tensor) -> Tensor:
        """bool [B, N]: which drafts pass on their own.

        Args:
            p: float32 [B, N, V] law of each drafted slot.
            q: float32 [B, N, V] law each draft was drawn from, ``None`` if all are one-hot.
            drafts: int64 [B, N].
            onehot: bool [B, N], drafts whose law is a point mass (their row of q is ignored).
            u: float32 [B, N] uniforms in [0, 1).
        """


@dataclass(frozen=True)
class ExactRule:
    """Accept with probability ``min(1, p(x)/q(x))``, tested as ``u q(x) < p(x)``: p = 0 always fails."""

    lossless: bool = True

    def accept(self, p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor, u: Tensor) -> Tensor:
        at = drafts[..., None]
        p_x = p.gather(2, at)[..., 0]
        if q is None:
            return u < p_x
        q_x = torch.where(onehot, 1.0, q.gather(2, at)[..., 0])
        return u * q_x < p_x


EXACT = ExactRule()


@dataclass
class ChainVerdict:
    """Outcome of a chain.

    Attributes:
        accepted: bool [B, N-1] each draft's own test (False beyond ``n_draft``).
        n_accepted: int64 [B] length of the accepted run.
        next_token: int64 [B] the token after the run: residual draw at the first rejection, or the fresh draw of the
            slot behind the last draft.
        coupled: int64 [B, N] per slot the draft where it passed, else its residual draw; the fresh draw from slot
            ``n_draft`` on. Under an exact rule each has law p of its slot.
    """

    accepted: Tensor
    n_accepted: Tensor
    next_token: Tensor
    coupled: Tensor


def verify_chain(
    p: Tensor,
    drafts: Tensor,
    n_draft: Tensor,
    fresh: Tensor,
    *,
    rule: ChainRule = EXACT,
    q: Tensor | None = None,
    onehot: Tensor | None = None,
    u: Tensor | None = None,
    U: Tensor | None = None,
    match: bool = False,
    unbroken: bool = True,
) -> ChainVerdict:
    """Judge a chain of drafts in every row of a batch.

    Args:
        p: float32 [B, N, V], row k = law of the slot that draft k is for; the last row is the slot behind all drafts.
        drafts: int64 [B, N-1].
        n_draft: int64 [B] number of real drafts of the row, at most N-1.
        fresh: int64 [B, N] tokens drawn from p independently of ``u`` and ``U`` (read at slot ``n_draft``; with
            ``match`` at every slot).
        q, onehot: draft laws [B, N-1, V] and which of them are point masses [B, N-1]; ``q=None`` means all.
        u, U: per draft a uniform in [0, 1) and a 32-bit integer; not needed with ``match``.
        match: accept a draft iff it equals ``fresh`` (Gumbel-exact and greedy decoding); ``fresh`` replaces it.
        unbroken: also draw residuals behind the first rejection; without it ``coupled`` is only right up to there.

    Returns:
        ChainVerdict.
    """
    batch, size, vocab = p.shape
    order = torch.arange(size - 1, device=p.device)
    if match:
        accepted = (drafts == fresh[:, :-1]) & (order < n_draft[:, None])
        run = accepted.long().cumprod(1).sum(1)
        return ChainVerdict(accepted, run, fresh.gather(1, run[:, None])[:, 0], fresh)
    if u is None or U is None:
        raise ValueError("verify_chain needs uniforms u and integers U unless match=True")
    if onehot is None:
        onehot = torch.full_like(drafts, q is None, dtype=torch.bool)
    tested = p[:, :-1]
    accepted = rule.accept(tested, q, drafts, onehot, u) & (order < n_draft[:, None])
    run = accepted.long().cumprod(1).sum(1)
    if unbroken:
        weights = _residual(tested, q, drafts, onehot)
        residual = draw(weights.reshape(-1, vocab), U.reshape(-1), fallback=tested.reshape(-1, vocab))
        residual = residual.view(batch, size - 1)
    elif size > 1:
        rows, stop = torch.arange(batch, device=p.device), run.clamp(max=size - 2)
        q_row = None if q is None else q[rows, stop][:, None]
        weights = _residual(p[rows, stop][:, None], q_row, drafts[rows, stop][:, None], onehot[rows, stop][:, None])
        residual = draw(weights[:, 0], U[rows, stop], fallback=p[rows, stop])[:, None].expand(batch, size - 1)
    else:
        residual = drafts
    kept = torch.where(accepted, drafts, residual)
    kept = torch.where(order < n_draft[:, None], kept, fresh[:, :-1])
    coupled = torch.cat([kept, fresh[:, -1:]], dim=1)
    return ChainVerdict(accepted, run, coupled.gather(1, run[:, None])[:, 0], coupled)


def _residual(p: Tensor, q: Tensor | None, drafts: Tensor, onehot: Tensor) -> Tensor:
    """Unnormalised ``max(p - q, 0)`` [B, N, V]; for a point mass p without the drafted token."""
    without = p.scatter(2, drafts[..., None], 0.0)
    if q is None:
        return without
    return torch.where(onehot[..., None], without, (p - q).clamp(min=0))
