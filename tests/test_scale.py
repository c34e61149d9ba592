"""Several processes: the same pictures as one, one writer of the common files, drafters trained together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import torchrun
from tiny import save_tiny, tiny_llamagen

from visacc import generate_files
from visacc.cli import main
from visacc.eval.world import World
from visacc.generate_files import Job, run_share, share
from visacc.pipeline import TextToImagePipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), grid=4)


@pytest.mark.parametrize(("images", "batch", "size"), [(7, 2, 3), (8, 8, 2), (1, 4, 1), (9, 1, 4)])
def test_shares_are_whole_batches_and_cover_all_images(images: int, batch: int, size: int) -> None:
    parts = [share(images, batch, rank, size) for rank in range(size)]
    assert sorted(i for part in parts for i in part) == list(range(images))
    for part in parts:
        starts = part[::batch]
        assert all(i % batch == 0 for i in starts)
        assert part == [i for s in starts for i in range(s, min(s + batch, images))]


class Several(World):
    """World ``rank`` of some processes that run one after the other: the last one to come is the main one."""

    def __init__(self, rank: int, size: int, kept: dict[int, object]) -> None:
        super().__init__(rank, size)
        self.kept = kept

    def gather(self, value: object) -> list[object]:
        self.kept[self.rank] = value
        return [self.kept.get(rank) for rank in range(self.size)]


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix == ".png"}


def record(folder: Path) -> dict[str, object]:
    read = json.loads((folder / "stats.json").read_text())
    stats = read["stats"]
    names = ("steps", "committed_histogram", "images", "target_forwards")
    return {"images": read["images"], "seeds": read["sampling"], **{name: stats[name] for name in names}}


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_do_not_depend_on_the_number_of_processes(tmp_path: Path, size: int) -> None:
    """Seven images in batches of two, by one process and by several: same files, same numbers, same order."""
    pipe = TextToImagePipeline(tiny_llamagen(grid=4), "mc-sjd", window=4)
    job = Job([3, 3, 3, 1, 1, 2, 5], seed=11, batch_size=2)
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    run_share(pipe, job, World(), one, True, {"guidance_scale": 2.0})
    kept: dict[int, object] = {}
    for rank in reversed(range(size)):
        done = run_share(pipe, job, Several(rank, size, kept), many, True, {"guidance_scale": 2.0})
        assert (done is None) == (rank > 0)
    assert files(many) == files(one)
    assert len(files(one)) == 15
    assert record(many) == record(one)


def test_idle_processes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = TextToImagePipeline(tiny_llamagen(grid=4))
    kept: dict[int, object] = {}
    for rank in (1, 0):
        run_share(pipe, Job([1, 2], 3), Several(rank, 2, kept), tmp_path, False, {})
    assert "1 of 2 processes had nothing to do: 2 images make 1 batches of 8" in capsys.readouterr().out
    assert set(files(tmp_path)) == {"000.png", "001.png", "contact_sheet.png"}


def test_what_would_depend_on_the_number_of_processes_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = TextToImagePipeline(tiny_llamagen(grid=4), "nc-sjd", window=4)
    with pytest.raises(ValueError, match="'nc-sjd' learns while it decodes"):
        run_share(pipe, Job([1, 2], 3), World(0, 2), tmp_path, False, {})
    exact = TextToImagePipeline(tiny_llamagen(grid=4), "nc-sjd", window=4, coupling="gumbel-exact")
    generate_files._check_memory(exact)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        main(["generate", "1", "-m", str(model), "-d", "sjd", "--window", "auto", "-o", str(tmp_path / "o")])
    assert stop.value.code == 2
    assert "window='auto' measures the machine" in capsys.readouterr().err


def test_model_options(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "1", "-m", str(model), "-o", str(tmp_path), "-q", "--model-option"]
    with pytest.raises(SystemExit) as stop:
        main([*line, "device_map=auto"])
    assert stop.value.code == 2
    assert "does not know one of the model options ['device_map']" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*line, f"vq={model / 'vq.safetensors'}"])
    assert stop.value.code == 0


@pytest.mark.slow
def test_generate_by_two_processes(tmp_path: Path, model: Path) -> None:
    """The command as users start it, seed drawn by the main process."""
    line = ["generate", "1", "2", "3", "-m", str(model), "-n", "2", "--batch-size", "2", "-d", "mc-sjd"]
    line += ["--window", "4", "-q", "-o"]
    done = torchrun("-m", "visacc", *line, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("6 images in") == 1
    made = json.loads((tmp_path / "two" / "stats.json").read_text())
    assert made["processes"] == 2
    seed = made["images"][0]["seed"]
    with pytest.raises(SystemExit) as stop:
        main([*line, str(tmp_path / "one"), "--seed", str(seed)])
    assert stop.value.code == 0
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert record(tmp_path / "two") == record(tmp_path / "one")
