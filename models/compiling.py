"""torch.compile of a model's window forward: what it needs of the machine, CUDA graphs on a GPU, and the cache write that
compiled code can do in place.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

_COMPILERS = ("g++", "clang++", "c++", "cl")


def compiled(function: Callable[..., Any], device: torch.device, *, whole: bool) -> Callable[..., Any]:
    """``torch.compile(function)``, after checking that this machine can; on a GPU replayed as CUDA graphs.

    A graph writes its results to the same memory every time, so on a GPU they must be copied (:func:`kept`) before the next
    call. Tensors that the function writes into must be marked (:func:`fixed`): others would keep it from becoming a graph.

    Args:
        whole: the function must be one graph; otherwise it may break into several.

    Raises:
        RuntimeError: no C++ compiler for code on a CPU, or no Triton for a GPU.
    """
    if device.type == "cpu":
        names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
        if not any(shutil.which(name) for name in names):
            raise RuntimeError(
                f"compile=True on a CPU needs a C++ compiler, and there is none here (looked for {', '.join(names)}):"
                " install g++, or load without compile"
            )
    elif device.type == "cuda" and find_spec("triton") is None:
        raise RuntimeError("compile=True on a GPU needs Triton: pip install triton, or load without compile")
    if device.type != "cuda":
        return torch.compile(function, fullgraph=whole)
    graphs = torch.compile(function, fullgraph=whole, mode="reduce-overhead")

    @functools.wraps(function)
    def replay(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return graphs(*args, **kwargs)

    return replay


def fixed(tensors: Iterable[Tensor]) -> None:
    """Mark tensors whose memory stays where it is from call to call, so that a CUDA graph may write into it.

    When it moves all the same, as from one batch to the next, the graph is recorded anew, and nothing is compiled anew.
    """
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


def kept(result: Tensor) -> Tensor:
    """A result of :func:`compiled` that outlives the next call."""
    return result.clone() if result.is_cuda else result


def refuse_hooks(module: nn.Module, name: str, what: str) -> None:
    """Raise ``ValueError`` for modules that accelerate has spread over devices: they cannot be ``what``."""
    if any(hasattr(m, "_hf_hook") for m in module.modules()):
        raise ValueError(
            f"{name} is spread over several devices (device_map), and accelerate moves its tensors between them from Python:"
            f" such a model cannot be {what}"
        )


def put_slots(store: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write ``new`` [R, H, N, d] into ``store`` [R, H, S, d] at ``slots`` int64 [R, N], in place.

    Compiled code copies the whole store for a scatter, and writes an index_put in place.
    """
    rows = torch.arange(store.shape[0], device=store.device)[:, None, None]
    heads = torch.arange(store.shape[1], device=store.device)[None, :, None]
    store[rows, heads, slots[:, None]] = new.to(store.dtype)
