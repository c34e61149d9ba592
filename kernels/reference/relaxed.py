"""Masses that relaxed acceptance rules put in place of p(x): LANTERN's neighbour mass and GSD's cluster sums.

Sums are taken over integers (round(p * 2**39), see `sampling`), so they do not depend on the order of
summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels.reference.sampling import WEIGHT_SCALE, as_mass, integer_weights


def neighbour_mass(p: Tensor, companions: Tensor, bound: Tensor) -> Tensor:
    """See `visacc.kernels.neighbour_mass`."""
    inside = companions >= 0
    near = p.gather(-1, companions.clamp(min=0).long()).masked_fill(~inside, 0.0)
    sums = integer_weights(near).cumsum(-1)
    limit = (bound * WEIGHT_SCALE).to(torch.int64)[..., None]
    return as_mass(sums.masked_fill(sums > limit, 0).amax(-1), p.dtype)


def group_members(p: Tensor, x: Tensor, size: int, official_edges: bool) -> Tensor:
    """Ids of the group of x: the `size` ranks around it in the ascending order of p, [R, size - 1] without
    x, -1 = none.

    p: float32 [R, V]. x: int64 [R]. The order is by (p, id). Half of `size` ranks lie below x, x included
    with the others above. By default only ids with p > 0 take part and the window is shifted to stay inside
    of them; with `official_edges` every id takes part, the window is cut at the top, and it is empty when
    it would begin below rank 0.
    """
    V = p.shape[1]
    half, width = size // 2, min(size - 1, V - 1)
    # Non-negative floats are ordered like their bit patterns: one int64 key orders by (p, id).
    key = (p.to(torch.float32).view(torch.int32).to(torch.int64) << 32) | torch.arange(V, device=p.device)
    own = key.gather(1, x[:, None])
    taken = torch.ones_like(p, dtype=torch.bool) if official_edges else p > 0
    lower, upper = (key < own) & taken, (key > own) & taken
    n_below, n_above = lower.sum(1), upper.sum(1)
    if official_edges:
        below = torch.where(n_below < half, 0, half)
        above = torch.where(n_below < half, 0, n_above.clamp(max=size - 1 - half))
    else:
        start = torch.minimum((n_below - half).clamp(min=0), (n_below + n_above + 1 - size).clamp(min=0))
        below = n_below - start
        above = torch.minimum(n_above, size - 1 - below)
    down = key.masked_fill(~lower, -1).topk(width, 1).values
    up = key.masked_fill(~upper, torch.iinfo(torch.int64).max).topk(width, 1, largest=False).values
    order = torch.arange(width, device=p.device)
    shifted = (order - below[:, None]).clamp(min=0)
    ids = torch.where(order < below[:, None], down, up.gather(1, shifted)) & 0xFFFFFFFF
    ids = ids.masked_fill(order >= (below + above)[:, None], -1)
    return torch.nn.functional.pad(ids, (0, size - 1 - width), value=-1)


def group_sums(
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    onehot: Tensor | None,
    embedding: Tensor,
    size: int,
    prob_threshold: float,
    distance_threshold: float,
    official_edges: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.group_sums`."""
    ids = group_members(p, x, size, official_edges)
    safe = ids.clamp(min=0)
    p_x = p.gather(1, x[:, None])
    p_y = p.gather(1, safe)
    codes = embedding.to(torch.float32)
    distance = (codes[safe] - codes[x][:, None]).square().sum(2)
    member = (ids >= 0) & ((p_y - p_x).abs() < prob_threshold) & (distance < distance_threshold)

    def total(own: Tensor, others: Tensor) -> Tensor:
        extra = integer_weights(others.masked_fill(~member, 0.0)).sum(1)
        return own + as_mass(extra, own.dtype)

    numerator = total(p_x.squeeze(1), p_y)
    if not official_edges:  # an impossible token stays impossible
        numerator = numerator.masked_fill(p_x.squeeze(1) <= 0, 0.0)
    if q is None:
        return numerator, torch.ones_like(numerator)
    denominator = total(q.gather(1, x[:, None]).squeeze(1), q.gather(1, safe))
    return numerator, denominator if onehot is None else denominator.masked_fill(onehot, 1.0)
