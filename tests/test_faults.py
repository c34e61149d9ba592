"""When the disk is full, the folder cannot be written to, the process is killed or memory runs out."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_runs import StandIn, config, fingerprints
from PIL import Image
from test_eagle import drafter_for
from test_llamagen_files import make_vq
from test_vlm_generate import drafter as vlm_drafter
from tiny import save_tiny, tiny_llamagen

from visacc import memory
from visacc.cli import main
from visacc.decoders.neighbour_tables import NeighbourTables
from visacc.drafters.checkpoint import load_drafter, save_drafter
from visacc.eval import config as eval_config
from visacc.eval.files import read_json, write_json, write_png
from visacc.eval.run import run
from visacc.eval.world import World
from visacc.memory import in_batches, out_of_memory
from visacc.metrics.npz import load_stats, save_stats
from visacc.metrics.stats import FeatureStats
from visacc.models.llamagen import load_vq, save_model
from visacc.models.shapes.train_util import load_checkpoint, save_atomic
from visacc.pictures import save_image, save_json
from visacc.pipeline import TextToImagePipeline
from visacc.speculate import checkpoints as speculators
from visacc.speculate.pipeline import CaptionPipeline
from visacc.video_io import write_clip
from visacc.writing import write_atomic, write_safetensors, write_text

PATIENCE = 300.0
"""Seconds; far more than anything here takes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), grid=4)


