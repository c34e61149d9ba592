"""Made-up neighbour tables, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from visacc.decoders.neighbour_tables import (
    IMAGE_OFFSETS,
    NeighbourTables,
)


def from_full(full, base, rank, model):
    """Tables of the best rank-r factors of float32 [O, V, V], scale split evenly."""
    u, s, vh = torch.linalg.svd(full, full_matrices=False)
    root = s[:, :rank].sqrt()
    left, right = u[..., :rank] * root[:, None], root[..., None] * vh[:, :rank]
    return NeighbourTables(
        IMAGE_OFFSETS, left.contiguous(), right.contiguous(), base, model.fingerprint(), 1.0
    )


def random_tables(model, std=1.5, seed=0, rank=None, gated=True):
    g = torch.Generator().manual_seed(seed)
    vocab, count = model.layout.vocab, len(IMAGE_OFFSETS)
    full = torch.randn(count, vocab, vocab, generator=g) * std
    base, rank = torch.randn(vocab, generator=g), rank or vocab
    tables = from_full(full, base, rank, model)
    if gated:
        probe, mixer = torch.randn(vocab, 3, generator=g), torch.randn(3, count, rank, generator=g)
        tables = replace(tables, probe=probe, mixer=mixer, fresh_gate=torch.rand(count, rank, generator=g))
    return tables
