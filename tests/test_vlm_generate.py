"""Speculative text is the text of ``model.generate``: greedy token for token, sampling by law and by seed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import vlm_tiny
from library_versions import of_later_transformers, parameters
from scipy import stats
from torch import Tensor
from vlm_tiny import Tiny

from visacc.models.vlm.target import VLMTarget
from visacc.speculate.api import Speculator, speculate
from visacc.speculate.block_tree import BlockTree
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.speculate.loop import generate
from visacc.speculate.ngram import NgramDrafter
from visacc.speculate.params import TextParams
from visacc.speculate.trees import Chain, DynamicTree, StaticTree

METHODS = ("ngram", "eagle", "msd", "dream", "flash", "vispec")
GREEDY = {"max_new_tokens": 20, "do_sample": False}


@functools.cache
def tiny(name: str) -> Tiny:
    case = vlm_tiny.FAMILIES[name]()
    case.model.generation_config.pad_token_id = 0
    case.model.generation_config.eos_token_id = 2
    return case


def drafter(method: str, seed: int = 1, **overrides: Any) -> Drafter | NgramDrafter:
    """An untrained drafter whose every part has an effect."""
    if method == "ngram":
        return NgramDrafter(vlm_tiny.VOCAB)
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "vocab_size": vlm_tiny.VOCAB,
    }
    if method == "flash":
        values.update(heads_ahead=3, latents=2)
    config = DrafterConfig(method=method, **{**values, **overrides})
    made = Drafter(config)
    for name, p in made.named_parameters():
        if name.endswith("gate"):
            p.data.fill_(0.7)
    return made


@functools.cache
def plain(name: str) -> Tensor:
    case = tiny(name)
    return case.model.generate(**case.inputs, **GREEDY)


NO_TYPES = "generate() refuses the mm_token_type_ids of this model's processor"


@pytest.mark.parametrize("name", parameters(vlm_tiny.FAMILIES, {"qwen2": NO_TYPES, "qwen2.5": NO_TYPES}))
def test_greedy_equals_generate(name: str) -> None:
    case = tiny(name)
    for method in METHODS:
        speculator = speculate(case.model, drafter(method))
        out = speculator.generate(**case.inputs, **GREEDY)
        assert torch.equal(out, plain(name)), method
        assert speculator.last is not None
        assert int(speculator.last.lengths.max()) <= GREEDY["max_new_tokens"]


class Oracle:
    """A drafter that knows the right answer and drafts it as a chain; every ``slip``-th token is wrong."""

    ahead = 1
    taps: tuple[int, ...] = ()

    def __init__(self, answer: Tensor, slip: int) -> None:
        self.answer, self.slip = answer, slip

    def prefill(self, view: Any, feats: Any, root: Tensor, *, room: int) -> Any:
        self.at = torch.ones_like(root)
        self.rows = torch.arange(len(root))
        self.root, self.logits = root, torch.zeros(0)
        self.feature = torch.zeros(len(root), 1)
        return self

    def observe(self, state: Any, step: Any) -> None:
        self.at, self.root = self.at + step.n, step.next_root

    def session(self, state: Any) -> Any:
        return self

    def select(self, rows: Tensor) -> None:
        self.at, self.rows, self.root = self.at[rows], self.rows[rows], self.root[rows]

    def tighten(self) -> None:
        pass

    def grow(self, session: Any, root: Tensor, feature: Any, logits: Any, sampler: Any = None) -> Any:
        from visacc.speculate.trees import Grown

        place = self.at[:, None] + torch.arange(4)
        width = self.answer.shape[1]
        tokens = self.answer[self.rows[:, None], place.clamp(max=width - 1)]
        tokens = torch.where(place % self.slip == 0, (tokens + 1) % vlm_tiny.VOCAB, tokens)
        tokens = torch.cat([root[:, None], tokens], dim=1)
        order = torch.arange(5).expand_as(tokens)
        return Grown(tokens, order - 1, order, torch.ones_like(tokens, dtype=torch.bool), torch.zeros(1))

    slots = scratch = 5
    levels = 4


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("slip", [1000, 3, 1])
def test_accepted_runs(slip: int, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long accepted runs, of different lengths in the two rows, leave caches and positions right."""
    monkeypatch.setenv("VISACC_DEBUG", debug)  # the checks of values find nothing
    case = tiny("llava")
    width = case.inputs["input_ids"].shape[1]
    answer = plain("llava")[:, width:]
    oracle = Oracle(answer, slip)
    params = TextParams(max_new_tokens=20, eos=(2,))
    result = generate(VLMTarget(case.model), oracle, oracle, case.inputs, params, [0, 0])
    assert torch.equal(result.ids, answer[:, : result.ids.shape[1]])
    tau = result.stats.tau
    assert tau == 1 if slip == 1 else tau > (4 if slip == 1000 else 2)
    assert int(result.stats.accepted.sum()) <= int(result.stats.tokens.sum())


