"""Decoders: how the next tokens are proposed and which of them stand."""

from visacc.decoders.ar import AR
from visacc.decoders.base import Decoder, Verdict
from visacc.decoders.jacobi import MCSJD, SJD, Jacobi

__all__ = ["AR", "MCSJD", "SJD", "Decoder", "Jacobi", "Verdict"]
