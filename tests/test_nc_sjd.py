"""Neighbour-corrected coupling: exact for any tables, equal to AR in its seed-exact form, and its table files."""

from __future__ import annotations

import pytest
import torch
from test_exact_jacobi import ALPHA, LAYOUTS, Script, chi_square, enumerate_law
from tiny import save_tiny, tiny_llamagen
from toy import NeighbourModel, TableModel

import visacc.decoders.nc_sjd as nc_module
from visacc.calibrate import EffectSums, calibrate
from visacc.cli import main
from visacc.decoders import AR, MCSJD
from visacc.decoders.nc_online import Learner, forget, learner_for
from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import IMAGE_OFFSETS, NeighbourTables, low_rank
from visacc.engine import decode
from visacc.loading import load_model
from visacc.sampling import SamplingParams


def random_tables(model, std=1.5, seed=0, rank=None):
    g = torch.Generator().manual_seed(seed)
    vocab = model.layout.vocab
    full = torch.randn(len(IMAGE_OFFSETS), vocab, vocab, generator=g) * std
    base = torch.randn(vocab, generator=g)
    return NeighbourTables.from_full(full, base, IMAGE_OFFSETS, rank or vocab, model.fingerprint(), 1.0)


# ---- exact enumeration ------------------------------------------------------------------------------------


class SweepScript(Script):
    """Also branches the sweep. The passes of one step share each slot's uniform, so what they see of it is narrowed down
    lazily: with two codes a residual is the other code, and a redraw is one comparison of that uniform."""

    def patch(self, monkeypatch, decoder):
        super().patch(monkeypatch, decoder)
        monkeypatch.setattr(
            NCSJD, "_settled", staticmethod(lambda before, tokens: False)
        )  # every decision is taken
        monkeypatch.setattr(nc_module, "gumbel_draw", self.gumbel)
        monkeypatch.setattr(nc_module, "window_resample", self.resample)

    def columns(self, decoder, size, init_columns):
        self.init_random = False  # fresh drafts come from the tables after the first window
        self.sweep = None
        drafts, width = size - 1, decoder.window - 1
        base = [2] * (1 if decoder.coupling == "maximal" else size)
        if decoder.coupling != "gumbel-exact" and drafts:
            base += [2] * drafts + [2]
        return base + [2] * (width * (decoder.passes + 1))

    def resample(self, p, q, x, u, U, onehot, *, has_draft):
        rows = len(self.weight)
        tokens = self.take(len(p) // rows).reshape(-1)
        p_x, q_x = (t.gather(1, x[:, None])[:, 0] for t in (p, q))
        ratio = torch.where(p_x >= torch.where(onehot, 1.0, q_x), 1.0, p_x / torch.where(onehot, 1.0, q_x))
        cut = torch.where(has_draft, ratio, p[:, 0])
        if self.sweep is None:
            self.sweep = torch.zeros_like(cut), torch.ones_like(cut)
        low, high = self.sweep
        cut = cut.clamp(low, high)
        below = tokens == torch.where(has_draft, x, 0)
        new = torch.where(below, low, cut), torch.where(below, cut, high)
        width = high - low
        chance = torch.where(width > 0, (new[1] - new[0]) / width, 0)
        self.sweep, self.weight = new, self.weight * chance.view(rows, -1).prod(1)
        return below, tokens


@pytest.mark.exact
@pytest.mark.parametrize(
    ("coupling", "passes"),
    [("maximal", 0), ("maximal", 1), ("maximal", 2), ("gumbel", 1), ("gumbel-exact", 2)],
)
@pytest.mark.parametrize("top_k", [0, 1])
def test_law_is_exact_by_enumeration(coupling, passes, top_k, monkeypatch):
    """The real decoder with adversarial tables, every random draw branched."""
    model = TableModel(2, 4, width=2, seed=3, std=1.5, dtype=torch.float64)
    decoder = NCSJD(3, coupling, random_tables(model), passes=max(passes, 1))
    decoder.passes = passes
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
    decoder = NCSJD(3, "maximal", random_tables(model, 3.0), passes=2)
    decoder.check(model)
    honest = NCSJD.begin

    def cheat(self, run, law):
        first = honest(self, run, law)
        after = run.layout.neighbour(0, 0, 1).expand_as(self._neighbour)
        self._neighbour, self._has = after.clamp(min=0), after >= 0
        return first

    monkeypatch.setattr(NCSJD, "begin", cheat)
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
    decoder = NCSJD(4, coupling, random_tables(model), passes=3, fresh=fresh)
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


# ---- online tables ----------------------------------------------------------------------------------------


@pytest.mark.exact
@pytest.mark.parametrize("coupling", ["maximal", "gumbel"])
def test_online_tables_never_change_the_law(coupling):
    """Twelve decodes in a row, each with tables learned from those before it."""
    model = TableModel(4, 6, width=3, seed=1, std=1.5)
    sampling = SamplingParams(guidance_scale=2.0, top_k=3, temperature=0.8)
    decoder = NCSJD(4, coupling, "online", passes=3, rank=3)
    assert chi_square(model, decoder, sampling, 40_000, batches=12) > ALPHA
    learner = learner_for(model, sampling, IMAGE_OFFSETS)
    assert float(learner.gate[0]) > 0.2  # the tables were not empty
    assert float(learner.full.abs().max()) > 0.1


def test_online_tables_learn_the_neighbours_effect():
    """On a model that is additive in its neighbours the steps fall towards those of the true tables."""
    model = NeighbourModel(12, 8, 8, std=1.5)
    cond, seeds = model.encode([""] * 16), list(range(16))

    def steps(decoder):
        return float(decode(model, decoder, cond, SamplingParams(), seeds).stats.steps.float().mean())

    effects = torch.zeros(5, 12, 12)
    effects[0], effects[3] = model.effects[0], model.effects[1]
    true = NeighbourTables.from_full(
        effects, model.tables[0][0][0], IMAGE_OFFSETS, 12, model.fingerprint(), 1.0
    )
    plain, best = steps(MCSJD(24, "maximal")), steps(NCSJD(24, tables=true))
    assert best < 0.6 * plain
    online = [steps(NCSJD(24, tables="online", rank=12)) for _ in range(8)]
    assert online[0] == plain  # nothing is known yet
    assert online[-1] < 0.5 * (plain + best)
    learner = learner_for(model, SamplingParams(), IMAGE_OFFSETS)
    found = learner.full[0] - learner.full[0].mean(0)
    found, wanted = (
        t - t.mean(1, keepdim=True) for t in (found, model.effects[0] - model.effects[0].mean(0))
    )
    assert float(torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1]) > 0.8
    forget(model)
    assert learner_for(model, SamplingParams(), IMAGE_OFFSETS).passes == 0


