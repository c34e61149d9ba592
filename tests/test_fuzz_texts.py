"""Damaged reports, run configurations and files of lines: refused in one line, in bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from eval_runs import config as small_config
from eval_runs import prompts as clauses
from fuzzing import as_bytes, bent, damaged, memory_bound, noise, outcome, survive
from PIL import Image
from report_runs import bench_run, generate_run
from tiny import save_tiny

from visacc.eval.config import load_config
from visacc.eval.files import write_json
from visacc.eval.generate import Images, drop_damaged
from visacc.eval.prompts import load_prompts
from visacc.eval.run import _check, run
from visacc.eval.table import Speed
from visacc.eval.world import World
from visacc.metrics.dpg import read_questions
from visacc.metrics.geneval import read_prompts, read_results, scan, summarise
from visacc.report import build
from visacc.report.read import load as load_report
from visacc.speculate.answers import answered
from visacc.speculate.train_run import read_rows

CASES = 120


# ---- reports ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run of every kind; the file that a report reads first."""
    root = tmp_path_factory.mktemp("runs")
    evaluation = root / "eval"
    run(small_config(evaluation), world=World(), quiet=True)
    row = {"method": "ngram", "temperature": 0.0, "tau": 2.5, "tokens_per_second": 10.0, "draft_share": 0.1}
    row |= {"tokens_per_second_range": [9.0, 11.0], "committed_histogram": [0, 3, 2]}
    vlm = {"tau": "tokens", "rows": [row], "model": "x", "pictures": 2, "batch_size": 1, "max_new_tokens": 8}
    (root / "vlm.json").write_text(json.dumps({**vlm, "device": "cpu", "threads": 1}))
    scores = json.loads((evaluation / "summary.json").read_text())["rows"][0]["scores"]
    (root / "scores.json").write_text(json.dumps(scores))
    return {
        "bench": bench_run(root / "bench") / "decoders.json",
        "eval": evaluation / "summary.json",
        "generate": generate_run(root / "generate", save_tiny(root / "model", grid=4), "ar") / "stats.json",
        "vlm": root / "vlm.json",
        "scores": root / "scores.json",
    }


