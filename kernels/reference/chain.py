"""Speculative verification of a chain, and the coupled redraw of a Jacobi window: one operation.

Keeping a draft x with probability min(1, p(x)/q(x)) and otherwise drawing from norm(max(p - q, 0)) is
speculative sampling (arXiv 2211.17192, 2302.01318) and at the same time maximal coupling of q and p (arXiv
2510.24211): the leading run of kept drafts is what is committed, the first redraw is the correction,
everything behind it is the coupled redraw of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels.reference.sampling import draw


def residual_weights(
    p: Tensor, q: Tensor | None, x: Tensor, onehot: Tensor | None, from_residual: Tensor
) -> Tensor:
    """Unnormalised weights of the redraw, float32 like p [..., V].

    Rows with `from_residual` [...] get max(p - q, 0), where q is the point mass on x for `onehot` rows (all
    rows if q is None); the others get p.
    """
    point: Tensor | None = from_residual
    if q is None:
        weights = p.clone()
    else:
        dense = from_residual if onehot is None else from_residual & ~onehot
        weights = torch.where(dense[..., None], (p - q).clamp_(min=0), p)
        point = None if onehot is None else from_residual & onehot
    if point is not None:
        at_x = weights.gather(-1, x[..., None])
        weights.scatter_(-1, x[..., None], at_x.masked_fill_(point[..., None], 0))
    return weights


def chain_verify(
    p: Tensor,
    draft: Tensor,
    q: Tensor | None,
    q_onehot: Tensor | None,
    n_draft: Tensor | None,
    u: Tensor,
    U: Tensor,
    fresh: Tensor | None = None,
    unbroken: bool = False,
    numerator: Tensor | None = None,
    denominator: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `visacc.kernels.chain_verify`."""
    B, N = p.shape[:2]
    D = draft.shape[1]
    if D == 0 and fresh is not None:
        return draft.new_zeros(B), draft.bool(), fresh.clone()
    slots = torch.arange(N, device=p.device)
    rows = torch.arange(B, device=p.device)
    if numerator is None or denominator is None:
        p_x, q_x = token_masses(p[:, :D], q, draft, q_onehot)
        numerator = p_x if numerator is None else numerator
        denominator = q_x if denominator is None else denominator
    accepted = u * denominator < numerator
    rejected = ~accepted
    if n_draft is not None:
        drafted = slots[:D] < n_draft[:, None]
        accepted, rejected = accepted & drafted, rejected & drafted
    n = accepted.long().cumprod(1).sum(1)

    if unbroken:
        weights = residual_weights(p[:, :D], q, draft, q_onehot, rejected)
        if fresh is not None:
            redraw = draw(weights.flatten(0, 1), U[:, :D].flatten(), p[:, :D].flatten(0, 1)).view(B, D)
            tokens = fresh.clone()
            tokens[:, :D] = torch.where(rejected, redraw, fresh[:, :D])
        else:
            weights = torch.cat((weights, p[:, D:]), 1).flatten(0, 1)
            tokens = draw(weights, U.flatten(), p.flatten(0, 1)).view(B, N)
        tokens[:, :D] = torch.where(accepted, draft, tokens[:, :D])
        return n, accepted, tokens

    stop = n.clamp(max=N - 1)
    weights = last = p[rows, stop]
    broken = torch.zeros_like(rows, dtype=torch.bool)
    if D:
        at = n.clamp(max=D - 1)
        broken = rejected[rows, at] & (n < D)
        q_row = None if q is None else q[rows, at]
        weights = residual_weights(
            last, q_row, draft[rows, at], None if q_onehot is None else q_onehot[rows, at], broken
        )
    extra = draw(weights, U[rows, stop.clamp(max=U.shape[1] - 1)], last)
    if fresh is not None:
        extra = torch.where(broken, extra, fresh[rows, stop])
    tokens = torch.where(slots == n[:, None], extra[:, None], -1 if fresh is None else fresh)
    tokens[:, :D] = torch.where(slots[:D] < n[:, None], draft, tokens[:, :D])
    return n, accepted, tokens


def token_masses(p: Tensor, q: Tensor | None, x: Tensor, onehot: Tensor | None) -> tuple[Tensor, Tensor]:
    """p(x) and q(x) [...] of tokens x [...] under rows [..., V]; q(x) is 1 for point masses."""
    at = x[..., None]
    p_x = p.gather(-1, at).squeeze(-1)
    if q is None:
        return p_x, torch.ones_like(p_x)
    q_x = q.gather(-1, at).squeeze(-1)
    return p_x, q_x if onehot is None else q_x.masked_fill(onehot, 1.0)
