"""Losslessness of the tree verifier, by exact enumeration and by chi-square; bounds of the relaxed rules."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from visacc.kernels import (
    INDEPENDENT,
    POINT,
    WITHOUT_REPLACEMENT,
    chain_verify,
    draw,
    race_topk,
    rng,
    tree_verify,
    window_resample,
)
from visacc.verify import (
    EXACT,
    GREEDY,
    GUMBEL_EXACT,
    DraftTree,
    Grouped,
    Lantern,
    LanternPP,
    Traversal,
    TreeShape,
    Typical,
    verify,
    verify_chain,
)
from visacc.verify.traversal import node_weights

pytestmark = pytest.mark.exact

V = 3
ALMOST_ONE = 1 - 2.0**-24
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


def drafted(shape: TreeShape, q: Laws, kind: str) -> tuple[Tensor, Tensor]:
    """Every possible draft [rows, T] and its probability."""
    T, vocab = shape.slots, q.vocab
    combos = list(itertools.product(range(vocab), repeat=T - 1))
    tokens = torch.tensor([(0, *c) for c in combos])
    prefix = prefixes(shape, tokens, vocab)
    weight = torch.ones(len(tokens), dtype=torch.float64)
    for slot, up in enumerate(shape.parent[1:], 1):
        law = q.at(prefix[:, up], shape.depth[up]).clone()
        if kind == "best":  # the likeliest tokens in order, nothing random
            rank = shape.children[up].index(slot)
            choice = law.argsort(dim=1, descending=True, stable=True)[:, rank]
            weight = weight * (tokens[:, slot] == choice)
            continue
        if kind == "without_replacement":
            for earlier in shape.children[up]:
                if earlier < slot:
                    law.scatter_(1, tokens[:, earlier : earlier + 1], 0.0)
            law = law / law.sum(1, keepdim=True).clamp(min=1e-300)
        weight = weight * law.gather(1, tokens[:, slot : slot + 1]).squeeze(1)
    live = weight > 0
    return tokens[live], weight[live]


def output_law(shape: TreeShape, p: Laws, q: Laws, kind: str, rule: str, claim: str | None = None) -> Tensor:
    """Exact law of the first max_depth + 1 output tokens of one verification (filled up from p)."""
    tokens, weight = drafted(shape, q, kind)
    bits = torch.tensor(list(itertools.product((False, True), repeat=shape.slots - 1)))
    rows = len(tokens)
    tokens, weight = tokens.repeat_interleave(len(bits), 0), weight.repeat_interleave(len(bits))
    bits = torch.cat((torch.ones(len(bits), 1, dtype=torch.bool), bits), 1).repeat(rows, 1)
    prefix = prefixes(shape, tokens, p.vocab)
    laws, u = slot_laws(p, shape, prefix), torch.where(bits, 0.0, ALMOST_ONE)
    kind = claim or ("point" if kind == "best" else kind)
    q_rows = None if kind == "point" else slot_laws(q, shape, prefix)[:, list(shape.internal)]
    tree = DraftTree.of_shape(shape, tokens, q_kind=kind, q_rows=q_rows)
    U = torch.zeros_like(tokens)
    if rule == "exact":
        path, n, _, details = tree_verify(
            laws,
            tree.tokens,
            tree.parent,
            tree.live,
            tree.index,
            u=u,
            U=U,
            q_rows=tree.q_rows,
            q_row_of=tree.q_row_of,
            kind=tree.kind,
            nodes=torch.tensor(shape.internal),
            max_children=shape.max_children,
            width=shape.max_depth + 1,
            details=True,
        )
        tested = details.ratios >= 0
        chance = details.ratios.clamp(0, 1)
        extra = details.weights
    else:
        step = verify(tree, laws, Traversal(), u=u, U=U)
        path, n = step.path, step.n
        chance, residual = node_weights(tree, laws)
        tested = torch.arange(shape.slots) > 0
        extra = residual[torch.arange(len(tokens)), path.gather(1, (n - 1)[:, None]).squeeze(1).long()]
    decided = torch.where(bits, chance, 1 - chance)
    weight = weight * torch.where(tested, decided, torch.where(bits, 0.0, 1.0)).masked_fill(
        torch.arange(shape.slots) == 0, 1.0
    ).prod(1)
    return complete(shape, p, path, n, prefix, weight, extra)


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


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("kind", ["without_replacement", "independent", "best", "point"])
@pytest.mark.parametrize("rule", ["exact", "traversal"])
def test_output_law_is_the_target(shape: str, kind: str, rule: str) -> None:
    """Every draft times every accept/reject pattern, summed: total variation below 1e-9, total mass 1."""
    tree = TreeShape(SHAPES[shape])
    if kind == "without_replacement" and tree.max_children > V - 1 and shape != "three":
        pytest.skip("needs more tokens than the vocabulary has")
    for seed, top_k in ((0, 0), (1, 2)):
        if kind == "without_replacement" and top_k and tree.max_children > top_k:
            continue
        p = Laws(seed, tree.max_depth, top_k=top_k)
        q = Laws(seed + 100, tree.max_depth, top_k=top_k)
        law = output_law(
            tree, p, q, "independent" if kind == "point" else kind, rule, "point" if kind == "point" else None
        )
        assert abs(float(law.sum()) - 1) < 1e-9
        assert distance(law, p.sequence_law(tree.max_depth + 1)) < 1e-9


def test_enumeration_sees_a_wrong_claim() -> None:
    """Likeliest children tested as if they had been sampled, and draws without replacement tested with
    plain q."""
    tree = TreeShape(SHAPES["three"])
    p, q = Laws(0, 1), Laws(100, 1)
    target = p.sequence_law(2)
    assert distance(output_law(tree, p, q, "best", "exact", "without_replacement"), target) > 0.05
    tree = TreeShape(SHAPES["two by two"])
    p, q = Laws(1, 2), Laws(101, 2)
    target = p.sequence_law(3)
    assert distance(output_law(tree, p, q, "without_replacement", "exact", "independent"), target) > 0.01
