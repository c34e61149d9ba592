"""Drafted trees on the engine: exactness, equality with plain decoding, relaxed rules, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from tiny import tiny_llamagen

from visacc.decoders.ar import AR
from visacc.decoders.eagle import Eagle
from visacc.decoders.eagle_relaxed import LanternDecoder, LanternPPDecoder
from visacc.drafters import DrafterConfig, EagleNetwork
from visacc.drafters.bind import target_card
from visacc.drafters.checkpoint import load_drafter, save_drafter
from visacc.drafters.neighbours import NeighbourTable, cached_table, nearest_codes
from visacc.drafters.trees import StaticTree, parse_tree
from visacc.engine import decode
from visacc.models.base import ModelOutput
from visacc.sampling import SamplingParams, probs
from visacc.speculate.trees import DynamicTree

SAMPLING = SamplingParams(guidance_scale=2.0, temperature=0.9, top_k=20, top_p=0.95)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISACC_CACHE", str(tmp_path))


def drafter_for(model, seed=0, **changes):
    """A random drafter: whatever it drafts, exact rules must not care."""
    cfg = model.gpt.config
    values = {
        "family": "llamagen",
        "hidden_size": cfg.dim,
        "intermediate_size": 48,
        "num_heads": cfg.n_head,
        "vocab_size": cfg.vocab_size,
        "prefix": cfg.prefix_len,
        "grid": cfg.grid,
        "target": target_card(model, cfg.dim),
    }
    torch.manual_seed(seed)
    network = EagleNetwork(DrafterConfig(**values | changes))
    for p in network.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return network.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return tiny_llamagen()


# ---- exactness --------------------------------------------------------------------------------------------
def sequence_law(model, label, sampling):
    """Chain-rule law of all sequences by teacher forcing, in the order of itertools.product."""
    gpt, layout = model.gpt, model.layout
    every = torch.tensor(list(itertools.product(range(layout.vocab), repeat=layout.total)))
    with torch.no_grad():
        labels = torch.full((len(every),), label)
        cond, uncond = gpt(every, labels), gpt(every, gpt.null_condition(len(every)))
        slots = torch.arange(layout.total).expand(len(every), -1)
        law = probs(ModelOutput(cond, uncond), slots, layout, sampling)
    return law.gather(2, every[..., None])[..., 0].double().prod(1)


CASES = [
    ("exact", "2x2"),
    ("exact", [[0], [1], [2], [0, 0], [0, 1], [1, 0]]),
    ("traversal", [[0], [1], [0, 0], [0, 1], [1, 0]]),
    ("gumbel-exact", "2x2"),
    ("exact", DynamicTree(depth=2, top_k=2, budget=5)),
]


@pytest.mark.exact
@pytest.mark.parametrize(("rule", "tree"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_law_is_the_targets(rule, tree):
    """Chi-square over all 81 sequences of a 2 x 2 grid of three codes, with guidance and top-k."""
    model = tiny_llamagen(grid=2, vocab=3, classes=3, seed=3)
    sampling = SamplingParams(guidance_scale=1.5, top_k=2, temperature=1.3)
    count = 4_000
    decoder = Eagle(drafter_for(model), tree, rule)
    result = decode(model, decoder, model.encode([1] * count), sampling, list(range(count)))
    index = (result.sequence * 3 ** torch.arange(3, -1, -1)).sum(1)
    observed = torch.bincount(index, minlength=81).double()
    expected = sequence_law(model, 1, sampling) * count
    assert float(observed[expected < 1e-6].sum()) == 0
    large = expected >= 5
    observed = torch.cat([observed[large], observed[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3
    assert result.stats.nfe < 4


@pytest.mark.exact
def test_chi_square_finds_unprocessed_draft_laws():
    """Testing against laws that were not the drawn ones is lossy: the test above has to see it."""

    class Wrong(Eagle):
        def _grow(self, run):
            tree, depth = super()._grow(run)
            tree.q_rows = tree.q_rows.sqrt() / tree.q_rows.sqrt().sum(-1, keepdim=True)
            return tree, depth

    model = tiny_llamagen(grid=2, vocab=3, classes=3, seed=3)
    sampling = SamplingParams(guidance_scale=1.5, temperature=1.3)
    count = 4_000
    result = decode(
        model, Wrong(drafter_for(model), "2x2"), model.encode([1] * count), sampling, list(range(count))
    )
    observed = torch.bincount((result.sequence * 3 ** torch.arange(3, -1, -1)).sum(1), minlength=81).double()
    expected = sequence_law(model, 1, sampling) * count
    large = expected >= 5
    observed, expected = observed[large], expected[large]
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue < 1e-6


@pytest.mark.parametrize("tree", ["chain-3", "mc_sim_7b_63", "dynamic", "3x4"])
def test_gumbel_exact_equals_plain_decoding(model, tree):
    cond, seeds = model.encode([1, 2, 3]), [4, 5, 6]
    plain = decode(model, AR(), cond, SAMPLING, seeds)
    result = decode(model, Eagle(drafter_for(model), tree, "gumbel-exact"), cond, SAMPLING, seeds)
    assert torch.equal(plain.sequence, result.sequence)


@pytest.mark.parametrize("tree", ["chain-1", "naive_extend_57", "dynamic"])
def test_greedy_equals_plain_greedy(model, tree):
    cond, greedy = model.encode([1, 2, 3]), SamplingParams(guidance_scale=3.0, temperature=0)
    plain = decode(model, AR(), cond, greedy, [0, 0, 0])
    result = decode(model, Eagle(drafter_for(model), tree), cond, greedy, [0, 0, 0])
    assert torch.equal(plain.sequence, result.sequence)


@pytest.mark.parametrize("rule", ["exact", "traversal", "gumbel-exact"])
def test_a_sample_does_not_depend_on_its_batch(rule):
    model = tiny_llamagen(grid=4)
    decoder = Eagle(drafter_for(model), "2x3", rule)
    together = decode(model, decoder, model.encode([1, 2, 3]), SAMPLING, [7, 8, 9])
    for i in range(3):
        alone = decode(model, decoder, model.encode([i + 1]), SAMPLING, [7 + i])
        assert torch.equal(alone.sequence[0], together.sequence[i])
        assert int(alone.stats.steps[0]) == int(together.stats.steps[i])


def test_a_perfect_drafter_is_always_accepted(model, monkeypatch):
    """With the target's own law as draft law every chain is accepted to its end."""
    network = drafter_for(model)
    decoder = Eagle(network, "chain-3")
    law = torch.full((1, 1, model.layout.vocab), 1 / model.layout.vocab)
    monkeypatch.setattr(
        Eagle, "_finish", lambda self, run: lambda f, slots: law.expand(*slots.shape, -1).contiguous()
    )
    monkeypatch.setattr(
        "visacc.engine.probs", lambda output, slots, *rest: law.expand(*slots.shape, -1).clone()
    )
    result = decode(model, decoder, model.encode([1, 2]), SamplingParams(), [1, 2])
    assert result.stats.forwards == 1 + -(-35 // 4)
    assert result.stats.tau > 3.5


def test_nodes_of_a_tree_equal_the_same_tokens_as_chains(model):
    """What the drafter says at a node depends on its path only."""
    from visacc.drafters.draft import Drafting

    network = drafter_for(model)
    features = torch.randn(1, 1, 32)

    def start():
        return Drafting.start(
            network,
            features,
            torch.tensor([[5]]),
            branches=1,
            room=64,
            finish=lambda f, slots: model.head(f),
            to_ids=lambda codes, slots: codes,
        )

    drafting = start()
    rows = {}

    def record(scores, count, place):
        depth = len(rows) + 1
        ids = (torch.arange(scores.shape[1] * count).view(1, -1, count) * 7 + depth) % 32
        rows[depth] = (scores, ids)
        return ids, torch.ones_like(ids, dtype=torch.bool), None

    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0)))
    drafted = tree.grow(drafting.session(), torch.tensor([5]), drafting.feature, drafting.root_row(), record)
    tokens = drafted.tokens[0].tolist()
    for path, place in ((((0, 1)), 0), (((1, 0)), 1)):
        slots = [1 + tree.paths.index(path[: i + 1]) for i in range(len(path))]
        chain = start()
        session, feature = chain.session(), chain.feature[:, None]
        above = torch.full((1, 1), -1)
        for depth, slot in enumerate(slots, 1):
            feature, scores = session.run(torch.tensor([[tokens[slot]]]), feature, above, depth)
            above = torch.full((1, 1), depth - 1)
        torch.testing.assert_close(scores[0, 0], rows[3][0][0, place], atol=1e-4, rtol=1e-4)


