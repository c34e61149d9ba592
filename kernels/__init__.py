"""Sampling, verification and attention kernels: torch references and Triton, behind one set of ops."""

from visacc.kernels import rng
from visacc.kernels.attention_ops import attention_mask, commit_kv, tree_attention
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
from visacc.kernels.sweep_ops import neighbour_sweep
from visacc.kernels.tree_ops import (
    INDEPENDENT,
    POINT,
    WITHOUT_REPLACEMENT,
    Group,
    TreeIndex,
    pack_bits,
    tree_index,
    tree_verify,
    tree_walk,
)

__all__ = [
    "INDEPENDENT",
    "POINT",
    "WITHOUT_REPLACEMENT",
    "Group",
    "TreeIndex",
    "attention_mask",
    "chain_verify",
    "commit_kv",
    "draw",
    "group_sums",
    "neighbour_mass",
    "neighbour_sweep",
    "pack_bits",
    "process_logits",
    "race",
    "race_topk",
    "rng",
    "tree_attention",
    "tree_index",
    "tree_verify",
    "tree_walk",
    "window_resample",
]
