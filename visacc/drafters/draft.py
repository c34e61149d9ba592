"""A drafter at work: its cache, reading the prompt, following what was accepted, and growing trees.

Guided models have two rows per sample, conditional and unconditional, with the same tokens but their own features and
columns. Policies see one row per sample: the features of the branches side by side, [B, n, branches * D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.drafters.network import Cache, EagleNetwork
from visacc.speculate.kv import RowCache

Finish = Callable[[Tensor, Tensor], Tensor]
"""``finish(features [branches * B, n, D], slots int64 [B, n])`` -> [B, n, V]: laws or scores of the slots."""


def side_by_side(features: Tensor, branches: int) -> Tensor:
    """[branches * B, ...n, D] -> [B, ...n, branches * D]."""
    return features.unflatten(0, (branches, -1)).movedim(0, -2).flatten(-2)


def stacked(features: Tensor, branches: int) -> Tensor:
    """Inverse of :func:`side_by_side`."""
    return features.unflatten(-1, (branches, -1)).movedim(-2, 0).flatten(0, 1)


@dataclass
class Drafting:
    """State of a batch.

    Attributes:
        cache: columns of branches * B rows; committed ones come from target features only.
        branches: 1, or 2 with guidance.
        feature: [B, branches * D] drafter's output behind which the root's children come.
        root_slot: int64 [B] slot of the newest committed token.
        shift: int64 [branches * B] padded prompt columns, by which positions lag behind columns; ``None`` for none.
        finish: see :data:`Finish`; depends on the sampling parameters.
        to_ids: codes int64 [B, n] and their slots -> ids of the drafter's embedding.
    """

    network: EagleNetwork
    cache: RowCache
    branches: int
    feature: Tensor
    root_slot: Tensor
    finish: Finish
    to_ids: Callable[[Tensor, Tensor], Tensor]
    shift: Tensor | None = None

    @classmethod
    def start(
        cls,
        network: EagleNetwork,
        features: Tensor,
        ids: Tensor,
        *,
        branches: int,
        room: int,
        finish: Finish,
        to_ids: Callable[[Tensor, Tensor], Tensor],
        valid: Tensor | None = None,
    ) -> Drafting:
        """Read the prompt.

        Args:
            features: [branches * B, P, D] target features of the prompt's slots.
            ids: int64 [branches * B, P] the tokens behind them; the last column is the root.
            room: columns to keep behind the prompt.
            valid: bool [branches * B, P], False at left padding that must not be seen; ``None`` sees all.
        """
        c = network.config
        rows, prefix, device = features.shape[0], features.shape[1], features.device
        cache = RowCache.empty(
            c.num_layers, rows, c.kv_heads, c.head_dim, prefix + room, network.dtype, device
        )
        shift = None
        order = torch.arange(prefix, device=device)
        seen = (order[:, None] >= order).expand(rows, -1, -1)
        if valid is not None:
            shift = prefix - valid.sum(1)
            seen = (seen & valid[:, None]) | (order[:, None] == order)
        slot = torch.zeros(rows // branches, dtype=torch.int64, device=device)
        drafting = cls(network, cache, branches, features, slot, finish, to_ids, shift)
        out = drafting._run(ids, features, order.expand(rows // branches, -1), seen, 0)
        if valid is not None:
            cache.valid[:, :prefix] = valid
        cache.commit(torch.full_like(cache.length, prefix), prefix)
        drafting.feature = side_by_side(out[:, -1], branches)
        return drafting

    @property
    def next_column(self) -> Tensor:
        """int64 [B] column and position of the root's children."""
        return self.cache.length[: len(self.root_slot)]

    def follow(self, features: Tensor, tokens: Tensor, n: Tensor) -> None:
        """Take in a verified step.

        Args:
            features: [branches * B, A, D] target features of the root and the accepted drafts.
            tokens: int64 [B, A] the token behind each of them (the next root behind the last one).
            n: int64 [B] how many of the A are real; 0 for a finished sample.
        """
        width = tokens.shape[1]
        order = torch.arange(width, device=tokens.device)
        slots = self.root_slot[:, None] + 1 + order
        causal = (order[:, None] >= order).expand(len(n), -1, -1)
        positions = self.next_column[:, None] + order
        out = self._run(self.to_ids(tokens, slots), features, positions, causal, 0)
        tip = side_by_side(out, self.branches)
        last = (n - 1).clamp(min=0)[:, None, None].expand(-1, 1, tip.shape[2])
        self.feature = torch.where((n > 0)[:, None], tip.gather(1, last)[:, 0], self.feature)
        self.cache.commit(n.repeat(self.branches), width)
        self.root_slot = self.root_slot + n

    def root_row(self) -> Tensor:
        """[B, V] what ``finish`` says about the root's children."""
        return self.finish(stacked(self.feature[:, None], self.branches), self.root_slot[:, None] + 1)[:, 0]

    def select(self, rows: Tensor) -> None:
        """Keep only the samples ``rows``."""
        batch = len(self.root_slot)
        self.cache.select(torch.cat([rows + i * batch for i in range(self.branches)]))
        self.feature, self.root_slot = self.feature[rows], self.root_slot[rows]
        if self.shift is not None:
            self.shift = self.shift[torch.cat([rows + i * batch for i in range(self.branches)])]

    def _run(self, ids: Tensor, features: Tensor, positions: Tensor, seen: Tensor, first: int) -> Tensor:
        """Rows at uncommitted columns ``first...`` -> features [branches * B, n, D].

        Args:
            ids: int64 [B, n] or [branches * B, n]; positions: int64 [B, n].
            seen: bool [B or branches * B, n, first + n], which uncommitted columns each row sees.
        """
        n, k, rows = ids.shape[1], self.branches, features.shape[0]
        if len(ids) != rows:
            ids = ids.repeat(k, 1)
        if len(seen) != rows:
            seen = seen.repeat(k, 1, 1)
        positions = positions.repeat(k, 1)
        if self.shift is not None:
            positions = (positions - self.shift[:, None]).clamp(min=0)
        mask = self.cache.mask(seen, self.cache.limit(first + n))
        return self.network(ids, features, positions, mask, Cache(self.cache, self.cache.addresses(first, n)))

    def session(self) -> Session:
        return Session(self)


