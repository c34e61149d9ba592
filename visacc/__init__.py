"""visacc: fast, exact decoding for visual autoregressive models."""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0"

# In a source checkout the sub-packages lie beside this folder, not inside it. Python started in the checkout
# finds this folder first even when a wheel is installed, so the sub-packages must be reachable from here too.
_root = _Path(__file__).resolve().parent.parent
if not (_Path(__file__).parent / "models").exists() and (_root / "models" / "__init__.py").exists():
    __path__.append(str(_root))

_EXPORTS = {
    "load": "visacc.loading",
    "TextToImagePipeline": "visacc.pipeline",
    "TextToVideoPipeline": "visacc.video",
    "VideoContinuationPipeline": "visacc.video",
    "Decoder": "visacc.decoders",
    "SamplingParams": "visacc.sampling",
    "attach": "visacc.integrations.attach",
    "ARImagePipeline": "visacc.integrations.diffusers_pipeline",
}

__all__ = [
    "ARImagePipeline",
    "Decoder",
    "SamplingParams",
    "TextToImagePipeline",
    "TextToVideoPipeline",
    "VideoContinuationPipeline",
    "__version__",
    "attach",
    "load",
]


_PACKAGES = ("decoders", "kernels", "metrics", "models", "speculate", "verify")


def __getattr__(name: str) -> _Any:
    """Import on first use: ``import visacc`` alone stays quick."""
    if name in _PACKAGES:
        return _import_module(f"visacc.{name}")
    if name in _EXPORTS:
        return getattr(_import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'visacc' has no attribute {name!r}")
