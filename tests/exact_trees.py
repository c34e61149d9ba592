"""Drafted trees with made-up laws, for tests of the verifier's law."""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.verify import (
    TreeShape,
)

V = 3


SHAPES = {
    "one": (-1, 0),
    "three": (-1, 0, 0, 0),
    "chain": (-1, 0, 1, 2),
    "two by two": (-1, 0, 0, 1, 1, 2, 2),
    "by rank": (-1, 0, 0, 1, 1, 3),
    "unsorted": (-1, 0, 1, 0, 3, 1),
}


class Laws:
    """A random Markov-free model: an independent law per prefix of the output."""

    def __init__(self, seed: int, depth: int, vocab: int = V, top_k: int = 0, scale: float = 1.5) -> None:
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.levels = vocab, []
        for d in range(depth + 1):
            z = scale * torch.randn(vocab**d, vocab, generator=g, dtype=torch.float64)
            if top_k:
                z = z.masked_fill(z < z.topk(top_k, 1).values[:, -1:], -torch.inf)
            self.levels.append(z.softmax(1))

    def at(self, prefix: Tensor, depth: int) -> Tensor:
        return self.levels[depth][prefix]

    def sequence_law(self, length: int) -> Tensor:
        law = torch.ones(1, dtype=torch.float64)
        for d in range(length):
            law = (law[:, None] * self.levels[d]).flatten()
        return law


def prefixes(shape: TreeShape, tokens: Tensor, vocab: int) -> Tensor:
    """Index of every slot's token path (without the root) [rows, T]."""
    out = torch.zeros_like(tokens)
    for slot, up in enumerate(shape.parent[1:], 1):
        out[:, slot] = out[:, up] * vocab + tokens[:, slot]
    return out


def slot_laws(model: Laws, shape: TreeShape, prefix: Tensor) -> Tensor:
    return torch.stack([model.at(prefix[:, s], shape.depth[s]) for s in range(shape.slots)], 1)


def complete(
    shape: TreeShape, p: Laws, path: Tensor, n: Tensor, prefix: Tensor, weight: Tensor, extra: Tensor
) -> Tensor:
    length, vocab = shape.max_depth + 1, p.vocab
    law = torch.zeros(vocab**length, dtype=torch.float64)
    stop = path.gather(1, (n - 1)[:, None]).long()
    head = prefix.gather(1, stop).squeeze(1)
    extra = extra / extra.sum(1, keepdim=True).clamp(min=1e-300)
    for accepted in range(length):
        mine = n - 1 == accepted
        partial = torch.zeros(vocab**accepted, vocab, dtype=torch.float64)
        partial.index_add_(0, head[mine], weight[mine, None] * extra[mine])
        tail = partial.flatten()
        for d in range(accepted + 1, length):
            tail = (tail[:, None] * p.levels[d]).flatten()
        law += tail
    return law


def distance(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())