# ---- relaxed rules ----------------------------------------------------------------------------------------
def test_neutral_settings_are_exact(model):
    network, cond, seeds = drafter_for(model), model.encode([1, 2, 3]), [1, 2, 3]
    exact = decode(model, Eagle(network, "2x3"), cond, SAMPLING, seeds)
    for decoder in (LanternDecoder(0.0, 8, network, "2x3"), LanternPPDecoder(1.0, 8, network, "2x3")):
        assert decoder.lossless
        assert torch.equal(exact.sequence, decode(model, decoder, cond, SAMPLING, seeds).sequence)


@pytest.mark.parametrize("tree", ["2x3", "dynamic"])
def test_relaxation_accepts_more(tree):
    model = tiny_llamagen(grid=4)
    network, seeds = drafter_for(model), list(range(24))
    cond = model.encode([s % 10 for s in seeds])

    def tau(decoder):
        return decode(model, decoder, cond, SAMPLING, seeds).stats.tau

    taus = [tau(LanternPPDecoder(lam, 8, network, tree)) for lam in (1.0, 3.0, 30.0)]
    assert taus[0] < taus[1] < taus[2]
    assert taus[0] < tau(LanternDecoder(0.5, 8, network, tree))


def test_neighbour_table_cache(tmp_path):
    book = torch.randn(40, 5)
    first = cached_table(book, 10)
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 1
    again = cached_table(book, 12)
    assert isinstance(again, NeighbourTable)
    assert torch.equal(first.neighbours, again.neighbours)
    brute = torch.cdist(book, book).fill_diagonal_(torch.inf).argsort(1)[:, :5]
    assert torch.equal(first.neighbours[:, :5].long(), brute)
    other = cached_table(book + 1e-3 * torch.randn(40, 5), 10)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert not torch.equal(other.distances, first.distances)
    files[0].write_bytes(b"half a file")
    assert torch.equal(cached_table(book, 10).neighbours, first.neighbours)
    with pytest.raises(ValueError, match="more than 40 codes"):
        cached_table(book, 40)
    with pytest.raises(ValueError, match="metric"):
        nearest_codes(book, 3, "cosine")