def test_online_tables_are_frozen_within_a_decode_and_kept_apart():
    model = tiny_llamagen()
    decoder, cond = NCSJD(9, tables="online", rank=4), model.encode([1, 2])
    decode(model, decoder, cond, SamplingParams(), [0, 1])
    used = []
    decode(model, decoder, cond, SamplingParams(), [2, 3], callback=lambda info: used.append(decoder._tables))
    assert used[0] is not None and all(t is used[0] for t in used)
    before = used[0].left.clone()
    decode(model, decoder, cond, SamplingParams(), [4, 5])
    assert torch.equal(before, used[0].left)
    guided = learner_for(model, SamplingParams(guidance_scale=3.0), IMAGE_OFFSETS)
    assert guided.passes == 0
    assert learner_for(model, SamplingParams(top_k=5), IMAGE_OFFSETS).passes > 0


def test_a_table_that_predicts_nothing_is_gated_off():
    g = torch.Generator().manual_seed(0)
    effect = torch.randn(8, 8, generator=g)

    def gate(additive):
        learner = Learner(8, IMAGE_OFFSETS[:1], torch.device("cpu"))
        for _ in range(300):
            a, b = torch.randint(8, (2, 1, 4, 8), generator=g)
            old = torch.randn(4, 8, 8, generator=g)
            new = old + (effect[b[0]] - effect[a[0]] if additive else torch.randn(4, 8, 8, generator=g))
            learner.learn(old.log_softmax(2), new.log_softmax(2), a, b, a != b)
        return float(learner.gate)

    assert gate(True) > 0.9
    assert gate(False) < 0.4


