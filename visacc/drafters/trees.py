"""Growing a static draft tree for a whole batch, level by level.

A tree is a set of paths of child ranks. When sampling, the children of a node are drawn without replacement from the
draft law, in rank order; image laws are so flat that deterministic candidates would almost never be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from visacc.speculate.trees import Grower
from visacc.verify import DraftTree, TreeShape
from visacc.verify.policies import PUBLISHED, ordered_paths, published_paths, static_tree

Paths = tuple[tuple[int, ...], ...]
Draw = Callable[[Tensor, int, int], "tuple[Tensor, Tensor, Tensor | None]"]
"""``draw(rows [B, f, V], count, place)`` for expanded nodes ``place .. place + f - 1`` (in slot order) -> ids int64
[B, f, count], which of them are real [B, f, count], and the laws [B, f, V] they were drawn from (``None``: the likeliest
were taken)."""


@dataclass(frozen=True)
class Level:
    """How the nodes of one depth come from the frontier, the expanded nodes of the depth above.

    Attributes:
        children: most children of a frontier node.
        source: int64 [m] frontier node of each new node; rank: int64 [m] which of its children it is.
        expand: int64 [f] which of the new nodes form the next frontier.
        above: int64 [f] row of the frontier node's parent among the rows run so far, -1 for children of the root.
    """

    children: int
    source: Tensor
    rank: Tensor
    expand: Tensor
    above: Tensor


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree, slots ordered by depth and path, slot 0 the root."""

    paths: Paths

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(ordered_paths(self.paths)))

    @property
    def slots(self) -> int:
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """Depth of every node that has children, in slot order, the root first."""
        shape = self.shape
        return tuple(shape.depth[slot] for slot in shape.internal)

    @cached_property
    def shape(self) -> TreeShape:
        return static_tree(self.paths)

    def levels(self, device: torch.device) -> tuple[Level, ...]:
        return _levels(self.paths, str(device))

    def grow(self, session: Grower, root: Tensor, feature: Tensor, first: Tensor, draw: Draw) -> DraftTree:
        """Draft the tree for a batch.

        Args:
            root: int64 [B]; feature: [B, W] drafter's output behind which the root's children come.
            first: [B, V] what the session returns as second item, for the root's children.
            draw: chooses candidates from such rows, see :data:`Draw`.
        """
        tokens, live, laws = [root[:, None]], [torch.ones_like(root, dtype=torch.bool)[:, None]], []
        features, scores, alive = feature[:, None], first[:, None], live[0]
        place = 0
        for depth, level in enumerate(self.levels(root.device), 1):
            ids, good, law = draw(scores, level.children, place)
            place += scores.shape[1]
            if law is not None:
                laws.append(law)
            new = ids[:, level.source, level.rank]
            there = good[:, level.source, level.rank] & alive[:, level.source]
            tokens.append(new)
            live.append(there)
            if not level.expand.numel():
                break
            above = level.above.expand(len(root), -1)
            parent = features[:, level.source[level.expand]]
            features, scores = session.run(new[:, level.expand], parent, above, depth)
            alive = there[:, level.expand]
        rows = torch.cat(laws, dim=1) if laws else None
        kind = "without_replacement" if laws else "point"
        return DraftTree.of_shape(
            self.shape, torch.cat(tokens, dim=1), live=torch.cat(live, dim=1), q_kind=kind, q_rows=rows
        )


@lru_cache(maxsize=32)
def _levels(paths: Paths, device: str) -> tuple[Level, ...]:
    result = []
    frontier: list[tuple[int, ...]] = [()]
    row: dict[tuple[int, ...], int] = {(): -1}
    inner = {path[:-1] for path in paths}

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    for depth in range(1, len(paths[-1]) + 1):
        nodes = [path for path in paths if len(path) == depth]
        expand = [i for i, path in enumerate(nodes) if path in inner]
        following = [nodes[i] for i in expand]
        result.append(
            Level(
                max(path[-1] for path in nodes) + 1,
                tensor([frontier.index(path[:-1]) for path in nodes]),
                tensor([path[-1] for path in nodes]),
                tensor(expand),
                tensor([row[path[:-1]] for path in following]),
            )
        )
        row.update({path: len(row) - 1 + i for i, path in enumerate(following)})
        frontier = following
    return tuple(result)


def parse_tree(tree: str | Sequence[Sequence[int]]) -> StaticTree:
    """A static tree from a published name, ``chain-N``, ``WxD`` (W children at the root, then single chains of depth D)
    or a list of paths."""
    if not isinstance(tree, str):
        return StaticTree(tuple(tuple(path) for path in tree))
    if tree in PUBLISHED:
        return StaticTree(tuple(published_paths(tree)))
    head, dash, tail = tree.partition("-")
    if head == "chain" and dash and tail.isdecimal() and int(tail) > 0:
        return StaticTree(tuple((0,) * n for n in range(1, int(tail) + 1)))
    wide, cross, deep = tree.partition("x")
    if cross and wide.isdecimal() and deep.isdecimal() and int(wide) > 0 and int(deep) > 0:
        return StaticTree(tuple((w, *[0] * n) for w in range(int(wide)) for n in range(int(deep))))
    raise ValueError(
        f"unknown tree {tree!r}; use dynamic, chain-N, WxD (such as 2x5), a list of paths, or one of"
        f" {', '.join(PUBLISHED)}"
    )