def test_end_token_cuts_the_path() -> None:
    """An end token inside of an accepted path ends the row there; nothing of the overshoot is returned."""
    case = tiny("llava")
    width = case.inputs["input_ids"].shape[1]
    answer = plain("llava")[:, width:]
    end = int(answer[0, 6])
    first = int((answer[0] == end).nonzero()[0])
    oracle = Oracle(answer, 1000)
    params = TextParams(max_new_tokens=20, eos=(end,))
    result = generate(VLMTarget(case.model), oracle, oracle, case.inputs, params, [0, 0])
    assert int(result.lengths[0]) == first + 1
    assert result.ids[0, first] == end
    assert bool((result.ids[0, first + 1 :] == 0).all())


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 15},
        pytest.param(
            {"repetition_penalty": 1.3, "min_new_tokens": 12},
            marks=of_later_transformers("the repetition penalty counts padding as said"),
        ),
    ],
)
def test_processors_equal_generate(options: dict[str, Any]) -> None:
    case = tiny("llava")
    expected = case.model.generate(**case.inputs, **GREEDY, **options)
    for method in ("ngram", "msd"):
        out = speculate(case.model, drafter(method)).generate(**case.inputs, **GREEDY, **options)
        assert torch.equal(out, expected), method


def test_one_seed_one_text() -> None:
    """A seed gives the same sampled text with every drafter, without one, alone and in a batch."""
    case = tiny("llava")
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    reference = speculate(case.model, None).generate(**case.inputs, **options, seed=5)
    for method in METHODS:
        out = speculate(case.model, drafter(method)).generate(**case.inputs, **options, seed=5)
        assert torch.equal(out, reference), method
    assert not torch.equal(reference, speculate(case.model, None).generate(**case.inputs, **options, seed=6))
    params = TextParams(max_new_tokens=16, temperature=0.8, top_k=20, top_p=0.9, eos=(2,))
    row = {k: v[1:] for k, v in case.inputs.items() if k not in case.images(1)} | case.images(1)
    both = Speculator(case.model, drafter("msd")).run(case.inputs, params, [1, 2])
    alone = Speculator(case.model, drafter("dream")).run(row, params, [2])
    n = int(alone.lengths)
    assert int(both.lengths[1]) == n
    assert torch.equal(both.ids[1, :n], alone.ids[0, :n])


def exact_law(case: Tiny, params: TextParams) -> dict[tuple[int, int], float]:
    """Exact law of the first two tokens behind prompt 1, by enumeration with plain causal forwards."""
    target = VLMTarget(case.model)
    with torch.no_grad():
        view = target.prefill(case.inputs, room=1).view
    prompt = view.inputs_embeds[1:, view.valid[1]]

    def law(ids: list[int]) -> Tensor:
        embeds = torch.cat([prompt, target.embed(torch.tensor([ids], dtype=torch.int64))], dim=1)
        with torch.no_grad():
            hidden = target.text(inputs_embeds=embeds, use_cache=False).last_hidden_state
            return params.filter(target.logits(hidden[:, -1]).float())[0]

    first = law([])
    result = {}
    for a in first.nonzero()[:, 0].tolist():
        second = law([a])
        for b in second.nonzero()[:, 0].tolist():
            result[a, b] = float(first[a] * second[b])
    return result


@pytest.mark.exact
@pytest.mark.parametrize("kind", ["dynamic", "block", "static", "static-drawn", "ngram"])
def test_sampling_is_lossless(kind: str) -> None:
    """Frequencies of the first two tokens against their exact law, chi-square, thousands of rows in one
    batch.

    Without a bug p-values are uniform; the threshold fails one run in 10^4, and the seeds are fixed.
    """
    case = tiny("llava")
    params = TextParams(max_new_tokens=3, temperature=0.6, top_k=6, top_p=0.95)
    exact = exact_law(case, params)
    assert abs(sum(exact.values()) - 1) < 1e-5
    count = 3000
    inputs = {k: v[1:].expand(count, *v.shape[1:]) for k, v in case.inputs.items() if k not in case.images(1)}
    inputs |= {k: v.expand(count, *v.shape[1:]) for k, v in case.images(1).items()}
    made, tree = drafter("msd"), DynamicTree(depth=1, top_k=3, budget=8)
    if kind == "block":
        made, tree = drafter("flash"), BlockTree(3, top_k=3, budget=8)
    elif kind == "static" or kind == "static-drawn":
        tree = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
    elif kind == "ngram":
        made = drafter("ngram")
    drawn = kind == "static-drawn"
    speculator = Speculator(case.model, made, tree=tree, sampled_drafts=drawn)
    result = speculator.run(inputs, params, list(range(count)))
    pairs: dict[tuple[int, int], int] = {}
    for a, b in result.ids[:, :2].tolist():
        pairs[a, b] = pairs.get((a, b), 0) + 1
    assert set(pairs) <= set(exact)
    observed, expected, rest = [], [], [0.0, 0.0]
    for pair, p in exact.items():
        if p * count >= 5:
            observed.append(pairs.get(pair, 0))
            expected.append(p * count)
        else:
            rest[0] += pairs.get(pair, 0)
            rest[1] += p * count
    if rest[1] > 0:
        observed.append(rest[0])
        expected.append(rest[1])
    scale = sum(observed) / sum(expected)
    assert stats.chisquare(observed, [e * scale for e in expected]).pvalue > 1e-4
    if drawn:
        assert int(result.stats.accepted.sum()) > 0


