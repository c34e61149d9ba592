"""``visacc bench vlm``: every yardstick that runs, whole calls and decoding alone, rows that take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import vlm_tiny
from PIL import Image
from vlm_tiny import save_untrained_captioner

from visacc.cli import main
from visacc.models.vlm.scenes import draw_scene, picture
from visacc.speculate import bench as module
from visacc.speculate.yardsticks import Measured, assistants, stock, written

OURS = ("none", "ngram")
STOCK = ("model.generate", "model.generate + prompt lookup", "model.generate + assistant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained captioner and three pictures."""
    path = tmp_path_factory.mktemp("bench")
    save_untrained_captioner(path / "model")
    (path / "pictures").mkdir()
    for i in range(3):
        Image.fromarray(picture(draw_scene(i))).save(path / "pictures" / f"{i}.png")
    return path


def test_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    line = ["bench", "vlm", "-m", str(folder / "model"), "--images", str(folder / "pictures"), "-o", str(out)]
    line += [
        "--methods",
        "ngram",
        "--count",
        "2",
        "--repeats",
        "2",
        "--max-new-tokens",
        "8",
        "--device",
        "cpu",
    ]
    with pytest.raises(SystemExit) as stop:
        main([*line, "--prompt", "describe the image .", "--threads", "1"])
    assert stop.value.code == 0
    report = json.loads(out.read_text())
    assert (report["pictures"], report["threads"]) == (2, 1)
    assert report["assistant"] == "the first 3 of the target's 6 layers"
    rows = {(row["temperature"], row["method"]): row for row in report["rows"]}
    assert set(rows) == {(t, m) for t in (0.0, 1.0) for m in (*OURS, *STOCK)}
    for (temperature, method), row in rows.items():
        if "failed" in row:
            assert method == "model.generate + prompt lookup"  # transformers 5.24 loses the picture's rows
            continue
        assert 0 < row["tokens"] <= 16
        if temperature == 0:
            assert row["tokens"] == rows[0.0, "none"]["tokens"]
        for speed in ("tokens_per_second", "decode_tokens_per_second"):
            low, high = row[f"{speed}_range"]
            assert 0 < low <= row[speed] <= high
            for other, key in zip(
                ("none", "model.generate", STOCK[2]), ("none", "generate", "assisted"), strict=True
            ):
                quotient = row[speed] / rows[temperature, other][speed]
                assert row[f"{speed}_ratio_to_{key}"] == pytest.approx(quotient)
        assert ("tau" in row) == (method in OURS)
    assert rows[0.0, "none"]["tau"] == rows[1.0, "none"]["tau"] == 1
    assert rows[1.0, "ngram"]["tokens"] == rows[1.0, "none"]["tokens"]  # one seed, one text
    said = capsys.readouterr().out
    assert "assisted" in said
    assert "decoding alone" in said


def test_rows_take_turns() -> None:
    """Warm-up of every row first; then every batch is run by every row before the next; failures are set aside."""
    calls: list[tuple[str, int]] = []

    def runner(name: str) -> module._Runner:
        def run(number: int, inputs: dict[str, Any]) -> Measured:
            calls.append((name, number))
            if name == "model.generate + x":
                raise ValueError("no")
            return Measured(1, 3, 2.0, 1.0, steps=1)

        return module._Runner(name, run)

    runners = [runner("none"), runner("model.generate"), runner("model.generate + x"), runner("msd")]
    module._take_turns(runners, [{}, {}], 2)
    assert calls[:4] == [(r.name, 0) for r in runners]
    for start, number in zip(range(4, 16, 3), (0, 1, 0, 1), strict=True):
        part = calls[start : start + 3]
        assert {name for name, _ in part} == {"none", "model.generate", "msd"}
        assert {n for _, n in part} == {number}
    assert {calls[i][0] for i in range(4, 16, 3)} == {"none", "model.generate", "msd"}
    assert runners[2].failed == "ValueError: no"
    rows = {row["method"]: row for row in module._rows(runners, 0.0)}
    assert rows["msd"]["tokens_per_second"] == pytest.approx(1.5)
    assert rows["msd"]["decode_tokens_per_second"] == pytest.approx(2.0)
    assert rows["msd"]["tau"] == 2
    broken = module._Runner("msd", lambda number, inputs: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        module._take_turns([broken], [{}], 1)


@pytest.mark.parametrize("name", ["llava", "qwen2.5", "gemma3"])
def test_assistant_shares_the_weights(name: str) -> None:
    """Half of the target's layers, no copy of a weight; the target keeps all of them and its text."""
    case = vlm_tiny.FAMILIES[name]()
    case.model.generation_config.pad_token_id = 0
    made = assistants(case.model, None)
    half = made.options["assistant_model"]
    layers = len(case.model.get_decoder().layers)
    assert len(half.get_decoder().layers) == layers // 2
    assert case.model.config.get_text_config().num_hidden_layers == layers
    assert {p.data_ptr() for p in half.parameters()} <= {p.data_ptr() for p in case.model.parameters()}
    row = {k: v[:1] for k, v in case.inputs.items() if k not in case.images(0)} | case.images(0)
    timed = stock(case.model, 0.0, 6, made.options)(0, row)
    assert (timed.rows, timed.tokens) == (1, 6)
    assert 0 < timed.prefill_seconds < timed.seconds


def test_tokens_are_counted_to_the_end() -> None:
    out = torch.tensor([[5, 2, 0, 0], [5, 6, 7, 8]])
    assert written(out, (2,)) == 6
    assert written(out, ()) == 8
