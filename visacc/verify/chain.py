"""Acceptance of a chain of drafts: speculative and Jacobi windows (arXiv 2211.17192, 2410.01699, 2510.24211).

The chain is the width-one case of the token tree; it has an entry of its own because a Jacobi window also
wants the tests behind the first rejection (*unbroken*: every slot is kept or redrawn, which is the maximal
coupling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.kernels import chain_verify, checks
from visacc.verify.rules import EXACT, Rule

ChainRule = Rule


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
    rule: Rule = EXACT,
    q: Tensor | None = None,
    onehot: Tensor | None = None,
    u: Tensor | None = None,
    U: Tensor | None = None,
    match: bool = False,
    unbroken: bool = True,
    validate: bool = False,
) -> ChainVerdict:
    """Judge a chain of drafts in every row of a batch.

    Args:
        p: float32 [B, N, V], row k = law of the slot that draft k is for; the last row is the slot behind all drafts.
        drafts: int64 [B, N-1].
        n_draft: int64 [B] number of real drafts of the row, at most N-1.
        fresh: int64 [B, N] tokens drawn from p independently of ``u`` and ``U`` (read at slot ``n_draft``; with
            ``match``, and behind the first rejection without ``unbroken``, at every slot).
        rule: how a draft is tested, see :mod:`visacc.verify.rules`.
        q, onehot: draft laws [B, N-1, V] and which of them are point masses [B, N-1]; ``q=None`` means all.
        u, U: per draft a uniform in [0, 1) and a 32-bit integer; not needed with ``match``.
        match: accept a draft iff it equals ``fresh`` (Gumbel-exact and greedy decoding); ``fresh`` replaces it.
        unbroken: also draw residuals behind the first rejection (the maximal coupling of q and p); without it
            ``coupled`` holds ``fresh`` there.
        validate: check values too (as VISACC_DEBUG=1 does everywhere): laws, uniforms, drafts that q excludes.

    Returns:
        ChainVerdict.

    Raises:
        ValueError: wrong shapes, dtypes or devices; with validation also the first bad row and slot.
    """
    if match or rule.matches:
        _check_match(p, drafts, n_draft, fresh, validate)
        order = torch.arange(drafts.shape[1], device=p.device)
        accepted = (drafts == fresh[:, :-1]) & (order < n_draft[:, None])
        run = accepted.long().cumprod(1).sum(1)
        return ChainVerdict(accepted, run, fresh.gather(1, run[:, None])[:, 0], fresh)
    if u is None or U is None:
        raise ValueError("verify_chain needs uniforms u and integers U unless match=True")
    numerator, denominator = rule.chain_ratio(p[:, : drafts.shape[1]], q, drafts, onehot)
    run, accepted, coupled = chain_verify(
        p,
        drafts,
        q,
        onehot,
        n_draft,
        u=u,
        U=U,
        fresh=fresh,
        unbroken=unbroken,
        numerator=numerator,
        denominator=denominator,
        validate=validate,
    )
    return ChainVerdict(accepted, run, coupled.gather(1, run[:, None])[:, 0], coupled)


def _check_match(p: Tensor, drafts: Tensor, n_draft: Tensor, fresh: Tensor, validate: bool) -> None:
    B, N, V = p.shape
    checks.law_dtype("p", p)
    checks.shape("drafts", drafts, ("B", "N-1"), B, N - 1)
    checks.shape("n_draft", n_draft, ("B",), B)
    checks.shape("fresh", fresh, ("B", "N"), B, N)
    checks.same_device(p, drafts, n_draft, fresh)
    if checks.enabled(validate):
        checks.laws("p", p)
        real = torch.arange(N - 1, device=p.device) < n_draft[:, None]
        checks.drafts(drafts, None, None, real, V)
        checks.fail_where((fresh < 0) | (fresh >= V), f"fresh token outside the vocabulary 0..{V - 1}")
