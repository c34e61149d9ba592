"""Grouped speculative decoding: the published sampler's decisions, bounds, neutral setting, bad input."""

from __future__ import annotations

import json

import pytest
import torch
from golden import golden_dir
from safetensors.torch import load_file
from toy import TableModel

from visacc.decoders import SJD
from visacc.decoders.gsd import GSD
from visacc.engine import decode
from visacc.models.base import Conditioning
from visacc.sampling import SamplingParams
from visacc.verify import DraftTree, Grouped, TreeShape, verify, verify_chain

GOLDEN = golden_dir("jacobi")


class CodedTable(TableModel):
    """The table model with a codebook."""

    provides = frozenset({"grid", "tree_mask", "codebook"})
    book = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))

    @property
    def codebook(self):
        return self.book


def cases():
    path = GOLDEN.find("gsd_cases.json")
    return json.loads(path.read_text())["cases"] if path else []


@pytest.mark.golden
@pytest.mark.parametrize("case", cases(), ids=lambda c: c["name"])
def test_published_decisions(case):
    tensors = load_file(GOLDEN / "gsd_cases.safetensors")
    p, q, draft, u = (tensors[f"{case['name']}.{k}"] for k in ("p", "q", "draft", "u"))
    onehot = torch.full_like(draft, case["onehot_q"], dtype=torch.bool)
    rule = Grouped(tensors["embed"], official_edges=True)
    drafts, laws = draft[None, 1:], q[None, 1:]
    top, bottom = rule.chain_ratio(p[None, :-1], laws, drafts, onehot[None, 1:])
    own = p[:-1].gather(1, draft[1:, None])[:, 0]
    for row in case["rows"]:
        i = row["i"] - 1
        if row["final_p"] is not None and (own[i] > 0 or not case["onehot_q"]):
            ratio = (top[0, i] / bottom[0, i]).clamp(max=1) if bottom[0, i] > 0 else torch.tensor(0.0)
            assert float(ratio) == pytest.approx(row["final_p"], abs=2e-6)
    verdict = verify_chain(
        p[None],
        drafts,
        torch.tensor([len(p) - 1]),
        torch.zeros_like(draft)[None],
        rule=rule,
        q=laws,
        onehot=onehot[None, 1:],
        u=u[None, 1:],
        U=torch.zeros_like(drafts),
    )
    assert verdict.accepted[0].tolist() == [row["accept"] for row in case["rows"]]
    assert int(verdict.n_accepted) + 1 == case["first_misaligned"]


@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel"])
def test_group_of_one_is_sjd(coupling):
    model, cond = CodedTable(6, 6, width=3, std=1.0), Conditioning(16, {})
    sampling, seeds = SamplingParams(guidance_scale=1.5, top_k=5), list(range(16))
    grouped = GSD(5, 1, coupling=coupling)
    exact = SJD(5)
    exact.coupling = coupling
    ours, theirs = (decode(model, d, cond, sampling, seeds) for d in (grouped, exact))
    assert grouped.lossless
    assert torch.equal(ours.sequence, theirs.sequence)
    assert torch.equal(ours.stats.steps, theirs.stats.steps)


@pytest.mark.parametrize("coupling", ["independent", "maximal"])
def test_larger_groups_take_fewer_steps(coupling):
    model, cond = CodedTable(6, 6, width=3, std=1.5), Conditioning(400, {})
    steps = [
        decode(model, GSD(6, g, 1.0, 1e9, coupling), cond, SamplingParams(), list(range(400))).stats.nfe
        for g in (1, 3, 6)
    ]
    assert steps[0] > steps[1] > steps[2]


def test_law_of_one_test_stays_within_its_bound():
    """Distance of one test's output to p <= sum q |a - min(1, p/q)| (docs/decoders/gsd.md), by exact
    summation."""
    g = torch.Generator().manual_seed(3)
    vocab = 24
    book = torch.randn(vocab, 4, generator=g) * 0.4
    for _ in range(20):
        p, q = (torch.randn(2, vocab, generator=g) * 1.5).softmax(1)
        every = torch.arange(vocab)[None]
        rows = p.expand(1, vocab, -1), q.expand(1, vocab, -1)
        top, bottom = Grouped(book, 8).chain_ratio(*rows, every, None)
        accept = (top / bottom)[0].clamp(max=1)
        exact = (p / q).clamp(max=1)
        residual = (p - q).clamp(min=0)
        law = q * accept + (1 - (q * accept).sum()) * residual / residual.sum()
        bound = (q * (accept - exact).abs()).sum()
        assert (law - p).abs().sum() / 2 <= bound + 1e-6
        assert bound > 1e-3


