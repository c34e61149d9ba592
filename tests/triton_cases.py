"""Running an op as Triton kernel and as reference, for tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from kernel_cases import DEVICE, to

pytest.importorskip("triton")


FEW = settings(max_examples=10, deadline=None, derandomize=True)


def both(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Results of the reference and of the kernel."""
    args = tuple(to(DEVICE, a) for a in args)
    kwargs = {k: to(DEVICE, v) for k, v in kwargs.items()}
    return op(*args, **kwargs, backend="reference"), op(*args, **kwargs, backend="triton")


def same(results: tuple[Any, Any]) -> None:
    """Bit-equal, element by element."""
    a, b = results
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),):
        if x is None:
            assert y is None
            continue
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
