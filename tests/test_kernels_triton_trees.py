"""Triton kernels against the reference: trees, attention, cache moves, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, generator, laws, random_tree, sibling_tokens, to, words32
from torch import Tensor
from triton_cases import FEW, both, same

from visacc.kernels import (
    INDEPENDENT,
    WITHOUT_REPLACEMENT,
    commit_kv,
    pack_bits,
    rng,
    tree_attention,
    tree_index,
    tree_verify,
    tree_walk,
)
from visacc.kernels.dispatch import interpreting

pytest.importorskip("triton")


# Trees


@FEW
@given(
    seed=st.integers(0, 999), B=st.integers(1, 3), T=st.sampled_from([1, 2, 9, 33, 64]), first=st.booleans()
)
def test_tree_index_and_walk(seed: int, B: int, T: int, first: bool) -> None:
    g = generator(seed)
    parent, live = random_tree(g, B, T)
    results = both(tree_index, parent, live)
    same(results)
    flags = torch.rand(B, T, generator=g) < 0.7
    flags, parent, live = (to(DEVICE, a) for a in (flags, parent, live))
    walk = [
        tree_walk(flags, parent, live, index, first=first, width=T, backend=backend)
        for index, backend in zip(results, ("reference", "triton"), strict=True)
    ]
    same((walk[0], walk[1]))


def tree_case(seed: int, B: int, T: int, V: int) -> dict[str, Any]:
    g = generator(seed)
    parent, live = random_tree(g, B, T)
    p, q = laws(g, B, T, V, scale=1.0), laws(g, B, T, V, scale=1.0)
    tokens, live = sibling_tokens(g, parent, live, q)
    return {
        "p": p,
        "tokens": tokens,
        "parent": parent,
        "live": live,
        "u": torch.rand(B, T, generator=g),
        "U": words32(g, B, T),
        "q_rows": q,
        "q_row_of": torch.arange(T).expand(B, T),
    }


def check_tree(case: dict[str, Any], **kwargs: Any) -> Tensor:
    case = {k: to(DEVICE, v) for k, v in case.items()}
    index = tree_index(case["parent"], case["live"], backend="reference")
    kwargs = {k: to(DEVICE, v) for k, v in kwargs.items()}
    a = tree_verify(**case, index=index, **kwargs, backend="reference")
    b = tree_verify(**case, index=index, **kwargs, backend="triton")
    same((a[:3], b[:3]))
    return a[1]


@FEW
@given(
    seed=st.integers(0, 999),
    size=st.sampled_from([(1, 1, 5), (3, 6, 11), (2, 20, 70)]),
    rule=st.sampled_from(["point", "without", "independent", "mixed"]),
)
def test_tree_verify_any_shape(seed: int, size: tuple[int, int, int], rule: str) -> None:
    case = tree_case(seed, *size)
    kind: Any = WITHOUT_REPLACEMENT if rule == "without" else INDEPENDENT
    if rule == "point":
        check_tree({k: v for k, v in case.items() if not k.startswith("q_")})
        return
    if rule == "mixed":
        kind = (case["parent"].clamp(min=0) % 3).to(torch.int8)
    check_tree(case, kind=kind)


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("bounds", [{"delta": 0.3}, {"growth": 2.0}])
def test_tree_verify_lantern(bounds: dict[str, float], with_q: bool) -> None:
    case = tree_case(4, 3, 12, 60)
    near = torch.randint(-1, 60, (3, 12, 8), generator=generator(9), dtype=torch.int32)
    if with_q:
        check_tree(case, kind=WITHOUT_REPLACEMENT, companions=near, **bounds)
    else:
        check_tree({k: v for k, v in case.items() if not k.startswith("q_")}, companions=near, **bounds)


def test_tree_verify_reaches_depth_and_residual() -> None:
    """Rows that accept several levels and rows that stop behind rejections, V over several tiles."""
    case = tree_case(21, 4, 16, 5000)
    case["u"] = case["u"] * torch.tensor([[0.05], [0.3], [1.0], [1.0]])
    n = check_tree(case, kind=WITHOUT_REPLACEMENT)
    assert int(n.max()) >= 3
    assert int(n.min()) == 1


def test_tree_verify_repeated_point_siblings() -> None:
    """A sibling that repeats a rejected token has no mass left."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 4])
    case = {
        "p": p,
        "tokens": torch.tensor([[0, 0, 0, 1]]),
        "parent": torch.tensor([[-1, 0, 0, 0]]),
        "live": torch.ones(1, 4, dtype=torch.bool),
        "u": torch.tensor([[0.0, 0.9, 0.0, 0.7]]),
        "U": torch.full((1, 4), 2**31),
    }
    assert check_tree(case).tolist() == [1]
    case["u"][0, 3] = 0.5  # 0.5 * (1 - 0.5) < 0.3
    assert check_tree(case).tolist() == [2]


