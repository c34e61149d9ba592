"""Tree policies: which tokens a drafter offers. They use only the drafter's session, so every policy runs on
every drafter.

A policy returns ``Grown``: slot 0 is the root, parents precede children, and every row of the batch has the
same number of slots (dead ones are marked).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from visacc.speculate.sampler import DraftSampler
from visacc.verify.policies import DEFAULT_IMAGE_TREE, ordered_paths, published_paths, select_best


class Grower(Protocol):
    """What a policy needs of a drafter's session (see ``visacc.speculate.drafter.Session``)."""

    def run(
        self, tokens: Tensor, feature: Tensor, parents: Tensor, depth: Tensor | int
    ) -> tuple[Tensor, Tensor]: ...


@dataclass
class Grown:
    """A drafted tree.

    Attributes:
        tokens, parent, depth: int64 [B, T]; parent -1 and depth 0 at slot 0.
        live: bool [B, T].
        score: float32 [B, T] cumulative draft log-probability.
        kind: "point" (nothing about q is needed to verify) or "without_replacement".
        q_rows, q_row_of: float32 [B, R, V] laws that children were drawn from, int64 [B, T] which of them a
            node's children come from (-1 none); only for "without_replacement".
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    live: Tensor
    score: Tensor
    kind: str = "point"
    q_rows: Tensor | None = None
    q_row_of: Tensor | None = None


class TreePolicy(Protocol):
    """How a tree is grown.

    Attributes:
        slots: width T, root included. levels: largest depth of a node.
        scratch: drafter rows run while growing. ahead: tokens the drafter must predict per row.
    """

    @property
    def slots(self) -> int: ...

    @property
    def levels(self) -> int: ...

    @property
    def scratch(self) -> int: ...

    @property
    def ahead(self) -> int: ...

    def grow(
        self,
        session: Grower,
        root: Tensor,
        feature: Tensor,
        logits: Tensor,
        sampler: DraftSampler | None = None,
    ) -> Grown:
        """Grow trees for a batch.

        Args:
            root: int64 [B]. feature, logits: the drafter's last committed output, [B, D] and [B, V] (K-way
                heads: [B, K, D] and [B, K, V]).
            sampler: how to draw when sampling; ``None`` takes the likeliest tokens.
        """


def top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k likeliest tokens of every row, [..., k] each, descending."""
    lp = logits.log_softmax(-1)
    return lp.topk(min(k, lp.shape[-1]), dim=-1)


