"""Caption metrics against pycocoevalcap's numbers, agreement of decoders, DPG-Bench's rules."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from golden import golden_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from visacc.metrics.captions import bleu, cider_d, exact_match, longest_captions, ptb_tokenise, rouge_l
from visacc.metrics.dpg import (
    Question,
    grid_crops,
    make_grid,
    read_prompts,
    read_questions,
    score_answers,
    score_folder,
    score_image,
)

GOLDEN = golden_dir("metrics")


@pytest.mark.golden
def test_pycocoevalcap() -> None:
    data = json.loads((GOLDEN / "captions.json").read_text())
    for key, texts in data["references"].items():
        assert [ptb_tokenise(t) for t in texts] == data["tokenised_references"][key]
    for key, text in data["candidates"].items():
        assert [ptb_tokenise(text)] == data["tokenised_candidates"][key]
    refs = data["tokenised_references"]
    outs = {k: v[0] for k, v in data["tokenised_candidates"].items()}
    want = data["expected"]
    got = bleu(refs, outs)
    assert list(got.corpus) == pytest.approx(want["BLEU"]["corpus"], abs=1e-9)
    for key, row in want["BLEU"]["per_image"].items():
        assert list(got.per_image[key]) == pytest.approx(row, abs=1e-9)
    for metric, name in ((rouge_l, "ROUGE_L"), (cider_d, "CIDEr")):
        mean, per_image = metric(refs, outs)
        assert mean == pytest.approx(want[name]["mean"], abs=1e-9)
        assert per_image == pytest.approx(want[name]["per_image"], abs=1e-9)


WORDS = st.lists(
    st.sampled_from(["a", "red", "dog", "on", "the", "mat", "cat", "blue"]), min_size=1, max_size=7
).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_bounds_and_perfect_captions(pairs: list[tuple[str, str]]) -> None:
    refs = {str(i): [r] for i, (r, _) in enumerate(pairs)}
    outs = {str(i): o for i, (_, o) in enumerate(pairs)}
    same = {k: v[0] for k, v in refs.items()}
    assert all(-1e-9 <= s <= 1 + 1e-6 for s in bleu(refs, outs).corpus)
    assert rouge_l(refs, outs)[0] <= rouge_l(refs, same)[0] + 1e-12 == pytest.approx(1.0)
    assert -1e-9 <= cider_d(refs, outs)[0] <= 10 + 1e-9


def test_caption_refusals() -> None:
    with pytest.raises(ValueError, match="differ in 1 images, first 'b'"):
        bleu({"a": ["x"], "b": ["y"]}, {"a": "x"})
    with pytest.raises(ValueError, match="no captions"):
        rouge_l({}, {})
    with pytest.raises(ValueError, match="'a' has no reference"):
        cider_d({"a": []}, {"a": "x"})


def test_tokeniser_on_english() -> None:
    assert (
        ptb_tokenise("The dog's well-known ball; isn't it RED?") == "the dog 's well-known ball is n't it red"
    )
    assert ptb_tokenise("It costs 3.50, doesn't it... 'fine'") == "it costs 3.50 does n't it fine"
    assert ptb_tokenise("") == ""


def test_token_exact_agreement() -> None:
    target = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    outputs = [[1, 2, 3], [4, 0], [6, 7], [9]]
    gaps = [[1.0] * 3, [1.0, 0.001], [1.0, 1.0, 0.5], [1.0]]
    got = exact_match(outputs, target, gaps)
    assert (got.identical, got.total, got.rate) == (2, 4, 0.5)
    assert got.first_mismatch == {1: 1, 2: 2}
    assert got.ties(0.01) == 1
    assert exact_match(target, target).rate == 1.0
    with pytest.raises(ValueError, match="as many outputs"):
        exact_match([[1]], [[1], [2]])


def test_caption_choice_rules() -> None:
    """The record of SJD's script is never reset: only image a and c set one; b and d get caption 1 and
    their last.
    """
    captions = {"a": ["xx", "xxxxx", "x"], "b": ["yyy", "y", "yy"], "c": ["z", "z" * 9], "d": ["w"]}
    assert longest_captions(captions) == {"a": "xxxxx", "b": "yyy", "c": "z" * 9, "d": "w"}
    assert longest_captions(captions, "sjd") == {"a": "xxxxx", "b": "y", "c": "z" * 9, "d": "w"}
    assert longest_captions({"a": ["ab", "cd"]}) == {"a": "ab"}
    with pytest.raises(ValueError, match="caption rule"):
        longest_captions(captions, "best")


QUESTIONS = [
    Question(1, "is there a dog?", (), "entity"),
    Question(2, "is the dog brown?", (1,), "attribute"),
    Question(3, "is there a ball?", (), "entity"),
    Question(4, "does the dog chase the ball?", (1, 3), "relation"),
]


def test_dependent_questions_are_zeroed() -> None:
    assert score_answers(QUESTIONS, {1: True, 2: True, 3: False, 4: True}) == {1: 1, 2: 1, 3: 0, 4: 0}
    assert score_answers(QUESTIONS, {1: False, 2: True, 3: True, 4: True}) == {1: 0, 2: 0, 3: 1, 4: 0}


def table(path: Path, rows: list[list[str]]) -> Path:
    with open(path, "w", newline="") as f:
        csv.writer(f).writerows(
            [
                [
                    "item_id",
                    "text",
                    "proposition_id",
                    "dependency",
                    "category_broad",
                    "question_natural_language",
                ],
                *rows,
            ]
        )
    return path


def test_dpg_files_and_score(tmp_path: Path) -> None:
    path = table(
        tmp_path / "q.csv",
        [
            ["p1", "a red square", "1", "0", "entity", "red?"],
            ["p1", "a red square", "2", "1", "attribute", "square?"],
            ["p2", "a blue picture", "1", "0", "entity", "blue?"],
        ],
    )
    items = read_questions(path)
    assert [len(i.questions) for i in items.values()] == [2, 1]  # the first row counts
    red, blue = (Image.new("RGB", (8, 8), c) for c in ("red", "blue"))
    images = tmp_path / "images"
    images.mkdir()
    make_grid([red, red, red, blue]).save(images / "p1.png")
    blue.save(images / "p2.png")

    def answer(image: Image.Image, question: str) -> bool:
        return {"red?": (255, 0, 0), "blue?": (0, 0, 255)}.get(
            question, image.getpixel((0, 0))
        ) == image.getpixel((0, 0))

    value, categories = score_image(Image.open(images / "p1.png"), items["p1"], answer, 8)
    assert value == pytest.approx(0.75)  # three crops right, the blue one loses both questions
    assert categories == {"entity": 0.75, "attribute": 0.75}
    score = score_folder(images, items, answer, resolution=8, answerer="toy")
    assert score.value == pytest.approx(87.5)
    assert score.details["categories"] == {"entity": pytest.approx(87.5), "attribute": 75}
    (images / "p2.png").unlink()
    with pytest.raises(ValueError, match="1 of 2 prompts have no image, first 'p2'"):
        score_folder(images, items, answer, resolution=8, answerer="toy")
    assert [c.size for c in grid_crops(make_grid([red] * 4), 8)] == [(8, 8)] * 4
    with pytest.raises(ValueError, match="cannot be 8 x 8"):
        grid_crops(red, 5)
    with pytest.raises(ValueError, match="depends on question 9"):
        read_questions(table(tmp_path / "bad.csv", [["p", "t", "1", "9", "e", "q?"]]))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="column 'item_id' is missing"):
        read_questions(tmp_path / "other.csv")
    (tmp_path / "a1.txt").write_text("a prompt\n")
    assert read_prompts(tmp_path) == {"a1": "a prompt"}
    with pytest.raises(ValueError, match="no prompt files"):
        read_prompts(images)