# Attention, commit, random numbers


@pytest.mark.parametrize(
    ("B", "N", "H", "HK", "D", "S", "dtype"),
    [
        (2, 5, 4, 2, 64, 96, torch.float32),
        (2, 33, 2, 1, 100, 300, torch.float16),
        (1, 7, 8, 2, 128, 130, torch.bfloat16),
    ],
)
def test_tree_attention(B: int, N: int, H: int, HK: int, D: int, S: int, dtype: torch.dtype) -> None:
    """Trees, chains, left padding, sliding windows, one and several slices, against float64.

    The error may be twice that of torch's own attention in the same dtype; the interpreter truncates
    bfloat16, so there one unit in the last place (2**-7) is allowed.
    """
    from visacc.kernels.triton import attention

    g = generator(D)
    q, k, v = (torch.randn(B, *s, D, generator=g).to(DEVICE, dtype) for s in ((N, H), (HK, S), (HK, S)))
    parent, live = random_tree(g, B, N, dead=0)
    index = tree_index(parent.to(DEVICE), live.to(DEVICE), backend="reference")
    lengths = torch.randint(S // 3, S - N, (B,), generator=g).to(DEVICE)
    lengths[-1] = S - N  # a full cache
    start = torch.randint(0, 9, (B,), generator=g).to(DEVICE)
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"start": start}, (1, 4)),
        ({"start": start, "words": index.words}, (2,)),
        ({"words": index.words, "window": 20, "depth": index.depth}, (1, 2)),
    ]
    for case, slices in cases:
        wanted = tree_attention(q.double(), k.double(), v.double(), lengths, **case, backend="reference")
        plain = tree_attention(q, k, v, lengths, **case, backend="reference").double()
        allowed = 2 * float((plain - wanted).abs().max()) + 1e-6
        if dtype == torch.bfloat16 and interpreting():
            allowed += 2.0**-7 * float(wanted.abs().max())
        for splits in slices:
            got = attention.tree_attention(
                q,
                k,
                v,
                lengths,
                case.get("start"),
                case.get("words"),
                D**-0.5,
                case.get("window"),
                case.get("depth"),
                splits=splits,
            )
            assert got.dtype == dtype
            assert float((got.double() - wanted).abs().max()) <= allowed


def test_tree_attention_blind_nodes() -> None:
    """Nodes that see nothing get zeros, not NaN, and leave the others alone; strided heads-first queries."""
    q = torch.randn(1, 2, 3, 16, generator=generator(0)).to(DEVICE).transpose(1, 2)  # [B, N, H, D] view
    k, v = (torch.randn(1, 2, 20, 16, generator=generator(i)).to(DEVICE) for i in (1, 2))
    visible = torch.tensor([[[1, 0, 0], [0, 0, 0], [1, 0, 1]]], dtype=torch.bool, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    a, b = both(tree_attention, q, k, v, zero, words=pack_bits(visible))
    torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5)
    assert not bool(b[:, 1].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_kv(dtype: torch.dtype) -> None:
    """Overlapping moves, ragged counts, padded paths; bits are moved, never rounded."""
    kv = torch.randn(4, 3, 2, 40, 20, generator=generator(3)).to(DEVICE, dtype)
    path = torch.tensor([[0, 2, 3, 7, -1], [0, 1, 5, -1, -1], [0, -1, -1, -1, -1]], device=DEVICE)
    n, start = torch.tensor([4, 3, 1], device=DEVICE), torch.tensor([10, 3, 30], device=DEVICE)
    out = []
    for backend in ("reference", "triton"):
        out.append(kv.clone())
        commit_kv(out[-1], path, n, start, backend=backend)
    same((out[0], out[1]))
    assert torch.equal(out[1][:, 0, :, 10:14], kv[:, 0, :, [10, 12, 13, 17]])
    assert torch.equal(out[1][:, 0, :, 14:], kv[:, 0, :, 14:])


def test_philox() -> None:
    from visacc.kernels.triton.rng import philox

    args = (
        torch.tensor([[5], [-7], [2**62 + 3]]),
        torch.arange(40),
        torch.tensor(3),
        torch.tensor([[1], [9], [2**31]]),
        torch.tensor(2**32 - 1),
    )
    same((rng.philox(*args), tuple(w.cpu() for w in philox(*(a.to(DEVICE) for a in args)))))
