"""ZipAR: schedules and their closed forms, equality with plain decoding, adaptive window, bad input."""

from __future__ import annotations

import pytest
import torch
from plans import pass_of, raster_plan
from toy import TableModel

from visacc.decoders import AR
from visacc.decoders.plan import Feed, Pass, PlanDecoder, pack
from visacc.decoders.zipar import ZipAR
from visacc.decoders.zipar_plan import layout_rows, zipar_plan
from visacc.engine import decode
from visacc.models.base import Conditioning, Layout
from visacc.models.llamagen import GPT, GPTConfig, LlamaGen, VQConfig, VQModel
from visacc.sampling import SamplingParams

MODES = ("paper", "llamagen", "lumina")
FORCED = (90, *([-1, -1, -1, 91] * 2), 92)


def tiny_llamagen() -> LlamaGen:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(dim=32, n_layer=2, n_head=2, vocab_size=24, block_size=36, num_classes=5)).eval()
    torch.nn.init.normal_(gpt.output.weight, std=0.3)
    return LlamaGen(gpt, VQModel(VQConfig(ch=32, ch_mult=(1,), codebook_size=24)))


@pytest.mark.parametrize("shape", [(16, 16), (24, 24), (32, 32), (48, 48), (5, 9), (9, 5), (1, 7)])
@pytest.mark.parametrize("window", [1, 2, 4, 8, 12, 16, 100])
def test_paper_passes(shape, window):
    height, width = shape
    plan = zipar_plan(Layout((1, *shape), 8), window)
    lag = min(window, width)
    assert plan.passes == width + (height - 1) * lag
    expected = torch.arange(height)[:, None] * lag + torch.arange(width)
    assert torch.equal(pass_of(plan).view(shape), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (7, 2)])
