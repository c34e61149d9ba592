"""Evaluation runs killed at random points, with one process and with two."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_runs import (
    StandIn,
    config,
    fingerprints,
)

from visacc.eval import lock
from visacc.eval.files import read_json
from visacc.eval.run import run
from visacc.eval.world import World, join

PATIENCE = 300.0  # seconds; far more than anything here takes
SEED = "VISACC_KILL_SEED"


def drawn() -> np.random.Generator:
    """Draws the places to be killed at: other ones every time, printed (pytest shows it where a test fails) so that
    ``VISACC_KILL_SEED=...`` repeats them.
    """
    seed = int(os.environ.get(SEED) or np.random.SeedSequence().generate_state(1)[0])
    print(f"repeat these kills with {SEED}={seed}")
    return np.random.default_rng(seed)


def test_the_kills_of_a_failed_test_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SEED, raising=False)
    first = drawn().integers(1, 2**40, 5).tolist()
    assert drawn().integers(1, 2**40, 5).tolist() != first
    seed = capsys.readouterr().out.splitlines()[0].rpartition("=")[2]
    monkeypatch.setenv(SEED, seed)
    assert drawn().integers(1, 2**40, 5).tolist() == first


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "out"
    run(config(output), world=World(), quiet=True)
    return output


class Fate:
    """Kills the process at the n-th file written by all processes together: before it appears, half written, or
    just after. Nothing depends on how fast the machine is.
    """

    def __init__(self, count: Path, n: int, how: str):
        self.count, self.n, self.how, self.replace = count, n, how, os.replace

    def install(self) -> None:
        self.handle = os.open(self.count, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.replace = self  # type: ignore[assignment]

    def __call__(self, part: Any, path: Any) -> None:
        os.write(self.handle, b".")
        dies = os.lseek(self.handle, 0, os.SEEK_CUR) == self.n
        if dies and self.how == "half":
            os.truncate(part, os.path.getsize(part) // 2)
        if dies and self.how != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        self.replace(part, path)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def _child(output: Path, rank: int, size: int, port: int, pause: float) -> None:
    """Body of a forked process."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    if size > 1:
        from accelerate.state import PartialState

        PartialState._shared_state.clear()  # what an earlier test of this process may have set up
    run(
        config(output),
        world=join("cpu"),
        quiet=True,
        build=lambda cell: StandIn(cell.decoder, pause, **cell.options),
    )


def launch(
    output: Path, size: int, fate: Fate | None = None, pauses: tuple[float, ...] = (0.0, 0.0)
) -> list[int]:
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
                if fate is not None:
                    fate.install()
                _child(output, rank, size, port, pauses[rank])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def killed(pids: list[int]) -> bool:
    """Wait until one process has ended, kill the others, reap all; whether SIGKILL took the first."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while not statuses and time.monotonic() < deadline:
        for p in pids:
            ended, status = os.waitpid(p, os.WNOHANG)
            if ended:
                statuses[p] = status
        time.sleep(0.002)
    for p in set(pids) - set(statuses):
        os.kill(p, signal.SIGKILL)
        os.waitpid(p, 0)
    assert statuses, "nothing happened for a long time"
    first = next(iter(statuses.values()))
    return os.WIFSIGNALED(first) and os.WTERMSIG(first) == signal.SIGKILL


def complete(output: Path, size: int) -> None:
    assert [os.waitpid(pid, 0)[1] for pid in launch(output, size)] == [0] * size


def same_results(output: Path, undisturbed: Path) -> None:
    assert fingerprints(output) == fingerprints(undisturbed)
    assert not list(output.rglob(".*.part*"))
    a, b = (read_json(p / "summary.json") for p in (output, undisturbed))
    assert [r["scores"] for r in a["rows"]] == [r["scores"] for r in b["rows"]]
    assert [r["paired"] for r in a["rows"]] == [r["paired"] for r in b["rows"]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("size", [1, 2])
def test_killed_three_times_gives_the_same_bytes(undisturbed: Path, tmp_path: Path, size: int) -> None:
    if size > 1:
        pytest.importorskip("accelerate")
    output = tmp_path / "out"
    rng = drawn()
    # an undisturbed run writes more files than three of these: 2 x (24 images + 6 prompts + 6 chunks + 6 times)
    points = [(int(rng.integers(1, 45)), str(rng.choice(["before", "half", "after"]))) for _ in range(3)]
    print("killed at", points)
    for k, (n, how) in enumerate(points):
        assert killed(launch(output, size, Fate(tmp_path / f"count{k}", n, how)))
        assert not (output / "summary.json").exists()
    complete(output, size)
    same_results(output, undisturbed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("size", [1, 2])
def test_killed_while_scoring_gives_the_same_bytes(undisturbed: Path, tmp_path: Path, size: int) -> None:
    if size > 1:
        pytest.importorskip("accelerate")
    output = tmp_path / "out"
    for cell in ("good", "sloppy"):
        for part in ("images", "chunks", "timing"):
            shutil.copytree(undisturbed / cell / part, output / cell / part)
        shutil.copy(undisturbed / cell / "manifest.json", output / cell / "manifest.json")
    rng = drawn()
    for k in range(3):  # 30 reference pictures, then features, verdicts and scores
        n, how = int(rng.integers(1, 20)), str(rng.choice(["before", "half", "after"]))
        print("killed at", n, how)
        assert killed(launch(output, size, Fate(tmp_path / f"count{k}", n, how)))
    complete(output, size)
    same_results(output, undisturbed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_survivors_of_a_killed_run_keep_the_folder(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the main process is killed; the other one goes on until it is through with its share."""
    pytest.importorskip("accelerate")
    output = tmp_path / "out"
    main, other = launch(output, 2, pauses=(0.0, 600.0))
    deadline = time.monotonic() + PATIENCE
    while not list(output.glob("good/chunks/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(main, signal.SIGKILL)
    os.waitpid(main, 0)
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    try:
        with pytest.raises(ValueError, match=f"another run is working in .*{other}.*end what is left"):
            run(config(output), world=World(), quiet=True)
    finally:
        os.kill(other, signal.SIGKILL)
    monkeypatch.setattr(lock, "PATIENCE", 60.0)  # the survivor may still be dying
    run(config(output), world=World(), quiet=True)
    os.waitpid(other, 0)
    same_results(output, undisturbed)


def test_chunks_of_joined_features_are_removed_after_a_kill(undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(undisturbed, output)
    features = next((output / "good").glob("features-*"))
    (features / "chunks").mkdir()
    (features / "chunks" / "000001.npz").write_bytes(b"joined already")
    for f in (output / "good" / "scores").iterdir():
        f.unlink()
    run(config(output), world=World(), quiet=True)
    same_results(output, undisturbed)


def test_every_rank_must_know_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state")
    monkeypatch.setattr(state.PartialState, "_shared_state", {})
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    state.PartialState(cpu=True)  # for one process, as an inherited or earlier set-up
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"for 1 process.*WORLD_SIZE says 2"):
        join("cpu")
