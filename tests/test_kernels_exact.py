"""Losslessness of the tree verifier, by exact enumeration and by chi-square; bounds of the relaxed rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from exact_trees import SHAPES, Laws, V, complete, distance, prefixes, slot_laws
from torch import Tensor

from visacc.kernels import tree_verify
from visacc.kernels.tree_ops import Details
from visacc.verify import (
    DraftTree,
    Traversal,
    TreeShape,
    verify,
)
from visacc.verify.traversal import node_weights

pytestmark = pytest.mark.exact


ALMOST_ONE = 1 - 2.0**-24


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


def output_law(
    shape: TreeShape,
    p: Laws,
    q: Laws,
    kind: str,
    rule: str,
    claim: str | None = None,
    finish: Callable[..., Tensor] | None = None,
) -> Tensor:
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
    return (finish or complete)(shape, p, path, n, prefix, weight, extra)


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


def test_traversal_never_accepts_fewer() -> None:
    """Expected accepted drafts, exactly: traversal >= top-down for every draft kind, and more on some
    trees."""
    gained = 0.0
    for name in ("chain", "two by two", "by rank"):
        tree = TreeShape(SHAPES[name])
        for seed in range(3):
            p, q = Laws(seed, tree.max_depth), Laws(seed + 100, tree.max_depth)
            for kind in ("without_replacement", "independent"):
                top_down, bottom_up = (expected_accepted(tree, p, q, kind, r) for r in ("exact", "traversal"))
                assert bottom_up >= top_down - 1e-9
                gained = max(gained, bottom_up - top_down)
    assert gained > 0.01


def expected_accepted(tree: TreeShape, p: Laws, q: Laws, kind: str, rule: str) -> float:
    seen: list[tuple[Tensor, Tensor]] = []

    def record(shape: TreeShape, p: Laws, path: Tensor, n: Tensor, *rest: Tensor) -> Tensor:
        seen.append((n, rest[1]))
        return torch.zeros(1)

    output_law(tree, p, q, kind, rule, finish=record)
    n, weight = seen[0]
    return float(((n - 1) * weight).sum())


def test_block_verification_on_a_chain() -> None:
    """The chain's weights follow the published recursion (arXiv 2403.10444)."""
    shape, gamma = TreeShape((-1, 0, 1, 2)), 3
    p, q = Laws(3, gamma), Laws(103, gamma)
    tokens, _ = drafted(shape, q, "independent")
    prefix = prefixes(shape, tokens, V)
    laws, drafts = slot_laws(p, shape, prefix), slot_laws(q, shape, prefix)[:, :-1]
    tree = DraftTree.of_shape(shape, tokens, q_kind="independent", q_rows=drafts)
    weight, residual = node_weights(tree, laws)
    w = torch.ones(len(tokens), dtype=torch.float64)
    for i in range(gamma + 1):
        if i:
            x = tokens[:, i : i + 1]
            ratio = laws[:, i - 1].gather(1, x) / drafts[:, i - 1].gather(1, x)
            w = (w * ratio.squeeze(1)).clamp(max=1)
        if i == gamma:
            torch.testing.assert_close(weight[:, i], w, atol=1e-12, rtol=1e-9)
            continue
        rest = (w[:, None] * laws[:, i] - drafts[:, i]).clamp(min=0)
        mass = rest.sum(1)
        h = torch.where(w >= 1, torch.ones_like(w), mass / (mass + 1 - w))
        if i:
            torch.testing.assert_close(weight[:, i], h, atol=1e-12, rtol=1e-9)
        some = mass > 1e-12
        torch.testing.assert_close(residual[some, i], rest[some] / mass[some, None], atol=1e-12, rtol=1e-9)


def test_draws_without_mass_are_skipped() -> None:
    """Fewer than m tokens with mass: dead children, and children that q excludes, leave the law exact."""
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    q = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    shape = TreeShape((-1, 0, 0))
    for live in ([True, True, False], [True, True, True]):
        law = torch.zeros(3, dtype=torch.float64)
        for bit in (False, True):
            details = tree_verify_details(shape, p, q, torch.tensor([[0, 1, 2]]), torch.tensor([live]), bit)
            chance = float(details.ratios[0, 1])
            assert float(details.ratios[0, 2]) == -1
            if bit:
                law[1] += chance
            else:
                law += (1 - chance) * details.weights[0] / details.weights[0].sum()
        torch.testing.assert_close(law, p[0], atol=1e-9, rtol=0)


def tree_verify_details(
    shape: TreeShape, p: Tensor, q: Tensor, tokens: Tensor, live: Tensor, bit: bool
) -> Details:
    T = shape.slots
    tree = DraftTree.of_shape(shape, tokens, live=live, q_kind="without_replacement", q_rows=q[:, None])
    details = tree_verify(
        p[:, None].expand(-1, T, -1),
        tree.tokens,
        tree.parent,
        tree.live,
        tree.index,
        u=torch.full((1, T), 0.0 if bit else ALMOST_ONE),
        U=torch.zeros_like(tokens),
        q_rows=tree.q_rows,
        q_row_of=tree.q_row_of,
        kind=tree.kind,
        details=True,
    )[3]
    assert details is not None
    return details
