"""Batches that do not fit into memory are decoded in halves.

Random numbers belong to the sample, not to its batch, so the pictures stay the same (up to the rounding that any change of
batch size brings).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_CPU = ("can't allocate memory", "not enough memory")
"""How torch's CPU allocator puts it; on a GPU there is an exception of its own."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory has run out, on a GPU or a CPU."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _CPU)


def in_batches(
    count: int, size: int, work: Callable[[int, int], T], *, what: str = "images", halve: bool = True
) -> Iterator[tuple[int, int, T]]:
    """``(start, stop, work(start, stop))`` for items ``0..count`` in order, at most ``size`` at a time.

    Where memory runs out the batch is tried again in halves, down to single items, and the smaller size is kept for the
    rest. ``work`` must have no effect that a second call with the same items would double.

    Args:
        halve: ``False`` lets the first failure stand.

    Raises:
        torch.OutOfMemoryError: not even one item fits.
    """
    start = 0
    while start < count:
        stop = min(start + size, count)
        try:
            result = work(start, stop)
        except (RuntimeError, MemoryError) as error:
            if not halve or not out_of_memory(error):
                raise
            if stop - start == 1:
                import torch

                raise torch.OutOfMemoryError(
                    f"not even one of the {what} fits into memory; use a smaller size or window, a smaller dtype, or"
                    f" another device ({' '.join(str(error).split())[:200]})"
                ) from error
            size = (stop - start + 1) // 2
        else:
            yield start, stop, result
            start = stop
            continue
        # only here, behind the except clause, are the frames of the failed attempt and their tensors gone
        _release()
        warnings.warn(
            f"{stop - start} {what} at a time do not fit into memory: going on with {size}", stacklevel=2
        )


def _release() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
