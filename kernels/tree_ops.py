"""Public ops on token trees: structure, walk, ratio verification. See `ops` for the conventions.

Trees: tokens int64 [B, T], parent int [B, T] (slot 0 the root, parent -1; parents before children), live bool
[B, T]. Siblings are tested in slot order. At most 128 slots take the kernels; larger trees take the
reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visacc.kernels import checks
from visacc.kernels.dispatch import choose, launcher, warn_unsupported
from visacc.kernels.reference import tree as _tree
from visacc.kernels.reference import tree_ratio as _ratio
from visacc.kernels.reference.tree_ratio import INDEPENDENT, POINT, WITHOUT_REPLACEMENT, Details, Group

MAX_SLOTS = 128

__all__ = [
    "INDEPENDENT",
    "POINT",
    "WITHOUT_REPLACEMENT",
    "Details",
    "Group",
    "TreeIndex",
    "pack_bits",
    "tree_index",
    "tree_verify",
    "tree_walk",
]


class TreeIndex(NamedTuple):
    """Derived structure of trees.

    ancestors: bool [B, T, T], [b, i, j] = slot j is i or an ancestor of i (dead slots: themselves only).
    depth: int64 [B, T], the root 0. words: int32 [B, T, ceil(T/32)], `ancestors` packed, bit j of word w =
        slot
    32 w + j (the attention kernel's mask).
    """

    ancestors: Tensor
    depth: Tensor
    words: Tensor


def _kernel(backend: str | None, op: str, first: Tensor, T: int) -> bool:
    if choose(backend, (first,)) != "triton":
        return False
    if T > MAX_SLOTS:
        warn_unsupported(op, f"trees of more than {MAX_SLOTS} slots have no kernel")
        return False
    return True


def pack_bits(visible: Tensor) -> Tensor:
    """Visibility bool [..., T] packed into int32 words [..., ceil(T/32)], the mask format of
    `tree_attention`."""
    return _tree.pack_bits(visible)


def tree_index(parent: Tensor, live: Tensor, *, backend: str | None = None) -> TreeIndex:
    """Ancestors, depths and packed visibility of trees given by `parent` and `live` [B, T]."""
    checks.shape("parent", parent, ("B", "T"), *parent.shape)
    checks.shape("live", live, ("B", "T"), *parent.shape)
    checks.same_device(parent, live)
    if _kernel(backend, "tree_index", parent, parent.shape[1]):
        return TreeIndex(*launcher("tree").tree_index(parent, live))
    ancestors, depth = _tree.tree_index(parent, live)
    return TreeIndex(ancestors, depth, _tree.pack_bits(ancestors))


def tree_walk(
    flags: Tensor,
    parent: Tensor,
    live: Tensor,
    index: TreeIndex,
    *,
    first: bool,
    width: int,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Walk down accepted slots. Returns path int32 [B, width] (slot numbers, path[:, 0] = 0, then -1) and n
    int64 [B].

    flags: bool [B, T], slots that pass their own test (slot 0 always does). n counts path slots, the root
        included.
    first: at every node follow the first child that passes; otherwise take the longest passing path (ties to
        the
    lowest slot). width: at least the deepest slot's depth + 1.
    """
    B, T = flags.shape
    for name, a in (("parent", parent), ("live", live), ("depth", index.depth)):
        checks.shape(name, a, ("B", "T"), B, T)
    checks.same_device(flags, parent, live, index.depth)
    if _kernel(backend, "tree_walk", flags, T):
        return launcher("tree").tree_walk(flags, parent, live, index.words, index.depth, first, width)
    return _tree.tree_walk(flags, parent, live, index.ancestors, index.depth, first, width)


def tree_verify(
    p: Tensor,
    tokens: Tensor,
    parent: Tensor,
    live: Tensor,
    index: TreeIndex,
    *,
    u: Tensor,
    U: Tensor,
    q_rows: Tensor | None = None,
    q_row_of: Tensor | None = None,
    kind: Tensor | int = POINT,
    companions: Tensor | None = None,
    delta: float = 0.0,
    growth: float = 0.0,
    group: Group | None = None,
    official: str | None = None,
    nodes: Tensor | None = None,
    max_children: int | None = None,
    width: int | None = None,
    details: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Details | None]:
    """Ratio verification. Returns path int32 [B, width], n int64 [B], next token int64 [B], details.

    p: float32 [B, T, V], row s is the law of the token after slot s. u: float32 [B, T], slot s is tested with
        u[s].
    U: int64 [B, T], the next token is drawn with the integer of the slot where the walk stops. q_rows:
        float32
    [B, R, V] draft laws; q_row_of: int [B, T], the row that a slot's children were drawn from. kind: how each
    slot's token was drafted (int for all, or int8 [B, T]): POINT, WITHOUT_REPLACEMENT, INDEPENDENT.

    Child x of a node with residual r (initially p, mass S) passes iff ``(q(x) S) u < r(x) Q``, Q the part of
    q not yet tried (1 unless drawn without replacement; q(x) = 1 for point drafts). A failure turns r into
    ``max(r / S - q / Q, 0)`` with x removed; for point drafts only x is removed. A drafted x with q(x) = 0 is
    skipped.

    Relaxed tests: with `companions` int32 [B, T, K] (per slot, -1 = none) r(x) gains the largest prefix sum
    of r over them within ``delta S + growth r(x)`` (LANTERN); with `group` the test compares group sums (GSD,
    reference only); `official` are the after-rejection updates of the original LANTERN programs (reference
    only).

    Host-side hints, which save work: nodes int64 [M], the slots that have children in any row (default all);
    max_children (default T - 1); width, deepest depth + 1 (default T).
    """
    B, T, V = p.shape
    checks.law_dtype("p", p)
    for name, a in (("tokens", tokens), ("parent", parent), ("live", live), ("u", u), ("U", U)):
        checks.shape(name, a, ("B", "T"), B, T)
    checks.dtype("U", U, torch.int64)
    if (q_rows is None) != (q_row_of is None):
        raise ValueError("give both q_rows and q_row_of, or neither (point drafts)")
    if q_rows is not None:
        checks.shape("q_rows", q_rows, ("B", "R", "V"), B, q_rows.shape[1], V)
        checks.optional("q_row_of", q_row_of, ("B", "T"), B, T)
    elif isinstance(kind, Tensor) or kind != POINT:
        raise ValueError("drafts other than point drafts need q_rows and q_row_of")
    if companions is not None:
        checks.shape("companions", companions, ("B", "T", "K"), B, T, companions.shape[-1])
    checks.same_device(p, tokens, parent, live, u, U, q_rows, q_row_of, kind, companions, nodes)
    max_children = max(T - 1, 1) if max_children is None else max_children
    width = T if width is None else width
    only_reference = group is not None or official is not None or details
    fast = _kernel(backend, "tree_verify", p, T)
    if fast and group is not None:
        warn_unsupported("tree_verify", "group tests on trees have no kernel")
    if fast and not only_reference:
        path, n, token = launcher("tree_ratio").tree_verify(
            p, tokens, parent, live, u, U, q_rows, q_row_of, kind, companions, delta, growth, width
        )
        return path, n, token, None
    return _ratio.tree_verify(
        p,
        tokens,
        parent,
        live,
        index.ancestors,
        index.depth,
        u,
        U,
        q_rows,
        q_row_of,
        kind,
        companions,
        delta,
        growth,
        nodes,
        max_children,
        width,
        group,
        official,
        details,
    )
