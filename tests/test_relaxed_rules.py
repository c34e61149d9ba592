"""Relaxed rules: what they cost, and that they vanish at their neutral setting; matching rules follow plain decoding."""

from __future__ import annotations

import pytest
import torch
from exact_trees import SHAPES, Laws, distance, prefixes, slot_laws
from torch import Tensor

from visacc.kernels import draw, race, rng
from visacc.verify import (
    GREEDY,
    GUMBEL_EXACT,
    DraftTree,
    Grouped,
    Lantern,
    LanternPP,
    Rule,
    TreeShape,
    Typical,
    verify,
    verify_chain,
)

pytestmark = pytest.mark.exact


# Relaxed rules: what they cost, and that they vanish at their neutral setting


def relaxed_pair(seed: int, vocab: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(0), None
    q = (p.log() + 0.8 * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(0)
    codes = torch.randn(vocab, 3, generator=g, dtype=torch.float64)
    distance = torch.cdist(codes, codes).fill_diagonal_(torch.inf)
    return p, q, distance.argsort(1)[:, :-1].int(), codes.float()


def one_test_law(rule: Rule, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Output law of one sampled draft under a rule, and its acceptance probabilities a(x), exactly."""
    vocab = len(p)
    drafts = torch.arange(vocab)[:, None]
    numerator, denominator = rule.chain_ratio(
        p.expand(vocab, 1, vocab), q.expand(vocab, 1, vocab), drafts, None
    )
    top = p if numerator is None else numerator.squeeze(1)
    bottom = q if denominator is None else denominator.squeeze(1)
    a = (top / bottom).clamp(max=1)
    rest = (p - q).clamp(min=0)
    return q * a + (1 - (q * a).sum()) * rest / rest.sum(), a


@pytest.mark.parametrize("seed", range(4))
def test_lantern_distance_closed_form(seed: int) -> None:
    """TV(output, p) = sum over q > p of min(m, q - p) <= TV(p, q), for both bounds."""
    p, q, near, _ = relaxed_pair(seed)
    for rule in (Lantern(near, 8, delta=0.2), Lantern(near, 3, delta=0.05), LanternPP(near, 5, lam=3.0)):
        law, _ = one_test_law(rule, p, q)
        masses = rule.chain_ratio(p.expand(16, 1, 16), None, torch.arange(16)[:, None], None)[0]
        m = masses.squeeze(1) - p
        over = q > p
        closed = float(torch.minimum(m, q - p)[over].sum())
        assert abs(distance(law, p) - closed) < 1e-9
        assert closed <= distance(p, q) + 1e-12
        assert closed > 0


def test_grouped_distance_bound() -> None:
    """TV(output, p) <= sum q |a - min(1, p/q)| on every pair; over twelve pairs the group test accepts more."""
    gained = 0.0
    for seed in range(12):
        p, q, _, codes = relaxed_pair(seed)
        law, a = one_test_law(Grouped(codes, 14, 0.15, 4.0), p, q)
        exact = (p / q).clamp(max=1)
        assert distance(law, p) <= float((q * (a - exact).abs()).sum()) + 1e-9
        gained += float((q * (a - exact)).sum())
    assert gained > 0


@pytest.mark.parametrize("seed", range(4))
def test_typical_distance(seed: int) -> None:
    """One sampled child under typical acceptance: TV(output, p) = TV(q a + (1 - sum q a) p, p), below the
    accepted
    drafts' own distance."""
    p, q, _, _ = relaxed_pair(seed)
    rule = Typical(eps=0.2, alpha=0.6)
    shape = TreeShape((-1, 0))
    tokens = torch.stack((torch.zeros(16, dtype=torch.int64), torch.arange(16)), 1)
    tree = DraftTree.of_shape(shape, tokens)
    step = verify(tree, p.expand(16, 2, 16), rule, U=torch.zeros_like(tokens))
    a = (step.n == 2).double()
    assert torch.equal(a > 0, p > float(rule.threshold(p)))
    assert 0 < float(a.sum()) < 16
    law = q * a + (1 - (q * a).sum()) * p
    assert distance(law, p) <= float((q * a).sum()) * distance(q * a / (q * a).sum(), p) + 1e-12


def test_relaxed_rules_are_exact_when_neutral() -> None:
    """delta = 0, lambda = 1 and groups of one take bit for bit the exact rule's decisions: chains and
    trees."""
    g = torch.Generator().manual_seed(2)
    p, q = (torch.randn(200, 5, 16, generator=g).softmax(2) for _ in range(2))
    q = q[:, :4].contiguous()
    _, _, near, codes = relaxed_pair(0)
    draft = torch.multinomial(q.view(-1, 16), 1, generator=g).view(200, 4)
    u = torch.rand(200, 5, generator=g)
    U = torch.randint(0, 2**32, (200, 5), generator=g)
    fresh = draw(p.view(-1, 16), U.flatten()).view(200, 5)
    tree = DraftTree.chain(torch.zeros(200, dtype=torch.int64), draft, q=q)
    count = torch.full((200,), 4)
    kwargs = {"q": q, "u": u[:, :4], "U": U[:, :4]}
    wanted = verify_chain(p, draft, count, fresh, **kwargs)
    walk = verify(tree, p, u=u, U=U)
    for rule in (Lantern(near, 8, delta=0.0), LanternPP(near, 8, lam=1.0), Grouped(codes, 1)):
        got = verify_chain(p, draft, count, fresh, rule=rule, **kwargs)
        assert torch.equal(got.coupled, wanted.coupled)
        assert torch.equal(got.accepted, wanted.accepted)
        step = verify(tree, p, rule, u=u, U=U)
        assert torch.equal(step.n, walk.n)
        assert torch.equal(step.next_root, walk.next_root)


def test_relaxed_rules_accept_more() -> None:
    g = torch.Generator().manual_seed(3)
    p, q = (torch.randn(400, 5, 16, generator=g).mul(2).softmax(2) for _ in range(2))
    _, _, near, codes = relaxed_pair(0)
    draft = torch.multinomial(q[:, :4].reshape(-1, 16), 1, generator=g).view(400, 4)
    u = torch.rand(400, 5, generator=g)
    U = torch.zeros(400, 5, dtype=torch.int64)
    tree = DraftTree.chain(torch.zeros(400, dtype=torch.int64), draft, q=q[:, :4])
    exact = int(verify(tree, p, u=u, U=U).n.sum())
    for rule in (Lantern(near, 8, delta=0.3), LanternPP(near, 8, lam=4.0), Grouped(codes, 6, 0.5, 9.0)):
        assert int(verify(tree, p, rule, u=u, U=U).n.sum()) > exact


def test_greedy_and_gumbel_trees_follow_plain_decoding() -> None:
    """Whatever the drafts, committed tokens are those of plain greedy decoding, or of plain sampling with
    the same noise."""
    shape = TreeShape(SHAPES["by rank"])
    p = Laws(9, shape.max_depth, vocab=4)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (300, shape.slots), generator=g)
    prefix = prefixes(shape, tokens, 4)
    tree = DraftTree.of_shape(shape, tokens)
    laws = slot_laws(p, shape, prefix).float()
    noise = rng.exponential(
        torch.arange(300)[:, None, None], torch.arange(4), torch.arange(4)[:, None], 0, rng.GUMBEL
    )
    by_slot = noise[:, list(shape.depth)]
    for rule in (GREEDY, GUMBEL_EXACT):
        step = verify(tree, laws, rule, noise=by_slot)
        at = torch.zeros(300, dtype=torch.int64)
        for i in range(shape.max_depth + 1):
            law = p.at(at, i).float()
            plain = law.argmax(1) if rule is GREEDY else race(law, noise[:, i])
            mine = torch.where(i < step.n - 1, step.tokens[:, min(i + 1, shape.max_depth)], step.next_root)
            known = i <= step.n - 1
            assert torch.equal(mine[known], plain[known])
            at = at * 4 + plain
        assert int(step.n.max()) > 2
