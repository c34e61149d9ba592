"""Losslessness of the Jacobi decoders: exact enumeration of the output law, and chi-square on the real engine."""

from __future__ import annotations

import math

import pytest
import torch
from laws import ALPHA, LAYOUTS, chi_square, enumerate_law
from toy import TableModel

import visacc.decoders.window_init as init_module
from visacc.decoders import AR, Jacobi
from visacc.engine import decode
from visacc.sampling import SamplingParams

pytestmark = pytest.mark.exact


CASES = [
    (c, i, u)
    for c in ("independent", "maximal", "gumbel")
    for i, u in (("random", True), ("random", False), ("repeat_left", True))
]
CASES += [("gumbel-exact", "random", True), ("gumbel-exact", "repeat_above", True)]
CASES += [("maximal", i, True) for i in ("repeat_above", "sample_left", "sample_above")]


@pytest.mark.parametrize("top_k", [0, 1])
@pytest.mark.parametrize(("coupling", "init", "uniform_q"), CASES)
def test_law_is_exact_by_enumeration(coupling, init, uniform_q, top_k, monkeypatch):
    model = TableModel(2, 4, width=2, seed=3, std=1.5, dtype=torch.float64)
    decoder = Jacobi(3, coupling, init, uniform_q=uniform_q)
    found = enumerate_law(model, decoder, top_k, monkeypatch)

    def processed(logits, _uncond, _slot):
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
        return logits.softmax(-1)

    expected = model.law(processed)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    keys = set(found) | set(expected)
    assert max(abs(found.get(k, 0) - expected.get(k, 0)) for k in keys) < 1e-12


@pytest.mark.parametrize(
    ("coupling", "window"), [("independent", 1), ("maximal", 5), ("independent", 4), ("gumbel", 4)]
)
def test_law_is_exact_for_other_windows(coupling, window, monkeypatch):
    model = TableModel(2, 4, width=4, seed=5, std=1.5, dtype=torch.float64)
    found = enumerate_law(model, Jacobi(window, coupling), 0, monkeypatch)
    expected = model.law(lambda logits, _u, _s: logits.softmax(-1))
    assert max(abs(found.get(k, 0) - v) for k, v in expected.items()) < 1e-12


def test_law_is_exact_with_three_codes(monkeypatch):
    model = TableModel(3, 3, seed=6, std=1.5, dtype=torch.float64)
    found = enumerate_law(model, Jacobi(3, "maximal"), 2, monkeypatch)

    def processed(logits, _u, _s):
        return logits.masked_fill(logits < logits.topk(2).values[..., -1:], -math.inf).softmax(-1)

    expected = model.law(processed)
    assert {k for k, v in found.items() if v > 0} == set(expected)
    assert max(abs(found[k] - v) for k, v in expected.items()) < 1e-12


def test_enumeration_finds_an_illegal_draft_law(monkeypatch):
    """A copied token must not record the uniform law: the enumeration has to see the damage."""
    model = TableModel(2, 4, width=4, seed=3, std=1.5, dtype=torch.float64)
    decoder = Jacobi(3, "maximal", "repeat_left")
    honest = init_module.WindowInit._propose

    def cheat(self, run, slots, first, known, laws, want_q):
        tokens, onehot, _ = honest(self, run, slots, first, known, laws, want_q)
        q = torch.full((*slots.shape, 2), 0.5, dtype=torch.float64)
        return tokens, torch.zeros_like(onehot), q

    monkeypatch.setattr(init_module.WindowInit, "_propose", cheat)
    found = enumerate_law(model, decoder, 0, monkeypatch)
    expected = model.law(lambda logits, _u, _s: logits.softmax(-1))
    assert sum(abs(found.get(k, 0) - v) for k, v in expected.items()) / 2 > 0.02


# ---- chi-square on the real engine ------------------------------------------------------------------------


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("layout", ["plain", "forced"])
@pytest.mark.parametrize("coupling", ["ar", "independent", "maximal", "gumbel", "gumbel-exact"])
def test_engine_samples_the_ar_law(coupling, layout, guided):
    """Rows of unequal progress, top-k and guidance on; one batch of all samples."""
    model = TableModel(4, 6, seed=1, forced=LAYOUTS[layout])
    sampling = SamplingParams(guidance_scale=2.0 if guided else 1.0, top_k=2, temperature=0.8)
    decoder = AR() if coupling == "ar" else Jacobi(4, coupling)
    assert chi_square(model, decoder, sampling) > ALPHA


