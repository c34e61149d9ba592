"""The one place where drafts are accepted or rejected."""

from visacc.verify.chain import ChainRule, ChainVerdict, verify_chain
from visacc.verify.rules import (
    EXACT,
    GREEDY,
    GUMBEL_EXACT,
    Exact,
    Greedy,
    Grouped,
    GumbelExact,
    Lantern,
    LanternPP,
    Rule,
    Typical,
)

ExactRule = Exact

__all__ = [
    "EXACT",
    "GREEDY",
    "GUMBEL_EXACT",
    "ChainRule",
    "ChainVerdict",
    "Exact",
    "ExactRule",
    "Greedy",
    "Grouped",
    "GumbelExact",
    "Lantern",
    "LanternPP",
    "Rule",
    "Typical",
    "verify_chain",
]
