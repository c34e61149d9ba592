"""Neighbour-corrected coupling: exact for any tables, equal to AR in its seed-exact form, and its table files."""

from __future__ import annotations

import pytest
import torch
from laws import ALPHA, LAYOUTS, Script, ScriptedNoise, chi_square, enumerate_law
from neighbour_cases import random_tables
from tiny import tiny_llamagen
from toy import TableModel

import visacc.decoders.nc_sjd as nc_module
import visacc.kernels.reference.sweep as sweep_module
from visacc.decoders import AR, MCSJD
from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import (
    NeighbourTables,
)
from visacc.engine import decode
from visacc.sampling import SamplingParams

# ---- exact enumeration ------------------------------------------------------------------------------------


class SweepScript(Script):
    """Also branches the sweep: one decision for every slot of the window. With two codes a residual is the other code,
    and a redraw is one comparison of the slot's random number. Slots that are not redrawn drop one of the branches."""

    def patch(self, monkeypatch, decoder):
        super().patch(monkeypatch, decoder)
        sweep = nc_module.neighbour_sweep

        def scripted(p, draft, known, seen, first, *args, **kwargs):
            rows, width = draft.shape
            self.slots = (first[:, None] + torch.arange(width)).flatten()
            self.wanted = self.take(width).flatten()
            self.left = torch.ones(rows * width, dtype=torch.bool)
            result = sweep(p, draft, known, seen, first, *args, **kwargs)
            self.weight = self.weight * (~self.left | (self.wanted == 0)).view(rows, width).all(1)
            return result

        monkeypatch.setattr(nc_module, "neighbour_sweep", scripted)
        monkeypatch.setattr(sweep_module, "choose", self.choose)
        # the race is decided here, whatever the noise
        monkeypatch.setattr(ScriptedNoise, "exponential", lambda _, s: torch.ones(*s.shape, 2), raising=False)

    def columns(self, decoder, size, init_columns):
        self.init_random = False  # fresh drafts come from the tables after the first window
        drafts, width = size - 1, decoder.window - 1
        base = [2] * (1 if decoder.coupling == "maximal" else size)
        if decoder.coupling != "gumbel-exact" and drafts:
            base += [2] * drafts + [2]
        return base + [2] * width

    def choose(self, law, at, coupling):
        assert bool(self.left[at].all()), "a slot is decided once"
        self.left[at] = False
        tokens, x, row = self.wanted[at], coupling.draft[at], at // (len(self.left) // len(self.weight))
        if coupling.E is not None:
            slot = self.slots[at]
            low, high = self.low[row, slot], self.high[row, slot]
            cut = torch.minimum(torch.maximum(law[:, 0], low), high)
            first = tokens == 0
            new = torch.where(first, low, cut), torch.where(first, cut, high)
            self.low[row, slot], self.high[row, slot] = new
            chance = torch.where(high > low, (new[1] - new[0]) / (high - low), 0)
        else:
            p_x = law.gather(1, x[:, None])[:, 0]
            q_x = torch.where(coupling.onehot[at], 1.0, coupling.q[at, x])
            keep = torch.where(p_x >= q_x, 1.0, p_x / q_x)
            first = tokens == torch.where(coupling.drafted[at], x, 0)
            cut = torch.where(coupling.drafted[at], keep, law[:, 0])
            chance = torch.where(first, cut, 1 - cut)
        # several slots of one row may be decided in one call
        self.weight = self.weight.scatter_reduce(0, row, chance.double(), "prod")
        return tokens


@pytest.mark.exact
@pytest.mark.parametrize("coupling", ["maximal", "gumbel", "gumbel-exact"])
@pytest.mark.parametrize("top_k", [0, 1])
def test_law_is_exact_by_enumeration(coupling, top_k, monkeypatch):
    """The real decoder with adversarial tables, every random draw branched."""
    model = TableModel(2, 4, width=2, seed=3, std=1.5, dtype=torch.float64)
    decoder = NCSJD(3, coupling, random_tables(model))
    decoder.check(model)
    found = enumerate_law(model, decoder, top_k, monkeypatch, SweepScript(2))

    def processed(logits, _uncond, _slot):
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
        return logits.softmax(-1)

    expected = model.law(processed)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert max(abs(found.get(k, 0) - expected.get(k, 0)) for k in {*found, *expected}) < 1e-12