# ---- a disk that is full ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 8 MB, where the tests may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, left: int = 0) -> None:
    """Leave so many bytes free."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        while free(disk):
            file.write(bytes(min(1 << 16, free(disk))))
    size = (disk / "ballast").stat().st_size
    os.truncate(disk / "ballast", max(0, size - left))


def big(side: int = 200) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8))


def frames() -> np.ndarray:
    return np.stack([np.asarray(big(160)) ^ flip for flip in (0, 85, 170)])


def stats(dim: int = 100) -> FeatureStats:
    return FeatureStats.of(np.random.default_rng(0).normal(size=(2 * dim, dim)), "net")


def tables() -> NeighbourTables:
    g = torch.Generator().manual_seed(0)
    parts = (
        torch.rand(2, 9000, 2, generator=g),
        torch.rand(2, 2, 9000, generator=g),
        torch.rand(9000, generator=g),
    )
    return NeighbourTables(((0, 0, -1), (0, -1, 0)), *parts, "print")


WRITERS: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path], Any]]] = {
    "picture": ("a.png", lambda p: save_image(big(), p), lambda p: Image.open(p).load()),
    "picture of a run": ("a.png", lambda p: write_png(p, big()), lambda p: Image.open(p).load()),
    "record": ("a.json", lambda p: save_json(["x" * 100_000], p), lambda p: json.loads(p.read_text())),
    "record of a run": ("a.json", lambda p: write_json(p, ["x" * 100_000]), read_json),
    "text": ("a.txt", lambda p: write_text(p, "ä" * 100_000), lambda p: p.read_text(encoding="utf-8")),
    "statistics": ("a.npz", lambda p: save_stats(p, stats()), load_stats),
    "tensors": (
        "a.safetensors",
        lambda p: write_safetensors(p, {"a": torch.rand(50_000)}),
        lambda p: speculators.read_weights(p),
    ),
    "model": ("a.safetensors", lambda p: save_model(p, make_vq()), load_vq),
    "tables": ("a.safetensors", lambda p: tables().save(p), NeighbourTables.load),
    "training state": ("a.pt", lambda p: save_atomic({"a": torch.rand(50_000)}, p), load_checkpoint),
    "image drafter": ("a", lambda p: save_drafter(drafter_for(tiny_llamagen(grid=4), intermediate_size=512), p),
                      load_drafter),
    "drafter": ("a", lambda p: speculators.save_drafter(vlm_drafter("msd", intermediate_size=512), p),
                speculators.load_drafter),
    "clip": ("a.gif", lambda p: write_clip(frames(), p, side=0), lambda p: Image.open(p).load()),
}  # fmt: skip


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"ballast"}


@pytest.mark.parametrize("left", [0, 8192, 40_000])
@pytest.mark.parametrize("name", WRITERS)
def test_full_disk(small_disk: Path, name: str, left: int) -> None:
    """At once, or in the middle: the error names the file, nothing half-written stays, an earlier file is kept."""
    file, write, read = WRITERS[name]
    folder = small_disk / "out"
    folder.mkdir()
    try:
        fill(small_disk, left)
        with pytest.raises(OSError, match=rf"cannot write .*{file}"):
            write(folder / file)
        for whole in (p for p in names(folder) if p.endswith("safetensors")):
            raise AssertionError(f"{whole} looks whole")  # drafters: no weights without room for them
        assert not any(".part" in p for p in names(folder))
        (small_disk / "ballast").unlink()
        write(folder / file)
        read(folder / file)
        before = {p: (folder / p).read_bytes() for p in names(folder)}
        fill(small_disk, left)
        with pytest.raises(OSError, match="cannot write"):
            write(folder / file)
        assert {p: (folder / p).read_bytes() for p in names(folder)} == before
        read(folder / file)
    finally:
        for path in [small_disk / "ballast", *(p for p in small_disk.rglob("*") if p.is_file())]:
            path.unlink(missing_ok=True)
        for path in sorted((p for p in small_disk.rglob("*")), reverse=True):
            path.rmdir()


class Full:
    """Every write of a file fails from the n-th on, the way a full disk fails it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
        self.left, self.replace = n, os.replace
        monkeypatch.setattr(os, "replace", self)

    def __call__(self, part: Any, path: Any) -> None:
        self.left -= 1
        if self.left < 0:
            os.truncate(part, os.path.getsize(part) // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))
        self.replace(part, path)


def visacc(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return int(stop.value.code or 0), capsys.readouterr().err


def generate(model: Path, out: Path, *more: str) -> list[str]:
    line = ["generate", "1", "2", "3", "-m", str(model), "-d", "mc-sjd", "--window", "4", "--seed", "5", "-q"]
    return [*line, "-o", str(out), *more]


def test_generate_on_a_disk_that_fills(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every one of its files: one line, exit code 2, no statistics, so that nothing looks whole; then it works."""
    assert visacc(capsys, *generate(model, tmp_path / "good"))[0] == 0
    good = names(tmp_path / "good")
    for n in range(len(good)):
        out = tmp_path / f"out{n}"
        with monkeypatch.context() as patch:
            Full(patch, n)
            code, err = visacc(capsys, *generate(model, out))
        assert code == 2
        assert "No space left on device" in err
        assert err.count("\n") == 1
        assert "stats.json" not in names(out)
        assert not any(".part" in p for p in names(out))
        assert len(names(out)) == n
        assert visacc(capsys, *generate(model, out))[0] == 0
        assert names(out) == good
        for name in good - {"stats.json"}:
            assert (out / name).read_bytes() == (tmp_path / "good" / name).read_bytes()


def test_statistics_of_an_earlier_run_go_before_new_pictures_come(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert visacc(capsys, *generate(model, out))[0] == 0
    assert "stats.json" in names(out)
    (out / ".000.99.part.png").write_bytes(b"half")  # of a process that was killed
    Full(monkeypatch, 1)
    assert visacc(capsys, *generate(model, out, "--guidance-scale", "3"))[0] == 2
    assert "stats.json" not in names(out)
    assert ".000.99.part.png" not in names(out)


def test_evaluation_on_a_disk_that_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every forty files: the error says so, every start goes on, and the end is the same bytes."""
    whole = tmp_path / "whole"
    run(config(whole), world=World(), quiet=True)
    output, stops = tmp_path / "out", 0
    while not (output / "summary.json").exists():
        with monkeypatch.context() as patch:
            Full(patch, 40)
            try:
                run(config(output), world=World(), quiet=True)
            except OSError as error:
                said = str(error)
            else:
                continue
        assert "No space left on device" in said
        assert not list(output.rglob("*.part*"))
        stops += 1
        assert stops < 20, "the run does not get on"
    assert stops >= 3
    assert fingerprints(output) == fingerprints(whole)


# ---- folders that cannot be written to --------------------------------------------------------------------
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_where_a_folder_should_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"cannot write|exists|Not a directory"):
        WRITERS[name][1](tmp_path / "file" / WRITERS[name][0])
    assert (tmp_path / "file").read_text() == "x"


def test_read_only_folders(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The tests may run as root, whom no permission stops, so opening for writing is refused here."""
    import builtins

    opened = builtins.open

    def refuse(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and str(file).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, mode, *args, **kwargs)

    def locked(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr("io.open", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", locked)
    code, err = visacc(capsys, *generate(model, tmp_path / "out"))
    assert code == 2
    assert "cannot write to the output folder" in err
    with pytest.raises(PermissionError, match=r"cannot write .*a\.txt: Permission denied"):
        write_text(tmp_path / "a.txt", "x")
    with pytest.raises(PermissionError, match="cannot write"):
        save_image(big(8), tmp_path / "a.png")
    assert not names(tmp_path)


def test_an_error_of_the_writer_itself_leaves_nothing(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        part.write_text("half")
        raise KeyError("no")

    (tmp_path / "a.txt").write_text("whole")
    with pytest.raises(KeyError):
        write_atomic(tmp_path / "a.txt", fail)
    assert names(tmp_path) == {"a.txt"}
    assert (tmp_path / "a.txt").read_text() == "whole"


# ---- signals ----------------------------------------------------------------------------------------------
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


def start(script: str, ready: Path, *args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "READY": str(ready), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", script, *args],
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
    from visacc.speculate.cli import _done

    rows = [{"image": f"{i}.png", "prompt": "what?", "text": "noise"} for i in range(3)]
    lines = [json.dumps(row) + "\n" for row in rows]
    out = tmp_path / "captions.jsonl"
    text = "".join(lines)
    for cut in range(len(text) + 1):
        out.write_text(text[:cut])
        known = _done(out)
        whole = sum(len("".join(lines[: i + 1])) <= cut + 1 for i in range(3))
        assert len(known) == whole
        assert out.read_text() == "".join(lines[:whole])
    for foreign in ("a text\nwithout an end", lines[0] + "no JSON\n" + lines[1][:-5], "x"):
        out.write_text(foreign)
        with pytest.raises(ValueError, match="write to another file"):
            _done(out)
        assert out.read_text() == foreign


# ---- memory -----------------------------------------------------------------------------------------------
def test_batches_are_halved() -> None:
    """Every item once and in order, at the largest size that fits; the smaller size stays."""
    tried: list[tuple[int, int]] = []

    def work(start: int, stop: int) -> list[int]:
        tried.append((start, stop))
        if stop - start > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return list(range(start, stop))

    with pytest.warns(UserWarning, match="do not fit") as said:
        done = list(in_batches(11, 8, work))
    assert [i for _, _, part in done for i in part] == list(range(11))
    assert tried == [(0, 8), (0, 4), (0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]
    assert "8 images at a time do not fit into memory: going on with 4" in str(said[0].message)
    assert len(said) == 2


def test_one_item_that_does_not_fit() -> None:
    def work(start: int, stop: int) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"
        )

    with (
        pytest.warns(UserWarning, match="do not fit"),
        pytest.raises(torch.OutOfMemoryError, match="not even one of the images fits"),
    ):
        list(in_batches(4, 4, work))


def test_other_errors_are_not_taken_for_it() -> None:
    def work(start: int, stop: int) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        list(in_batches(4, 4, work))
    assert not out_of_memory(ValueError("out of memory"))
    assert out_of_memory(MemoryError())


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, most: int, rows: Callable[..., int]
) -> list[int]:
    """Calls with more than ``most`` rows run out of memory; returns the sizes that were tried."""
    call, tried = getattr(owner, name), []

    def limited(*args: Any, **kwargs: Any) -> Any:
        tried.append(rows(*args, **kwargs))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, limited)
    return tried


@pytest.mark.parametrize("decoder", ["ar", "mc-sjd", "sjd", "gsd", "zipar", "pjd", "sjd-pac", "eagle"])
@pytest.mark.filterwarnings("ignore:.*do not fit into memory")
def test_generation_goes_on_with_the_same_images(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the first forward, in the middle of a batch, and in the pixel decoder."""
    options: dict[str, Any] = {"drafter": drafter_for(tiny_llamagen(grid=4))} if decoder == "eagle" else {}
    labels = [1, 2, 3, 4, 5, 6, 7]
    pipe = TextToImagePipeline(tiny_llamagen(grid=4), decoder, **options)
    whole = pipe(labels, seed=3, batch_size=4, guidance_scale=2.0, output_type="np")
    for name, rows in (("prefill", lambda cond, **_: cond.batch), ("decode", lambda codes: len(codes))):
        with monkeypatch.context() as patch:
            tried = short_of_memory(patch, pipe.model, name, 2, rows)
            again = pipe(labels, seed=3, batch_size=4, guidance_scale=2.0, output_type="np")
        assert tried[0] == 4
        assert max(tried[1:]) == 2
        assert torch.equal(again.codes, whole.codes)
        assert (again.images == whole.images).all()
        assert again.seeds == whole.seeds
        assert torch.equal(again.stats.steps, whole.stats.steps)
    calls = 0
    forward = pipe.model.forward

    def late(state: Any, proposal: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if state.batch > 1 and calls > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")
        return forward(state, proposal, **kwargs)

    monkeypatch.setattr(pipe.model, "forward", late)
    again = pipe(labels, seed=3, batch_size=4, guidance_scale=2.0, output_type="codes")
    assert torch.equal(again.codes, whole.codes)


@pytest.mark.filterwarnings("ignore:.*do not fit into memory")
def test_an_evaluation_goes_on_with_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are decoded as one batch of the configured size; one that does not fit is halved."""
    pipe = TextToImagePipeline(tiny_llamagen(grid=4))

    def settings(output: Path) -> eval_config.Config:
        data = {"model": "x", "prompts": "labels:6x2", "batch_size": 12, "seed": 4, "decoders": ["ar"]}
        return eval_config.parse(data, output=output)

    for name, most in (("whole", 100), ("short", 5)):
        with monkeypatch.context() as patch:
            tried = short_of_memory(patch, pipe.model, "prefill", most, lambda cond, **_: cond.batch)
            run(settings(tmp_path / name), world=World(), quiet=True, build=lambda cell: pipe)
        assert tried[0] == 12
    assert tried == [12, 6, 3, 3, 3, 3]
    pictures = [{p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.png")} for n in ("whole", "short")]
    assert len(pictures[0]) == 12
    assert pictures[0] == pictures[1]


@pytest.mark.filterwarnings("ignore:.*do not fit into memory")
def test_captions_go_on_with_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    from visacc.models.vlm.scenes import draw_scene, picture

    pictures = [Image.fromarray(picture(draw_scene(20_000 + i, held_out=True))) for i in range(5)]
    try:
        pipeline = CaptionPipeline()
    except ValueError as error:
        pytest.skip(str(error))
    call = {"seed": 3, "temperature": 1.0, "max_new_tokens": 12, "prompts": "describe the image ."}
    whole = pipeline(pictures, batch_size=4, **call)
    tried = short_of_memory(
        monkeypatch, pipeline.speculator, "run", 2, lambda inputs, *_, **__: len(inputs["input_ids"])
    )
    again = pipeline(pictures, batch_size=4, **call)
    assert tried == [4, 2, 2, 1]
    assert [c.text for c in again] == [c.text for c in whole]
    assert all(c.error is None for c in again)


LIMITED = """
import resource, sys, warnings
import torch
from tiny import tiny_llamagen
from visacc.pipeline import TextToImagePipeline

pipe = TextToImagePipeline(tiny_llamagen(grid=8))
labels = [i % 10 for i in range(int(sys.argv[1]))]
small = pipe(labels, seed=1, batch_size=8, output_type="codes")  # also warms everything up
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20),) * 2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    large = pipe(labels, seed=1, batch_size=len(labels), output_type="codes")
said = [str(w.message) for w in said if "do not fit" in str(w.message)]
print(len(said), int(torch.equal(small.codes, large.codes)), said[:1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are Linux's")
def test_the_allocators_own_error(tmp_path: Path) -> None:
    """No imitation: the process may take 48 MB more, one batch of 512 needs several times that."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "512", "48"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    halved, equal, first = done.stdout.split(maxsplit=2)
    assert int(halved) >= 1, done.stdout
    assert int(equal) == 1
    assert "512 images at a time do not fit into memory: going on with 256" in first


@pytest.mark.gpu
def test_a_gpus_own_error() -> None:
    device = torch.device("cuda")
    model = tiny_llamagen(grid=8)
    model.gpt.to(device)
    model.vq.to(device)
    pipe = TextToImagePipeline(model)
    labels = [i % 10 for i in range(2048)]
    small = pipe(labels, seed=1, batch_size=64, output_type="codes")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.warns(UserWarning, match="do not fit into memory"):
            large = pipe(labels, seed=1, batch_size=2048, output_type="codes")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (
        float((small.codes == large.codes).float().mean()) > 0.9
    )  # the last bits may differ between batch sizes


def test_memory_is_let_go_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a failed attempt hang on its traceback; they must be gone when the smaller one starts."""
    import weakref

    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)  # reference counts alone must do

    def work(start: int, stop: int) -> None:
        alive.append(sum(ref() is not None for ref in held))
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        if stop - start > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.warns(UserWarning, match="do not fit"):
        list(in_batches(4, 4, work))
    assert alive == [0] * 6


# ---- the same whatever the batch, the processes and the interruptions --------------------------------------
@pytest.mark.parametrize("decoder", ["ar", "sjd", "mc-sjd", "gsd", "zipar", "pjd", "sjd-pac"])
def test_pictures_do_not_depend_on_the_batch(decoder: str) -> None:
    labels = [i % 10 for i in range(13)]
    pipe = TextToImagePipeline(tiny_llamagen(grid=4), decoder)
    codes = [
        pipe(labels, seed=9, batch_size=b, guidance_scale=2.0, output_type="codes").codes
        for b in (1, 2, 5, 13)
    ]
    for other in codes[1:]:
        assert torch.equal(other, codes[0])


def test_standin_counts_batches(tmp_path: Path) -> None:
    """Third-party pipelines are called with a chunk at a time and no batch size of ours."""
    made = StandIn("a")
    run(config(tmp_path / "out", decoders={"one": {"decoder": "a"}}, metrics=[]), world=World(), quiet=True,
        build=lambda cell: made)  # fmt: skip
    assert [len(call) for call in made.calls] == [4] * 6
