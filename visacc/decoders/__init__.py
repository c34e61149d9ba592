"""Decoders: how the next tokens are proposed and which of them stand."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from visacc.decoders.ar import AR
from visacc.decoders.base import Decoder, Verdict
from visacc.decoders.jacobi import MCSJD, SJD, Jacobi

if TYPE_CHECKING:
    from visacc.decoders.eagle import Eagle
    from visacc.decoders.eagle_relaxed import LanternDecoder, LanternPlusPlus, LanternPPDecoder
    from visacc.decoders.gsd import GSD
    from visacc.decoders.lpd import LPD
    from visacc.decoders.nbp import NBP
    from visacc.decoders.nc_sjd import NCSJD
    from visacc.decoders.pjd import PJD
    from visacc.decoders.sjd_pac import SJDPAC
    from visacc.decoders.zipar import ZipAR

_LATER = {
    "Eagle": "eagle",
    "GSD": "gsd",
    "LPD": "lpd",
    "NBP": "nbp",
    "LanternDecoder": "eagle_relaxed",
    "LanternPPDecoder": "eagle_relaxed",
    "LanternPlusPlus": "eagle_relaxed",
    "NCSJD": "nc_sjd",
    "PJD": "pjd",
    "SJDPAC": "sjd_pac",
    "ZipAR": "zipar",
}

__all__ = [
    "AR",
    "GSD",
    "LPD",
    "MCSJD",
    "NBP",
    "NCSJD",
    "PJD",
    "SJD",
    "SJDPAC",
    "Decoder",
    "Eagle",
    "Jacobi",
    "LanternDecoder",
    "LanternPPDecoder",
    "LanternPlusPlus",
    "Verdict",
    "ZipAR",
]


def __getattr__(name: str) -> object:
    """Import the larger decoders on first use."""
    if name in _LATER:
        return getattr(_import_module(f"visacc.decoders.{_LATER[name]}"), name)
    raise AttributeError(f"module 'visacc.decoders' has no attribute {name!r}")
