"""Tests whose counterpart is missing or wrong in the oldest version of a library that visacc supports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import transformers
from packaging.version import Version

OLDEST = Version(transformers.__version__) < Version("5.1")


def of_later_transformers(reason: str) -> pytest.MarkDecorator:
    """The comparison with transformers itself must fail with 5.0, for this reason, and hold with every later version."""
    return pytest.mark.xfail(OLDEST, reason=f"transformers 5.0: {reason}", strict=True)


def parameters(values: Iterable[Any], later: dict[Any, str]) -> list[Any]:
    """Values of a parametrised test, those in ``later`` with their mark."""
    return [pytest.param(v, marks=of_later_transformers(later[v])) if v in later else v for v in values]
