"""Targets spread over two processes (FSDP2, gloo): the same pictures, each process holding a part of the layers."""

from __future__ import annotations

import json
from pathlib import Path

import hf_tiny
import pytest
import torch
from launch import torchrun
from tiny import save_tiny, tiny_llamagen

import visacc
from visacc.cli import main
from visacc.memory import in_batches
from visacc.models.base import ImageModel
from visacc.models.hf.loading import load_hf
from visacc.pipeline import TextToImagePipeline
from visacc.sharding import Shards

TESTS = Path(__file__).parent

RANKS = """
import sys
from pathlib import Path
import torch
from test_lpd import build as tiny_lpd
from torch import distributed
from torch.distributed.tensor import DTensor
import visacc
from visacc.eval.world import join
from visacc.models.hf.loading import load_hf
from visacc.pipeline import TextToImagePipeline
from visacc.sharding import Shards

folder, world = Path(sys.argv[1]), join("cpu")
prompts = {"llamagen": [3, 1, 4, 1, 5], "janus": [[5, 6, 7], [8, 9], [3, 4, 5, 6], [2, 8], [9, 9]], "lpd": [0, 1, 2, 1, 0]}
decoders = {"llamagen": {"decoder": "mc-sjd", "window": 4}, "janus": {"decoder": "sjd", "window": 4},
            "lpd": {"decoder": "lpd", "steps": 5}}

def load(name, shard):
    if name == "lpd":  # made in memory, as a plug-in would
        model = tiny_lpd()
        if shard:
            model.shards = Shards(model, world.device)
        return TextToImagePipeline(model, **decoders[name])
    options = {"dtype": "float32", "device": "cpu"}
    return visacc.load(folder / name, shard=shard, **options, **decoders[name])

def draw(pipe, texts, seeds):
    return pipe(texts, seed=seeds, batch_size=2, output_type="codes", guidance_scale=2.0)

for name, texts in prompts.items():
    wanted = draw(load(name, False), texts, [7, 8, 9, 10, 11])
    whole = load(name, False).model
    pipe = load(name, True)
    assert pipe.model.fingerprint() == whole.fingerprint()
    # rank 0 makes four pictures in two batches, rank 1 one: it has to help with the rest
    mine = [0, 1, 2, 3] if world.rank == 0 else [4]
    if name == "janus" and world.rank:
        mine = []
    for again in range(2):
        if mine:
            found = draw(pipe, [texts[i] for i in mine], [7 + i for i in mine])
            assert torch.equal(found.codes, wanted.codes[mine]), (name, world.rank)
            assert found.stats.steps.tolist() == wanted.stats.steps[mine].tolist()
        pipe.finish()
    held = [p for layer in pipe.model.shards.layers for p in layer.parameters()]
    assert held and all(isinstance(p, DTensor) for p in held)
    local, total = (sum(n) for n in zip(*((p.to_local().numel(), p.numel()) for p in held)))
    assert 0.4 < local / total < 0.6, (name, local, total)
    others = set(map(id, held))
    assert not any(isinstance(p, DTensor) for p in pipe.model.module.parameters() if id(p) not in others)
    print(name, "ok", world.rank, flush=True)
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_pictures_of_sharded_models(tmp_path: Path) -> None:
    """Ranks with different numbers of batches, one with none; twice, as the cells of an evaluation run are."""
    pytest.importorskip("accelerate")
    save_tiny(tmp_path / "llamagen", grid=4)
    hf_tiny.janus(tmp_path / "janus")
    script = tmp_path / "ranks.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{RANKS}")
    done = torchrun(str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok") == 6


@pytest.mark.slow
def test_sharded_commands(tmp_path: Path) -> None:
    """``visacc generate --shard`` and an evaluation run with ``shard: true`` write what one process writes without."""
    pytest.importorskip("accelerate")
    yaml = pytest.importorskip("yaml")
    model = save_tiny(tmp_path / "model", grid=4)
    line = ["generate", "1", "2", "3", "-m", str(model), "-d", "mc-sjd", "--window", "4", "--seed", "5", "-q",
            "--batch-size", "1", "-o"]  # fmt: skip
    done = torchrun("-m", "visacc", *line, str(tmp_path / "two"), "--shard")
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.raises(SystemExit) as stop:
        main([*line, str(tmp_path / "one")])
    assert stop.value.code == 0
    names = [f"{i:03d}.png" for i in range(3)]
    assert [(tmp_path / "two" / n).read_bytes() for n in names] == [
        (tmp_path / "one" / n).read_bytes() for n in names
    ]
    assert json.loads((tmp_path / "two" / "stats.json").read_text())["processes"] == 2

    config = {"model": str(model), "prompts": "labels:3x1", "batch_size": 1, "metrics": []}
    config["decoders"] = {"ar": None, "sjd": {"decoder": "sjd", "window": 4}}
    for name, options in (("plain", {}), ("sharded", {"shard": True})):
        config |= {"model_options": options, "output": str(tmp_path / name)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    done = torchrun("-m", "visacc", "eval", "run", str(tmp_path / "sharded.yaml"), "--quiet")
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.raises(SystemExit) as stop:
        main(["eval", "run", str(tmp_path / "plain.yaml"), "--quiet"])
    assert not stop.value.code
    made = {p.relative_to(tmp_path / "plain"): p.read_bytes() for p in (tmp_path / "plain").rglob("*.png")}
    assert len(made) == 6
    assert made == {
        p.relative_to(tmp_path / "sharded"): p.read_bytes() for p in (tmp_path / "sharded").rglob("*.png")
    }


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "model", grid=4)
    with pytest.raises(RuntimeError, match="this one is alone: start the program with accelerate"):
        visacc.load(folder, shard=True)
    with pytest.raises(RuntimeError, match="needs several processes"):
        Shards(tiny_llamagen(grid=4), torch.device("cpu"))
    with pytest.raises(ValueError, match="with shard or with compile"):
        visacc.load(folder, shard=True, compile=True)
    with pytest.raises(ValueError, match="device_map spreads models of the transformers library"):
        visacc.load(folder, device_map="auto")
    with pytest.raises(SystemExit) as stop:
        main(["generate", "1", "-m", str(folder), "-o", str(tmp_path / "out"), "-q", "--shard"])
    assert stop.value.code == 2
    assert "this one is alone" in capsys.readouterr().err

    class Other(type(tiny_llamagen(grid=4))):  # type: ignore[misc]
        stack = ImageModel.stack

    plain = tiny_llamagen(grid=4)
    with pytest.raises(ValueError, match="tiny cannot be spread over processes"):
        Other(plain.gpt, plain.vq, name="tiny").stack()


def test_device_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``device_map`` reaches transformers, through ``visacc.load`` and the command line; such a model is not sharded."""
    import transformers

    accelerate = pytest.importorskip("accelerate")
    folder = hf_tiny.janus(tmp_path / "janus")
    plain = visacc.load(folder, "sjd", device="cpu", dtype="float32")
    maps = []
    cls = transformers.JanusForConditionalGeneration
    real = cls.from_pretrained

    def spy(*args: object, **kwargs: object) -> object:
        maps.append(kwargs.get("device_map"))
        return real(*args, **kwargs)

    monkeypatch.setattr(cls, "from_pretrained", spy)
    mapped = visacc.load(folder, "sjd", device_map="auto", dtype="float32")
    with pytest.raises(SystemExit) as stop:
        main(["generate", "x", "-m", str(folder), "--device-map", "auto", "-q", "-o", str(tmp_path / "out")])
    assert stop.value.code == 0
    assert maps == ["auto", "auto"]
    options = {"seed": 3, "guidance_scale": 2.0, "output_type": "codes"}
    assert torch.equal(mapped([[5, 6, 7]], **options).codes, plain([[5, 6, 7]], **options).codes)
    accelerate.cpu_offload(mapped.model.module, execution_device=torch.device("cpu"))
    assert torch.equal(mapped([[5, 6, 7]], **options).codes, plain([[5, 6, 7]], **options).codes)
    with pytest.raises(ValueError, match=r"spread over several devices .* cannot be sharded"):
        mapped.model.stack()


def test_a_failure_is_not_tried_again_where_others_wait() -> None:
    calls = []

    def work(start: int, stop: int) -> None:
        calls.append((start, stop))
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        list(in_batches(4, 4, work, halve=False))
    assert calls == [(0, 4)]


def test_finish_of_a_model_in_one_piece_is_nothing() -> None:
    TextToImagePipeline(tiny_llamagen(grid=4)).finish()


def test_fingerprint_is_read_anew_in_one_piece(tmp_path: Path) -> None:
    """Only a sharded model keeps the one it had: weights that are changed in place are other weights."""
    model = load_hf(hf_tiny.janus(tmp_path / "janus"))
    before = model.fingerprint()
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(1.0)
    assert model.fingerprint() != before
