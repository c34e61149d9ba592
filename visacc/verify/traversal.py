"""Traversal verification of trees (arXiv 2505.12398); on a chain it is block verification (arXiv 2403.10444).

Lossless like the top-down test, and never accepts fewer tokens. In words: visit(node, w, P, Q) tries the
children in order. Child x enters with w_x = min(1, w P(x) / Q(x)); if its whole subtree is rejected, the
node's state becomes w <- A / (A + 1 - w) and P <- norm(max(w P - Q, 0)), A = sum max(w P - Q, 0), and x
leaves Q (draws without replacement). When no child is left, the node itself is accepted with probability w,
and the next token is drawn from P.

None of this depends on the random tests (a later sibling is visited only if all earlier subtrees were
rejected), so all weights are computed first, rank by rank and level by level, and the accepted slot is the
first in post-order with u < w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from visacc.kernels import POINT, WITHOUT_REPLACEMENT, draw
from visacc.kernels.reference.tree import child_table
from visacc.kernels.reference.tree_ratio import untried
from visacc.verify.rules import Rule
from visacc.verify.tree import DraftTree

_TINY = 1e-20


@dataclass(frozen=True)
class Traversal(Rule):
    """Bottom-up acceptance of whole paths. Torch on every device."""

    lossless: ClassVar[bool] = True


def verify_traversal(tree: DraftTree, p: Tensor, u: Tensor, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as in `verify`; returns path int32 [B, A], n int64 [B], next token int64 [B]."""
    B, T, _ = p.shape
    weight, residual = node_weights(tree, p)
    ancestors, depth = tree.index.ancestors, tree.index.depth
    slots = torch.arange(T, device=p.device)
    passed = ((u < weight) & tree.live) | (slots == 0)
    order = post_order(tree.parent, tree.live, ancestors)
    stop = order.masked_fill(~passed, 2 * T).argmin(1)
    rows = torch.arange(B, device=p.device)
    width = tree.width
    column = torch.where(ancestors[rows, stop], depth, width)
    path = torch.full((B, width + 1), -1, dtype=torch.int32, device=p.device)
    path.scatter_(1, column, slots.to(torch.int32).expand(B, T))
    token = draw(residual[rows, stop], U[rows, stop], p[rows, stop])
    return path[:, :width], depth[rows, stop] + 1, token


def post_order(parent: Tensor, live: Tensor, ancestors: Tensor) -> Tensor:
    """Rank of every live slot when children come before their parent, in slot order: int64 [B, T]."""
    T = parent.shape[1]
    slots = torch.arange(T, device=parent.device)
    size = (ancestors & live[..., None]).sum(1)  # live slots of the subtree below each slot
    child = live & (parent >= 0)
    earlier = (
        (parent[:, :, None] == parent[:, None])
        & child[:, None]
        & child[:, :, None]
        & (slots < slots[:, None])
    )
    before = (earlier * size[:, None]).sum(2)  # subtrees of earlier siblings
    return size - 1 + (ancestors * before[:, None]).sum(2)


def node_weights(tree: DraftTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance probability [B, T] and law of the next token [B, T, V] of every slot once its children
    failed."""
    B, T = tree.tokens.shape
    most = tree.shape.max_children if tree.shape is not None else (tree.max_children or max(T - 1, 1))
    table = child_table(tree.parent, tree.live, most)
    rows = torch.arange(B, device=p.device)[:, None]
    enter = torch.ones(B, T + 1, dtype=p.dtype, device=p.device)  # w with which a slot is visited
    leave, law = enter[:, :T].clone(), p.clone()
    kind = tree.kind
    for level in range(tree.width):
        here = (tree.index.depth == level) & tree.live
        w, P = enter[:, :T], p
        Q = left = None
        if tree.q_rows is not None and tree.q_row_of is not None:
            Q = tree.q_rows[rows, tree.q_row_of.clamp(min=0).long()]
            left = untried(tree.tokens, tree.parent, tree.live, tree.q_rows, tree.q_row_of, kind)
        for j in range(most):
            slot = table[..., j]
            there = slot >= 0
            slot = slot.clamp(min=0)
            x = tree.tokens.gather(1, slot)
            at = x[..., None]
            how = kind.gather(1, slot) if isinstance(kind, Tensor) else torch.full_like(slot, kind)
            point = torch.zeros_like(P).scatter_(2, at, 1.0)
            if Q is not None and left is not None:
                share = left.gather(1, slot)[..., None]
                q_i = torch.where((how == POINT)[..., None], point, Q / share)
            else:
                q_i = point
            q_x = q_i.gather(2, at).squeeze(2)
            tested = there & (q_x > 0)
            ratio = (w * P.gather(2, at).squeeze(2) / q_x.clamp(min=_TINY)).clamp(max=1.0)
            target = torch.where(here & tested, slot, T)
            enter.scatter_(1, target, ratio)
            rest = (w[..., None] * P - q_i).clamp_(min=0)
            mass = rest.sum(2)
            # w = 1 (the root) stays 1 even when nothing is left: A / (A + 1 - w) = 1.
            new_w = torch.where(w >= 1, 1.0, mass / (mass + 1 - w).clamp(min=_TINY))
            empty = mass <= _TINY
            new_P = torch.where(empty[..., None], P, rest / mass.clamp(min=_TINY)[..., None])
            w = torch.where(tested, new_w, w)
            P = torch.where(tested[..., None], new_P, P)
            if Q is not None and left is not None:
                spent = tested & (how == WITHOUT_REPLACEMENT)
                raw = Q.gather(2, at)
                Q = Q.scatter(2, at, raw.masked_fill(spent[..., None], 0.0))
        leave = torch.where(here, w, leave)
        law = torch.where(here[..., None], P, law)
    return leave, law
