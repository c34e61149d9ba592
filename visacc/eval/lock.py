"""One run per folder: every process of a run holds a share of the folder's lock until it ends, however it ends.

A killed main process alone does not free the folder while other processes of its run still write into it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from visacc.eval.files import sweep
from visacc.eval.world import World

PATIENCE = 10.0  # seconds a run waits for what is left of a killed one


@contextmanager
def claim(folder: Path, world: World, patience: float | None = None) -> Iterator[None]:
    """Hold the folder for this run; every process of the run must come here. Leftovers of killed writers are
    swept while nobody else works in the folder.

    patience: seconds to wait for processes of an earlier run; default PATIENCE.

    Raises:
        ValueError: processes of another run still hold the folder; the message has their ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no advisory locks on this system
        if world.main:
            sweep(folder)
        world.barrier()
        yield
        return
    with open(folder / ".lock", "a+") as handle:
        if world.main:
            _take(handle, fcntl.LOCK_EX, folder, PATIENCE if patience is None else patience)
            handle.truncate(0)
            sweep(folder)
            _take(handle, fcntl.LOCK_SH, folder, 0.0)
        world.barrier()
        if not world.main:
            _take(handle, fcntl.LOCK_SH, folder, 0.0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        world.barrier()
        yield


def _take(handle: IO[str], kind: int, folder: Path, patience: float) -> None:
    import fcntl

    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                handle.seek(0)
                ids = ", ".join(handle.read().split()) or "starting"
                raise ValueError(
                    f"another run is working in {folder} (process {ids}); wait for it, end what is left of "
                    "it, or choose another folder"
                ) from error
        except OSError as error:
            warnings.warn(f"no lock on {folder} ({error}): start only one run in it at a time", stacklevel=4)
            return
        time.sleep(0.05)
