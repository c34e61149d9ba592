"""The embedded world of coloured shapes: scenes, captions, an exact detector and the trained models' assets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"


def load_t2i(**options: Any) -> Any:
    """embedded text-to-image model of coloured shapes (LlamaGen architecture, 64x64 pixels, 256 tokens)"""
    from visacc.models import llamagen
    from visacc.models.assets_io import without_bars

    with without_bars():
        return llamagen.load(ASSETS / "t2i", **options)


#: name -> loader of every model that ships inside the package
EMBEDDED: dict[str, Callable[..., Any]] = {"shapes-t2i": load_t2i}
