"""Evaluation runs with a stand-in pipeline: resuming after SIGKILL, any number of processes, refusals, summaries."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visacc.eval.config import Config, expand, parse
from visacc.eval.files import locked, read_json, write_atomic
from visacc.eval.generate import image_seed
from visacc.eval.run import run
from visacc.eval.world import World, join
from visacc.metrics import extractors
from visacc.metrics.extractors.base import Extractor

N_PROMPTS, SAMPLES, BATCH = 6, 4, 4
TOTAL = N_PROMPTS * SAMPLES


@cache
def prompts() -> list[dict[str, Any]]:
    """One held-out prompt of each task."""
    from visacc.models.shapes.captions import heldout_prompts

    return heldout_prompts(1)


@dataclass
class Stats:
    steps: torch.Tensor
    tokens: int = 64
    seconds: float = 0.0


@dataclass
class Output:
    images: list[Image.Image]
    stats: Stats


class StandIn:
    """Draws one true scene of the prompt per image; which one depends on the seed alone. Slow enough to be killed."""

    def __init__(self, decoder: str, pause: float = 0.0, wrong: float = 0.0):
        self.decoder, self.pause, self.wrong = decoder, pause, wrong
        self.metadata = {m["prompt"]: m for m in prompts()}
        self.calls: list[list[int]] = []

    def __call__(self, prompt: list[Any], *, seed: list[int], output_type: str, **options: Any) -> Output:
        from visacc.models.shapes.captions import scene_for
        from visacc.models.shapes.world import render

        assert output_type == "pil"
        assert len(prompt) == len(seed)
        self.calls.append(list(seed))
        time.sleep(self.pause)
        images = []
        for text, s in zip(prompt, seed, strict=True):
            key = s % 2**31
            shown = list(self.metadata)[key % len(self.metadata)] if key % 100 < 100 * self.wrong else text
            pixels = render(scene_for(self.metadata[shown], key))
            images.append(Image.fromarray(np.round(pixels * 255).astype(np.uint8)))
        return Output(images, Stats(torch.tensor([10 + s % 7 for s in seed])))


def build(**options: Any) -> StandIn:
    options.pop("device")
    return StandIn(**options)


class ColourGrid(Extractor):
    """Mean colour of 2 x 2 areas: 12 features."""

    name, preprocess, weights, heads = "colour-grid", "area-2", "none", {"features": 12, "logits": 12}
    built, pause = 0, 0.0

    def __init__(self, device: Any = None, poison: bool = False):
        self.device, self.poison = torch.device("cpu"), poison
        type(self).built += 1

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self.pause)
        rows = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
        if self.poison:
            rows[0, 0] = torch.nan
        return {"features": rows, "logits": 8 * rows}


if "colour-grid" not in extractors.names():
    extractors.register("colour-grid", ColourGrid)

METRICS = [
    {"metric": ["fd", "kid", "is", "prdc"], "extractor": "colour-grid", "reference": "shapes:30", "batch": 8,
     "kid": {"subset_size": 10, "subsets": 5}, "is": {"splits": 2}},
    {"metric": "geneval", "detector": "shapes", "batch": 8},
]  # fmt: skip


def config(output: Path, **changes: Any) -> Config:
    source = output.parent / "prompts.jsonl"
    if not source.exists():
        source.write_text("".join(json.dumps(m) + "\n" for m in prompts()))
    data: dict[str, Any] = {
        "pipeline": f"{__name__}:build",
        "prompts": str(source),
        "samples_per_prompt": SAMPLES,
        "batch_size": BATCH,
        "seed": 5,
        "decoders": {"good": {"decoder": "a"}, "sloppy": {"decoder": "b", "wrong": 0.5}},
        "metrics": METRICS,
    }
    return parse({**data, **changes}, output=output)


def fingerprints(output: Path) -> dict[str, str]:
    """Hash of every file a run leaves, except clocks and locks."""
    skip = ("timing", ".lock", "summary.json", "summary.md")
    return {
        f.relative_to(output).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(output.rglob("*"))
        if f.is_file() and not any(part in skip for part in f.relative_to(output).parts)
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "out"
    run(config(output), world=World(), quiet=True)
    return output


def test_a_run_leaves_everything_needed(undisturbed: Path) -> None:
    summary = read_json(undisturbed / "summary.json")
    assert [r["name"] for r in summary["rows"]] == ["good", "sloppy"]
    good, sloppy = ({s["protocol"]["metric"]: s for s in r["scores"]} for r in summary["rows"])
    assert {"fd", "kid", "is", "precision", "recall", "density", "coverage", "geneval"} <= set(good)
    assert good["geneval"]["value"] > 0.95  # true scenes; the detector is exact on them
    assert sloppy["geneval"]["value"] < good["geneval"]["value"] - 0.2
    assert summary["rows"][0]["paired"] == {}
    assert summary["rows"][1]["paired"]["geneval"]["ci"][1] < 0
    assert good["fd"]["ci"][0] < good["fd"]["value"] < good["fd"]["ci"][1]
    assert good["fd"]["protocol_id"] == sloppy["fd"]["protocol_id"]
    assert good["fd"]["protocol"]["n_ref"] == 30
    text = (undisturbed / "summary.md").read_text()
    assert f"| good | {TOTAL} |" in text
    assert good["fd"]["protocol_id"] in text
    rows = [
        row for p in sorted((undisturbed / "good" / "chunks").glob("*")) for row in read_json(p)["images"]
    ]
    assert [row["seed"] for row in rows] == [image_seed(5, i) for i in range(TOTAL)]
    assert all(row["steps"] == 10 + row["seed"] % 7 for row in rows)
    first = undisturbed / "good" / rows[0]["file"]
    assert rows[0]["sha256"] == hashlib.sha256(first.read_bytes()).hexdigest()
    results = next((undisturbed / "good").glob("geneval-*/results.jsonl")).read_text().splitlines()
    assert len(results) == TOTAL
    assert set(json.loads(results[0])) == {
        "filename",
        "tag",
        "prompt",
        "correct",
        "reason",
        "metadata",
        "details",
    }


def test_running_again_does_nothing(undisturbed: Path) -> None:
    before, built = fingerprints(undisturbed), ColourGrid.built

    def never(*args: Any) -> Any:
        raise AssertionError("a finished run must not load the model")

    run(config(undisturbed), world=World(), quiet=True, build=never)
    assert fingerprints(undisturbed) == before
    assert ColourGrid.built == built


def _child(output: Path, rank: int, size: int, port: int, pause: float) -> None:
    """Body of a forked process."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    ColourGrid.pause = pause
    run(
        config(output),
        world=join("cpu"),
        quiet=True,
        build=lambda cell: StandIn(cell.decoder, pause, **cell.options),
    )