def test_online_seed_exact_form_equals_ar():
    model = tiny_llamagen()
    sampling, seeds = SamplingParams(guidance_scale=2.0, top_k=20), [3, 1, 4]
    ar = decode(model, AR(), model.encode(seeds), sampling, seeds)
    for _ in range(3):
        decoder = NCSJD(9, "gumbel-exact", "online")
        assert torch.equal(decode(model, decoder, model.encode(seeds), sampling, seeds).codes, ar.codes)


def test_without_tables_it_says_what_it_does(caplog):
    model = tiny_llamagen()
    decoder = NCSJD(8)
    decoder.check(model)
    assert "learned while decoding" in caplog.text
    caplog.clear()
    seeds, cond = [5, 6], model.encode([1, 2])
    off = decode(model, NCSJD(8, online=False), cond, SamplingParams(), seeds)
    assert "as mc-sjd" in caplog.text
    plain = decode(model, MCSJD(8, "maximal"), cond, SamplingParams(), seeds)
    assert torch.equal(off.sequence, plain.sequence)
    assert torch.equal(off.stats.steps, plain.stats.steps)
    large = TableModel(5000, 1)
    with pytest.raises(ValueError, match="up to 4096 codes"):
        NCSJD(8, tables="online").check(large)
    caplog.clear()
    NCSJD(8).check(large)
    assert "as mc-sjd" in caplog.text and "5000" in caplog.text


# ---- the same noise, the same image -----------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("window", [2, 7, 40])
def test_seed_exact_form_equals_ar(window, passes):
    model = tiny_llamagen()
    sampling = SamplingParams(guidance_scale=2.0, top_k=20)
    seeds = [3, 1, 4]
    ar = decode(model, AR(), model.encode(seeds), sampling, seeds)
    decoder = NCSJD(window, "gumbel-exact", random_tables(model, 0.5), passes=passes)
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


def test_enough_passes_are_the_sequential_sweep():
    """More passes than window slots change nothing."""
    model = tiny_llamagen()
    sampling = SamplingParams(top_k=20)

    def codes(passes):
        decoder = NCSJD(8, "maximal", random_tables(model, 0.5), passes=passes)
        result = decode(model, decoder, model.encode([1, 2]), sampling, [5, 6])
        return result.codes, result.stats.steps

    a, b = codes(8), codes(13)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


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


# ---- tables -----------------------------------------------------------------------------------------------


def test_tables_round_trip_and_rank(tmp_path):
    model = tiny_llamagen()
    tables = random_tables(model, rank=8)
    tables.save(tmp_path / "t.safetensors")
    again = NeighbourTables.load(tmp_path / "t.safetensors")
    assert again.offsets == tables.offsets
    assert again.rank == 8
    assert torch.allclose(again.left, tables.left, atol=2e-3)
    again.check(model)
    full = random_tables(model)
    exact = full.left @ full.right
    error = [(t.left @ t.right - exact).norm() for t in (random_tables(model, rank=r) for r in (4, 16, 32))]
    assert error[0] > error[1] > error[2]
    assert error[2] < 1e-3


def test_bad_tables(tmp_path):
    model, other = tiny_llamagen(), tiny_llamagen(seed=5)
    with pytest.raises(ValueError, match="belong to another model"):
        NCSJD(8, tables=random_tables(other)).check(model)
    with pytest.raises(ValueError, match="64 codes"):
        NCSJD(8, tables=random_tables(tiny_llamagen(vocab=64))).check(model)
    with pytest.raises(ValueError, match="rank must be"):
        NCSJD(8, rank=0)
    with pytest.raises(ValueError, match="do not exist"):
        NCSJD(8, tables=tmp_path / "none.safetensors").check(model)
    (tmp_path / "bad.safetensors").write_bytes(b"xxxxxxxxxxxxxxxxxx")
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        NCSJD(8, tables=tmp_path / "bad.safetensors").check(model)
    with pytest.raises(ValueError, match="rank"):
        random_tables(model, rank=33)
    with pytest.raises(ValueError, match="earlier cell"):
        NeighbourTables(((0, 0, 1),), torch.zeros(1, 4, 2), torch.zeros(1, 2, 4), torch.zeros(4), "x")
    with pytest.raises(ValueError, match="couples"):
        NCSJD(coupling="independent")
    with pytest.raises(ValueError, match="passes"):
        NCSJD(passes=0)


