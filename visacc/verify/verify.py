"""`verify`: the one place where drafted trees are accepted or rejected."""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels import Group, checks, draw, neighbour_mass, race, tree_verify, tree_walk
from visacc.verify.rules import EXACT, Exact, Greedy, Grouped, GumbelExact, Lantern, LanternPP, Rule, Typical
from visacc.verify.traversal import Traversal, verify_traversal
from visacc.verify.tree import AcceptedStep, DraftTree


def verify(
    tree: DraftTree,
    p: Tensor,
    rule: Rule = EXACT,
    *,
    u: Tensor | None = None,
    U: Tensor | None = None,
    noise: Tensor | None = None,
    validate: bool = False,
) -> AcceptedStep:
    """Judge the trees of a batch, every row on its own, without a host synchronisation.

    Args:
        tree: the drafts.
        p: float32 [B, T, V], row s = processed target law of the token after slot s. Plain Greedy takes any scores with the
            law's arg-max, such as logits.
        rule: see :mod:`visacc.verify.rules`; :class:`Traversal` never accepts fewer tokens than
            :class:`Exact`.
        u: float32 [B, T] uniforms in [0, 1), slot s is tested with u[s]. Not for Greedy, GumbelExact,
            Typical.
        U: int64 [B, T] uniform integers below 2**32; the next root is drawn with the one of the last accepted
            slot. Not for Greedy, GumbelExact.
        noise: float32 [B, T, V] exponential noise of the token after each slot (a function of its position),
            for GumbelExact only.
        validate: check values too (as VISACC_DEBUG=1 does everywhere).

    Returns:
        AcceptedStep with paths of ``tree.width`` slots.

    Raises:
        ValueError: wrong shapes, dtypes or devices, missing random numbers; with validation malformed trees,
            invalid laws and drafts that their q excludes, naming row and slot.
    """
    B, T = tree.tokens.shape
    if p.shape[:2] != (B, T) or p.ndim != 3:
        raise ValueError(f"p must be [B={B}, T={T}, V], got {list(p.shape)}")
    checks.shape("parent", tree.parent, ("B", "T"), B, T)
    checks.shape("live", tree.live, ("B", "T"), B, T)
    checks.same_device(p, tree.tokens, tree.parent, tree.live, tree.q_rows, tree.q_row_of, u, U, noise)
    if checks.enabled(validate):
        tree.validate()
        if isinstance(rule, Greedy) and rule.relaxed is None:
            checks.scores("p", p, tree.live)
        else:
            checks.laws("p", p, tree.live)
        if u is not None:
            checks.uniforms(u)
    if isinstance(rule, Traversal):
        path, n, token = verify_traversal(tree, p, *_needed(rule, u, U))
    elif isinstance(rule, GumbelExact):
        if noise is None:
            raise ValueError("GumbelExact needs the noise [B, T, V] of the slots")
        path, n, token = _match(tree, race(p, noise), first=True)
    elif isinstance(rule, Greedy):
        path, n, token = _greedy(tree, p, rule)
    elif isinstance(rule, Typical):
        if U is None:
            raise ValueError("Typical needs integers U for the next root")
        path, n, token = _typical(tree, p, rule, U)
    else:
        path, n, token = _ratio(tree, p, rule, *_needed(rule, u, U))
    tokens = tree.tokens.gather(1, path.clamp(min=0).long())
    return AcceptedStep(path, n, tokens.masked_fill(path < 0, -1), token)


def _needed(rule: Rule, u: Tensor | None, U: Tensor | None) -> tuple[Tensor, Tensor]:
    if u is None or U is None:
        raise ValueError(f"{type(rule).__name__} needs uniforms u and integers U, one per slot")
    return u, U


def _ratio(tree: DraftTree, p: Tensor, rule: Rule, u: Tensor, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    companions, delta, growth, group, official = None, 0.0, 0.0, None, None
    if isinstance(rule, (Lantern, LanternPP)):
        official = None if rule.residual == "ordinary" else rule.residual
        companions = rule.companions(tree.tokens, extra=0 if official is None else 1)
        delta, growth = rule.slack
    elif isinstance(rule, Grouped):
        group = Group(rule.embedding, rule.group_size, rule.prob_threshold, rule.distance_threshold)
    elif not isinstance(rule, Exact):
        raise ValueError(f"{type(rule).__name__} is not a rule for trees")
    nodes, most = None, tree.max_children
    if tree.shape is not None:
        nodes, most = tree.shape.tensors(p.device).internal, tree.shape.max_children
    path, n, token, _ = tree_verify(
        p,
        tree.tokens,
        tree.parent,
        tree.live,
        tree.index,
        u=u,
        U=U,
        q_rows=tree.q_rows,
        q_row_of=tree.q_row_of,
        kind=tree.kind,
        companions=companions,
        delta=delta,
        growth=growth,
        group=group,
        official=official,
        nodes=nodes,
        max_children=most,
        width=tree.width,
    )
    return path, n, token


def _match(tree: DraftTree, drawn: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the children that equal their parent's token `drawn` [B, T]; the one at the last slot comes
    next.

    With random draws only the first equal sibling may be followed: choosing among repeated ones by what is
    drawn further down would favour drafted tokens.
    """
    flags = tree.tokens == drawn.gather(1, tree.parent.clamp(min=0).long())
    return _walk(tree, flags, drawn, first)


def _walk(tree: DraftTree, flags: Tensor, following: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    path, n = tree_walk(flags, tree.parent, tree.live, tree.index, first=first, width=tree.width)
    stop = path.gather(1, (n - 1)[:, None]).long()
    return path, n, following.gather(1, stop).squeeze(1)


def _greedy(tree: DraftTree, p: Tensor, rule: Greedy) -> tuple[Tensor, Tensor, Tensor]:
    best = p.argmax(2)
    if rule.relaxed is None:
        return _match(tree, best, first=False)
    rows = torch.arange(p.shape[0], device=p.device)[:, None]
    law = p[rows, tree.parent.clamp(min=0).long()]
    at = tree.tokens[..., None]
    mass = law.gather(2, at).squeeze(2)
    raised = mass + neighbour_mass(law, rule.relaxed.companions(tree.tokens), rule.relaxed.bound(mass))
    flags = law.scatter(2, at, raised[..., None]).argmax(2) == tree.tokens
    return _walk(tree, flags, best, first=False)


def _typical(tree: DraftTree, p: Tensor, rule: Typical, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(p.shape[0], device=p.device)[:, None]
    up = tree.parent.clamp(min=0).long()
    flags = p[rows, up, tree.tokens] > rule.threshold(p).gather(1, up)
    path, n = tree_walk(flags, tree.parent, tree.live, tree.index, first=False, width=tree.width)
    stop = path.gather(1, (n - 1)[:, None]).long()
    return path, n, draw(p[rows, stop].squeeze(1), U.gather(1, stop).squeeze(1))