def launch(output: Path, size: int, pause: float) -> list[int]:
    """Fork `size` processes that run the configuration together."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _child(output, rank, size, port, pause)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def finished_files(output: Path) -> int:
    kinds = ("cell", "chunks", "results.jsonl", "rows.json", "scores")
    return sum(any(k in f.parts or f.name == k for k in kinds) for f in output.rglob("*") if f.is_file())


def kill_when(output: Path, pids: list[int], files: int) -> bool:
    """SIGKILL everyone once that many result files are there; False if the run ended before."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended = [os.waitpid(p, os.WNOHANG)[0] for p in pids]
        if any(ended):
            for p, e in zip(pids, ended, strict=True):
                if not e:
                    os.waitpid(p, 0)
            return False
        if finished_files(output) >= files:
            break
        time.sleep(0.002)
    for p in pids:
        os.kill(p, signal.SIGKILL)
    for p in pids:
        os.waitpid(p, 0)
    return True


def complete(output: Path, size: int) -> None:
    for pid in launch(output, size, 0.0):
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("size", [1])
def test_killed_three_times_gives_the_same_bytes(undisturbed: Path, tmp_path: Path, size: int) -> None:
    if size > 1:
        pytest.importorskip("accelerate")
    output = tmp_path / "out"
    rng = np.random.default_rng()  # new points every time: in the first cell, in the second, while scoring
    points = [int(rng.integers(2, 7)), int(rng.integers(7, 12)), int(rng.integers(12, 14))]
    print("killed after", points, "result files")
    kills = 0
    for point in points:
        killed = kill_when(output, launch(output, size, 0.03), point)
        kills += killed
        if not killed:  # on a slow machine the last stretch can end before the signal arrives
            break
    assert kills >= 2
    complete(output, size)
    assert fingerprints(output) == fingerprints(undisturbed)
    assert not list(output.rglob(".*.part*"))
    a, b = (read_json(p / "summary.json") for p in (output, undisturbed))
    assert [r["scores"] for r in a["rows"]] == [r["scores"] for r in b["rows"]]
    assert [r["paired"] for r in a["rows"]] == [r["paired"] for r in b["rows"]]


