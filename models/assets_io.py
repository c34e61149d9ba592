"""Weights that ship with the package: safetensors in half precision, hyper-parameters in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visacc.reading import read_entry
from visacc.weights import read_weights
from visacc.writing import write_safetensors

MAX_BYTES = 6_000_000


def save_asset(module: nn.Module, config: Any, path: Path, **facts: Any) -> None:
    """Write the state dict in float16 with ``config`` (a dataclass) and other facts as metadata.

    Raises:
        ValueError: the file would exceed 6 MB, or a weight does not fit float16.
    """
    state = {}
    for key, value in module.state_dict().items():
        half = (
            value.detach().half().contiguous() if value.is_floating_point() else value.detach().contiguous()
        )
        if half.is_floating_point() and not bool(half.isfinite().all()):
            raise ValueError(f"{key} holds values that float16 cannot")
        state[key] = half
    size = sum(t.numel() * t.element_size() for t in state.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"{path.name} would take {size / 1e6:.1f} MB; shipped weights stay below {MAX_BYTES / 1e6:.0f} MB"
        )
    if not is_dataclass(config) or isinstance(config, type):
        raise ValueError("config must be a dataclass instance")
    write_safetensors(path, state, {"config": json.dumps(asdict(config)), "facts": json.dumps(facts)})
    path.chmod(0o644)  # the library writes for the owner alone, packages are for everybody


def read_asset(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """State dict in float32, hyper-parameters and facts of a file that :func:`save_asset` wrote."""
    if not path.is_file():
        raise ValueError(f"weights {path} are missing from this installation")
    state, metadata = read_weights(path)
    if "config" not in metadata:
        raise ValueError(f"{path} carries no hyper-parameters: not a file of this package")
    state = {key: value.float() if value.dtype == torch.float16 else value for key, value in state.items()}
    return state, read_entry(path, metadata, "config"), read_entry(path, metadata, "facts")


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bar: an embedded model is read in an instant."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
