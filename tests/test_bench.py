"""Decoder comparison: what it measures, its statistics and its files."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from tiny import tiny_llamagen

from visacc.bench.quality import (
    FEATURES,
    Scores,
    distance_test,
    fixed_features,
    frechet_distance,
)
from visacc.bench.report import to_markdown, write
from visacc.bench.run import Entry, bench_decoders, default_entries, parse_entry
from visacc.metrics.intervals import wilson
from visacc.sampling import SamplingParams

SAMPLING = SamplingParams(guidance_scale=2.0, top_k=16)


@pytest.fixture(scope="module")
def bench():
    entries = [
        Entry("ar"),
        Entry("mc-sjd", {"window": 6, "coupling": "gumbel-exact"}),
        Entry("gsd", {"window": 6, "group_size": 6}, "group_size"),
        Entry("gsd", {"window": 6, "group_size": 20}, "group_size"),
        Entry("zipar", {"window": 1}, "window"),
        Entry("eagle"),
    ]
    model = tiny_llamagen(grid=4, vocab=24)
    return bench_decoders(
        model, [1, 2, 3], entries, sampling=SAMPLING, batch=2, per_prompt=2, permutations=19
    )


def test_rows(bench):
    assert bench.images == 6
    plain = bench.row("ar")
    assert plain.stats.nfe == 16
    assert plain.ratio == [1.0] * 3
    twin = bench.rows[1]
    assert torch.equal(twin.codes, plain.codes)
    assert twin.lossless
    zipar = bench.row("zipar (window=1)")
    assert zipar.stats.nfe == 4 + 3
    assert not zipar.lossless
    assert "comes without a drafter" in bench.skipped["eagle"]
    for row in bench.rows:
        assert row.features.shape == (6, FEATURES)
        assert row.distance is not None
        assert 0 < row.distance.p_value <= 1
        if row is not plain and sum(row.seconds) > sum(plain.seconds):
            assert "slower here" in row.note
    assert plain.note == ""


def test_files(bench, tmp_path):
    paths = write(bench, tmp_path)
    data = json.loads(paths["json"].read_text())
    assert [d["label"] for d in data["decoders"]] == [row.entry.label for row in bench.rows]
    assert data["decoders"][1]["same_codes_as_ar"] == 1.0
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")
    text = to_markdown(bench)
    assert text.count("\n| `") == len(bench.rows)
    assert "`eagle` did not run: tiny comes without a drafter" in text


def test_entries():
    assert parse_entry("gsd:group_size=50,init=repeat_left").options == {
        "group_size": 50,
        "init": "repeat_left",
    }
    assert parse_entry("ar") == Entry("ar")
    assert len({e.label for e in default_entries(16)}) == len(default_entries(16))
    with pytest.raises(ValueError, match="name:option=value"):
        parse_entry("gsd:50")
    model = tiny_llamagen(grid=4)
    with pytest.raises(ValueError, match="unknown decoder"):
        bench_decoders(model, [1], [Entry("gds")])
    with pytest.raises(ValueError, match="listed twice"):
        bench_decoders(model, [1], [Entry("ar"), Entry("ar")])
    with pytest.raises(ValueError, match="at least one prompt"):
        bench_decoders(model, [], [Entry("ar")])


# ---- statistics -------------------------------------------------------------------------------------------
def test_frechet_distance_of_known_gaussians():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=g, dtype=torch.float64)
    y = 2 * torch.randn(4000, 3, generator=g, dtype=torch.float64) + torch.tensor([1.0, 0, 0])
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(x, y) == pytest.approx(1 + 3, rel=0.1)


def detection_rate(x, reference, spoiled, fraction, trials=15):
    """How often the distance test notices that ``fraction`` of the images in ``x`` are spoiled ones."""
    g = torch.Generator().manual_seed(0)
    both, n, bad = torch.cat([x, reference]), len(x), round(fraction * len(x))
    hits = 0
    for trial in range(trials):
        order = torch.randperm(len(both), generator=g)
        mixed = both[order[:n]].clone()
        mixed[:bad] = spoiled[torch.randperm(len(spoiled), generator=g)[:bad]]
        hits += distance_test(mixed, both[order[n:]], permutations=39, seed=trial).p_value <= 0.05
    return hits / trials


def test_distance_test_has_its_level_and_power():
    g = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randn(n, 4, generator=g, dtype=torch.float64)

    p_values = [distance_test(draw(40), draw(40), permutations=39, seed=i).p_value for i in range(60)]
    assert np.mean(np.array(p_values) <= 0.1) < 0.25
    x, reference, spoiled = draw(60), draw(60), draw(60) + 3
    assert distance_test(spoiled, reference, permutations=39).p_value <= 0.05
    powers = [detection_rate(x, reference, spoiled, f) for f in (0.0, 0.3, 0.8)]
    assert powers[0] < 0.3
    assert powers[2] > 0.9
    with pytest.raises(ValueError, match="at least 2"):
        distance_test(draw(1), draw(5))


def test_features_are_fixed_and_see_colour_and_place():
    picture = torch.zeros(2, 3, 32, 32)
    picture[0, 0, :16, :16] = 1
    picture[1, 0, 16:, 16:] = 1
    a, b = fixed_features(picture)
    assert torch.equal(fixed_features(picture)[0], a)
    assert (a - b).abs().max() > 1e-2
    assert fixed_features(torch.rand(1, 3, 17, 40)).shape == (1, FEATURES)


def test_scores():
    tags = ("colors",) * 10 + ("counting",) * 10
    plain = Scores(tags, (True,) * 8 + (False,) * 2 + (True,) * 5 + (False,) * 5)
    worse = Scores(tags, (True,) * 4 + (False,) * 6 + (True,) * 5 + (False,) * 5)
    assert plain.overall == pytest.approx(0.65)
    low, high = plain.interval()
    assert low < 0.65 < high
    mean, below, above = worse.difference(plain)
    assert mean == pytest.approx(-0.2)
    assert below < -0.2 < above
    with pytest.raises(ValueError, match="same prompts"):
        plain.difference(Scores(tags[:5], plain.right[:5]))


def test_differences_are_paired():
    tags = ("colors",) * 8 + ("counting",) * 8
    plain = Scores(tags, (True, False) * 8)
    assert plain.difference(plain) == (0, 0, 0)
    flipped = Scores(tags, (False, *plain.right[1:]))
    mean, low, high = flipped.difference(plain)
    # one of eight pairs of one of two tasks: within-task squares 7/8 over 14 degrees of freedom
    half = 1.96 * (7 / 8 / 14 * 2 / 8) ** 0.5 / 2
    assert (mean, low, high) == pytest.approx((-1 / 16, -1 / 16 - half, -1 / 16 + half))
    # the spread of both scores is far wider than that of their difference
    assert half < (plain.interval()[1] - plain.interval()[0]) / 3
    assert plain.difference(flipped) == pytest.approx((-mean, -high, -low))


def test_differences_of_single_pictures():
    tags = ("colors", "counting", "position")
    one, other = Scores(tags, (True, True, False)), Scores(tags, (True, False, False))
    mean, low, high = one.difference(other)
    half = 1.96 * (1 / 3) ** 0.5 / 3**0.5  # variance 1/3 across the tasks
    assert (mean, low, high) == pytest.approx((1 / 3, 1 / 3 - half, 1 / 3 + half))
    assert Scores(("colors",), (True,)).difference(Scores(("colors",), (False,))) == (1, -1, 1)


def test_differences_have_their_level():
    """Two decoders of one law, many times: the interval leaves 0 out in about 5 % of the comparisons."""
    rng = np.random.default_rng(3)
    tags = tuple(t for t in "abcdef" for _ in range(20))
    outside = 0
    for _ in range(400):
        chance = np.repeat(rng.uniform(0.2, 0.9, 6), 20)
        x, y = (Scores(tags, tuple(bool(v) for v in rng.random(120) < chance)) for _ in range(2))
        _, low, high = x.difference(y)
        outside += not low <= 0 <= high
    assert 0.02 < outside / 400 < 0.09


def test_the_table_goes_without_matplotlib(monkeypatch, tmp_path, capsys):
    from visacc.cli import main

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a yellow star\na red circle\n")
    command = ["bench", "decoders", "-d", "zipar:window=1", "--prompts-file", str(prompts)]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--batch-size", "2", "--pictures", "0", "--out", str(tmp_path / "bench")])
    assert stop.value.code == 0
    assert sorted(p.name for p in (tmp_path / "bench").iterdir()) == ["decoders.json", "decoders.md"]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "matplotlib" in line] == [
        "no trade-off plot: it needs matplotlib (pip install 'visacc[report]')"
    ]


def test_interval_of_a_proportion():
    assert wilson(10, 10)[1] == 1
    assert wilson(0, 10)[0] == 0
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0, 0) == (0, 1)
    with pytest.raises(ValueError, match="between 0 and n=3"):
        wilson(4, 3)


def test_pictures_of_the_shapes_world_are_judged():
    """The judge is exact on pictures that the world drew itself."""
    from visacc.bench.quality import shapes_scores
    from visacc.models.shapes.captions import all_prompts, scene_for
    from visacc.models.shapes.world import render

    prompts = all_prompts(2)
    pictures = [np.asarray(render(scene_for(p, i))) for i, p in enumerate(prompts)]
    scores = shapes_scores(prompts, pictures)
    assert len(scores.tasks()) == 6
    assert scores.overall > 0.9
    wrong = shapes_scores(prompts, pictures[::-1])
    assert wrong.overall < 0.5