class Session:
    """Growing one tree: rows run in scratch columns, each seeing the committed ones, its ancestors and itself."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting
        self.seen = torch.zeros(
            len(drafting.root_slot), 0, 0, dtype=torch.bool, device=drafting.feature.device
        )

    def run(
        self, tokens: Tensor, feature: Tensor, parents: Tensor, depth: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Run nodes of one depth.

        Args:
            tokens: int64 [B, n]; feature: [B, n, branches * D] features of their parents.
            parents: int64 [B, n] rows of the parents in running order, -1 for children of the root.
            depth: 1 for children of the root.

        Returns:
            features [B, n, branches * D], and ``finish`` of the slots behind the nodes [B, n, V].
        """
        d, (batch, n), first = self.drafting, tokens.shape, self.seen.shape[1]
        seen = torch.zeros(batch, first + n, first + n, dtype=torch.bool, device=tokens.device)
        seen[:, :first, :first] = self.seen
        if first:
            rows = torch.arange(batch, device=tokens.device)[:, None]
            seen[:, first:, :first] = self.seen[rows, parents.clamp(min=0)] & (parents >= 0)[..., None]
        seen[:, first:, first:] = torch.eye(n, dtype=torch.bool, device=tokens.device)
        self.seen = seen
        slots = (d.root_slot[:, None] + depth).expand(batch, n)
        positions = (d.next_column[:, None] + depth - 1).expand(batch, n)
        given = stacked(feature, d.branches)
        out = d._run(d.to_ids(tokens, slots), given, positions, seen[:, first:], first)
        return side_by_side(out, d.branches), d.finish(out, slots + 1)
