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
from visacc.verify.traversal import Traversal
from visacc.verify.tree import AcceptedStep, DraftTree, TreeShape
from visacc.verify.verify import verify

__all__ = [
    "EXACT",
    "GREEDY",
    "GUMBEL_EXACT",
    "AcceptedStep",
    "ChainRule",
    "ChainVerdict",
    "DraftTree",
    "Exact",
    "Greedy",
    "Grouped",
    "GumbelExact",
    "Lantern",
    "LanternPP",
    "Rule",
    "Traversal",
    "TreeShape",
    "Typical",
    "verify",
    "verify_chain",
]
