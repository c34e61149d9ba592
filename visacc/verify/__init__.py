"""The one place where drafts are accepted or rejected."""

from visacc.verify.chain import EXACT, ChainRule, ChainVerdict, ExactRule, verify_chain

__all__ = ["EXACT", "ChainRule", "ChainVerdict", "ExactRule", "verify_chain"]
