"""Speculative decoding for vision-language models: drafters, token trees, the decode loop, captioning."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CaptionPipeline": "pipeline",
    "Drafter": "drafter",
    "DrafterConfig": "config",
    "NgramDrafter": "ngram",
    "Speculator": "api",
    "TextDrafter": "contract",
    "TextParams": "params",
    "load_drafter": "checkpoints",
    "save_drafter": "checkpoints",
    "speculate": "api",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    # lazy: the target adapters import this package's views, and the api imports the adapters
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