def group_of(law, x, size, near, far, book):
    """Ids of the group of x by its definition: ranks around x in ascending order, close in law and in embedding."""
    order = sorted((i for i in range(len(law)) if law[i] > 0), key=lambda i: (float(law[i]), i))
    at = order.index(x)
    start = max(0, min(at - size // 2, len(order) - size))
    window = order[start : start + size]
    close = [
        i
        for i in window
        if abs(float(law[i] - law[x])) < near and float((book[i] - book[x]).square().sum()) < far
    ]
    return sorted({*close, x})


def test_siblings_drawn_without_replacement():
    """Three children of one node, one after the other, against a plain computation for every row: what is left of q
    after a failure is q without that child, whatever its companions weigh.
    """
    B, V, size, near, far = 300, 12, 4, 0.2, 6.0
    g = torch.Generator().manual_seed(11)
    book = torch.randn(V, 3, generator=g)
    p, q = (torch.randn(B, V, generator=g).mul(1.2).softmax(1) for _ in range(2))
    children = torch.multinomial(q, 3, generator=g)
    tokens = torch.cat([torch.zeros(B, 1, dtype=torch.int64), children], 1)
    u = 0.3 + 0.7 * torch.rand(B, 4, generator=g)  # most first children fail
    U = torch.randint(0, 2**32, (B, 4), generator=g)
    tree = DraftTree.of_shape(
        TreeShape((-1, 0, 0, 0)), tokens, q_rows=q[:, None], q_kind="without_replacement"
    )
    step = verify(tree, p[:, None].expand(-1, 4, -1).contiguous(), Grouped(book, size, near, far), u=u, U=U)
    failures = 0
    for b in range(B):
        r, left, kept = p[b].double(), q[b].double(), None
        for j, x in enumerate(children[b].tolist()):
            law = left / left.sum()
            ids = group_of(r, x, size, near, far, book) if r[x] > 0 else []
            top, bottom = float(r[ids].sum()), float(law[ids].sum()) if ids else 1.0
            gap = float(u[b, j + 1]) * bottom - top
            if abs(gap) < 1e-6:
                break  # within rounding of its threshold
            if gap < 0:
                kept = x
                break
            failures += 1
            r = (r - law).clamp(min=0)
            r[x] = 0
            r = r / r.sum() if float(r.sum()) > 0 else r
            left[x] = 0
        else:
            assert int(step.n[b]) == 1
            assert float(r[step.next_root[b]]) > 0
            continue
        if kept is not None:
            assert int(step.n[b]) == 2
            assert int(step.tokens[b, 1]) == kept
    assert failures > B // 2


def test_a_sample_does_not_depend_on_its_batch():
    model, sampling = CodedTable(6, 6, width=3), SamplingParams(top_k=4)
    together = decode(model, GSD(4, 4, 1.0, 4.0), Conditioning(6, {}), sampling, list(range(6)))
    for i in range(6):
        alone = decode(model, GSD(4, 4, 1.0, 4.0), Conditioning(1, {}), sampling, [i])
        assert torch.equal(alone.sequence[0], together.sequence[i])


def test_bad_input():
    for options in (
        {"group_size": 0},
        {"group_size": 2.0},
        {"prob_threshold": 0},
        {"distance_threshold": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            GSD(**options)
    with pytest.raises(ValueError, match="gumbel-exact"):
        GSD(coupling="gumbel-exact")
    with pytest.raises(ValueError, match=r"gsd.*codebook.*table"):
        GSD().check(TableModel(4, 4))
    model = CodedTable(4, 4)
    with pytest.raises(ValueError, match="one of 6 codes"):
        GSD().check(model)
