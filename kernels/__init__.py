"""Sampling, verification and attention kernels: torch references and Triton, behind one set of ops."""

from visacc.kernels import rng
from visacc.kernels.ops import (
    chain_verify,
    draw,
    group_sums,
    neighbour_mass,
    process_logits,
    race,
    race_topk,
    window_resample,
)

__all__ = [
    "chain_verify",
    "draw",
    "group_sums",
    "neighbour_mass",
    "process_logits",
    "race",
    "race_topk",
    "rng",
    "window_resample",
]
