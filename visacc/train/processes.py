"""Training on several processes: plain data parallelism by accelerate, every process on its own GPU (or the CPU)."""

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
        RuntimeError: accelerate is not installed, was configured to shard the model, or sees another number of processes
            than the launcher started.
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
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"):
        raise RuntimeError(
            f"accelerate is configured for {kind}, but drafters are small and are trained with data parallelism: launch"
            " with --multi_gpu (or --cpu), or with torchrun"
        )
    return accelerator


def own_device(device: str | None) -> str | None:
    """The device asked for; under a launcher without one, this process's GPU; else ``None``."""
    rank = os.environ.get("LOCAL_RANK")
    if device is not None or rank is None or not torch.cuda.is_available():
        return device
    return f"cuda:{rank}"
