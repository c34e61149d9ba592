"""Drafted token trees: what every drafter hands over and the verifier judges."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from visacc.kernels import INDEPENDENT, POINT, WITHOUT_REPLACEMENT, TreeIndex, checks, tree_index

Q_KINDS = {"point": POINT, "without_replacement": WITHOUT_REPLACEMENT, "independent": INDEPENDENT}


@dataclass(frozen=True)
class TreeShape:
    """A tree structure known on the host, the same for every row: parent of every slot, slot 0 the root (-1).

    Raises:
        ValueError: slot 0 is not the root, or a parent does not come before its child.
    """

    parent: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parent or self.parent[0] != -1:
            raise ValueError("slot 0 must be the root with parent -1")
        for slot, up in enumerate(self.parent[1:], 1):
            if not 0 <= up < slot:
                raise ValueError(
                    f"slot {slot} has parent {up}; a parent must be one of the earlier slots 0..{slot - 1}"
                )

    @property
    def slots(self) -> int:
        return len(self.parent)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        depth = [0]
        for up in self.parent[1:]:
            depth.append(depth[up] + 1)
        return tuple(depth)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s for s in range(self.slots) if self.parent[s] == n) for n in range(self.slots))

    @cached_property
    def internal(self) -> tuple[int, ...]:
        """Slots that have children: the row order of q_rows in a static draft."""
        return tuple(n for n in range(self.slots) if self.children[n])

    @property
    def max_children(self) -> int:
        return max(1, *(len(c) for c in self.children)) if self.slots > 1 else 1

    @property
    def max_depth(self) -> int:
        return max(self.depth)

    def tensors(self, device: torch.device | str) -> ShapeTensors:
        """The structure as tensors, made once per device."""
        return _shape_tensors(self, str(device))


@dataclass(frozen=True)
class ShapeTensors:
    """parent, depth, row_of: int64 [T]; internal: int64 [M]; index: ancestors [1, T, T], depth [1, T],
    words."""

    parent: Tensor
    depth: Tensor
    row_of: Tensor
    internal: Tensor
    index: TreeIndex


@lru_cache(maxsize=64)
def _shape_tensors(shape: TreeShape, device: str) -> ShapeTensors:
    parent = torch.tensor(shape.parent, dtype=torch.int64)
    live = torch.ones(1, shape.slots, dtype=torch.bool)
    index = tree_index(parent[None], live, backend="reference")
    row_of = torch.full((shape.slots,), -1, dtype=torch.int64)
    internal = torch.tensor(shape.internal, dtype=torch.int64)
    row_of[internal] = torch.arange(len(internal))
    return ShapeTensors(
        parent.to(device),
        torch.tensor(shape.depth, dtype=torch.int64, device=device),
        row_of.to(device),
        internal.to(device),
        TreeIndex(*(a.to(device) for a in index)),
    )


@dataclass
class DraftTree:
    """Drafted trees of a batch, padded to T slots.

    Attributes:
        tokens: int64 [B, T]; slot 0 is the root, the newest committed token.
        parent: int [B, T], -1 at slot 0; parents come before their children, siblings are in drawing order.
        live: bool [B, T]; dead slots (padding, draws without mass) are never tested. A live slot's parent is
            live.
        q_kind: how drafted tokens were chosen: "point" (any way; nothing about q is needed),
            "without_replacement" (siblings drawn one after the other from q), "independent" (each drawn from
            q), or int8 [B, T] with the codes of :data:`Q_KINDS` per slot.
        q_rows: float32 [B, R, V] laws that were actually drawn from; not for "point".
        q_row_of: int [B, T] row of the law that a slot's *children* were drawn from, -1 = none.
        shape: the structure, if it is the same for all rows and known on the host: saves recomputing it.
        max_children, max_depth: host-side bounds for trees without `shape`; they save work.
    """

    tokens: Tensor
    parent: Tensor
    live: Tensor
    q_kind: str | Tensor = "point"
    q_rows: Tensor | None = None
    q_row_of: Tensor | None = None
    shape: TreeShape | None = None
    max_children: int | None = None
    max_depth: int | None = None
    _index: TreeIndex | None = field(default=None, repr=False)

    @classmethod
    def of_shape(
        cls,
        shape: TreeShape,
        tokens: Tensor,
        *,
        live: Tensor | None = None,
        q_kind: str | Tensor = "point",
        q_rows: Tensor | None = None,
    ) -> DraftTree:
        """A tree of static shape; row r of q_rows is the law of the children of ``shape.internal[r]``."""
        known = shape.tensors(tokens.device)
        if live is None:
            live = torch.ones_like(tokens, dtype=torch.bool)
        rows = None if q_rows is None else known.row_of.expand(tokens.shape)
        return cls(tokens, known.parent.expand(tokens.shape), live, q_kind, q_rows, rows, shape)

    @classmethod
    def chain(
        cls, root: Tensor, drafts: Tensor, n_draft: Tensor | None = None, q: Tensor | None = None
    ) -> DraftTree:
        """A chain: root int64 [B], drafts int64 [B, D], the first n_draft [B] of them real, q [B, D, V] or
        None."""
        tokens = torch.cat((root[:, None], drafts), 1)
        slots = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        live = torch.ones_like(tokens, dtype=torch.bool) if n_draft is None else slots <= n_draft[:, None]
        shape = TreeShape(tuple(range(-1, drafts.shape[1])))
        kind = "point" if q is None else "independent"
        return cls.of_shape(shape, tokens, live=live, q_kind=kind, q_rows=q)

    @property
    def index(self) -> TreeIndex:
        """Ancestors, depths and packed visibility (of all slots for static shapes, of live ones
        otherwise)."""
        if self._index is None:
            if self.shape is not None:
                known, B = self.shape.tensors(self.tokens.device).index, self.tokens.shape[0]
                self._index = TreeIndex(*(a.expand(B, *a.shape[1:]) for a in known))
            else:
                self._index = tree_index(self.parent, self.live)
        return self._index

    @property
    def kind(self) -> Tensor | int:
        """`q_kind` as the kernels want it."""
        if isinstance(self.q_kind, Tensor):
            return self.q_kind
        if self.q_kind not in Q_KINDS:
            raise ValueError(
                f"q_kind must be one of {', '.join(Q_KINDS)} or an int8 tensor, got {self.q_kind!r}"
            )
        return Q_KINDS[self.q_kind]

    @property
    def width(self) -> int:
        """Slots of the longest possible path, the root included."""
        if self.shape is not None:
            return self.shape.max_depth + 1
        return self.tokens.shape[1] if self.max_depth is None else self.max_depth + 1

    def validate(self) -> None:
        """Check the values (synchronises): ValueError naming the first bad row and slot."""
        T = self.tokens.shape[1]
        slots = torch.arange(T, device=self.tokens.device)
        parent, live = self.parent.long(), self.live
        checks.fail_where((slots == 0) & (parent != -1), "the root must have parent -1")
        checks.fail_where((slots == 0) & ~live, "the root must be live")
        child = live & (slots > 0)
        checks.fail_where(child & ((parent < 0) | (parent >= T)), f"parent out of range 0..{T - 1}")
        checks.fail_where(child & (parent == slots), "slot is its own parent (a cycle)")
        checks.fail_where(
            child & (parent > slots), "parent comes after its child (child before parent, or a cycle)"
        )
        up = live.gather(1, parent.clamp(0, T - 1))
        checks.fail_where(child & ~up, "live slot hangs below a dead parent")
        if self.shape is not None:
            known = self.shape.tensors(self.tokens.device).parent
            checks.fail_where(child & (parent != known), "parent differs from the declared static shape")
        _, depth = self.index.ancestors, self.index.depth
        checks.fail_where(child & (depth >= self.width), f"slot deeper than max_depth={self.width - 1}")
        most = ((parent[:, :, None] == slots) & child[:, :, None]).sum(1)
        bound = self.shape.max_children if self.shape is not None else self.max_children
        if bound is not None:
            checks.fail_where(most > bound, f"more than max_children={bound} live children")
        self._validate_q(child, parent)

    def _validate_q(self, child: Tensor, parent: Tensor) -> None:
        """Every sampled child could have come from the law it claims."""
        kind = self.kind
        sampled = child if not isinstance(kind, Tensor) else child & (kind != POINT)
        if not isinstance(kind, Tensor) and kind == POINT:
            return
        if self.q_rows is None or self.q_row_of is None:
            raise ValueError(f"q_kind {self.q_kind!r} needs q_rows and q_row_of")
        R, V = self.q_rows.shape[1:]
        row = self.q_row_of.long().gather(1, parent.clamp(min=0))
        checks.fail_where(sampled & ((row < 0) | (row >= R)), f"the parent's q_row_of is not in 0..{R - 1}")
        checks.laws("q_rows", self.q_rows, _used_rows(row, sampled, R))
        bad = (self.tokens < 0) | (self.tokens >= V)
        checks.fail_where(child & bad, f"token outside the vocabulary 0..{V - 1}")
        rows = torch.arange(len(row), device=row.device)[:, None]
        q_x = self.q_rows[rows, row.clamp(0, R - 1), self.tokens.clamp(0, V - 1)]
        checks.fail_where(
            sampled & (q_x <= 0), "q gives the drafted token probability 0, so it was not drawn from q"
        )
        without = sampled if not isinstance(kind, Tensor) else sampled & (kind == WITHOUT_REPLACEMENT)
        if isinstance(kind, Tensor) or kind == WITHOUT_REPLACEMENT:
            slots = torch.arange(parent.shape[1], device=parent.device)
            same = parent[:, :, None] == parent[:, None]
            same = same & (self.tokens[:, :, None] == self.tokens[:, None])
            twin = same & without[:, None] & (slots < slots[:, None])
            checks.fail_where(
                without & twin.any(2), "token drawn twice among siblings drawn without replacement"
            )


def _used_rows(row: Tensor, sampled: Tensor, rows: int) -> Tensor:
    used = torch.zeros(row.shape[0], rows + 1, dtype=torch.bool, device=row.device)
    return used.scatter_(1, torch.where(sampled, row.clamp(0, rows - 1), rows), True)[:, :rows]


@dataclass
class AcceptedStep:
    """What the verifier decided, per row.

    Attributes:
        path: int32 [B, A] slots of the committed tokens, path[:, 0] = 0 (the root), -1 padded.
        n: int64 [B] committed slots, the root included (accepted drafts = n - 1).
        tokens: int64 [B, A] their tokens, -1 padded.
        next_root: int64 [B] the token behind them, drawn by the verifier: root of the next tree.
    """

    path: Tensor
    n: Tensor
    tokens: Tensor
    next_root: Tensor