def test_chi_square_finds_a_stale_draft_law():
    """The known fault of an original program: drafts kept behind a rejection keep their old q."""

    class Stale(Jacobi):
        def _refill(self, run, slots, inside, law, survivors, tokens, keep):
            old = self.state["q"].clone()
            super()._refill(run, slots, inside, law, survivors, tokens, keep)
            gained = keep.sum(1)
            source = gained[:, None] + torch.arange(old.shape[1])
            kept = survivors.gather(1, source.clamp(max=slots.shape[1] - 1)) == self._before.gather(
                1, source.clamp(max=old.shape[1] - 1)
            )
            rows = torch.arange(len(old))[:, None]
            stale = old[rows, source.clamp(max=old.shape[1] - 1)]
            self.state["q"] = torch.where((kept & (source < old.shape[1]))[..., None], stale, self.state["q"])

        def judge(self, run, proposal, law, output):
            self._before = self.state["drafts"]
            return super().judge(run, proposal, law, output)

    model = TableModel(4, 6, seed=1)
    assert chi_square(model, Stale(4, "maximal", uniform_q=False), SamplingParams(top_k=2)) < ALPHA


# ---- the same noise, the same image -----------------------------------------------------------------------


@pytest.mark.parametrize("init", ["random", "repeat_left", "sample_above"])
@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_gumbel_exact_equals_ar_token_for_token(window, init):
    model = TableModel(4, 6, width=3, seed=2)
    sampling = SamplingParams(guidance_scale=3.0, top_k=3, top_p=0.95)
    seeds = list(range(64))
    ar = decode(model, AR(), model.encode([""] * 64), sampling, seeds)
    fast = decode(model, Jacobi(window, "gumbel-exact", init), model.encode([""] * 64), sampling, seeds)
    assert torch.equal(ar.sequence, fast.sequence)
    assert window == 1 or fast.stats.nfe < ar.stats.nfe


@pytest.mark.parametrize("coupling", ["ar", "independent", "maximal", "gumbel", "gumbel-exact"])
def test_a_sample_does_not_depend_on_its_batch(coupling):
    model = TableModel(4, 6, seed=2)
    sampling = SamplingParams(guidance_scale=2.0, top_k=3)

    def sequences(seeds):
        decoder = AR() if coupling == "ar" else Jacobi(4, coupling)
        return decode(model, decoder, model.encode([""] * len(seeds)), sampling, seeds).sequence

    together = sequences(list(range(9)))
    alone = torch.cat([sequences([s]) for s in range(9)])
    shuffled = sequences([5, 3, 8])
    assert torch.equal(together, alone)
    assert torch.equal(shuffled, together[[5, 3, 8]])


@pytest.mark.parametrize("coupling", ["independent", "maximal", "gumbel", "gumbel-exact"])
def test_greedy_limit_is_greedy_ar(coupling):
    model = TableModel(4, 6, seed=4)
    sampling = SamplingParams(temperature=0)
    ar = decode(model, AR(), model.encode([""] * 2), sampling, [0, 1])
    fast = decode(model, Jacobi(4, coupling), model.encode([""] * 2), sampling, [2, 3])
    assert torch.equal(ar.sequence, fast.sequence)


def test_samples_of_a_batch_are_independent():
    """Neighbouring samples share no noise: equal tokens at a slot are as frequent as two independent draws say."""
    model = TableModel(4, 6, seed=1, std=0.0)
    sequence = decode(
        model, Jacobi(4, "gumbel"), model.encode([""] * 8000), SamplingParams(), list(range(8000))
    ).sequence
    equal = (sequence[0::2] == sequence[1::2]).double().mean(0)
    # binomial(4000, 1/4): sd 0.0068; 6 slots, two-sided 5 sd: false alarm 3e-6
    assert bool(((equal - 0.25).abs() < 5 * 0.00685).all())
