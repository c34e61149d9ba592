"""Training on several processes, each on its own GPU (or the CPU): data parallelism by accelerate, or shards."""

from __future__ import annotations

import os
from typing import Any

import torch

from visacc.eval.world import PATIENCE, join, several


def make_accelerator(device: torch.device, accumulate: int = 1, *, unused: bool = False) -> Any:
    """An ``accelerate.Accelerator`` that leaves placement and precision to the caller.

    Args:
        device: where the model lies.
        accumulate: rounds per optimiser step.
        unused: some parameters may take no part in a batch (drafters that pool pictures, in batches without any).

    Raises:
        RuntimeError: accelerate is not installed, was configured for a kind of training that is not available, or sees
            another number of processes than the launcher started.
    """
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError as error:
        raise RuntimeError("training a drafter needs accelerate: pip install 'visacc[eval]'") from error
    waits = InitProcessGroupKwargs(timeout=PATIENCE)  # the others wait while the main process measures
    cpu = several() and device.type == "cpu"
    if several():  # without cpu=True accelerate takes processes without GPUs for independent ones
        join("cpu" if cpu else None)
    # accelerate keeps precision and placement for the life of the process, so both stay ours
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        mixed_precision="no",
        cpu=cpu,
        device_placement=False,
        kwargs_handlers=[waits, DistributedDataParallelKwargs(find_unused_parameters=unused)],
    )
    kind = str(accelerator.distributed_type.value)
    if kind in ("DEEPSPEED", "MEGATRON_LM", "TP"):
        raise RuntimeError(
            f"accelerate is configured for {kind}; drafters are trained with data parallelism (--multi_gpu, torchrun) or"
            " sharded by FSDP (--use_fsdp --fsdp_version 2)"
        )
    if kind == "FSDP":
        _check_plugin(accelerator.state.fsdp_plugin)
    return accelerator


def _check_plugin(plugin: Any) -> None:
    """What accelerate's configuration of FSDP asks for and a drafter, one small unit, cannot give."""
    if int(plugin.fsdp_version) != 2:
        raise RuntimeError(
            f"accelerate is configured for version {plugin.fsdp_version} of FSDP; drafters are sharded by version 2:"
            " launch with --fsdp_version 2"
        )
    asked = {
        "activation checkpointing": bool(plugin.activation_checkpointing),
        "CPU offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
    }
    for what in (name for name, on in asked.items() if on):
        raise RuntimeError(
            f"drafters are sharded without {what}: switch it off in accelerate's configuration"
        )


def shards(accelerator: Any, asked: bool) -> bool:
    """Whether a run is sharded: its option says so, or accelerate's configuration.

    Raises:
        RuntimeError: it should be, but runs as one process.
    """
    if asked and accelerator.num_processes < 2:
        raise RuntimeError("sharding needs several processes: start them with accelerate launch or torchrun")
    return asked or str(accelerator.distributed_type.value) == "FSDP"


def own_device(device: str | None) -> str | None:
    """The device asked for; under a launcher without one, this process's GPU; else ``None``."""
    rank = os.environ.get("LOCAL_RANK")
    if device is not None or rank is None or not torch.cuda.is_available():
        return device
    return f"cuda:{rank}"