def test_full_window_is_the_raster_plan(mode, shape):
    layout = Layout((1, *shape), 8)
    plan, plain = zipar_plan(layout, shape[1] + 1, mode=mode), raster_plan(layout)
    for name in ("n_in", "n_out", "reach"):
        assert getattr(plan, name) == getattr(plain, name)
    for name in ("feed_slot", "feed_src", "feed_addr", "keep", "take", "out_slot", "valid_from"):
        assert torch.equal(getattr(plan, name), getattr(plain, name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row_ends", [False, True])
@pytest.mark.parametrize("window", [2, 3, 5])
def test_every_cell_sees_what_the_lag_allows(mode, row_ends, window):
    """The vector that predicts (r, c) sees row r - i up to column c - 1 + i * lag, and nothing behind
    itself."""
    height, width = 5, 7
    layout = (
        Layout((1, height, width), 8, ([-1] * width + [9]) * height)
        if row_ends
        else Layout((1, height, width), 8)
    )
    plan, cells = zipar_plan(layout, window, mode=mode), layout.cell_slots.view(height, width)
    lag = window - 1 if mode == "lumina" else window
    for r in range(1, height):
        for c in range(width):
            step = int(pass_of(plan)[cells[r, c]])
            column = int((plan.out_slot[step] == cells[r, c]).nonzero())
            node = int(plan.take[step, column])
            seen = plan.sees(step, slice(plan.n_in[step]))[node].nonzero()[:, 0].tolist()
            for above in range(r):
                ahead = c + (r - above) * lag if mode != "llamagen" or above else width
                wanted = set(cells[above, : min(ahead, width)].tolist())
                real = set(cells[above].tolist()) & set(seen)
                stand_ins = set() if row_ends or above >= r else {int(cells[above, -1])}
                assert real | stand_ins == wanted | stand_ins, (r, c, above)
                assert real <= wanted | stand_ins
            assert max(seen) < cells[r, c]
            assert set(cells[r, :c].tolist()) <= set(seen)


@pytest.mark.parametrize("mode", MODES)
def test_final_cache_holds_every_token(mode):
    """Each slot is fed once with its own token, but for the last row's end, which nobody needs."""
    for layout in (Layout((1, 5, 6), 8), Layout((1, 5, 6), 8, (7, *([-1] * 6 + [9]) * 5))):
        plan = zipar_plan(layout, 3, mode=mode)
        own = (plan.feed_slot == plan.feed_src) & plan.keep & (plan.feed_slot >= 0)
        slots, count = plan.feed_slot[own].unique(return_counts=True)
        needed = range(int(layout.cell_slots[-1]))
        assert set(needed) <= set(slots.tolist())
        assert count.max() == 1


def test_pack_refuses_broken_schedules():
    good = [Pass([], {0: 0}), Pass([Feed(0, 0)], {1: 0})]
    assert pack(2, good).passes == 2
    with pytest.raises(ValueError, match="never decided"):
        pack(3, good)
    with pytest.raises(ValueError, match="before it is decided"):
        pack(2, [Pass([], {0: 0}), Pass([Feed(0, 1)], {1: 0})])
    with pytest.raises(ValueError, match="address 0 twice"):
        pack(2, [Pass([], {0: 0}), Pass([Feed(0, 0), Feed(1, 0, address=0)], {1: 0})])
    with pytest.raises(ValueError, match="overwrites"):
        pack(3, [*good, Pass([Feed(0, 1)], {2: 0})])
    with pytest.raises(ValueError, match="decided already"):
        pack(2, [*good, Pass([Feed(1, 1)], {1: 0})])
    with pytest.raises(ValueError, match="pass 0"):
        pack(1, [Pass([], {}), Pass([Feed(0, -1)], {0: 0})])


# ---- running ----------------------------------------------------------------------------------------------
SAMPLING = SamplingParams(guidance_scale=2.0, temperature=0.9, top_k=9, top_p=0.95)


@pytest.mark.parametrize(
    "options", [{"mode": m} for m in MODES] + [{"adaptive": True}, {"unwritten": "zero"}]
)
def test_full_window_equals_plain_decoding_token_for_token(options):
    model = tiny_llamagen()
    cond = model.encode([0, 3, 4])
    plain = decode(model, AR(), cond, SAMPLING, [1, 2, 3])
    decoder = ZipAR(7, **options)
    result = decode(model, decoder, cond, SAMPLING, [1, 2, 3])
    assert decoder.lossless
    assert torch.equal(plain.sequence, result.sequence)
    assert result.stats.forwards == 36
    narrow = decode(model, ZipAR(2), cond, SAMPLING, [1, 2, 3])
    assert not torch.equal(plain.sequence, narrow.sequence)
    assert narrow.stats.forwards == 6 + 5 * 2


@pytest.mark.parametrize("adaptive", [False, True])
def test_full_window_with_row_ends(adaptive):
    """Forced tokens between rows cost no pass and leave the tokens as they are."""
    model = TableModel(3, forced=FORCED, width=3, seed=5)
    cond = Conditioning(4, {})
    plain = decode(model, AR(), cond, SAMPLING, [1, 2, 3, 4])
    result = decode(model, ZipAR(3, adaptive=adaptive), cond, SAMPLING, [1, 2, 3, 4])
    assert torch.equal(plain.sequence, result.sequence)
    assert plain.stats.forwards == len(FORCED)
    assert result.stats.forwards == 1 + 3 + 3
    assert not result.stats.unfinished


@pytest.mark.parametrize(
    "options", [{}, {"mode": "llamagen"}, {"stand_in": "row_above_latest"}, {"adaptive": True}]
)
@pytest.mark.parametrize("forced", [False, True])
def test_a_sample_does_not_depend_on_its_batch(options, forced):
    model = TableModel(3, forced=FORCED, width=3) if forced else TableModel(3, 8, width=4)
    together = decode(model, ZipAR(1, **options), Conditioning(5, {}), SAMPLING, [3, 4, 5, 6, 7])
    assert not together.stats.unfinished
    for i, seed in enumerate([3, 4, 5, 6, 7]):
        alone = decode(model, ZipAR(1, **options), Conditioning(1, {}), SAMPLING, [seed])
        assert torch.equal(alone.sequence[0], together.sequence[i])
        assert int(alone.stats.steps[0]) == int(together.stats.steps[i])


@pytest.mark.parametrize("mode", ["paper", "llamagen"])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 6])
def test_adaptive_lag_is_one_more_where_the_law_never_moves(mode, window):
    """With a constant law every first test passes: lag = window + 1, at most the full row."""
    model = tiny_llamagen()
    torch.nn.init.zeros_(model.gpt.output.weight)
    result = decode(model, ZipAR(window, mode, adaptive=True), model.encode([1, 2]), SamplingParams(), [1, 2])
    lag = min(window + 1, 6)
    assert result.stats.forwards == (6 + 5 * lag if mode == "paper" else 2 * 6 + 4 * lag)


