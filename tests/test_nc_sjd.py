"""Neighbour-corrected coupling: exact for any tables, equal to AR in its seed-exact form, and its table files."""

from __future__ import annotations

import pytest
import torch
from test_exact_jacobi import ALPHA, LAYOUTS, chi_square
from tiny import tiny_llamagen
from toy import TableModel

from visacc.decoders import AR
from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import IMAGE_OFFSETS, NeighbourTables
from visacc.engine import decode
from visacc.sampling import SamplingParams


def random_tables(model, std=1.5, seed=0, rank=None):
    g = torch.Generator().manual_seed(seed)
    vocab = model.layout.vocab
    full = torch.randn(len(IMAGE_OFFSETS), vocab, vocab, generator=g) * std
    base = torch.randn(vocab, generator=g)
    return NeighbourTables.from_full(full, base, IMAGE_OFFSETS, rank or vocab, model.fingerprint(), 1.0)


@pytest.mark.exact
@pytest.mark.parametrize("fresh", ["tables", "repeat_left", "random"])
@pytest.mark.parametrize("coupling", ["maximal", "gumbel"])
@pytest.mark.parametrize("layout", ["plain", "forced"])
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
    together = decode(model, decoder, model.encode(seeds[:3] + [5]), sampling, seeds).codes
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
    from visacc.decoders import MCSJD

    model = tiny_llamagen()
    seeds = list(range(24))
    cond = model.encode([s % 10 for s in seeds])
    plain = decode(model, MCSJD(8, "gumbel"), cond, SamplingParams(), seeds)
    empty = decode(model, NCSJD(8, "gumbel", NeighbourTables.zeros(model), fresh="random"), cond, SamplingParams(), seeds)
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
    with pytest.raises(ValueError, match="visacc calibrate"):
        NCSJD(8).check(model)
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


def test_calibration_measures_real_effects():
    """On a model whose law depends strongly on its neighbours the measured tables reduce the staleness."""
    from visacc.calibrate import calibrate

    model = tiny_llamagen(vocab=16)
    ticks = []
    tables, staleness = calibrate(
        model, [1, 2], SamplingParams(), contexts=24, rank=16, progress=lambda done, total: ticks.append((done, total))
    )
    assert ticks[-1] == (24, 24)
    tables.check(model)
    assert len(staleness.before) == 5
    assert staleness.before[0] > 0.05
    assert min(staleness.ratio) < 1
    again, _ = calibrate(model, [1, 2], SamplingParams(), contexts=24, rank=16)
    assert torch.equal(again.left, tables.left)
    with pytest.raises(ValueError, match="contexts"):
        calibrate(model, [1], SamplingParams(), contexts=2)
