"""The ratio test of a token tree, with its residuals (arXiv 2305.09781, 2401.15077; rules in
`visacc.verify`).

At a node with law p the children x_1, x_2, ... are tested in slot order against r, initially p: x_i passes
with probability min(1, r(x_i) / q_i(x_i)), and a failure turns r into norm(max(r - q_i, 0)). q_i is the
point mass on x_i (point drafts), q without the earlier siblings (draws without replacement), or q
(independent draws). The first that passes becomes the current node; when none does, the next root is drawn
from r.

Which child a node accepts does not depend on whether the node is reached, so the reference tests all nodes
at once, one child rank after the other, and walks afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visacc.kernels.reference.relaxed import group_sums, neighbour_mass
from visacc.kernels.reference.sampling import as_mass, draw, integer_weights
from visacc.kernels.reference.tree import child_table, tree_walk

POINT, WITHOUT_REPLACEMENT, INDEPENDENT = 0, 1, 2
"""How a slot's token was drafted: chosen outright, drawn without replacement, drawn independently of
siblings.
"""

TINY = 1e-20


class Group(NamedTuple):
    """Arguments of GSD's group test, see `group_sums`."""

    embedding: Tensor
    size: int
    prob_threshold: float
    distance_threshold: float


class Details(NamedTuple):
    """What parity tests look at: unclamped ratio of every test [B, T] (-1 untested), final weights [B, V]."""

    ratios: Tensor
    weights: Tensor


def point_verify(
    p: Tensor,
    tokens: Tensor,
    parent: Tensor,
    live: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    u: Tensor,
    U: Tensor,
    width: int,
    details: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Details | None]:
    """`tree_verify` when every draft is a point draft: r is p without the failed siblings, so nothing is
    stored.

    Child x passes iff u S < p(x), S = 1 - (mass of the earlier siblings); a repeated sibling has no mass
    left.
    """
    B, T, V = p.shape
    rows = torch.arange(B, device=p.device)[:, None]
    slots = torch.arange(T, device=p.device)
    child = live & (parent >= 0)
    earlier = (parent[:, :, None] == parent[:, None, :]) & child[:, None, :] & (slots < slots[:, None])
    repeated = (earlier & (tokens[:, :, None] == tokens[:, None, :])).any(2)
    mass = p[rows, parent.clamp(min=0).long(), tokens].masked_fill(repeated | ~child, 0.0)
    spent = (earlier * integer_weights(mass)[:, None, :]).sum(2)
    left = 1.0 - as_mass(spent, p.dtype)
    path, n = tree_walk(u * left < mass, parent, live, ancestors, depth, True, width)
    stop = path.gather(1, (n - 1)[:, None]).long()
    last = p[rows, stop].squeeze(1)
    failed = torch.where(child & (parent == stop), tokens, V)
    keep = torch.ones(B, V + 1, dtype=p.dtype, device=p.device).scatter_(1, failed, 0.0)
    weights = last * keep[:, :V]
    token = draw(weights, U.gather(1, stop).squeeze(1), last)
    if not details:
        return path, n, token, None
    ratios = torch.where(child, mass / left.clamp(min=TINY), -1.0)
    return path, n, token, Details(ratios, weights)


def untried(
    tokens: Tensor, parent: Tensor, live: Tensor, q_rows: Tensor, q_row_of: Tensor, kind: Tensor | int
) -> Tensor:
    """Mass float32 [B, T] of each slot's draft law without the slot's earlier siblings; 1 where it was not drawn without
    replacement.

    A sum of what is left: one less the siblings' mass would be rounding noise where they hold nearly everything, as they
    do whenever a sharp law offers more than one child.
    """
    T, V = tokens.shape[1], q_rows.shape[2]
    up = parent.clamp(min=0).long()
    law = q_row_of.long().gather(1, up)
    drawn = live & (parent >= 0) & (law >= 0) & (kind == WITHOUT_REPLACEMENT)
    law = law.clamp(min=0)
    at = law * V + tokens
    flat = q_rows.flatten(1)
    q_x = flat.gather(1, at)
    # the law without all drafts, which cells of slots that were not drawn so must not clear
    clear = torch.ones_like(flat).scatter_reduce_(1, at, (~drawn).to(flat.dtype), "amin")
    rest = (flat * clear).unflatten(1, (-1, V)).sum(2).gather(1, law)
    # and of the drafts, each token once (nodes may share a law), those that no earlier sibling is
    slots = torch.arange(T, device=tokens.device)
    before = slots < slots[:, None]
    equal = (at[:, :, None] == at[:, None, :]) & drawn[:, None, :]
    first = drawn & ~(equal & before).any(2)
    earlier = (parent[:, :, None] == parent[:, None, :]) & before & drawn[:, None, :] & drawn[:, :, None]
    gone = torch.bmm(earlier.to(flat.dtype), equal.to(flat.dtype)) > 0
    counted = (law[:, :, None] == law[:, None, :]) & first[:, None, :] & ~gone
    left = rest + (counted * q_x[:, None, :]).sum(2)
    return torch.where(earlier.any(2), left.clamp(min=TINY), 1.0)


