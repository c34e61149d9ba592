"""Sampling defaults: the family's published ones, overridden by what a checkpoint's generation config states.

transformers fills ``top_k=50`` wherever top-k is unset; that never happens here: an unset field stays the
family's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def family_defaults(family: Mapping[str, Any], config: Any, take: Iterable[str]) -> dict[str, Any]:
    """Family defaults with the fields ``take`` of the generation config on top where they are set.

    A checkpoint may carry its own defaults under the key ``visacc`` of its generation config
    (``{"visacc": {"sampling": {"guidance_scale": 4.0}}}``); they win.
    """
    result = dict(family)
    for name in take:
        value = getattr(config, name, None)
        if value is not None:
            result[name] = value
    return {**result, **own_settings(config).get("sampling", {})}


def own_settings(config: Any) -> dict[str, Any]:
    """What a checkpoint's generation config says under the key ``visacc``: family, grid, sampling."""
    found = getattr(config, "visacc", None)
    return dict(found) if isinstance(found, Mapping) else {}
