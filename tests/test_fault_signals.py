"""Processes ended by a signal in the middle of their work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eval_runs import config, fingerprints
from fault_runs import generate, names, visacc
from tiny import save_tiny

from visacc.eval import config as eval_config
from visacc.eval.run import run
from visacc.eval.world import World

PATIENCE = 300.0
"""Seconds; far more than anything here takes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), grid=4)


SLOW = """
import os, sys, time
from visacc import pictures, generate_files
from visacc.cli import main
save = pictures.save_image

def slowly(image, path):
    from visacc.writing import write_atomic
    def write(part):
        image.save(part)
        if path.name == "001.png":
            open(os.environ["READY"], "w").close()
            time.sleep(600)
    write_atomic(path, write)

generate_files.save_image = slowly
main(sys.argv[1:])
"""


# a shell starts what it runs in the background with interrupts ignored, and children inherit that
HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def start(script: str, ready: Path, *args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "READY": str(ready), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", HEARS + script, *args],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + PATIENCE
    while not ready.exists():
        assert child.poll() is None, child.communicate()[1][-2000:]
        assert time.monotonic() < deadline, "the child never got so far"
        time.sleep(0.01)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_generate_ended_by_a_signal(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """While the second picture is being written: no half picture, no statistics; the same command then gives the same."""
    out, ready = tmp_path / "out", tmp_path / "ready"
    child = start(SLOW, ready, *generate(model, out))
    child.send_signal(number)
    _, err = child.communicate(timeout=PATIENCE)
    left = names(out)
    assert {n for n in left if not n.startswith(".")} == {"000.png"}
    if number == signal.SIGKILL:
        assert child.returncode == -signal.SIGKILL
        assert len(left) == 2  # the hidden part file, which the next run sweeps
    else:
        assert child.returncode == 128 + number
        assert err.strip() == f"visacc: error: {'terminated' if number == signal.SIGTERM else 'interrupted'}"
        assert left == {"000.png"}
    assert visacc(capsys, *generate(model, out))[0] == 0
    assert visacc(capsys, *generate(model, tmp_path / "good"))[0] == 0
    assert names(out) == names(tmp_path / "good")
    for name in names(out) - {"stats.json"}:
        assert (out / name).read_bytes() == (tmp_path / "good" / name).read_bytes()
    ours, theirs = (json.loads((p / "stats.json").read_text()) for p in (out, tmp_path / "good"))
    assert ours["images"] == theirs["images"]


EVALUATION = """
import os, sys, time
from pathlib import Path
import eval_runs
from visacc.cli import main
from visacc.eval import run as module

class Waits(eval_runs.StandIn):
    def __call__(self, prompt, **options):
        if len(self.calls) == 3:
            Path(os.environ["READY"]).touch()
            time.sleep(600)
        return super().__call__(prompt, **options)

eval_runs.build = lambda **options: (options.pop("device"), Waits(**options))[1]
sys.modules["eval_runs"] = eval_runs
main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_evaluation_ended_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The command as typed, ended in the fourth batch; a second start ends in the bytes of an undisturbed run."""
    output, whole = tmp_path / "out", tmp_path / "whole"
    run(config(whole), world=World(), quiet=True)
    settings = config(output)
    data = {
        "output": str(output),
        "pipeline": "eval_runs:build",
        "prompts": settings.prompts,
        "samples_per_prompt": settings.samples_per_prompt,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "decoders": {c.name: {"decoder": c.decoder, **c.options} for c in settings.decoders},
        "metrics": [dict(m) for m in settings.metrics],
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(data))
    child = start(EVALUATION, tmp_path / "ready", "eval", "run", str(file), "-q")
    child.send_signal(number)
    _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == (-9 if number == signal.SIGKILL else 143)
    assert number == signal.SIGKILL or err.strip().endswith("visacc: error: terminated")
    assert not (output / "summary.json").exists()
    assert len(list((output / "good" / "chunks").iterdir())) == 3
    again = eval_config.load_config(file)
    run(again, world=World(), quiet=True)
    assert fingerprints(output) == fingerprints(whole)


def test_captions_after_a_torn_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kill in the middle of a line: the line is cut off and answered again; files of others are left alone."""
    from visacc.speculate.answers import answered

    rows = [{"image": f"{i}.png", "prompt": "what?", "text": "noise"} for i in range(3)]
    lines = [json.dumps(row) + "\n" for row in rows]
    out = tmp_path / "captions.jsonl"
    text = "".join(lines)
    for cut in range(len(text) + 1):
        out.write_text(text[:cut])
        known = answered(out)
        whole = sum(len("".join(lines[: i + 1])) <= cut + 1 for i in range(3))
        assert len(known) == whole
        assert out.read_text() == "".join(lines[:whole])
    for foreign in ("a text\nwithout an end", lines[0] + "no JSON\n" + lines[1][:-5], "x"):
        out.write_text(foreign)
        with pytest.raises(ValueError, match="write to another file"):
            answered(out)
        assert out.read_text() == foreign
