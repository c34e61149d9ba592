"""Tree policies: which slots a drafted tree has. Structure only; drafters fill in the tokens.

Static trees are lists of paths of child ranks ("021": child 1 of child 2 of child 0 of the root). Dynamic and
block trees are chosen from recorded nodes by their cumulative draft log-probability (EAGLE-2, arXiv
2406.16858).

With sampled drafts only static shapes are lossless under the ratio test: which children exist may depend on
the path, on q and on rank, never on sampled tokens. Re-ranked (dynamic) trees are "point" drafts. Image laws
are flat: the likeliest children of a node hold 2-6 % of its mass, where children *sampled* from the drafter
and tested with p/q pass in 73-86 % of the cases; so sampled static trees are the default for images
(`DEFAULT_IMAGE_TREE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from visacc.verify.tree import TreeShape

Path = tuple[int, ...]

_MC_SIM_7B_63 = """0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000
00001"""
_NAIVE_EXTEND_57 = """0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40
000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200
0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200
00000 00001 00002 00010 00011 00100 00101 00110 00200"""
_MC_SIM_7B_63_BALANCED = """0 1 2 00 01 02 10 11 12 20 21 000 001 002 010 011 100 101 110 111
0000 0001 0002 00000 00001"""
_REVERSE_BALANCED_25 = """0 1 2 00 01 10 20 000 001 002 010 011 100 0000 0001 0002 0010 0011
00000 00001 00002 00003 00010 00011 00012"""
_MEDUSA_2_7B_63 = """0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70
000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200
0000 0001 0002 0003 0010 0020 0100"""

PUBLISHED = {
    "mc_sim_7b_63": _MC_SIM_7B_63,
    "naive_extend_57": _NAIVE_EXTEND_57,
    "mc_sim_7b_63_balanced": _MC_SIM_7B_63_BALANCED,
    "reverse_balanced_25": _REVERSE_BALANCED_25,
    "medusa_2_7b_63": _MEDUSA_2_7B_63,
    "chain": "0 00 000 0000 00000",
}
"""Trees of the published programs (EAGLE, Medusa, LANTERN++), as words of child ranks."""

DEFAULT_IMAGE_TREE = "mc_sim_7b_63"


def published_paths(name: str) -> list[Path]:
    """Paths of a published tree, in its own order."""
    if name not in PUBLISHED:
        raise ValueError(f"unknown tree {name!r}; choose one of {', '.join(sorted(PUBLISHED))}")
    return [tuple(int(rank) for rank in word) for word in PUBLISHED[name].split()]


def ordered_paths(paths: Iterable[Sequence[int]]) -> list[Path]:
    """Paths by (length, ranks), the slot order behind the root.

    Raises:
        ValueError: no paths, an empty or repeated path, a missing parent, or a skipped child rank.
    """
    known = [tuple(int(r) for r in p) for p in paths]
    inside = set(known)
    if not known:
        raise ValueError("a tree needs at least one path")
    if len(inside) != len(known):
        twice = next(p for p in known if known.count(p) > 1)
        raise ValueError(f"path {list(twice)} occurs twice")
    for path in known:
        if not path:
            raise ValueError("the empty path is the root and must not be listed")
        if len(path) > 1 and path[:-1] not in inside:
            raise ValueError(f"path {list(path)} has no parent {list(path[:-1])} in the tree")
        if path[-1] < 0 or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in inside):
            raise ValueError(
                f"path {list(path)} skips child rank {path[-1] - 1}; ranks must be contiguous from 0"
            )
    return sorted(known, key=lambda p: (len(p), p))


def static_tree(paths: str | Iterable[Sequence[int]]) -> TreeShape:
    """Shape of a published tree (by name) or of a list of paths; slots by (length, ranks)."""
    nodes = ordered_paths(published_paths(paths) if isinstance(paths, str) else paths)
    slot = {(): 0, **{path: i for i, path in enumerate(nodes, 1)}}
    return TreeShape((-1, *(slot[path[:-1]] for path in nodes)))


def select_best(score: Tensor, parent: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `budget` best recorded nodes of every row (dynamic and block trees), closed under parents.

    score: float32 [B, M] cumulative log-probability of the recorded nodes, parents recorded before children;
    parent: int64 [B, M] recorded index of the parent, -1 = the root. Ties go to the earlier node: a child's
        score never
    exceeds its parent's, so the parent is kept whenever the child is. Nodes of score -inf come out dead.

    Returns kept int64 [B, budget] ascending recorded indices, parent slots int64 [B, budget + 1] of the tree
    with the root in slot 0, and live bool [B, budget + 1].
    """
    B, M = score.shape
    if not 1 <= budget <= M:
        raise ValueError(f"budget must be in 1..{M} (the recorded nodes), got {budget}")
    order = score.argsort(dim=1, descending=True, stable=True)
    kept = order[:, :budget].sort(1).values
    slot_of = torch.full((B, M + 1), -1, dtype=torch.int64, device=score.device)
    slots = torch.arange(1, budget + 1, device=score.device).expand(B, budget)
    slot_of.scatter_(1, kept, slots)
    slot_of[:, M] = 0
    up = parent.gather(1, kept)
    up = slot_of.gather(1, torch.where(up < 0, M, up))
    live = score.gather(1, kept) > -torch.inf
    root = torch.ones(B, 1, dtype=torch.bool, device=score.device)
    return kept, torch.cat((up.new_full((B, 1), -1), up), 1), torch.cat((root, live), 1)
