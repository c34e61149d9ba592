"""Sharded training (FSDP2): parameters, gradients and optimiser states of a small model spread over the processes.

A drafter is one unit: it is whole while it computes and in parts between two passes. Everything that leaves the run is
whole and of the same format as without sharding, so a run can be continued either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, device: torch.device) -> None:
    """Spread the parameters of ``module`` over all processes, in place. Every process must hold the same weights.

    Raises:
        RuntimeError: the processes are not connected.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():
        raise RuntimeError("sharding needs several processes: start them with accelerate launch or torchrun")
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    fully_shard(module, mesh=mesh)


def whole(value: Any) -> Any:
    """The full tensor of a part, and anything else as it is; all processes must ask together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with full tensors; all processes must ask together."""
    return {name: whole(value) for name, value in state.items()}


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """``optimizer.state_dict()`` with full tensors; all processes must ask together."""
    found: dict[str, Any] = optimizer.state_dict()
    parts = found["state"]
    return {**found, "state": {i: {k: whole(v) for k, v in part.items()} for i, part in parts.items()}}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load what :func:`optimizer_state` gave, cut to the parts that this process holds of each parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for index, part in saved["state"].items():
        state[index] = {k: like(v, parameters[index]) for k, v in part.items()}
    optimizer.load_state_dict({**saved, "state": state})


def like(value: Any, parameter: Tensor) -> Any:
    """``value`` spread as ``parameter`` is, where it has its shape."""
    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
