"""Starting the command line as several processes on this machine (gloo, CPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(*command: str, processes: int = 2, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node N COMMAND``; ``COMMAND`` is a script, or ``-m`` and a module."""
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *command]
    return _start(line, cwd)


def accelerate_launch(*command: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """``accelerate launch --multi_gpu``: without that option accelerate starts one process where there is no GPU."""
    line = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes), *command]
    return _start(line, None)


def _start(module: list[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", *module]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, cwd=cwd)
