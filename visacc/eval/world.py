"""The processes of a run. One process needs nothing; several come from accelerate or torchrun."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from visacc.decoders.base import Decoder

PATIENCE = timedelta(days=7)
"""How long a rank waits for another's share of a long run."""


def several() -> bool:
    """Whether a launcher (accelerate, torchrun, Slurm through them) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def refuse_memory(decoder: Decoder) -> None:
    """Refuse a decoder whose pictures depend on what it decoded before: on the number of processes, on a resume."""
    if decoder.remembers:
        raise ValueError(
            f"decoder {decoder.name!r} learns while it decodes, so a picture would depend on the number of processes and on"
            " interruptions: give it measured tables (tables=FILE), or coupling=gumbel-exact"
        )


def refuse_several(command: str) -> None:
    """Raise ``RuntimeError`` if a command that works alone was started as several processes."""
    if several():
        raise RuntimeError(
            f"'{command}' runs as one process, but the launcher started {os.environ['WORLD_SIZE']}: they would all do the"
            " same work and write the same files"
        )


@dataclass
class World:
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _state: Any = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (anything that pickles), in order of rank, on every process."""
        if self._state is None:
            return [value]
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    def broadcast(self, value: Any) -> Any:
        """The main process's value, on every process."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


def leave(*, together: bool = False) -> bool:
    """Close this process's connections to the others; ``False`` if it has none.

    Args:
        together: wait for the other ranks first. Only after success: a rank that failed is never here, and then it is
            the launcher that ends the waiting ones.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    if together:
        distributed.barrier()
    distributed.destroy_process_group()
    return True


def join(device: str | None = None) -> World:
    """The world this process belongs to. device: overrides the automatic choice (first or own GPU, else
    CPU).

    Raises:
        ImportError: several processes without accelerate.
        RuntimeError: accelerate was set up in this process before, for another number of processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise ImportError(
                "several processes need accelerate: pip install 'visacc[eval]' (or run one process)"
            ) from error
        cpu = device == "cpu" or not torch.cuda.is_available()
        state = PartialState(cpu=cpu, timeout=PATIENCE)
        atexit.register(leave)
        if state.num_processes != size:  # set up before, or inherited over a fork: every rank would be rank 0
            raise RuntimeError(
                f"accelerate was set up in this process for {state.num_processes} process(es), WORLD_SIZE says "
                f"{size}: start each process of a run afresh with accelerate launch or torchrun"
            )
        place = torch.device(device) if device and device != "cuda" else state.device
        return World(state.process_index, state.num_processes, torch.device(place), state)
    place = torch.device(device) if device else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return World(device=place)
