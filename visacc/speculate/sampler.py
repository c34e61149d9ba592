"""Drawing draft tokens without replacement, for static trees under sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.kernels import rng


@dataclass
class DraftSampler:
    """Draws candidates from the processed draft law of every row.

    Attributes:
        seeds: int64 [B] Philox keys.
        position: int64 [B] sequence position of the root's children.
        process: draft logits [R, V] -> law float32 [R, V] (the target's own temperature, top-k and top-p).
    """

    seeds: Tensor
    position: Tensor
    process: Callable[[Tensor], Tensor]

    def candidates(self, logits: Tensor, count: int, level: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw ``count`` distinct tokens per row of logits [B, n, V], in drawing order.

        Returns:
            log q [B, n, count], ids, which of them have mass, and the laws q [B, n, V].
        """
        batch, n, vocab = logits.shape
        q = self.process(logits.flatten(0, 1)).view(batch, n, vocab)
        ids = torch.arange(vocab, device=q.device)
        node = torch.arange(n, device=q.device)[:, None] + 64 * level
        noise = rng.exponential(
            self.seeds[:, None, None],
            ids,
            (self.position + level - 1)[:, None, None],
            0,
            rng.DRAFT + rng.NODE_STRIDE * node,
        )
        race, chosen = (q / noise).topk(min(count, vocab), dim=-1)
        if chosen.shape[-1] < count:
            raise ValueError(
                f"a tree with {count} children per node needs a vocabulary of at least {count} tokens"
            )
        return q.gather(-1, chosen).log(), chosen, race > 0, q
