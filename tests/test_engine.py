"""The decode loop on real LlamaGen networks: equality, ragged rows, statistics, synchronisation, failure modes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_llamagen

from visacc.cache import move_slots, window_mask
from visacc.decoders import AR, MCSJD, SJD, Jacobi
from visacc.engine import decode
from visacc.kernels import checks
from visacc.models.base import DecodeState, Layout, Proposal
from visacc.sampling import SamplingParams, probs


@pytest.fixture(scope="module")
def model():
    return tiny_llamagen()


SAMPLING = SamplingParams(guidance_scale=2.0, top_k=12, temperature=0.9)


def run(model, decoder, seeds, sampling=SAMPLING, labels=None, **options):
    cond = model.encode(labels or [s % 10 for s in seeds])
    return decode(model, decoder, cond, sampling, seeds, **options)


@pytest.mark.parametrize("window", [1, 4, 9, 64])
def test_gumbel_exact_equals_ar_on_a_real_network(model, window):
    seeds = [3, 1, 4, 15]
    ar = run(model, AR(), seeds)
    fast = run(model, Jacobi(window, "gumbel-exact"), seeds)
    assert torch.equal(ar.codes, fast.codes)
    assert ar.stats.steps.tolist() == [36] * 4


@pytest.mark.parametrize(
    "decoder", [AR(), SJD(8), MCSJD(8), MCSJD(8, "maximal"), MCSJD(8, "gumbel")], ids=lambda d: d.name
)
def test_same_seed_same_image_alone_and_in_a_batch(model, decoder):
    seeds = [3, 1, 4, 15, 9]
    together = run(model, decoder, seeds)
    for i, seed in enumerate(seeds):
        assert torch.equal(run(model, decoder, [seed]).codes[0], together.codes[i])


def test_the_network_sees_the_same_law_in_a_window_as_alone(model):
    """What the engine verified equals a teacher-forced forward of the final tokens: greedy tokens are their arg-max."""
    sampling = SamplingParams(temperature=0)
    codes = run(model, MCSJD(8), [0, 1], sampling).sequence
    logits = model.gpt(codes, torch.tensor([0, 1])).detach()
    margin = logits.topk(2, -1).values
    clear = margin[..., 0] - margin[..., 1] > 1e-4
    assert torch.equal(logits.argmax(-1)[clear], codes[clear])
    assert float(clear.float().mean()) > 0.9
    assert torch.equal(codes, run(model, AR(), [0, 1], sampling).sequence)


def test_statistics_add_up(model):
    result = run(model, MCSJD(8, "maximal"), [0, 1, 2])
    stats = result.stats
    assert stats.committed.sum(0).tolist() == [36] * 3
    assert bool((stats.step_of >= 1).all())
    assert stats.steps.tolist() == stats.step_of.amax(1).tolist()
    assert stats.forwards == int(stats.steps.max())
    assert bool((stats.accepted <= stats.committed).all())
    assert sum(stats.histogram()) == int((stats.committed[1:] > 0).sum())
    assert stats.step_compression == pytest.approx(36 / stats.nfe)
    assert {"prefill", "forward", "judge"} <= set(stats.phases)
    # raster decoders commit in order
    assert bool((stats.step_of.diff(dim=1) >= 0).all())


def test_the_loop_looks_at_the_device_only_at_the_periodic_check(model, monkeypatch):
    """No .item(), .tolist(), .cpu(), nonzero or bool(tensor) in a step besides the finished-check."""
    counts = {"calls": 0}

    def counted(name):
        original = getattr(torch.Tensor, name)

        def wrapper(self, *args, **kwargs):
            counts["calls"] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, wrapper)

    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        counted(name)
    for decoder in (AR(), SJD(8), MCSJD(8, "maximal"), MCSJD(8)):
        marks = []
        run(model, decoder, [0, 1], check_every=6, callback=lambda info, m=marks: m.append(counts["calls"]))
        per_step = [b - a for a, b in pairwise(marks)]
        quiet = [n for i, n in enumerate(per_step) if i % 6]  # a check shows in the step after it
        assert quiet, decoder.name
        assert set(quiet) == {0}, f"{decoder.name}: {per_step}"


def test_check_interval_does_not_change_the_images(model):
    for decoder in (SJD(8), MCSJD(8), MCSJD(8, "maximal")):
        often = run(model, decoder, [5, 6, 7], check_every=1)
        seldom = run(model, decoder, [5, 6, 7], check_every=7)
        assert torch.equal(often.codes, seldom.codes)
        assert often.stats.steps.tolist() == seldom.stats.steps.tolist()


def test_callback_stops_early(model):
    result = run(model, AR(), [0], callback=lambda info: info.step < 5)
    assert result.stats.unfinished
    assert result.stats.forwards == 5
    assert int((result.stats.step_of > 0).sum()) == 5


def test_nan_names_step_and_module():
    broken = tiny_llamagen(seed=1)
    with torch.no_grad():
        broken.gpt.layers[1].feed_forward.w2.weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"NaN logits in step \d+.*layers\.1\.feed_forward\.w2"):
        run(broken, AR(), [0])


def test_guidance_needs_an_unconditional_branch(model):
    cond = model.encode([1])
    cond.has_uncond = False
    with pytest.raises(ValueError, match="unconditional"):
        decode(model, AR(), cond, SAMPLING, [0])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("guidance_scale", 0.5, "guidance_scale"),
        ("guidance_scale", -1, "guidance_scale"),
        ("guidance_scale", float("nan"), "finite"),
        ("temperature", -0.1, "temperature"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("top_k", -3, "top_k"),
        ("top_k", 2.5, "integer"),
        ("temperature", "hot", "number"),
    ],
)
def test_sampling_parameters_are_checked(field, value, text):
    with pytest.raises(ValueError, match=text):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "16"])
def test_window_is_checked(bad):
    with pytest.raises(ValueError, match="window"):
        Jacobi(bad)


def test_switches_are_checked():
    with pytest.raises(ValueError, match="coupling"):
        Jacobi(4, "tight")
    with pytest.raises(ValueError, match="initialisation"):
        Jacobi(4, init="zeros")
    with pytest.raises(ValueError, match="sjd"):
        MCSJD(coupling="independent")


# ---- cache and layout -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 4),
    st.lists(st.booleans(), min_size=24, max_size=24),
)
def test_layout_round_trip(frames, rows, columns, gaps):
    """Any interleaving of forced slots: cells and slots map onto each other, neighbours are neighbours."""
    forced: list[int] = []
    cells = 0
    for gap in gaps:
        if gap:
            forced.append(77)
        elif cells < frames * rows * columns:
            forced.append(-1)
            cells += 1
    forced += [-1] * (frames * rows * columns - cells)
    layout = Layout((frames, rows, columns), 5, tuple(forced))
    sequence = torch.arange(layout.total)[None]
    grid = layout.to_grid(sequence)
    assert grid.shape == (1, frames, rows, columns)
    left, above = layout.neighbour(dx=-1), layout.neighbour(dy=-1)
    for t in range(frames):
        for y in range(rows):
            for x in range(columns):
                slot = int(grid[0, t, y, x])
                assert int(left[slot]) == (int(grid[0, t, y, x - 1]) if x else -1)
                assert int(above[slot]) == (int(grid[0, t, y - 1, x]) if y else -1)


def state_of(batch, capacity, lengths, prefix=2, branches=1, heads=1, dim=3):
    kv = torch.randn(2, 2, batch * branches, heads, capacity, dim)
    mask = torch.ones(batch * branches, prefix, dtype=torch.bool)
    return DecodeState(batch, branches, kv, torch.tensor(lengths), prefix, mask, capacity)


def test_window_mask_of_a_tree():
    state = state_of(2, 12, [3, 1])
    state.prefix_mask[0, 0] = False
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, 3, 3)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    tree = Proposal(tokens, tokens, tokens == 0, visible=visible)
    mask = window_mask(state, tree)
    assert mask.shape == (2, 3, 12)
    assert mask[0, 2].int().tolist() == [0, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0]
    assert mask[1, 1].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    chain = Proposal(tokens, tokens, tokens == 0)
    causal = Proposal(tokens, tokens, tokens == 0, visible=torch.ones(3, 3).tril().bool().expand(2, 3, 3))
    assert torch.equal(window_mask(state, chain), window_mask(state, causal))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.sets(st.integers(1, 4)), st.sets(st.integers(1, 4)))
def test_move_slots_keeps_the_path_in_order(length0, length1, path0, path1):
    state = state_of(2, 16, [length0, length1], branches=2)
    before = state.kv.clone()
    paths = [[0, *sorted(path0)], [0, *sorted(path1)]]
    keep = torch.tensor([len(p) for p in paths])
    padded = torch.tensor([p + [-1] * (5 - len(p)) for p in paths])
    move_slots(state, keep, padded)
    for row in range(4):
        start = 2 + int(state.lengths[row % 2])
        path = paths[row % 2]
        expected = before[:, :, row, :, [start + n for n in path]]
        assert torch.equal(state.kv[:, :, row, :, start : start + len(path)], expected)
        untouched = [s for s in range(16) if s < start or s >= start + 5]
        assert torch.equal(state.kv[:, :, row, :, untouched], before[:, :, row, :, untouched])


def test_probs_forces_structure_and_greedy():
    layout = Layout((1, 1, 2), 4, (-1, 9, -1))
    from visacc.models.base import ModelOutput

    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]] * 3])
    p = probs(ModelOutput(logits), torch.tensor([[0, 1, 2]]), layout, SamplingParams(top_k=2))
    assert p[0, 1].tolist() == [1, 0, 0, 0]
    assert p[0, 0].tolist() == pytest.approx([0, 0.7311, 0, 0.2689], abs=1e-4)
    greedy = probs(ModelOutput(logits), torch.tensor([[0, 1, 2]]), layout, SamplingParams(temperature=0))
    assert greedy[0, 2].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "decoder",
    [AR(), SJD(6), MCSJD(6, "maximal"), MCSJD(6), Jacobi(6, "gumbel-exact")],
    ids=lambda d: repr(d.options()),
)
def test_value_checks_find_nothing(model, decoder, temperature, monkeypatch):
    """VISACC_DEBUG=1 looks at every law, draft and uniform of a decode, rows of different progress included."""
    sampling, seeds = SamplingParams(guidance_scale=2.0, top_k=12, temperature=temperature), [3, 1, 4]
    plain = run(model, decoder, seeds, sampling)
    monkeypatch.setenv("VISACC_DEBUG", "1")
    seen = []
    monkeypatch.setattr(checks, "laws", lambda *args, _f=checks.laws: seen.append(_f(*args)))
    assert torch.equal(run(model, decoder, seeds, sampling).codes, plain.codes)
    assert seen or isinstance(decoder, AR)


@pytest.mark.gpu
def test_no_synchronisation_on_a_gpu():
    model = tiny_llamagen()
    model.gpt.cuda()
    cond = model.encode([1, 2])
    decode(model, MCSJD(8), cond, SAMPLING, [0, 1])  # compiles the kernels

    def guard(info):
        torch.cuda.set_sync_debug_mode("error" if 2 <= info.step < 19 else "default")
        return info.step < 20

    try:
        decode(model, MCSJD(8), cond, SAMPLING, [0, 1], check_every=1000, callback=guard)
    finally:
        torch.cuda.set_sync_debug_mode("default")
