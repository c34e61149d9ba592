"""Made-up neighbour tables, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from visacc.decoders.neighbour_tables import (
    IMAGE_OFFSETS,
    NeighbourTables,
)


def random_tables(model, std=1.5, seed=0, rank=None, gated=True):
    g = torch.Generator().manual_seed(seed)
    vocab, count = model.layout.vocab, len(IMAGE_OFFSETS)
    full = torch.randn(count, vocab, vocab, generator=g) * std
    base, rank = torch.randn(vocab, generator=g), rank or vocab
    tables = NeighbourTables.from_full(full, base, IMAGE_OFFSETS, rank, model.fingerprint(), 1.0)
    if gated:
        probe, mixer = torch.randn(vocab, 3, generator=g), torch.randn(3, count, rank, generator=g)
        tables = replace(tables, probe=probe, mixer=mixer, fresh_gate=torch.rand(count, rank, generator=g))
    return tables
