"""The judge: right scenes are right, wrong scenes are wrong, for each of GenEval's six tasks; and its logic by cases."""

from __future__ import annotations

import numpy as np
import pytest

from visacc.models.shapes.captions import TASKS, all_prompts, compose, heldout_prompts, scene_for
from visacc.models.shapes.detector import Detection
from visacc.models.shapes.judge import judge, judge_detections, relations, score
from visacc.models.shapes.world import render


def picture(prompt, seed):
    return np.round(render(scene_for(prompt, seed)) * 255).astype(np.uint8)


@pytest.mark.parametrize("tag", TASKS)
def test_scenes_that_keep_the_prompt_are_right(tag):
    prompts = [p for p in all_prompts() + heldout_prompts() if p["tag"] == tag]
    verdicts = [judge(p, picture(p, i)) for i, p in enumerate(prompts)]
    wrong = [(p["prompt"], v.reasons) for p, v in zip(prompts, verdicts, strict=True) if not v.correct]
    assert len(wrong) <= 0.01 * len(prompts), wrong


WRONG = {
    "single_object": (("single_object", ["circle"], [None], {}), ("single_object", ["square"], [None], {})),
    "two_object": (
        ("two_object", ["circle", "star"], [None, None], {}),
        ("single_object", ["star"], [None], {}),
    ),
    "counting": (
        ("counting", ["cross"], [None], {"count": 3}),
        ("counting", ["cross"], [None], {"count": 4}),
    ),
    "colors": (("colors", ["diamond"], ["red"], {}), ("colors", ["diamond"], ["blue"], {})),
    "position": (
        ("position", ["circle", "star"], [None, None], {"relation": "left of"}),
        ("position", ["circle", "star"], [None, None], {"relation": "right of"}),
    ),
    "color_attr": (
        ("color_attr", ["circle", "star"], ["red", "green"], {}),
        ("color_attr", ["circle", "star"], ["green", "red"], {}),
    ),
}


@pytest.mark.parametrize("tag", TASKS)
def test_scenes_that_break_the_prompt_are_wrong(tag):
    (ta, sa, ca, oa), (tb, sb, cb, ob) = WRONG[tag]
    asked, other = compose(ta, sa, ca, **oa)[1], compose(tb, sb, cb, **ob)[1]
    for seed in range(6):
        verdict = judge(asked, picture(other, seed))
        assert not verdict.correct and verdict.reasons
        assert score(asked, picture(asked, seed))


def thing(shape, colour, x, y, half=5):
    return Detection(shape, colour, (x - half, y - half, x + half, y + half), 1.0)


def test_relations_follow_genevals_thresholds():
    a = thing("circle", "red", 10, 30)
    assert relations(a, thing("star", "red", 50, 30)) == {"left of"}
    assert relations(thing("star", "red", 50, 30), a) == {"right of"}
    assert relations(a, thing("star", "red", 10, 60)) == {"above"}
    assert relations(a, thing("star", "red", 40, 60)) == {"left of", "above"}
    # Offsets within a tenth of the summed sizes are no relation.
    assert relations(a, thing("star", "red", 12, 31)) == set()


def test_reasons_name_the_failed_clause():
    prompt = compose("counting", ["circle"], [None], count=2)[1]
    circles = [thing("circle", "red", x, 10) for x in (10, 30, 50)]
    assert judge_detections(prompt, circles[:1]).reasons == ("expected circle>=2, found 1",)
    assert judge_detections(prompt, circles[:2]).correct
    assert judge_detections(prompt, circles).reasons == ("expected circle<3, found 3",)
    coloured = compose("colors", ["circle"], ["blue"])[1]
    assert judge_detections(coloured, circles[:1]).reasons == (
        "expected blue circle>=1, found 0 blue; and 1 red",
    )
    position = compose("position", ["circle", "star"], [None, None], relation="above")[1]
    assert judge_detections(position, circles[:1]).reasons == (
        "expected star>=1, found 0",
        "no target for circle to be above",
    )


def test_bad_metadata_is_refused():
    with pytest.raises(ValueError, match="non-empty `include`"):
        judge_detections({"include": []}, [])
    with pytest.raises(ValueError, match="unknown class 'dog'"):
        judge_detections({"include": [{"class": "dog", "count": 1}]}, [])
    bad = {"include": [{"class": "star", "count": 1, "position": ["above", 2]}]}
    with pytest.raises(ValueError, match="refers to clause 2"):
        judge_detections(bad, [thing("star", "red", 9, 9)])