def tree_verify(
    p: Tensor,
    tokens: Tensor,
    parent: Tensor,
    live: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    u: Tensor,
    U: Tensor,
    q_rows: Tensor | None,
    q_row_of: Tensor | None,
    kind: Tensor | int,
    companions: Tensor | None,
    delta: float,
    growth: float,
    nodes: Tensor | None,
    max_children: int,
    width: int,
    group: Group | None = None,
    official: str | None = None,
    details: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Details | None]:
    """See `visacc.kernels.tree_verify`. `group`, `official` and `details` exist here only."""
    if q_rows is None and companions is None and group is None:
        return point_verify(p, tokens, parent, live, ancestors, depth, u, U, width, details)
    B, T = tokens.shape
    rows = torch.arange(B, device=p.device)[:, None]
    table = child_table(parent, live, max_children)
    if nodes is None:
        nodes = torch.arange(T, device=p.device)
    residual = p[:, nodes]  # [B, M, V] unnormalised, mass `total` [B, M]
    total = torch.ones_like(residual[..., 0])
    q = left_of = None
    if q_rows is not None and q_row_of is not None:
        q = q_rows[rows, q_row_of[:, nodes].clamp(min=0).long()]
        left_of = untried(tokens, parent, live, q_rows, q_row_of, kind)
    flags = torch.zeros(B, T + 1, dtype=torch.bool, device=p.device)
    ratios = torch.full((B, T + 1), -1.0, dtype=p.dtype, device=p.device)
    open_ = torch.ones_like(total, dtype=torch.bool)
    for j in range(max_children):
        slot = table[:, nodes, j]
        there = slot >= 0
        slot = slot.clamp(min=0)
        x = tokens.gather(1, slot)
        how = kind.gather(1, slot) if isinstance(kind, Tensor) else torch.full_like(slot, kind)
        point, without = how == POINT, how == WITHOUT_REPLACEMENT
        r_x = residual.gather(2, x[..., None]).squeeze(2)
        own, left = torch.ones_like(r_x), torch.ones_like(r_x)
        if q is not None and left_of is not None:
            own = torch.where(point, 1.0, q.gather(2, x[..., None]).squeeze(2))
            left = torch.where(without, left_of.gather(1, slot), 1.0)
        numerator, q_x = r_x, own
        near = used = None
        if companions is not None:
            near = companions[rows, slot]
            counted = near if official is None else near[..., :-1]
            bound = total * delta + r_x * growth
            numerator = r_x + neighbour_mass(residual, counted, bound)
            if official is not None:  # whether the first neighbour fits, be its mass zero
                nearest = residual.gather(2, near[..., :1].clamp(min=0).long()).squeeze(2)
                used = (near[..., 0] >= 0) & (nearest <= bound)
        elif group is not None:
            q_i = None if q is None else (q / left[..., None]).flatten(0, 1)
            r_i = (residual / total.clamp(min=TINY)[..., None]).flatten(0, 1)
            sums = group_sums(r_i, q_i, x.flatten(), point.flatten(), *group)
            numerator, q_x = (s.view(x.shape) for s in sums)
            numerator, q_x = numerator * total, q_x * left
        tested = there & open_ & (q_x > 0)
        passed = tested & ((q_x * total) * u.gather(1, slot) < numerator * left)
        failed = tested & ~passed
        flags.scatter_(1, torch.where(there, slot, T), passed)
        if details:
            ratio = numerator * left / (q_x * total).clamp(min=TINY)
            ratios.scatter_(1, torch.where(tested, slot, T), ratio)
        open_ = open_ & ~passed
        more = j + 1 < max_children
        residual, total = _reject(
            residual,
            total,
            q,
            left,
            x,
            failed,
            point,
            None if official is None or near is None or used is None else (official, near, used),
            more,
        )
        if more and q is not None:
            spent = failed & without
            q.scatter_(2, x[..., None], q.gather(2, x[..., None]).masked_fill(spent[..., None], 0.0))
    path, n = tree_walk(flags[:, :T], parent, live, ancestors, depth, True, width)
    stop = path.gather(1, (n - 1)[:, None]).long()
    position = torch.full((T,), -1, dtype=torch.int64, device=p.device)
    position = position.scatter(0, nodes, torch.arange(len(nodes), device=p.device))[stop]
    last = p[rows, stop].squeeze(1)
    weights = torch.where(position >= 0, residual[rows, position.clamp(min=0)].squeeze(1), last)
    token = draw(weights, U.gather(1, stop).squeeze(1), last)
    return path, n, token, Details(ratios[:, :T], weights) if details else None


