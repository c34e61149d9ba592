"""A target that one GPU does not hold: its layers in parts, one part in each process of a run (FSDP2).

Every process decodes images of its own, but a layer is whole only while it computes, and making it whole takes all
processes. So they run their forwards together: one that is through with its images takes part in those of the others
until all are (:meth:`Shards.finish`). Embedding, head and pixel decoder stay whole in every process.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

if TYPE_CHECKING:
    from visacc.models.base import ImageModel


class Shards:
    """Spread the layers of ``model`` over all processes, in place. Every process must hold the same weights.

    Args:
        model: adapter with :meth:`~visacc.models.base.ImageModel.stack`; it may lie on the CPU and is then moved layer by
            layer, so that no process ever holds more than its part and one layer on its device.
        device: where this process computes.

    Raises:
        RuntimeError: the processes are not connected.
        ValueError: the model cannot be sharded.
    """

    def __init__(self, model: ImageModel, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        if not distributed.is_initialized():
            raise RuntimeError(
                "a sharded model needs several processes: start them with accelerate launch or torchrun"
            )
        stack = model.stack()
        model.fingerprint()  # kept by the model: later it would take all processes to read the weights
        self.layers: list[Any] = list(stack.layers)
        self._device = device
        inside = {id(t) for layer in self.layers for t in (*layer.parameters(), *layer.buffers())}
        model.module._apply(lambda t: t if id(t) in inside else t.to(device))
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            register_fsdp_forward_method(layer, stack.layer_entry)
        parts = {id(p) for layer in self.layers for p in layer.parameters()}
        whole = {p for p in stack.root.parameters() if id(p) not in parts}
        # the root owns no part, but under a common root the next layer is fetched while one computes
        fully_shard(stack.root, mesh=mesh, ignored_params=whole)
        register_fsdp_forward_method(stack.root, stack.entry)
        self._announce(stack.root, stack.entry)

    def _announce(self, root: nn.Module, entry: str) -> None:
        """Tell the other processes of every forward before it begins."""
        call = getattr(root, entry)

        @functools.wraps(call)
        def together(*args: Any, **kwargs: Any) -> Any:
            self._running(1)
            return call(*args, **kwargs)

        setattr(root, entry, together)

    def _running(self, count: int) -> Tensor:
        """How many processes run the forward that now begins; int64 scalar on the device, not looked at here."""
        total = torch.tensor(count, device=self._device)
        distributed.all_reduce(total)
        return total

    @torch.no_grad()
    def finish(self) -> None:
        """Take part in the forwards of the other processes until none has any left. Every process must call it."""
        while int(self._running(0)):
            for layer in self.layers:
                layer.unshard()
                layer.reshard()
