"""visacc: fast, exact decoding for visual autoregressive models."""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a source checkout the sub-packages lie beside this folder, not inside it. Python started in the checkout
# finds this folder first even when a wheel is installed, so the sub-packages must be reachable from here too.
_root = _Path(__file__).resolve().parent.parent
if not (_Path(__file__).parent / "models").exists() and (_root / "models" / "__init__.py").exists():
    __path__.append(str(_root))