@pytest.mark.exact
def test_enumeration_finds_tables_that_look_ahead(monkeypatch):
    """A correction that reads a later position is illegal: the enumeration has to see the damage."""
    model = TableModel(2, 4, width=4, seed=3, std=1.5, dtype=torch.float64)
    decoder = NCSJD(3, "maximal", random_tables(model, 3.0))
    decoder.check(model)
    honest = nc_module.neighbour_sweep

    def cheat(p, draft, known, seen, first, neighbour, left, right, *args, **kwargs):
        ahead = left[0][draft.roll(-1, 1)] @ right[0]
        p = torch.cat([(p.log() + ahead).softmax(2)[:, :-1], p[:, -1:]], dim=1)
        return honest(p, draft, known, seen, first, neighbour, left, right, *args, **kwargs)

    monkeypatch.setattr(nc_module, "neighbour_sweep", cheat)
    found = enumerate_law(model, decoder, 0, monkeypatch, SweepScript(2))
    expected = model.law(lambda logits, _u, _s: logits.softmax(-1))
    assert sum(abs(found.get(k, 0) - v) for k, v in expected.items()) / 2 > 1e-4


# ---- chi-square on the real engine ------------------------------------------------------------------------


@pytest.mark.exact
@pytest.mark.parametrize(
    ("coupling", "fresh", "layout"),
    [
        ("maximal", "tables", "plain"),
        ("maximal", "tables", "forced"),
        ("maximal", "repeat_left", "forced"),
        ("maximal", "random", "plain"),
        ("gumbel", "tables", "forced"),
        ("gumbel", "random", "plain"),
    ],
)
def test_wrong_tables_never_change_the_law(coupling, fresh, layout):
    """Adversarial tables (random, as large as the logits) at every offset; rows of unequal progress."""
    model = TableModel(4, 6, width=2 if layout == "forced" else 3, seed=1, forced=LAYOUTS[layout])
    sampling = SamplingParams(guidance_scale=2.0, top_k=3, temperature=0.8)
    decoder = NCSJD(4, coupling, random_tables(model), fresh=fresh)
    assert chi_square(model, decoder, sampling, 40_000) > ALPHA


@pytest.mark.exact
def test_chi_square_finds_an_uncorrected_record():
    """Drawing from the corrected law but recording the uncorrected one is lossy: the test has to see it."""

    class Forgetful(NCSJD):
        def _refill(self, run, slots, inside, law, survivors, tokens, keep):
            super()._refill(run, slots, inside, law, survivors, tokens, keep)
            gained = keep.sum(1)
            source = (gained[:, None] + torch.arange(self.state["q"].shape[1])).clamp(max=slots.shape[1] - 1)
            carried = gained[:, None] + torch.arange(self.state["q"].shape[1]) < slots.shape[1]
            rows = torch.arange(run.batch)[:, None]
            self.state["q"] = torch.where(carried[..., None], law[rows, source], self.state["q"])

    model = TableModel(4, 6, width=3, seed=1)
    decoder = Forgetful(4, "maximal", random_tables(model), fresh="random")
    assert chi_square(model, decoder, SamplingParams(top_k=3), 40_000) < ALPHA


# ---- the same noise, the same image -----------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 7, 40])
def test_seed_exact_form_equals_ar(window):
    model = tiny_llamagen()
    sampling = SamplingParams(guidance_scale=2.0, top_k=20)
    seeds = [3, 1, 4]
    ar = decode(model, AR(), model.encode(seeds), sampling, seeds)
    decoder = NCSJD(window, "gumbel-exact", random_tables(model, 0.5))
    assert torch.equal(decode(model, decoder, model.encode(seeds), sampling, seeds).codes, ar.codes)


@pytest.mark.parametrize("coupling", ["maximal", "gumbel", "gumbel-exact"])
def test_a_sample_does_not_depend_on_its_batch(coupling):
    model = tiny_llamagen()
    sampling = SamplingParams(guidance_scale=2.0, top_k=20)
    decoder = NCSJD(9, coupling, random_tables(model, 0.5))
    seeds = [3, 1, 4, 15]
    together = decode(model, decoder, model.encode([3, 1, 4, 5]), sampling, seeds).codes
    for i, label in enumerate([3, 1, 4, 5]):
        alone = decode(model, decoder, model.encode([label]), sampling, [seeds[i]]).codes
        assert torch.equal(alone[0], together[i])


def test_empty_tables_are_mc_sjd_in_law_of_steps():
    """With tables of zeros and the same initialisation the sweep is the plain coupled redraw."""
    model = tiny_llamagen()
    seeds = list(range(24))
    cond = model.encode([s % 10 for s in seeds])
    plain = decode(model, MCSJD(8, "gumbel"), cond, SamplingParams(), seeds)
    empty = decode(
        model, NCSJD(8, "gumbel", NeighbourTables.zeros(model), fresh="random"), cond, SamplingParams(), seeds
    )
    assert torch.equal(plain.codes, empty.codes)
    assert torch.equal(plain.stats.steps, empty.stats.steps)