@pytest.mark.parametrize("kind", ["bench", "eval", "generate", "vlm", "scores"])
def test_damaged_reports(runs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Bent trees and damaged bytes; some of what is read is drawn as well."""
    path, drawn = runs[kind], 0

    def read() -> None:
        nonlocal drawn
        load_report([path])
        if drawn < 3:
            drawn += 1
            build([path], tmp_path / "report.html", pictures=1)

    tree = json.loads(path.read_text())
    with memory_bound(256):
        survive(read, path, as_bytes(bent(tree, CASES, seed=10)), least=CASES // 20)
        survive(read, path, damaged(path.read_bytes(), CASES, seed=11), least=CASES // 3)


def test_damaged_parts_of_an_evaluation_run(runs: dict[str, Path]) -> None:
    """Chunks and manifests of a cell: the report names them, the run makes damaged chunks again."""
    folder = runs["eval"].parent
    cell = folder / "good"
    chunk = sorted((cell / "chunks").glob("*.json"))[0]
    for path in (chunk, cell / "manifest.json"):
        tree = json.loads(path.read_text())

        def read() -> None:
            load_report([folder])

        survive(read, path, as_bytes(bent(tree, CASES // 2, seed=12)))
        survive(read, path, damaged(path.read_bytes(), CASES // 2, seed=13), least=CASES // 8)
    original = chunk.read_bytes()
    survive(lambda: Speed.read(cell), chunk, damaged(original, CASES // 2, seed=14))
    from visacc.eval.chunks import Chunks

    settings = small_config(folder)
    prompts = load_prompts(settings.prompts)
    images = Images(cell / "images", prompts, settings.samples_per_prompt)
    chunks = Chunks(cell / "chunks", len(images), settings.batch_size)
    for content in (b"", b"{", b"[]", b'{"images": [3]}', b'{"images": [{"file": "x"}]}', original[:-9]):
        chunk.write_bytes(content)
        assert drop_damaged(cell, chunks) == 1
        assert not chunk.exists()
        chunk.write_bytes(original)
    assert drop_damaged(cell, chunks) == 0


# ---- configurations ---------------------------------------------------------------------------------------
CONFIG: dict[str, Any] = {
    "output": "out",
    "model": "shapes-t2i",
    "model_options": {"dtype": "float32"},
    "prompts": "prompts.jsonl",
    "limit": 4,
    "samples_per_prompt": 2,
    "seed": 3,
    "batch_size": 4,
    "sampling": {"guidance_scale": 2.0},
    "decoders": {"ar": None, "fast": {"decoder": "mc-sjd", "window": [8, 16]}},
    "metrics": [
        {"metric": ["fd", "kid"], "extractor": "shapes-vq", "reference": "shapes:30", "batch": 8, "kid": {"subset_size": 4}},
        {"metric": "geneval", "detector": "shapes", "thresholds": {"threshold": 0.3}},
        "is",
    ],
    "baseline": "ar",
    "bootstrap": True,
}  # fmt: skip


def checked(path: Path) -> None:
    settings = load_config(path)
    try:
        _check(settings, load_prompts(settings.prompts, settings.limit))
    except ValueError as error:  # about prompts and metrics, which have names of their own
        raise ValueError(f"{path.name}: {error}") from error


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(m) + "\n" for m in clauses()))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    checked(path)
    return path


def test_bent_configurations(config_file: Path) -> None:
    with memory_bound(128):
        contents = as_bytes(bent(CONFIG, 5 * CASES, seed=15))
        survive(lambda: checked(config_file), config_file, contents, least=CASES)


def test_damaged_configurations(config_file: Path) -> None:
    contents = damaged(config_file.read_bytes(), 3 * CASES, seed=16)
    survive(lambda: checked(config_file), config_file, contents, least=CASES)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['CANARY']]",
        "a: !!python/object/apply:os.system ['touch CANARY']",
        "a: !!python/object/new:os.system ['touch CANARY']",
        "a: !!python/name:os.system",
        "a: !!python/module:os",
        "!!python/object/apply:builtins.eval [\"open('CANARY', 'w')\"]",
    ],
)
def test_tags_with_code_run_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("CANARY", str(tmp_path / "canary")))
    assert not outcome(lambda: load_config(path), path, text)
    assert not (tmp_path / "canary").exists()


def test_configurations_that_repeat_themselves(tmp_path: Path) -> None:
    """Nine lines that stand for a billion values, a list in itself, deep nesting, lists that span too many settings."""
    path = tmp_path / "run.yaml"
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    many = [f"o{i}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for i in range(30)]
    texts = {
        "\n".join(laughs): "values",
        "&a [*a]": "values",
        "&a {prompts: *a}": "values",
        "[" * 20_000: "YAML",
        "prompts: shapes\noutput: o\ndecoders: [{decoder: ar, "
        + ", ".join(many)
        + "}]": "span more than 1000",
        "date: 2001-99-99": "YAML",
        "a: !!timestamp x": "YAML",
        "a: !!int x": "YAML",
        "? [a]\n: 1": "YAML",
    }
    for text, words in texts.items():
        path.write_text(text)
        with memory_bound(128), pytest.raises(ValueError, match=rf"(?s)run\.yaml.*{words}"):
            load_config(path)


# ---- lines ------------------------------------------------------------------------------------------------
RESULT = {"filename": "0/samples/0.png", "tag": "colors", "prompt": "a", "correct": True, "reason": "", "metadata": "{}",
          "details": "{}"}  # fmt: skip
QUESTIONS = """item_id,text,proposition_id,dependency,category_broad,question_natural_language
0,a cat on a mat,1,0,entity,Is there a cat?
0,a cat on a mat,2,"0",entity,Is there a mat?
0,a cat on a mat,3,"1,2",relation,Is the cat on the mat?
"""


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def line_files(folder: Path) -> dict[str, tuple[Path, list[Any] | None, Callable[[Path], Any]]]:
    """name -> file, its rows (if they are JSON), reader."""
    judged = [dict(m) for m in clauses()]
    Image.fromarray(noise()).save(folder / "a.png")
    (folder / "0" / "samples").mkdir(parents=True)
    Image.fromarray(noise()).save(folder / "0" / "samples" / "00000.png")
    pairs = [{"image": "a.png", "prompt": "what?", "answer": "noise"}, {"prompt": "and?"}]
    done = [{"image": "a.png", "prompt": "what?", "text": "noise", "tokens": 2, "steps": 1}]
    found: dict[str, tuple[Path, list[Any] | None, Callable[[Path], Any]]] = {
        "prompts with clauses": (folder / "p.jsonl", judged, lambda p: load_prompts(str(p)).digest),
        "official prompts": (folder / "official.jsonl", judged, read_prompts),
        "results": (folder / "results.jsonl", [RESULT, {**RESULT, "correct": False}], lambda p: summarise(read_results(p))),
        "rows to train on": (folder / "rows.jsonl", pairs, read_rows),
        "captions": (folder / "captions.jsonl", done, answered),
        "plain prompts": (folder / "p.txt", None, lambda p: load_prompts(str(p))),
        "questions": (folder / "questions.csv", None, read_questions),
        "metadata": (folder / "0" / "metadata.jsonl", [judged[0]], lambda p: scan(folder)),
    }  # fmt: skip
    texts = {"plain prompts": "a red cat\nzwölf Bälle\n", "questions": QUESTIONS}
    for name, (path, rows, _) in found.items():
        path.write_bytes(jsonl(rows) if rows is not None else texts[name].encode())
    return found


NAMES = ["prompts with clauses", "official prompts", "results", "rows to train on", "captions", "plain prompts",
         "questions", "metadata"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_damaged_lines(tmp_path: Path, name: str) -> None:
    found = line_files(tmp_path)
    assert sorted(found) == sorted(NAMES)
    path, rows, read = found[name]
    read(path)
    survive(lambda: read(path), path, damaged(path.read_bytes(), 2 * CASES, seed=17))
    if rows is not None:
        trees: Iterator[Any] = (tree for tree in bent(rows, 3 * CASES, seed=18) if isinstance(tree, list))
        survive(lambda: read(path), path, map(jsonl, trees), least=CASES // 10)


def test_write_json_is_read_back(tmp_path: Path) -> None:
    """The writers' own files are no case for the readers above to refuse."""
    write_json(tmp_path / "x.json", {"a": [1, None, "ä"]})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": [1, None, "ä"]}