def test_adaptive_lag_grows_where_the_law_moves():
    model = tiny_llamagen()
    torch.nn.init.normal_(model.gpt.output.weight, std=3.0)
    cond = model.encode([0, 1, 2, 3])
    steps = decode(model, ZipAR(2, adaptive=True), cond, SamplingParams(), [1, 2, 3, 4]).stats.steps
    assert (steps > 6 + 5 * 3).any()
    assert (steps <= 36).all()


def test_first_candidate_test_keeps_the_law():
    """After one test the first token of a row has the law of the later pass, whether accepted or redrawn."""
    model = TableModel(3, 4, width=2, seed=2, std=1.5)
    count = 6000
    result = decode(
        model, ZipAR(1, adaptive=True), Conditioning(count, {}), SamplingParams(), list(range(count))
    )
    # row 1 is tested once at most (two columns): its first token must follow the true law given row 0
    sequence = result.sequence
    for a in range(3):
        for b in range(3):
            rows = sequence[(sequence[:, 0] == a) & (sequence[:, 1] == b), 2]
            if len(rows) < 300:
                continue
            p = model.tables[0][2][a * 4 + b].softmax(0)
            observed = torch.bincount(rows, minlength=3) / len(rows)
            assert (observed - p).abs().max() < 4 * (0.25 / len(rows)) ** 0.5


# ---- bad input --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [0, -1, True, 1.5, "8"])
def test_window_must_be_a_positive_integer(window):
    with pytest.raises(ValueError, match="at least 1"):
        ZipAR(window)


def test_unknown_switches():
    for options in ({"mode": "emu"}, {"unwritten": "skip"}, {"stand_in": "above"}):
        with pytest.raises(ValueError, match="choose one of"):
            ZipAR(2, **options)
    with pytest.raises(ValueError, match="adaptive"):
        ZipAR(2, "lumina", adaptive=True)


def test_layouts_that_have_no_rows_to_overlap():
    with pytest.raises(ValueError, match="frames"):
        layout_rows(Layout((2, 3, 3), 8))
    with pytest.raises(ValueError, match="interrupted"):
        layout_rows(Layout((1, 2, 3), 8, (-1, 9, -1, -1, -1, -1, -1)))
    with pytest.raises(ValueError, match="every row"):
        layout_rows(Layout((1, 3, 2), 8, (-1, -1, 9, -1, -1, -1, -1)))
    with pytest.raises(ValueError, match="at least 2"):
        zipar_plan(Layout((1, 3, 2), 8), 1, mode="lumina")


def test_a_model_without_grid_is_named():
    model = TableModel(3, 4)
    model.provides = frozenset({"tree_mask"})
    with pytest.raises(ValueError, match=r"zipar.*grid.*table"):
        decode(model, ZipAR(2), Conditioning(1, {}), SamplingParams(), [0])


def test_plan_decoder_runs_the_raster_plan():
    class Raster(PlanDecoder):
        name = "raster"

        def plan(self, layout):
            return raster_plan(layout)

    model = tiny_llamagen()
    cond = model.encode([1, 2])
    plain = decode(model, AR(), cond, SAMPLING, [5, 6])
    assert torch.equal(plain.sequence, decode(model, Raster(), cond, SAMPLING, [5, 6]).sequence)
