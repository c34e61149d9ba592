"""Choice of the implementation of an op. Callers never name a backend; tests and benchmarks may force one.

``VISACC_KERNELS`` (or the ``backend`` argument of an op):

* ``auto`` (default): Triton when every tensor is on a CUDA device of capability 8.0 or newer, else the
  reference;
* ``reference``: the torch definition, on any device;
* ``triton``: the Triton kernel. CPU tensors need Triton's interpreter (``TRITON_INTERPRET=1`` before Triton
  is imported).
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("visacc.kernels")

BACKENDS = ("auto", "reference", "triton")


class UnsupportedError(ValueError):
    """Raised by a Triton launcher for a shape or dtype that its kernel does not cover."""


@lru_cache(maxsize=1)
def triton_installed() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def interpreting() -> bool:
    """Whether Triton kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=16)
def _capable(device: torch.device) -> bool:
    return triton_installed() and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=64)
def _note(message: str, level: int) -> None:
    logger.log(level, message)


def choose(backend: str | None, tensors: tuple[Any, ...]) -> str:
    """'reference' or 'triton' for a call with these arguments (non-tensors are ignored)."""
    backend = backend or os.environ.get("VISACC_KERNELS", "auto")
    if backend not in BACKENDS:
        raise ValueError(f"kernel backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return backend
    first = next(t for t in tensors if isinstance(t, Tensor))
    if first.dtype == torch.float64:
        return "reference"
    if backend == "triton":
        if not triton_installed():
            raise ValueError("kernel backend 'triton' was asked for but triton is not installed")
        if first.device.type != "cuda" and not interpreting():
            raise ValueError(
                f"kernel backend 'triton' was asked for but the tensors are on {first.device}: move them to a"
                " CUDA device, or set TRITON_INTERPRET=1 before the first import of triton"
            )
        return backend
    chosen = "triton" if first.device.type == "cuda" and _capable(first.device) else "reference"
    _note(f"kernels on {first.device}: {chosen}", logging.DEBUG)
    return chosen


def launcher(module: str) -> ModuleType:
    """A module of `visacc.kernels.triton`, imported on first use so that the library runs without Triton."""
    return importlib.import_module(f"visacc.kernels.triton.{module}")


def warn_unsupported(op: str, reason: str) -> None:
    """Say once that `op` runs its reference on a device that has a kernel for other shapes."""
    _note(f"{op}: {reason}; using the torch reference", logging.WARNING)
