"""Neighbour tables: learned while decoding, calibrated, read from files."""

from __future__ import annotations

import json

import pytest
import torch
from laws import ALPHA, chi_square
from neighbour_cases import from_full, random_tables
from safetensors.torch import save_file
from tiny import save_tiny, tiny_llamagen
from toy import NeighbourModel, TableModel

from visacc.calibrate import calibrate
from visacc.cli import main
from visacc.decoders import AR, MCSJD
from visacc.decoders.nc_online import Learner, Witness, forget, learner_for
from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import (
    IMAGE_OFFSETS,
    VIDEO_OFFSETS,
    NeighbourTables,
    neighbour_slots,
    offsets_of,
)
from visacc.engine import decode
from visacc.loading import load_model
from visacc.models.base import Layout
from visacc.sampling import SamplingParams

# ---- online tables ----------------------------------------------------------------------------------------


@pytest.mark.exact
@pytest.mark.parametrize("coupling", ["maximal", "gumbel"])
def test_online_tables_never_change_the_law(coupling):
    """Twelve decodes in a row, each with tables learned from those before it."""
    model = TableModel(4, 6, width=3, seed=1, std=1.5)
    sampling = SamplingParams(guidance_scale=2.0, top_k=3, temperature=0.8)
    decoder = NCSJD(4, coupling, "online", rank=3)
    assert chi_square(model, decoder, sampling, 40_000, batches=12) > ALPHA
    learner = learner_for(model, sampling, IMAGE_OFFSETS, 3)
    tables = learner.tables("", 1.0)
    assert tables is not None  # the tables were not empty
    assert float((tables.left @ tables.right).abs().max()) > 0.1


def test_online_tables_learn_the_neighbours_effect():
    """On a model that is additive in its neighbours the steps fall towards those of the true tables."""
    model = NeighbourModel(12, 8, 8, std=1.5)
    cond, seeds = model.encode([""] * 16), list(range(16))

    def steps(decoder):
        return float(decode(model, decoder, cond, SamplingParams(), seeds).stats.steps.float().mean())

    effects = torch.zeros(5, 12, 12)
    effects[0], effects[3] = model.effects[0], model.effects[1]
    true = from_full(effects, model.tables[0][0][0].float(), 12, model)
    plain, best = steps(MCSJD(24, "maximal")), steps(NCSJD(24, tables=true))
    assert best < 0.6 * plain
    online = [steps(NCSJD(24, tables="online", rank=12)) for _ in range(8)]
    assert online[0] == plain  # nothing is known yet
    assert online[-1] < 0.5 * (plain + best)
    learner = learner_for(model, SamplingParams(), IMAGE_OFFSETS, 12)
    assert learner.passes > 0
    forget(model)
    assert learner_for(model, SamplingParams(), IMAGE_OFFSETS, 12).passes == 0


def test_online_tables_are_frozen_within_a_decode_and_kept_apart():
    model = NeighbourModel(12, 6, 6, std=1.5)
    decoder, cond = NCSJD(9, tables="online", rank=4), model.encode([1, 2])
    for seed in range(4):
        decode(model, decoder, cond, SamplingParams(), [seed, 100 + seed])
    used = []
    decode(model, decoder, cond, SamplingParams(), [2, 3], callback=lambda info: used.append(decoder._tables))
    assert used[0] is not None and all(t is used[0] for t in used)
    before = used[0].left.clone()
    decode(model, decoder, cond, SamplingParams(), [4, 5])
    assert torch.equal(before, used[0].left)
    assert not torch.equal(before, decoder._tables.left)
    other = learner_for(model, SamplingParams(temperature=0.5), IMAGE_OFFSETS, 4)
    assert other.passes == 0
    assert learner_for(model, SamplingParams(), IMAGE_OFFSETS, 4).passes > 0


def observations(additive, g, effect):
    """A pass of 4 positions with one neighbour each; the change of the law is its neighbour's effect, or chance."""
    was, now = torch.randint(8, (2, 1, 1, 4), generator=g)
    old = torch.randn(1, 4, 8, generator=g)
    change = effect[now[0]] - effect[was[0]] if additive else torch.randn(1, 4, 8, generator=g)
    laws = [z.log_softmax(2) for z in (old, old + change)]
    return *laws, was, now, (was != now).any(0), torch.arange(4)


def test_tables_that_predict_nothing_are_not_released():
    g = torch.Generator().manual_seed(0)
    effect = torch.randn(8, 8, generator=g)
    for additive in (True, False):
        learner = Learner(8, IMAGE_OFFSETS[:1], torch.device("cpu"), SamplingParams(), rank=8)
        for _ in range(150):
            learner.look(*observations(additive, g, effect))
        assert learner.useful == additive
        assert (learner.tables("", 1.0) is not None) == additive


def test_a_full_ring_forgets_the_oldest():
    g = torch.Generator().manual_seed(0)
    witness = Witness(8, IMAGE_OFFSETS[:1], torch.device("cpu"), room=1, share=1.0)
    room = len(witness.old)
    first = observations(True, g, torch.zeros(8, 8))
    witness.look(*first)
    kept = witness.new[0].clone()
    while witness.passes < room:
        witness.look(*observations(True, g, torch.zeros(8, 8)))
    assert witness.size == room
    assert not torch.equal(witness.new[0], kept)
    assert bool((witness.was != witness.now).any(1).all())  # only changes are kept
    assert bool(((witness.ahead >= 0) & (witness.ahead < 4)).all())