def test_changed_settings_are_refused(undisturbed: Path) -> None:
    before = fingerprints(undisturbed)
    for change, named in (
        ({"seed": 6}, "seed: 5 -> 6"),
        ({"batch_size": 3}, "batch_size: 4 -> 3"),
        ({"limit": 5}, "prompts_digest"),
        ({"decoders": {"good": {"decoder": "a", "pause": 0.001}}}, "decoder_options"),
        ({"sampling": {"temperature": 0.5}}, "sampling"),
    ):
        with pytest.raises(ValueError, match="other settings") as error:
            run(config(undisturbed, **change), world=World(), quiet=True)
        assert named in str(error.value)
    assert fingerprints(undisturbed) == before


def test_new_cells_and_metrics_join_an_old_run(undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    decoders = {"good": {"decoder": "a"}, "third": {"decoder": "c", "wrong": 0.2}}
    metrics = [*METRICS, {"metric": "mind", "extractor": "colour-grid", "reference": "shapes:30", "batch": 8}]
    rows = run(config(output, decoders=decoders, metrics=metrics), world=World(), quiet=True)
    assert [r.name for r in rows] == ["good", "third"]
    assert "mind" in {s.name for s in rows[1].scores}


def test_damaged_images_are_made_again(undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    images = sorted((output / "good" / "images").rglob("*.png"))
    images[3].write_bytes(images[3].read_bytes()[:100])
    images[17].unlink()
    run(config(output), world=World(), quiet=True)
    assert fingerprints(output) == fingerprints(undisturbed)


def test_one_run_per_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(ValueError, match="another run"):
        run(config(tmp_path / "out"), world=World(), quiet=True)


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    def broken(part: Path) -> None:
        part.write_text("half")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_atomic(tmp_path / "a.json", broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": ["fd"]}, "needs `reference`"),
        ({"metrics": ["fidd"]}, "unknown metric 'fidd'"),
        ({"metrics": [{"metric": "fd", "reference": "shapes:4", "extractr": "x"}]}, "unknown key 'extractr'"),
        (
            {"metrics": [{"metric": "kid", "reference": "shapes:4"}]},
            "subsets of 1000 images, this run makes 24",
        ),
        ({"prompts": "labels:10", "metrics": ["geneval"]}, "no clauses|has none"),
        ({"prompts": "labels:10", "metrics": ["clip"]}, "class labels"),
        ({"limit": 1, "samples_per_prompt": 1}, "at least 2 images"),
        ({"prompts": "nowhere.txt"}, "no prompt file"),
    ],
)
def test_impossible_requests_fail_before_generating(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(config(tmp_path / "out", **change), world=World(), quiet=True)
    assert not (tmp_path / "out" / "good").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {}}, "unknown key 'decoder'"),
        ({"decoders": []}, "no decoders"),
        ({"decoders": {"a": 3}}, "needs `decoder: NAME`"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"baseline": "nobody"}, "is none of the cells"),
        ({"model": "x"}, "either `model` or `pipeline`"),
        ({"decoders": ["ar", "ar"]}, "two decoder entries"),
    ],
)
def test_bad_configurations(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **change)


def test_grid_of_options() -> None:
    cells = expand([{"decoder": "mc-sjd", "window": [8, 16], "coupling": "maximal"}, "ar"])
    assert [c.name for c in cells] == [
        "mc-sjd-window=8-coupling=maximal", "mc-sjd-window=16-coupling=maximal", "ar"
    ]  # fmt: skip
    assert cells[1].options == {"window": 16, "coupling": "maximal"}
    named = expand({"jacobi": {"decoder": "sjd", "window": [4, 8]}})
    assert [c.name for c in named] == ["jacobi-window=4", "jacobi-window=8"]


def test_nan_features_name_the_images(tmp_path: Path) -> None:
    metrics = [{"metric": "fd", "extractor": "colour-grid", "extractor_options": {"poison": True},
                "reference": "shapes:4", "batch": 8}]  # fmt: skip
    with pytest.raises(ValueError, match=r"NaN or infinite features for images 0\.\.7"):
        run(config(tmp_path / "out", metrics=metrics), world=World(), quiet=True)


def test_progress_lines_estimate_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    from visacc.eval.progress import Lines, _clock

    line = Lines("generate x", total=100, start=40, interval=0.0)
    line.begun -= 10  # ten seconds ago
    line(60)
    shown = capsys.readouterr().err
    assert shown.startswith("generate x: 60/100, 2.0")
    assert "0:00:2" in shown  # 40 left at 2 per second: the 40 of an earlier run do not count
    assert _clock(3725) == "1:02:05"