def test_low_rank_factors_of_large_tables():
    g = torch.Generator().manual_seed(0)
    tables = torch.randn(2, 160, 6, generator=g) @ torch.randn(2, 6, 160, generator=g)
    tables += 0.01 * torch.randn(2, 160, 160, generator=g)
    left, right = low_rank(tables, 8)
    u, s, vh = torch.linalg.svd(tables)
    best = (u[..., :8] * s[:, None, :8]) @ vh[:, :8]
    assert float((left @ right - tables).norm()) < 1.001 * float((best - tables).norm())


@pytest.mark.parametrize("full", [4096, 4])
def test_calibration_measures_real_effects(full, monkeypatch):
    """On a model that is additive in its neighbours the measured tables take most of the staleness away, also when the
    effects are accumulated in few directions only."""
    monkeypatch.setattr(EffectSums, "FULL", full)
    model, ticks = NeighbourModel(20, 6, 6, std=1.0), []
    tables, staleness = calibrate(
        model,
        ["", ""],
        SamplingParams(),
        contexts=40,
        codes=16,
        rank=4 if full == 4 else 20,
        progress=lambda *t: ticks.append(t),
    )
    assert ticks[-1] == (40, 40)
    tables.check(model)
    assert staleness.before[0] > 0.2 and staleness.before[3] > 0.2
    most = 0.85 if full == 4 else 0.75  # these effects have full rank
    assert staleness.ratio[0] < most and staleness.ratio[3] < most
    assert staleness.before[1] == pytest.approx(0, abs=1e-3)  # two to the left has no effect in this model
    again, _ = calibrate(model, ["", ""], SamplingParams(), contexts=40, codes=16, rank=tables.rank)
    assert torch.equal(again.left, tables.left)


def test_refinement_goes_on_from_the_measured_tables():
    model = NeighbourModel(20, 6, 6, std=1.0)
    options = {"contexts": 20, "codes": 8, "rank": 20}
    measured, before = calibrate(model, [""], SamplingParams(), **options)
    refined, after = calibrate(model, [""], SamplingParams(), refine=64, **options)
    assert after.before == before.before
    assert after.ratio[0] < before.ratio[0] and after.ratio[3] < before.ratio[3]
    assert refined.rank == measured.rank


def test_calibration_of_a_network_and_bad_input():
    model = tiny_llamagen(vocab=16)
    tables, staleness = calibrate(model, [1, 2], SamplingParams(guidance_scale=2.0), contexts=10, rank=4)
    assert tables.guidance_scale == 2.0 and tables.rank == 4
    assert staleness.before[0] > 0.05
    for options, message in (({"contexts": 2}, "contexts"), ({"rank": 17}, "rank"), ({"codes": 1}, "codes")):
        with pytest.raises(ValueError, match=message):
            calibrate(model, [1], SamplingParams(), **options)
    model.provides = frozenset()
    with pytest.raises(ValueError, match="no token grid"):
        calibrate(model, [1], SamplingParams())


def test_calibrate_command(tmp_path, capsys):
    folder = save_tiny(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", str(folder), "1", "2", "--contexts", "8", "--rank", "4", "--codes", "8", "-q"])
    assert stop.value.code == 0
    assert "rank 4" in capsys.readouterr().out
    model = load_model(folder)
    decoder = NCSJD(8)
    decoder.check(model)
    assert decoder._tables is not None and decoder._tables.rank == 4
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", str(folder), "1", "--decoder", "sjd"])
    assert stop.value.code == 2
    assert "only nc-sjd" in capsys.readouterr().err