def test_learning_inside_inference_mode():
    model = NeighbourModel(12, 4, 4)
    decoder = NCSJD(6, tables="online", rank=4)
    with torch.inference_mode():
        decode(model, decoder, model.encode([""] * 4), SamplingParams(), [0, 1, 2, 3])
    decode(model, decoder, model.encode([""] * 4), SamplingParams(), [0, 1, 2, 3])
    with torch.inference_mode():
        decode(model, decoder, model.encode([""] * 4), SamplingParams(), [0, 1, 2, 3])
    learner = learner_for(model, SamplingParams(), IMAGE_OFFSETS, 4)
    assert float(learner.weights["left"].detach().abs().max()) > 0


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
    with pytest.raises(ValueError, match="earlier cell"):
        NeighbourTables(((0, 0, 1),), torch.zeros(1, 4, 2), torch.zeros(1, 2, 4), torch.zeros(4), "x")
    with pytest.raises(ValueError, match="couples"):
        NCSJD(coupling="independent")


def test_bad_table_files(tmp_path):
    """Parts of another rank, offsets or gates that do not fit, a file of something else: one line that names the file."""
    model = tiny_llamagen()
    good = random_tables(model, rank=4)
    meta = {"format": "visacc-neighbours-1", "fingerprint": model.fingerprint(), "guidance_scale": "1.0"}
    meta["offsets"] = json.dumps(IMAGE_OFFSETS)
    tensors = {n: t.contiguous() for n, t in good.tensors.items()}
    for name, parts, about, message in (
        ("rank", {"right": tensors["right"][:, :2].contiguous()}, {}, "do not fit together"),
        ("offsets", {}, {"offsets": json.dumps(IMAGE_OFFSETS[:3])}, "do not fit together"),
        ("ahead", {}, {"offsets": json.dumps([(0, 0, 1), *IMAGE_OFFSETS[1:]])}, "earlier cell"),
        ("gates", {"mixer": tensors["mixer"][:2].contiguous()}, {}, "gates"),
        ("codes", {"base": tensors["base"][:5].contiguous()}, {}, "do not fit together"),
        ("format", {}, {"format": "other"}, "no neighbour tables"),
    ):
        file = tmp_path / f"{name}.safetensors"
        save_file({**tensors, **parts}, file, {**meta, **about})
        with pytest.raises(ValueError, match=rf"{name}\.safetensors.*{message}"):
            NCSJD(8, tables=file).check(model)
    model.provides = frozenset()
    with pytest.raises(ValueError, match="requires \\['grid'\\]"):
        NCSJD(8, tables=good).check(model)


def test_gates_look_at_the_law():
    model = tiny_llamagen()
    tables = random_tables(model, rank=4)
    law = torch.rand(2, 3, 32).softmax(2)
    found = tables.gates(law)
    assert found.shape == (2, 3, 5, 4)
    looks = (law[1, 2].sqrt() @ tables.probe).tanh()
    expected = 1 + torch.einsum("m,mor->or", looks, tables.mixer)
    torch.testing.assert_close(found[1, 2], expected)
    assert random_tables(model, gated=False).gates(law) is None


def test_calibration_measures_real_effects():
    """On a model that is additive in its neighbours the tables take most of the staleness away."""
    model, ticks = NeighbourModel(20, 6, 6, std=1.0), []
    options = {"images": 40, "rank": 20, "window": 16, "batch": 8}
    tables, found = calibrate(
        model, ["", ""], SamplingParams(), **options, progress=lambda *t: ticks.append(t)
    )
    assert ticks[-1] == (40, 40)
    tables.check(model)
    rows = {what: (before, after) for what, before, after in found.rows()}
    for what in ("(0, 0, -1) alone", "(0, -1, 0) alone", "first tested", "all"):
        before, after = rows[what]
        assert before > 0.2 and after < 0.6 * before
    before, after = rows["(0, 0, -2) alone"]  # two to the left has no effect in this model
    assert before == pytest.approx(0, abs=1e-2) and after < 0.1
    again, _ = calibrate(model, ["", ""], SamplingParams(), **options)
    assert torch.equal(again.left, tables.left)
    with_tables = decode(
        model, NCSJD(16, tables=tables), model.encode([""] * 8), SamplingParams(), list(range(8))
    )
    plain = decode(model, MCSJD(16, "maximal"), model.encode([""] * 8), SamplingParams(), list(range(8)))
    assert with_tables.stats.steps.float().mean() < 0.8 * plain.stats.steps.float().mean()


def test_calibration_of_a_network_and_bad_input():
    model = tiny_llamagen(vocab=16, grid=6)
    sampling = SamplingParams(guidance_scale=2.0, top_k=8)
    tables, found = calibrate(model, [1, 2], sampling, images=6, rank=4, window=8)
    assert tables.guidance_scale == 2.0 and tables.rank == 4
    assert found.all[0] > 0.01 and len(found.steps) == 2
    for options, message in (
        ({"images": 2}, "images"),
        ({"rank": 17}, "rank"),
        ({"rank": 4, "window": 1}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(model, [1], SamplingParams(), **options)
    with pytest.raises(ValueError, match="needs prompts"):
        calibrate(model, [], SamplingParams())
    model.provides = frozenset()
    with pytest.raises(ValueError, match="no token grid"):
        calibrate(model, [1], SamplingParams())


def test_a_video_also_has_the_frame_before():
    layout = Layout((3, 4, 4), 8)
    assert offsets_of(layout) == VIDEO_OFFSETS and offsets_of(Layout((1, 4, 4), 8)) == IMAGE_OFFSETS
    slots = neighbour_slots(layout, VIDEO_OFFSETS)
    assert slots[-1, :16].tolist() == [-1] * 16
    assert slots[-1, 16:].tolist() == list(range(32))
    assert slots[0, 16] == -1 and slots[3, 16] == -1  # rows and columns end with their frame


def test_calibrate_command(tmp_path, capsys):
    folder = save_tiny(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", str(folder), "1", "2", "--images", "6", "--rank", "4", "--window", "8", "-q"])
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