def test_tree_nodes_equal_chains() -> None:
    """A drafter's logits of a node in a tree are those of the same path run as a chain."""
    case = tiny("llava")
    target = VLMTarget(case.model)
    for method in ("eagle", "msd", "dream", "vispec"):
        made = drafter(method)
        assert isinstance(made, Drafter)
        speculator = Speculator(case.model, made)
        with torch.no_grad():
            done = target.prefill(case.inputs, room=8)
            root = done.logits.argmax(1)
            state = speculator.drafter.prefill(done.view, done.feats, root, room=32)
            session = made.session(state)
            tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
            start = state.feature[:, None].expand(-1, 3, -1)
            none = torch.full((2, 3), -1)
            feats, _ = session.run(tokens, start, none, 1)
            below = torch.tensor([[0, 0, 2], [1, 2, 2]])
            rows = torch.arange(2)[:, None]
            children = torch.tensor([[11, 12, 13], [14, 15, 16]])
            _, logits = session.run(children, feats[rows, below], below, 2)
            for b in range(2):
                for i in range(3):
                    chain = made.session(state)
                    up = below[b, i]
                    f, _ = chain.run(tokens[:, up : up + 1], state.feature[:, None], none[:, :1], 1)
                    _, alone = chain.run(children[:, i : i + 1], f, torch.zeros(2, 1, dtype=torch.int64), 2)
                    assert (alone[b, 0] - logits[b, i]).abs().max() < 1e-5, method


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, ids: Tensor) -> None:
        self.parts.append(ids.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streaming_and_context() -> None:
    case = tiny("llava")
    row = {k: v[:1] for k, v in case.inputs.items() if k not in case.images(0)} | case.images(0)
    streamer = Recorder()
    with speculate(case.model, drafter("msd")):
        out = case.model.generate(**row, **GREEDY, streamer=streamer)
    assert "generate" not in vars(case.model)
    assert torch.equal(out, case.model.generate(**row, **GREEDY))
    assert [i for part in streamer.parts for i in part] == out[0].tolist()
    assert streamer.ended
    direct = case.model.generate(**row, **GREEDY, custom_generate=speculate(case.model, "ngram"))
    assert torch.equal(direct, out)


def test_stopping_criteria() -> None:
    """A custom rule is asked for every token, so it stops where ``generate`` stops."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    case = tiny("llava")
    width = case.inputs["input_ids"].shape[1]
    wanted = int(plain("llava")[1, width + 7])

    class Until(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids[:, -1] == wanted

    rule = StoppingCriteriaList([Until()])
    expected = case.model.generate(**case.inputs, **GREEDY, stopping_criteria=rule)
    out = speculate(case.model, drafter("msd")).generate(**case.inputs, **GREEDY, stopping_criteria=rule)
    assert torch.equal(out, expected)


def test_bad_input() -> None:
    case = tiny("llava")
    wrong = drafter("msd")
    assert isinstance(wrong, Drafter)
    wrong.config.target.update(hidden_size=64)
    with pytest.raises(ValueError, match="trained for another target"):
        speculate(case.model, wrong)
    with pytest.raises(ValueError, match="hidden size 16"):
        speculate(case.model, drafter("msd", hidden_size=16))
    with pytest.raises(ValueError, match="no trained 'dream' drafter"):
        speculate(case.model, "dream")
    with pytest.raises(ValueError, match="does not exist"):
        speculate(case.model, "/nowhere/drafter")
    with pytest.raises(ValueError, match="predicts 3 token"):
        speculate(case.model, drafter("flash"), tree=Chain(3))
    speculator = speculate(case.model, "ngram")
    with pytest.raises(ValueError, match="NoRepeatNGramLogitsProcessor"):
        speculator.generate(**case.inputs, **GREEDY, no_repeat_ngram_size=2)
    with pytest.raises(ValueError, match="exceed the model's context"):
        speculator.generate(**case.inputs, max_new_tokens=300, do_sample=False)
    with pytest.raises(ValueError, match="temperature"):
        TextParams(temperature=-1)
    with pytest.raises(ValueError, match="exceeds the"):
        DynamicTree(depth=1, top_k=2, budget=50)
    with pytest.raises(ValueError, match="has no parent"):
        StaticTree(((0,), (1, 0)))
