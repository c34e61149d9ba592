"""Ranges and statistics of the counter-based random numbers."""

from __future__ import annotations

import math

import numpy as np
import torch

from visacc.kernels import rng


def test_uniform_grid_and_range() -> None:
    u = rng.uniform(7, torch.arange(200_000), 3, 1, rng.PURPOSE.ACCEPT)
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    assert bool(((u * 2**24) % 1 == 0).all())
    # mean of 200k uniforms: standard error 6.5e-4, five of them
    assert abs(float(u.double().mean()) - 0.5) < 5 * math.sqrt(1 / 12 / 200_000)


def test_exponential_extremes_are_positive_and_finite() -> None:
    e = rng.to_exponential(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert bool((e > 0).all())
    assert bool(torch.isfinite(e).all())
    assert e[0].item() == np.float32(-math.log1p(-(2.0**-33)))
    assert abs(e[2].item() - math.log(2)) < 1e-6


def test_exponential_mean() -> None:
    e = rng.exponential(3, torch.arange(200_000), 0, 0, rng.PURPOSE.GUMBEL).double()
    assert abs(float(e.mean()) - 1) < 5 / math.sqrt(200_000)


def test_streams_differ() -> None:
    """Every part of the counter and of the seed changes the words."""
    base = (5, 0, 1, 2, 3)
    words = {int(rng.integer(*base))}
    for i in range(5):
        changed = list(base)
        changed[i] += 1
        words.add(int(rng.integer(*changed)))
    words.add(int(rng.integer(5 + (1 << 32), 0, 1, 2, 3)))
    words.add(int(rng.integer(-5, 0, 1, 2, 3)))
    assert len(words) == 8


def test_a_sample_does_not_depend_on_its_batch() -> None:
    seeds = torch.tensor([3, 2**40 + 1, -9])
    batch = rng.integer(seeds[:, None], 0, torch.arange(5), 4, 1)
    for b in range(3):
        assert torch.equal(batch[b], rng.integer(int(seeds[b]), 0, torch.arange(5), 4, 1))
