"""Sharp draft laws drawn from without replacement: when the first siblings hold all but 1e-9 of the mass, the rest of the
tree is still tested by its law.
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from visacc.kernels.reference.tree_ratio import INDEPENDENT, POINT, WITHOUT_REPLACEMENT, tree_verify, untried
from visacc.verify import DraftTree
from visacc.verify.traversal import node_weights

pytestmark = pytest.mark.exact

Q = torch.tensor([0.9344, 0.0656, 3e-10, 2e-11, 4e-12, 1e-15])
P = torch.tensor([0.05, 0.1, 0.15, 0.3, 0.2, 0.2])


def sequences() -> tuple[Tensor, Tensor]:
    """Every order in which three siblings can be drawn, int64 [N, 3], and its probability, float64 [N]."""
    q = Q.double() / Q.double().sum()
    orders = torch.tensor(list(permutations(range(len(Q)), 3)))
    chance = torch.ones(len(orders), dtype=torch.float64)
    gone = torch.zeros(len(orders), len(Q), dtype=torch.bool)
    for j in range(3):
        rest = q.expand(len(orders), -1).masked_fill(gone, 0)
        chance = chance * rest.gather(1, orders[:, j : j + 1])[:, 0] / rest.sum(1)
        gone = gone.scatter(1, orders[:, j : j + 1], True)
    return orders, chance


def star(orders: Tensor) -> DraftTree:
    """A root with three leaves, all orders as one batch."""
    n = len(orders)
    tokens = torch.cat([torch.zeros(n, 1, dtype=torch.int64), orders], 1)
    parent = torch.tensor([-1, 0, 0, 0]).expand(n, -1)
    live = torch.ones(n, 4, dtype=torch.bool)
    return DraftTree(
        tokens,
        parent,
        live,
        "without_replacement",
        Q.expand(n, 1, -1),
        torch.tensor([0, -1, -1, -1]).expand(n, -1),
        max_children=3,
        max_depth=1,
    )


def test_the_law_is_the_targets() -> None:
    orders, chance = sequences()
    n, tree = len(orders), star(orders)
    *_, details = tree_verify(
        P.expand(n, 4, -1), tree.tokens, tree.parent, tree.live, tree.index.ancestors, tree.index.depth,
        torch.full((n, 4), 1 - 2**-24), torch.zeros(n, 4, dtype=torch.int64), tree.q_rows, tree.q_row_of,
        WITHOUT_REPLACEMENT, None, 0.0, 0.0, None, 3, 2, details=True,
    )  # fmt: skip
    assert details is not None
    law, left = torch.zeros(len(P), dtype=torch.float64), chance.clone()
    for j in range(3):
        ratio = details.ratios[:, j + 1].double()
        accepted = ratio.clamp(0, 1)
        law.scatter_add_(0, orders[:, j], left * accepted)
        left = left * (1 - accepted)
    # a sequence whose walk ends at a child has that child's law as weights, and nothing left
    weights = details.weights.double()
    law += (left[:, None] * weights / weights.sum(1, keepdim=True)).sum(0)
    torch.testing.assert_close(law, P.double(), atol=2e-6, rtol=0)


def test_traversal_has_the_targets_law() -> None:
    orders, chance = sequences()
    tree = star(orders)
    weight, residual = node_weights(tree, P.expand(len(orders), 4, -1))
    law, left = torch.zeros(len(P), dtype=torch.float64), chance.clone()
    for j in range(3):
        accepted = weight[:, j + 1].double().clamp(0, 1)
        law.scatter_add_(0, orders[:, j], left * accepted)
        left = left * (1 - accepted)
    rest = residual[:, 0].double()
    law += (left[:, None] * rest / rest.sum(1, keepdim=True)).sum(0)
    torch.testing.assert_close(law, P.double(), atol=2e-6, rtol=0)


def test_mass_that_is_left() -> None:
    """Against sums in double precision: shared laws, repeated tokens, dead slots, every kind of draft."""
    g = torch.Generator().manual_seed(0)
    B, T, R, V = 6, 12, 3, 9
    parent = torch.stack([torch.tensor([-1, *(int(torch.randint(0, s, (), generator=g)) for s in range(1, T))])
                          for _ in range(B)])  # fmt: skip
    tokens = torch.randint(0, V, (B, T), generator=g)
    live = torch.rand(B, T, generator=g) < 0.85
    kind = torch.randint(0, 3, (B, T), generator=g, dtype=torch.int8)
    q_rows = (8 * torch.randn(B, R, V, generator=g)).softmax(2)
    q_row_of = torch.randint(0, R, (B, T), generator=g)
    left = untried(tokens, parent, live, q_rows, q_row_of, kind)
    seen = set()
    for b in range(B):
        for s in range(T):
            without = [
                i for i in range(T) if live[b, i] and parent[b, i] >= 0 and kind[b, i] == WITHOUT_REPLACEMENT
            ]
            gone = {int(tokens[b, i]) for i in without if i < s and parent[b, i] == parent[b, s]}
            wanted = 1.0
            if s in without and gone:
                q = q_rows[b, q_row_of[b, parent[b, s]]].double()
                wanted = max(float(sum(q[v] for v in range(V) if v not in gone)), 1e-20)
            assert float(left[b, s]) == pytest.approx(wanted, rel=1e-5)
            seen.add((int(kind[b, s]), wanted < 1))
    assert seen == {
        (POINT, False),
        (WITHOUT_REPLACEMENT, False),
        (WITHOUT_REPLACEMENT, True),
        (INDEPENDENT, False),
    }
