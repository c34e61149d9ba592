"""SJD-PAC with its repairs: the output law is exact for every tree, and the faults of the release are found."""

from __future__ import annotations

import pytest
import torch
from laws import ALPHA, LAYOUTS, chi_square
from tiny import tiny_llamagen
from toy import TableModel

from visacc.decoders import AR
from visacc.decoders.sjd_pac import SJDPAC, pac_shape
from visacc.engine import decode
from visacc.sampling import SamplingParams
from visacc.verify import verify


def test_shape_of_the_published_tree():
    shape, rank, path = pac_shape(64, 4, 3)
    assert shape.slots == 64
    assert shape.children[0] == (1, 2, 3, 4)
    assert shape.children[1] == (5, 6, 7, 8)
    assert shape.children[5] == (21,) and shape.children[6] == ()
    assert path[:4] == (0, 1, 5, 21) and path[-1] == 63
    assert rank[:9] == (0, 0, 1, 2, 3, 0, 1, 2, 3)


@pytest.mark.exact
@pytest.mark.parametrize("layout", ["plain", "forced"])
@pytest.mark.parametrize(
    ("window", "branching", "depth", "guided"),
    [(9, 2, 2, True), (12, 2, 3, False), (3, 2, 2, False), (14, 3, 3, True), (5, 4, 2, False)],
)
def test_law_is_exact(window, branching, depth, guided, layout):
    """Rows of unequal progress, trees with and without a chain, windows beyond the image, top-k and guidance."""
    model = TableModel(4, 6, seed=1, forced=LAYOUTS[layout])
    sampling = SamplingParams(guidance_scale=2.0 if guided else 1.0, top_k=3, temperature=0.8)
    assert chi_square(model, SJDPAC(window, branching, depth), sampling, 20_000) > ALPHA


@pytest.mark.exact
def test_more_candidates_than_codes():
    model = TableModel(2, 5, seed=1, std=1.5)
    assert chi_square(model, SJDPAC(24, 4, 3), SamplingParams(), 20_000) > ALPHA


@pytest.mark.exact
@pytest.mark.parametrize("fault", ["siblings", "longest path", "bonus"])
def test_chi_square_finds_the_faults_of_the_release(fault, monkeypatch):
    import visacc.decoders.sjd_pac as module

    if fault == "siblings":  # candidates that do not follow the law the test assumes

        def from_residual(p, E, m):
            return torch.topk(torch.where(p > 0, 1.0, 0.0) / E, m).indices, torch.ones_like(E[..., :m]) > 0

        monkeypatch.setattr(module, "race_topk", from_residual)
    else:

        def released(tree, law, **numbers):
            step = verify(tree, law, **numbers)
            if fault == "bonus":  # a path that stands to its end is followed by a uniform draw
                leaf = step.n == tree.width
                step.next_root = torch.where(leaf, numbers["U"][:, -1] % law.shape[2], step.next_root)
                return step
            # every node is tested against its own parent's law, and the longest path that passes wins
            rows = torch.arange(len(law))[:, None]
            up = tree.parent.clamp(min=0)
            p = law[rows, up].gather(2, tree.tokens[..., None])[..., 0]
            q = tree.q_rows[rows, tree.q_row_of.gather(1, up)].gather(2, tree.tokens[..., None])[..., 0]
            passed = ((numbers["u"] * q < p) & tree.live) | (torch.arange(tree.tokens.shape[1]) == 0)
            reached = ~(tree.index.ancestors & ~passed[:, None]).any(2)
            best = torch.where(reached, tree.index.depth, -1).argmax(1)
            deeper = tree.index.depth.gather(1, best[:, None])[:, 0] + 1 > step.n
            column = torch.where(tree.index.ancestors[rows[:, 0], best], tree.index.depth, tree.width)
            path = torch.full((len(law), tree.width + 1), -1).scatter_(
                1, column, torch.arange(tree.tokens.shape[1]).expand(len(law), -1)
            )
            step.path = torch.where(deeper[:, None], path[:, :-1].int(), step.path)
            step.n = torch.where(deeper, tree.index.depth.gather(1, best[:, None])[:, 0] + 1, step.n)
            step.tokens = tree.tokens.gather(1, step.path.clamp(min=0).long())
            return step

        monkeypatch.setattr(module, "verify", released)
    model = TableModel(4, 6, seed=1, std=1.5)
    window, depth = (4, 2) if fault == "bonus" else (12, 3)
    assert chi_square(model, SJDPAC(window, 2, depth), SamplingParams(), 20_000) < ALPHA


def test_a_sample_does_not_depend_on_its_batch():
    model = tiny_llamagen()
    sampling = SamplingParams(guidance_scale=2.0, top_k=20)
    seeds, labels = [3, 1, 4, 15], [3, 1, 4, 5]
    together = decode(model, SJDPAC(24), model.encode(labels), sampling, seeds)
    assert together.stats.nfe < 36
    for i, label in enumerate(labels):
        alone = decode(model, SJDPAC(24), model.encode([label]), sampling, [seeds[i]])
        assert torch.equal(alone.codes[0], together.codes[i])


def test_greedy_limit_is_greedy_ar():
    model = tiny_llamagen()
    sampling = SamplingParams(temperature=0)
    ar = decode(model, AR(), model.encode([1, 2]), sampling, [0, 1])
    fast = decode(model, SJDPAC(16), model.encode([1, 2]), sampling, [2, 3])
    assert torch.equal(ar.codes, fast.codes)


def test_bad_options():
    assert SJDPAC(64).branching == 4 and SJDPAC(32).branching == 3 and SJDPAC(8).branching == 2
    with pytest.raises(ValueError, match="21 nodes, more than the window of 16"):
        SJDPAC(16, branching=4)
    with pytest.raises(ValueError, match="branching must be"):
        SJDPAC(64, branching=1)
    with pytest.raises(ValueError, match="depth must be"):
        SJDPAC(64, depth=1)
