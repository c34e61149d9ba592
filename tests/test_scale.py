"""Several processes: the same pictures as one, one writer of the common files, drafters trained together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import accelerate_launch, torchrun
from safetensors.torch import load_file
from tiny import save_tiny, tiny_llamagen

from visacc.cli import main
from visacc.drafters.checkpoint import load_drafter
from visacc.eval.world import World, refuse_memory
from visacc.generate_files import Job, run_share, share
from visacc.pipeline import TextToImagePipeline
from visacc.speculate.checkpoints import load_drafter as load_vlm_drafter
from visacc.train.drafter import DrafterTraining, new_drafter


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
    refuse_memory(exact.current_decoder())
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
    assert "device_map spreads models of the transformers library" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*line, "no_such_option=1"])
    assert stop.value.code == 2
    assert "does not know one of the model options ['no_such_option']" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*line, f"vq={model / 'vq.safetensors'}"])
    assert stop.value.code == 0


def test_commands_that_run_alone_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for line in (["list"], ["caption", "a.png"], ["train", "lpd", str(tmp_path)]):
        with pytest.raises(SystemExit) as stop:
            main(line)
        assert stop.value.code == 2
        assert "runs as one process, but the launcher started 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("launch", [torchrun, accelerate_launch])
def test_generate_by_two_processes(launch: Any, tmp_path: Path, model: Path) -> None:
    """The command as users start it, seed drawn by the main process."""
    pytest.importorskip("accelerate")
    line = ["generate", "1", "2", "3", "-m", str(model), "-n", "2", "--batch-size", "2", "-d", "mc-sjd"]
    line += ["--window", "4", "-q", "-o"]
    done = launch("-m", "visacc", *line, str(tmp_path / "two"))
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


DRAFTER_RANKS = """
import sys, hashlib
from pathlib import Path
import torch
from tiny import tiny_llamagen
from visacc.sampling import SamplingParams
from visacc.train.drafter import DrafterTraining, train_drafter

out = Path(sys.argv[1])
settings = DrafterTraining(steps=6, batch=2, pool=4, lr=1e-3, eval_every=3, eval_prompts=1, save_every=3, log_every=1,
                           tree="chain-2")
sampling = SamplingParams(guidance_scale=2.0, top_k=16)
made = train_drafter(tiny_llamagen(grid=4, vocab=16), list(range(8)), [9], out, settings, sampling, echo=lambda _: None)
rank = torch.distributed.get_rank()
assert (out / "drafter" / "model.safetensors").is_file()
torch.save(made.state_dict(), out / f"rank-{rank}.pt")
"""


@pytest.mark.slow
def test_image_drafter_by_two_processes(tmp_path: Path) -> None:
    """Both processes sample for themselves and end with the same weights; one of them writes."""
    pytest.importorskip("accelerate")
    script = tmp_path / "ranks.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{DRAFTER_RANKS}")
    done = torchrun(str(script), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "run"
    one, two = (torch.load(run / f"rank-{rank}.pt", weights_only=True) for rank in range(2))
    fresh = new_drafter(tiny_llamagen(grid=4, vocab=16), DrafterTraining()).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["fc.weight"], fresh["fc.weight"])
    saved = load_drafter(run / "drafter").state_dict()
    assert all(torch.equal(saved[name], one[name]) for name in one)
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in rows if "tau" in r] == [3, 6]
    # the processes draw from different pools of samples
    codes = [load_file(run / f"samples-{rank}.safetensors")["codes"] for rank in range(2)]
    assert not torch.equal(*codes)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [torchrun, accelerate_launch])
def test_train_drafter_command_by_two_processes(launch: Any, tmp_path: Path, model: Path) -> None:
    """... and goes on alone where they stopped."""
    pytest.importorskip("accelerate")
    (tmp_path / "labels.txt").write_text("\n".join(map(str, range(10))))
    line = [
        "train",
        "drafter",
        "-m",
        str(model),
        "--prompts",
        str(tmp_path / "labels.txt"),
        "-o",
        str(tmp_path / "run"),
    ]
    line += ["--held-out", "1", "--batch", "2", "--pool", "4", "--tree", "chain-2", "--guidance-scale", "2"]
    done = launch("-m", "visacc", *line, "--steps", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("drafter written to") == 1
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 2
    with pytest.raises(SystemExit) as stop:
        main([*line, "--steps", "3"])
    assert stop.value.code == 0
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 3


VLM_RANKS = """
import sys
from pathlib import Path
import torch
import vlm_tiny
from visacc.models.vlm.target import VLMTarget
from visacc.speculate.harvest import OnlineHarvester
from visacc.speculate.losses import LossSpec
from visacc.speculate.train import DrafterTraining, default_config, resampled, train_drafter

out = Path(sys.argv[1])
case = vlm_tiny.llava()
target = VLMTarget(case.model)
harvest = OnlineHarvester(target, max_new_tokens=8)
# one batch with pictures and one without: ViSpec's image adaptor is unused in the second
text = {"input_ids": torch.randint(3, 80, (2, 6), generator=torch.Generator().manual_seed(1)),
        "attention_mask": torch.ones(2, 6, dtype=torch.long)}
source = resampled([harvest(case.inputs), harvest(text)])
options = DrafterTraining(steps=4, lr=1e-3, warmup=1, check_every=2, log_every=1, autocast=False)
seen = []
made = train_drafter(target, default_config("vispec", target), source, out, options, spec=LossSpec(),
                     evaluate=lambda drafter: seen.append(1) or {"tau": 1.0})
rank = torch.distributed.get_rank()
torch.save({"weights": made.state_dict(), "measured": torch.tensor(len(seen))}, out / f"rank-{rank}.pt")
"""


@pytest.mark.slow
def test_vlm_drafter_by_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "ranks.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{VLM_RANKS}")
    done = torchrun(str(script), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (torch.load(tmp_path / "run" / f"rank-{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(one["weights"][name], two["weights"][name]) for name in one["weights"])
    assert (int(one["measured"]), int(two["measured"])) == (2, 0)
    saved = load_vlm_drafter(tmp_path / "run" / "drafter").state_dict()
    for name, value in saved.items():
        torch.testing.assert_close(value, one["weights"][name], atol=1e-3, rtol=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4]
