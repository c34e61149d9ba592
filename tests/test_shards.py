"""Sharded training of drafters (FSDP2) by two processes: equal to data parallelism, same files, resumable either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import torchrun
from safetensors.torch import load_file

from visacc.models.vlm.target import VLMTarget
from visacc.train.processes import make_accelerator, shards

TESTS = Path(__file__).parent

IMAGE_RANKS = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from tiny import tiny_llamagen
from visacc.sampling import SamplingParams
from visacc.train.drafter import DrafterTraining, train_drafter
from visacc.train.loss import LossSpec

out = Path(sys.argv[1])
settings = DrafterTraining(steps=4, batch=2, accumulate=2, pool=4, lr=1e-3, eval_every=2, eval_prompts=1, save_every=2,
                           log_every=1, tree="chain-2", loss=LossSpec(unroll=2))
sampling = SamplingParams(guidance_scale=2.0, top_k=16)
def go(name, **changes):
    made = train_drafter(tiny_llamagen(grid=4, vocab=16), list(range(8)), [9], out / name,
                         replace(settings, **changes), sampling, echo=lambda _: None)
    if torch.distributed.get_rank() == 1:
        torch.save(made.state_dict(), out / f"{name}.pt")
go("plain")
go("sharded", shard=True)
go("halted", shard=True, steps=2)
go("halted", shard=True)
"""

VLM_RANKS = """
import sys
from dataclasses import replace
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
text = {"input_ids": torch.randint(3, 80, (2, 6), generator=torch.Generator().manual_seed(1)),
        "attention_mask": torch.ones(2, 6, dtype=torch.long)}
harvest = OnlineHarvester(target, max_new_tokens=8, mid=True)
source = resampled([harvest(case.inputs), harvest(text)])
options = DrafterTraining(steps=4, lr=1e-3, warmup=1, check_every=2, log_every=1, autocast=False, average=0.5)
def go(method, name, **changes):
    extra = {"heads_ahead": 2, "latents": 2} if method == "flash" else {}
    made = train_drafter(target, default_config(method, target, **extra), source, out / name,
                         replace(options, **changes), evaluate=lambda d: {"tau": 1.0})
    if torch.distributed.get_rank() == 1:
        torch.save(made.state_dict(), out / f"{name}.pt")
for method in ("eagle", "msd", "dream", "flash", "vispec"):
    go(method, method)
    go(method, method + "-sharded", shard=True)
go("msd", "halted", shard=True, steps=2)
go("msd", "halted", shard=True)
"""

#: as the command line ends: gloo's threads can abort an interpreter that is torn down
END = """
import os
from visacc.eval.world import leave
leave(together=True)
os._exit(0)
"""


def ranks(folder: Path, script: str) -> None:
    file = folder / "ranks.py"
    file.write_text(f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{script}{END}")
    done = torchrun(str(file), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]


def close(a: Any, b: Any) -> None:
    """The same nested state, numbers within rounding, neither of them in parts."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert (a.shape, a.dtype, type(a)) == (b.shape, b.dtype, torch.Tensor)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            close(x, y)
    elif not isinstance(a, str):
        assert a == b


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    return found


@pytest.mark.slow
def test_image_drafter_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks(tmp_path, IMAGE_RANKS)
    for name in ("sharded", "halted"):
        close(state(tmp_path / name), state(tmp_path / "plain"))
        close(*(load_file(tmp_path / n / "drafter" / "model.safetensors") for n in (name, "plain")))
        close(*(torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (name, "plain")))
    fresh = state(tmp_path / "sharded")["network"]["fc.weight"]
    assert float(fresh[:, fresh.shape[0] :].diagonal().std()) > 0  # it has moved from the identity


@pytest.mark.slow
def test_vlm_drafters_in_shards(tmp_path: Path) -> None:
    """Every method; then a run goes on where its first half stopped, and once more by a single process."""
    pytest.importorskip("accelerate")
    ranks(tmp_path, VLM_RANKS)
    for method in ("eagle", "msd", "dream", "flash", "vispec"):
        plain, sharded = tmp_path / method, tmp_path / f"{method}-sharded"
        close(state(sharded), state(plain))
        ours, theirs = (load_file(d / "drafter" / "model.safetensors") for d in (sharded, plain))
        assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
            k: (v.shape, v.dtype) for k, v in theirs.items()
        }
        assert (sharded / "drafter" / "config.json").read_text() == (
            plain / "drafter" / "config.json"
        ).read_text()
    close(state(tmp_path / "halted"), state(tmp_path / "msd"))
    close(*(torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("halted", "msd")))

    import vlm_tiny

    from visacc.speculate.harvest import OnlineHarvester
    from visacc.speculate.train import DrafterTraining, default_config, resampled, train_drafter

    case = vlm_tiny.llava()
    target = VLMTarget(case.model)
    source = resampled([OnlineHarvester(target, max_new_tokens=8)(case.inputs)])
    options = DrafterTraining(
        steps=5, lr=1e-3, warmup=1, check_every=2, log_every=1, autocast=False, average=0.5
    )
    train_drafter(target, default_config("msd", target), source, tmp_path / "halted", options)
    assert state(tmp_path / "halted")["step"] == 5


def test_one_process_has_no_shards() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(RuntimeError, match="needs several processes"):
        shards(make_accelerator(torch.device("cpu")), True)


@pytest.mark.parametrize(
    ("kind", "plugin", "message"),
    [
        ("DEEPSPEED", {}, "configured for DEEPSPEED; drafters are trained with data parallelism"),
        ("FSDP", {"fsdp_version": 1}, "launch with --fsdp_version 2"),
        ("FSDP", {"activation_checkpointing": True}, "without activation checkpointing"),
        ("FSDP", {"cpu_offload": True}, "without CPU offload"),
        ("FSDP", {}, None),
    ],
)
def test_accelerate_configurations(
    monkeypatch: pytest.MonkeyPatch, kind: str, plugin: dict[str, Any], message: str | None
) -> None:
    """Version 2 of FSDP is taken from accelerate's configuration, other kinds of sharding are refused."""
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **plugin})
    chosen = accelerate.utils.DistributedType[kind]
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", property(lambda self: chosen))
    monkeypatch.setattr(accelerate.state.AcceleratorState, "fsdp_plugin", plugin, raising=False)
    if message is None:
        assert shards(make_accelerator(torch.device("cpu")), False)
        return
    with pytest.raises(RuntimeError, match=message):
        make_accelerator(torch.device("cpu"))
