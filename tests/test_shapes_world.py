"""The shapes world: determinism, captions that agree with what is drawn, the held-out split, coverage."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from visacc.models.shapes.captions import (
    HELD_PAIRS,
    RELATION_PHRASES,
    TASKS,
    all_prompts,
    compose,
    heldout_prompts,
    plural,
    sample,
    scene_for,
    vocabulary,
)
from visacc.models.shapes.world import (
    COLOURS,
    EXTENT,
    SHAPES,
    SIZE,
    coverage,
    extent,
    place,
    render,
    signed_distance,
)


@pytest.fixture(scope="module")
def samples():
    return [sample(seed) for seed in range(400)]


def test_a_seed_gives_the_same_scene_and_pixels(samples):
    for seed in (0, 7, 399):
        again = sample(seed)
        assert again == samples[seed]
        assert np.array_equal(render(again.scene), render(samples[seed].scene))
    assert not np.array_equal(render(samples[0].scene), render(samples[1].scene))


def test_pictures_are_float_rgb_in_range(samples):
    image = render(samples[3].scene)
    assert image.shape == (SIZE, SIZE, 3)
    assert image.dtype == np.float32
    assert image.min() >= 0 and image.max() <= 1


def test_captions_agree_with_the_objects_drawn(samples):
    for item in samples:
        drawn = Counter(o.shape for o in item.scene.objects)
        asked = Counter()
        for clause in item.metadata["include"]:
            asked[clause["class"]] += clause["count"]
            if "color" in clause:
                assert any(
                    (o.shape, o.colour) == (clause["class"], clause["color"]) for o in item.scene.objects
                )
                assert f"{clause['color']} {clause['class']}" in item.caption
            noun = clause["class"] if clause["count"] == 1 else plural(clause["class"])
            assert noun in item.caption.split()
        assert drawn == asked
        assert item.metadata["prompt"] == item.caption


def test_positions_agree_with_the_relation(samples):
    checked = 0
    for item in samples:
        if item.metadata["tag"] != "position":
            continue
        target, subject = item.metadata["include"]
        relation, index = subject["position"]
        assert index == 0
        assert any(phrase in item.caption for phrase in RELATION_PHRASES[relation])
        a, b = item.scene.objects
        assert (a.shape, b.shape) == (subject["class"], target["class"])
        dx, dy = a.cx - b.cx, a.cy - b.cy
        along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
        assert along > 0 and along / math.hypot(dx, dy) > 0.85
        checked += 1
    assert checked > 40


def test_objects_stay_inside_and_apart(samples):
    for item in samples:
        for i, a in enumerate(item.scene.objects):
            reach = extent(a)
            assert reach <= a.cx <= SIZE - reach and reach <= a.cy <= SIZE - reach
            for b in item.scene.objects[:i]:
                gap = max(abs(a.cx - b.cx), abs(a.cy - b.cy)) - extent(a) - extent(b)
                assert gap >= 3


def test_every_task_occurs_and_training_never_names_a_held_out_pair(samples):
    assert {item.metadata["tag"] for item in samples} == set(TASKS)
    training = {item.caption for item in samples}
    for item in samples:
        for clause in item.metadata["include"]:
            assert (clause.get("color"), clause["class"]) not in HELD_PAIRS
    held = heldout_prompts()
    assert Counter(p["tag"] for p in held).keys() == set(TASKS)
    assert not training & {p["prompt"] for p in held}


def test_prompt_lists_are_fixed_and_in_genevals_layout():
    assert heldout_prompts() == heldout_prompts()
    prompts = all_prompts() + heldout_prompts()
    for p in prompts:
        assert set(p) == {"tag", "include", "exclude", "prompt"}
        for clause in p["include"] + p["exclude"]:
            assert clause["class"] in SHAPES and clause["count"] >= 1
            assert clause.get("color", "red") in COLOURS
        if p["tag"] == "counting":
            assert p["exclude"] == [
                {"class": p["include"][0]["class"], "count": p["include"][0]["count"] + 1}
            ]
        else:
            assert p["exclude"] == []
    words = set(vocabulary())
    assert all(set(p["prompt"].split()) <= words for p in prompts)


def test_scene_for_draws_what_any_prompt_asks():
    for i, p in enumerate(heldout_prompts()):
        scene = scene_for(p, i)
        assert len(scene.objects) == sum(clause["count"] for clause in p["include"])


def test_articles_plurals_and_bad_requests():
    assert compose("colors", ["circle"], ["orange"])[0] == "a photo of an orange circle"
    assert compose("counting", ["cross"], [None], count=3)[0] == "a photo of three crosses"
    with pytest.raises(ValueError, match="unknown task 'colour'"):
        compose("colour", ["circle"], [None])
    with pytest.raises(ValueError, match="needs a relation"):
        compose("position", ["circle", "star"], [None, None])
    with pytest.raises(ValueError, match="1 to 4 objects"):
        place(np.random.default_rng(0), [("circle", "red")] * 5)
    with pytest.raises(ValueError, match="unknown shape"):
        signed_distance("blob", np.zeros(1), np.zeros(1), 3.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_matches_a_supersampled_outline(shape):
    cx, cy, r = 31.3, 33.8, 12.4
    n = 8
    grid = (np.arange(SIZE * n) + 0.5) / n
    inside = signed_distance(shape, grid[None, :] - cx, grid[:, None] - cy, r) < 0
    exact = inside.reshape(SIZE, n, SIZE, n).mean((1, 3))
    analytic = coverage(shape, cx, cy, r)
    assert np.abs(analytic - exact).max() < 0.4  # at sharp corners only
    assert np.abs(analytic - exact).mean() < 1e-3
    assert abs(analytic.sum() / exact.sum() - 1) < 0.01
    ys, xs = np.nonzero(exact > 0)
    half = max(xs.max() - xs.min(), ys.max() - ys.min()) / 2
    assert half == pytest.approx(EXTENT[shape] * r, abs=1.0)
