"""Sampling kernels against vectors recorded from transformers and Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from visacc.kernels import rng

pytestmark = pytest.mark.golden


def load(root: Path, name: str) -> Any:
    path = root / "kernels" / name
    if not path.exists():
        pytest.skip(f"{path} is missing")
    if path.suffix == ".json":
        return json.loads(path.read_text())
    from safetensors.torch import load_file

    return load_file(path)


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_philox_words(golden_root: Path) -> None:
    entries = load(golden_root, "philox.json")
    seeds = torch.tensor([signed(e["seed"]) for e in entries])
    counters = torch.tensor([e["counter"] for e in entries]).unbind(1)
    words = torch.stack(rng.philox(seeds, *counters), 1)
    assert words.tolist() == [e["out"] for e in entries]


def test_philox_broadcasts(golden_root: Path) -> None:
    """Scalars, columns and rows give the same words as one call per element."""
    entry = load(golden_root, "philox.json")[5]
    c0, c1, c2, c3 = entry["counter"]
    seed = torch.tensor([[signed(entry["seed"])], [11]])
    words = rng.philox(seed, torch.tensor([c0, 9]), c1, c2, c3)
    assert [int(w[0, 0]) for w in words] == entry["out"]
    alone = rng.philox(torch.tensor(11), 9, c1, c2, c3)
    assert [int(w[1, 1]) for w in words] == [int(w) for w in alone]
