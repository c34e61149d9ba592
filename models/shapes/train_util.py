"""Small helpers of the training code: atomic checkpoints, JSONL logs, learning-rate schedule, weight averages."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visacc.weights import read_weights
from visacc.writing import write_torch


def save_atomic(state: dict[str, Any], path: Path) -> None:
    """torch.save through a temporary file, so that an interrupted run never leaves half a checkpoint."""
    write_torch(path, state)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint at `path`, or None if there is none yet."""
    return read_weights(path)[0] if path.exists() else None


class JsonLog:
    """Appends one JSON object per line, with the time, and echoes it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def write(self, **record: Any) -> None:
        record = {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}
        line = json.dumps({**record, "time": int(time.time())})
        with self.path.open("a") as handle:
            handle.write(line + "\n")
        print(line, flush=True)


def schedule(step: int, total: int, warmup: int = 100, floor: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then cosine to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def plateau(step: int, hold: int, fade: int, warmup: int = 60) -> float:
    """Learning-rate factor: linear warm-up, constant until `hold`, then linear to zero within `fade` steps."""
    return min((step + 1) / warmup, 1.0, (hold + fade - step) / fade)


class Average:
    """Exponential moving average of every floating tensor of a module's state dict."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.state = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """`step` counts from 0; early on the average follows faster than `decay`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        pairs = [(self.state[name], value) for name, value in module.state_dict().items()]
        floating: list[tuple[Tensor, Tensor]] = [p for p in pairs if p[0].is_floating_point()]
        torch._foreach_lerp_([a for a, _ in floating], [b for _, b in floating], 1 - decay)