# ---- bad input --------------------------------------------------------------------------------------------
def test_drafter_of_another_model(model, tmp_path):
    network = drafter_for(model)
    save_drafter(network, tmp_path / "drafter")
    other = tiny_llamagen(seed=1)
    other.name = "other"
    with pytest.raises(ValueError, match=r"trained for 'tiny'.*other"):
        Eagle(tmp_path / "drafter").check(other)
    for changes, match in (
        ({"hidden_size": 64}, "width 64.*have 32"),
        ({"vocab_size": 31}, "31 codes.*has 32"),
        ({"grid": 5}, "5 x 5 grid"),
    ):
        with pytest.raises(ValueError, match=match):
            Eagle(drafter_for(model, **changes)).check(model)
    with pytest.raises(ValueError, match="anole drafter cannot drive tiny"):
        Eagle(drafter_for(model, family="anole", norm_shards=2)).check(model)
    with pytest.raises(ValueError, match=r"comes without a drafter.*train drafter"):
        Eagle().check(model)
    prompts = drafter_for(model, prefix=7)
    with pytest.raises(ValueError, match="prompts of 7 slots, tiny has 1"):
        decode(model, Eagle(prompts, "2x2"), model.encode([1]), SAMPLING, [0])


def test_precision_does_not_make_it_another_model(model):
    network = drafter_for(model)
    half = tiny_llamagen()
    half.gpt.to(torch.bfloat16)
    Eagle(network).check(half)


def test_broken_folders(model, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_drafter(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_drafter(tmp_path / "empty")
    folder = tmp_path / "drafter"
    save_drafter(drafter_for(model), folder, dtype=torch.float16)
    assert load_drafter(folder).embed_tokens.weight.dtype == torch.float32
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be read"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither"):
        load_drafter(folder)


def test_options_are_checked(model):
    network = drafter_for(model)
    for call, match in (
        (lambda: Eagle(network, rule="typical"), "unknown rule"),
        (lambda: Eagle(network, "bush"), "unknown tree"),
        (lambda: Eagle(network, [[0], [2]]), "skips child rank 1"),
        (lambda: Eagle(network, [[0], [1, 0], [1]][:2]), "no parent"),
        (lambda: LanternDecoder(1.5), "multiplicative"),
        (lambda: LanternPPDecoder(0.5), "at least 1"),
        (lambda: LanternPPDecoder(k=0), "at least 1"),
        (lambda: LanternPPDecoder(metric="cosine"), "metric"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(ValueError, match=r"40 children.*32 codes"):
        Eagle(network, [[i] for i in range(40)]).check(model)
    with pytest.raises(ValueError, match=r"k=40.*32 of tiny"):
        LanternDecoder(0.1, 40, network).check(model)
    assert parse_tree("2x3").slots == 7
    assert parse_tree("chain-4").depth == 4
