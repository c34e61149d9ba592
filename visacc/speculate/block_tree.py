"""Trees over the several tokens that one drafter row predicts (FLASH, arXiv 2505.12728)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.speculate.sampler import DraftSampler
from visacc.speculate.trees import Grower, Grown, assemble, best, top_candidates


@dataclass(frozen=True)
class BlockTree:
    """Tree over the K independent laws of a semi-autoregressive head (FLASH).

    One drafter row predicts K tokens; given the prefix they are independent, so a node's score is the sum of
    its log-probabilities. With ``blocks > 1`` the ``beam`` best complete blocks are fed back, K rows at
    once, and each is continued by another block.
    """

    ahead: int
    top_k: int = 4
    budget: int = 30
    blocks: int = 1
    beam: int = 2

    def __post_init__(self) -> None:
        if min(self.ahead, self.top_k, self.budget, self.blocks, self.beam) < 1:
            raise ValueError(f"all options of a block tree must be >= 1, got {self}")

    @property
    def slots(self) -> int:
        return self.budget + 1

    @property
    def levels(self) -> int:
        return self.ahead * self.blocks

    @property
    def scratch(self) -> int:
        return (self.blocks - 1) * self.beam * self.ahead

    def grow(
        self,
        session: Grower,
        root: Tensor,
        feature: Tensor,
        logits: Tensor,
        sampler: DraftSampler | None = None,
    ) -> Grown:
        batch = len(root)
        rec = _Record(batch, root)
        start = torch.full((batch, 1), -1, dtype=torch.int64, device=root.device)
        tips = self._block(rec, start, torch.zeros_like(start, dtype=logits.dtype), logits[:, None], 0)
        feats = feature[:, None]  # [B, 1, K, D] features of the block behind each tip's origin
        above, first = start, 0  # rows that the session has run
        for block in range(1, self.blocks):
            order = rec.score(tips).topk(min(self.beam, tips.shape[1]), dim=1).indices
            chosen = tips.gather(1, order)  # recorded indices of complete blocks
            path = rec.path(chosen, self.ahead)  # [B, n, K]
            n = chosen.shape[1]
            origin = rec.origin(path[..., 0])
            tokens = rec.tokens(path.flatten(1))
            rows = torch.arange(batch, device=root.device)[:, None]
            given = feats[rows, origin].flatten(1, 2)  # [B, n K, D]
            inner = first + torch.arange(n * self.ahead, device=root.device) - 1
            parents = inner.expand(batch, -1).clone()
            parents[:, :: self.ahead] = above.gather(1, origin)
            depth = ((block - 1) * self.ahead + 1 + torch.arange(self.ahead, device=root.device)).repeat(n)
            out, logits = session.run(tokens, given, parents, depth)
            last = torch.arange(n, device=root.device) * self.ahead + self.ahead - 1
            above = (first + last).expand(batch, -1)
            first += n * self.ahead
            feats = out[:, last]
            tips = self._block(rec, chosen, rec.score(chosen), logits[:, last], block)
        token, parent, depth = rec.all("token"), rec.all("parent"), rec.all("depth")
        return assemble(root, token, parent, depth, rec.score(), self.budget)

    def _block(self, rec: _Record, tips: Tensor, score: Tensor, logits: Tensor, block: int) -> Tensor:
        """Extend tips int64 [B, n] (recorded indices) by K levels with laws [B, n, K, V]; returns the new
        tips.
        """
        batch, n = tips.shape
        lp, ids = top_candidates(logits, self.top_k)  # [B, n, K, C]
        k = ids.shape[-1]
        origin = torch.arange(n, device=tips.device).expand(batch, n)
        rows = torch.arange(batch, device=tips.device)[:, None]
        for i in range(self.ahead):
            level_lp, level_ids = lp[rows, origin, i], ids[rows, origin, i]  # [B, m, C]
            total = (score[..., None] + level_lp).flatten(1)
            flat = best(total, min(self.budget, total.shape[1]))
            score, up = total.gather(1, flat), flat // k
            origin = origin.gather(1, up)
            tips = rec.add(
                level_ids.flatten(1).gather(1, flat),
                tips.gather(1, up),
                score,
                origin,
                block * self.ahead + i + 1,
            )
        return tips


class _Record:
    """Recorded nodes of a growing block tree."""

    def __init__(self, batch: int, root: Tensor) -> None:
        self.batch, self.device, self.count = batch, root.device, 0
        self.parts: dict[str, list[Tensor]] = {k: [] for k in ("token", "parent", "score", "origin", "depth")}

    def add(self, token: Tensor, parent: Tensor, score: Tensor, origin: Tensor, depth: int) -> Tensor:
        m = token.shape[1]
        values = (token, parent, score, origin, torch.full_like(token, depth))
        for key, value in zip(self.parts, values, strict=True):
            self.parts[key].append(value)
        index = torch.arange(self.count, self.count + m, device=self.device).expand(self.batch, m)
        self.count += m
        return index

    def all(self, key: str) -> Tensor:
        return torch.cat(self.parts[key], dim=1)

    def score(self, index: Tensor | None = None) -> Tensor:
        value = self.all("score")
        return value if index is None else value.gather(1, index)

    def tokens(self, index: Tensor) -> Tensor:
        return self.all("token").gather(1, index)

    def origin(self, index: Tensor) -> Tensor:
        return self.all("origin").gather(1, index)

    def path(self, tips: Tensor, length: int) -> Tensor:
        """Recorded indices int64 [B, n, length] of the last ``length`` nodes ending at the tips."""
        parent, steps = self.all("parent"), [tips]
        for _ in range(length - 1):
            steps.append(parent.gather(1, steps[-1]))
        return torch.stack(steps[::-1], dim=-1)