def best(score: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores per row in ascending index order; ties go to the earlier index.

    The stable order keeps the set closed under parents when a child's score equals its parent's.
    """
    return score.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def assemble(
    root: Tensor, tokens: Tensor, parent: Tensor, depth: Tensor, score: Tensor, budget: int
) -> Grown:
    """The ``budget`` best recorded nodes (all, where there are fewer) behind the root.

    Args:
        tokens, depth, score: [B, M] of all recorded nodes, in recording order (parents first).
        parent: int64 [B, M] recorded index of the parent, -1 for the root.
    """
    kept, up, live = select_best(score, parent, min(budget, score.shape[1]))

    def behind(first: Tensor, recorded: Tensor) -> Tensor:
        return torch.cat([first[:, None], recorded.gather(1, kept)], dim=1)

    zero = torch.zeros_like(root)
    return Grown(
        behind(root, tokens), up, behind(zero, depth), live, behind(score.new_zeros(len(root)), score)
    )


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's context-dependent tree (arXiv 2406.16858).

    ``depth`` times the ``top_k`` best nodes of the last level are run and offer ``top_k`` children each; of
    all nodes seen the ``budget`` best by cumulative log-probability are verified. Levels = depth + 1. The
    official ``total_token`` is budget + 1.
    """

    depth: int = 5
    top_k: int = 10
    budget: int = 59
    ahead: int = 1

    def __post_init__(self) -> None:
        if self.depth < 0 or self.top_k < 1 or self.budget < 1:
            raise ValueError(f"depth must be >= 0, top_k and budget >= 1, got {self}")
        most = self.top_k + self.depth * self.top_k**2
        if self.budget > most:
            raise ValueError(
                f"budget={self.budget} exceeds the {most} nodes that depth={self.depth} and"
                f" top_k={self.top_k} can draft"
            )

    @property
    def slots(self) -> int:
        return self.budget + 1

    @property
    def levels(self) -> int:
        return self.depth + 1

    @property
    def scratch(self) -> int:
        return self.depth * self.top_k

    def grow(
        self,
        session: Grower,
        root: Tensor,
        feature: Tensor,
        logits: Tensor,
        sampler: DraftSampler | None = None,
    ) -> Grown:
        batch = len(root)
        lp, ids = top_candidates(logits, self.top_k)
        k = ids.shape[1]
        rows = torch.arange(batch, device=root.device)[:, None]
        tokens, parents, scores, depths = [ids], [torch.full_like(ids, -1)], [lp], [torch.ones_like(ids)]
        beam = torch.arange(k, device=root.device).expand(batch, k)  # recorded indices
        above = torch.full_like(beam, -1)  # scratch rows of the beam's parents
        beam_score, beam_tokens = lp, ids
        feature = feature[:, None].expand(-1, k, -1)
        for level in range(1, self.depth + 1):
            out, logits = session.run(beam_tokens, feature, above, level)
            lp, ids = top_candidates(logits, k)
            total = beam_score[..., None] + lp  # [B, K, K]
            base = k + (level - 1) * k * k
            tokens.append(ids.flatten(1))
            parents.append(beam[..., None].expand(-1, -1, k).flatten(1))
            scores.append(total.flatten(1))
            depths.append(torch.full_like(tokens[-1], level + 1))
            beam_score, flat = total.flatten(1).topk(k, dim=1)
            source = flat // k
            above = (level - 1) * k + source
            beam, beam_tokens = base + flat, ids.flatten(1).gather(1, flat)
            feature = out[rows, source]
        token, parent, depth, score = (torch.cat(p, dim=1) for p in (tokens, parents, depths, scores))
        return assemble(root, token, parent, depth, score, self.budget)


@dataclass(frozen=True)
class Chain(DynamicTree):
    """``length`` tokens one after the other."""

    length: int = 4

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise ValueError(f"a chain needs length >= 1, got {length}")
        for name, value in {"depth": length - 1, "top_k": 1, "budget": length, "length": length}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree of child ranks (EAGLE-1, FLASH): rank r of a node is its r-th candidate.

    When sampling, candidates are drawn without replacement in rank order, so the verifier can use the ratio
    test.
    """

    paths: tuple[tuple[int, ...], ...] = tuple(published_paths(DEFAULT_IMAGE_TREE))
    ahead: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(ordered_paths(self.paths)))

    @property
    def slots(self) -> int:
        return len(self.paths) + 1

    @property
    def levels(self) -> int:
        return max(map(len, self.paths))

    @property
    def scratch(self) -> int:
        return len(self.paths)

    def grow(
        self,
        session: Grower,
        root: Tensor,
        feature: Tensor,
        logits: Tensor,
        sampler: DraftSampler | None = None,
    ) -> Grown:
        nodes: list[tuple[int, ...]] = [(), *self.paths]
        slot = {path: i for i, path in enumerate(nodes)}
        width = max(path[-1] for path in nodes[1:]) + 1
        batch, device = len(root), root.device
        tokens = root.new_zeros(batch, len(nodes))
        tokens[:, 0] = root
        score = logits.new_zeros(batch, len(nodes))
        live = torch.ones_like(tokens, dtype=torch.bool)
        laws: list[Tensor] = []
        law_of = [-1] * len(nodes)
        row_of: dict[tuple[int, ...], int] = {}
        frontier: list[tuple[int, ...]] = [()]
        feats, outs = feature[:, None], logits[:, None]
        for level in range(1, self.levels + 1):
            lp, ids, alive, q = (sampler or _LIKELIEST).candidates(outs, width, level)
            for i, path in enumerate(frontier):
                if q is not None:
                    law_of[slot[path]] = len(laws)
                    laws.append(q[:, i])
                for rank in range(width):
                    child = (*path, rank)
                    if child in slot:
                        at, up = slot[child], slot[path]
                        tokens[:, at] = ids[:, i, rank]
                        score[:, at] = score[:, up] + lp[:, i, rank]
                        live[:, at] = live[:, up] & alive[:, i, rank]
            parents = [p for p in nodes if len(p) == level and (*p, 0) in slot]
            if not parents:
                break
            own = torch.tensor([slot[p] for p in parents], device=device)
            above = torch.tensor([row_of.get(p[:-1], -1) for p in parents], device=device).expand(batch, -1)
            source = torch.tensor([frontier.index(p[:-1]) for p in parents], device=device)
            first = len(row_of)
            feats, outs = session.run(tokens[:, own], feats[:, source], above, level)
            row_of.update({p: first + i for i, p in enumerate(parents)})
            frontier = parents
        parent = torch.tensor([-1] + [slot[p[:-1]] for p in nodes[1:]], device=device).expand(batch, -1)
        depth = torch.tensor([len(p) for p in nodes], device=device).expand(batch, -1)
        grown = Grown(tokens, parent, depth, live, score)
        if laws:
            grown.kind, grown.q_rows = "without_replacement", torch.stack(laws, dim=1)
            grown.q_row_of = torch.tensor(law_of, device=device).expand(batch, -1)
        return grown


class _Likeliest:
    """Deterministic candidates."""

    def candidates(self, logits: Tensor, count: int, level: int) -> tuple[Tensor, Tensor, Tensor, None]:
        lp, ids = top_candidates(logits, count)
        if ids.shape[-1] < count:
            raise ValueError(
                f"a tree with {count} children per node needs a vocabulary of at least {count} tokens"
            )
        return lp, ids, torch.isfinite(lp), None


_LIKELIEST = _Likeliest()


def make_policy(kind: str = "dynamic", **options: Any) -> TreePolicy:
    """A policy by name: "dynamic", "static", "chain", "block"."""
    from visacc.speculate.block_tree import BlockTree

    kinds: dict[str, Any] = {"dynamic": DynamicTree, "static": StaticTree, "chain": Chain, "block": BlockTree}
    if kind not in kinds:
        raise ValueError(f"unknown tree {kind!r}; known: {', '.join(kinds)}")
    if "paths" in options:
        options["paths"] = tuple(tuple(p) for p in options["paths"])
    return kinds[kind](**options)