def _reject(
    residual: Tensor,
    total: Tensor,
    q: Tensor | None,
    left: Tensor,
    x: Tensor,
    failed: Tensor,
    point: Tensor,
    official: tuple[str, Tensor, Tensor] | None,
    need_total: bool,
) -> tuple[Tensor, Tensor]:
    """Residual after `failed` tests: x removed (point drafts), else max(r - q_i, 0) with r normalised.

    A rejected x keeps no residual mass either way: rejection means r(x) < q_i(x). The new total mass is
    computed only if another child may be tested against it.
    """
    at_x = x[..., None]
    if official is not None:
        return _reject_official(residual, total, q, left, x, failed, *official)
    if q is not None:
        dense = failed & ~point
        less = (residual / total.clamp(min=TINY)[..., None] - q / left[..., None]).clamp_(min=0)
        residual = torch.where(dense[..., None], less, residual)
    r_x = residual.gather(2, at_x).squeeze(2)
    residual = residual.scatter(2, at_x, torch.where(failed, 0.0, r_x)[..., None])
    if not need_total:
        return residual, total
    reduced = torch.where(failed & point, total - r_x, total)
    if q is not None:
        mass = as_mass(integer_weights(residual).sum(2), residual.dtype)
        reduced = torch.where(failed & ~point, mass, reduced)
    return residual, reduced


def _reject_official(
    residual: Tensor,
    total: Tensor,
    q: Tensor | None,
    left: Tensor,
    x: Tensor,
    failed: Tensor,
    which: str,
    near: Tensor,
    used: Tensor,
) -> tuple[Tensor, Tensor]:
    """After-rejection updates of the original LANTERN programs, kept for parity tests.

    If neighbours were aggregated, their list (one entry more than aggregated at most) is cleared: from r in
    the Lumina and all dynamic programs, from q in the LlamaGen and Anole ones. An empty result becomes
    uniform.
    """

    def cleared(law: Tensor) -> Tensor:
        inside = (near >= 0) & (failed & used)[..., None]
        ids = near.clamp(min=0).long()
        # A scatter of zeros; absent ids rewrite their own value at id 0 unless id 0 is cleared as well.
        mask = torch.zeros_like(law).scatter_add(2, ids, inside.to(law.dtype))
        return law.masked_fill(mask > 0, 0.0)

    r = residual / total.clamp(min=TINY)[..., None]
    if which == "official-dynamic" or q is None:
        less = cleared(r).scatter(2, x[..., None], 0.0)
    elif which == "official-lumina":
        less = (cleared(r) - q / left[..., None]).clamp(min=0)
    else:
        less = (r - cleared(q / left[..., None])).clamp(min=0)
    mass = less.sum(2, keepdim=True)
    less = torch.where(mass > 0, less / mass, 1.0 / less.shape[2])
    fresh = failed[..., None]
    return torch.where(fresh, less, residual), torch.where(failed, 1.0, total)
