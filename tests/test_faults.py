"""When the disk is full, a folder cannot be written to or a writer fails."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_runs import config, fingerprints
from fault_runs import generate, names, visacc
from llamagen_tiny import make_vq
from PIL import Image
from test_eagle import drafter_for
from test_vlm_generate import drafter as vlm_drafter
from tiny import save_tiny, tiny_llamagen

from visacc.decoders.neighbour_tables import NeighbourTables
from visacc.drafters.checkpoint import load_drafter, save_drafter
from visacc.eval.files import read_json, write_json, write_png
from visacc.eval.run import run
from visacc.eval.world import World
from visacc.metrics.npz import load_stats, save_stats
from visacc.metrics.stats import FeatureStats
from visacc.models.llamagen import load_vq, save_model
from visacc.models.shapes.train_util import load_checkpoint, save_atomic
from visacc.pictures import save_image, save_json
from visacc.speculate import checkpoints as speculators
from visacc.video_io import write_clip
from visacc.writing import sweep, whole_files, write_atomic, write_safetensors, write_text


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
    (out / ".000.99999999.part.png").write_bytes(b"half")  # of a process that was killed
    Full(monkeypatch, 1)
    assert visacc(capsys, *generate(model, out, "--guidance-scale", "3"))[0] == 2
    assert "stats.json" not in names(out)
    assert ".000.99999999.part.png" not in names(out)


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


def test_a_folder_of_another_library_is_replaced_file_by_file_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")

    def fill(fails: bool) -> None:
        with whole_files(tmp_path) as folder:
            (folder / "config.json").write_text("new")
            (folder / "sub").mkdir()
            (folder / "sub" / "words.txt").write_text("new")
            if fails:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fill(True)
    assert names(tmp_path) == {"config.json", "mine.txt"}
    assert (tmp_path / "config.json").read_text() == "old"
    fill(False)
    assert names(tmp_path) == {"config.json", "mine.txt", "sub/words.txt"}
    assert (tmp_path / "config.json").read_text() == "new"


def test_sweeping_takes_leftovers_of_dead_writers_only(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kept = [".notes.partners.txt", ".a.part", f".001.{other.pid}.part.png", "a.1.part.png"]
    dead = [".000.99999999.part.png", f".002.{os.getpid()}.part", ".a b.c.99999999.part.npz"]
    for name in kept + dead:
        (tmp_path / name).write_bytes(b"x")
    assert sweep(tmp_path, deep=False, spare_running=True) == len(dead)
    assert names(tmp_path) == set(kept)
    other.communicate(b"\n")
    assert sweep(tmp_path) == 1


def test_links_and_long_names_are_written(tmp_path: Path) -> None:
    """What a link leads to is replaced, not the link; a name may be as long as the file system allows."""
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    for stem in ("x" * 251, "ä" * 125):
        write_text(tmp_path / f"{stem}.txt", "long")
        assert (tmp_path / f"{stem}.txt").read_text() == "long"
