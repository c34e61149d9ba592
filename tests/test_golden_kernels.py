"""Sampling kernels against vectors recorded from transformers and Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from visacc.kernels import chain_verify, process_logits, rng

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


def logits_cases(root: Path) -> list[dict[str, Any]]:
    return load(root, "logits_process.json")


def processed(case: dict[str, Any], tensors: dict[str, torch.Tensor], per_row: bool) -> torch.Tensor:
    """The case through `process_logits`, with its options as numbers or as per-row tensors."""
    name, rows, vocab = case["name"], case["rows"], case["vocab"]

    def option(key: str, dtype: torch.dtype = torch.float32) -> Any:
        value = case[key]
        return torch.full((rows,), value, dtype=dtype) if per_row and value is not None else value

    allowed = None
    if case["suppress"]:
        ids = torch.arange(vocab)
        allowed = (ids < case["suppress"][0]) | (ids >= case["suppress"][1])
    return process_logits(
        tensors[f"{name}.cond"],
        tensors.get(f"{name}.uncond"),
        option("cfg_scale"),
        allowed,
        option("temperature"),
        option("top_k", torch.int32),
        option("top_p"),
    )


@pytest.mark.parametrize("per_row", [False, True], ids=["numbers", "tensors"])
def test_process_logits(golden_root: Path, per_row: bool) -> None:
    """Same supports, and probabilities within 1e-6 + 1e-5 relative of the float64 inclusive pipeline."""
    tensors = load(golden_root, "logits_process.safetensors")
    for case in logits_cases(golden_root):
        got, name = processed(case, tensors, per_row), case["name"]
        want = tensors[f"{name}.probs_inclusive"]
        assert torch.equal(got > 0, want > 0), name
        assert (got > 0).sum(1).tolist() == case["support_inclusive"], name
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        same = torch.tensor(case["support_mismatch"]) == 0
        torch.testing.assert_close(got[same], tensors[f"{name}.probs_hf"][same], atol=1e-6, rtol=1e-5)


def test_chain_verify(golden_root: Path) -> None:
    """Accepted lengths, and extra tokens that lie in the support of the recorded residual."""
    meta = load(golden_root, "chain_verify.json")
    t = load(golden_root, "chain_verify.safetensors")
    cases = [c["case"] for c in meta["cases"]]

    def stack(key: str) -> torch.Tensor:
        return torch.stack([t[f"{i}.{key}"] for i in cases])

    p, q = stack("target_logits").softmax(-1), stack("draft_logits").softmax(-1)
    draft, u = stack("draft_tokens"), stack("uniforms")
    # Inverse-CDF inputs on a grid: the histogram of the extra token is the residual up to one grid step.
    grid = 256
    U = (torch.arange(grid) * (2**32 // grid) + 2**31 // grid).repeat_interleave(len(cases))
    n, _, tokens = chain_verify(
        p.repeat(grid, 1, 1),
        draft.repeat(grid, 1),
        q.repeat(grid, 1, 1),
        u=u.repeat(grid, 1),
        U=U[:, None].expand(-1, p.shape[1]),
    )
    expected = torch.tensor([c["n_accepted"] for c in meta["cases"]])
    assert torch.equal(n.view(grid, -1), expected.expand(grid, -1))
    kept = torch.arange(draft.shape[1]) < expected[:, None]
    assert torch.equal(tokens[: len(cases), :-1][kept], draft[kept])
    extra = tokens.gather(1, n[:, None]).view(grid, -1)
    counts = torch.zeros(len(cases), meta["vocab"]).scatter_add_(1, extra.T, torch.ones(len(cases), grid))
    torch.testing.assert_close(counts / grid, stack("residual"), atol=1.5 / grid, rtol=0)
