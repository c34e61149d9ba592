"""Triton kernels against the torch references: in the interpreter, or on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, chain_inputs, generator, laws, to, words32
from torch import Tensor
from triton_cases import FEW, both, same

from visacc.kernels import (
    chain_verify,
    draw,
    group_sums,
    neighbour_mass,
    process_logits,
    race,
    window_resample,
)
from visacc.kernels.dispatch import interpreting

pytest.importorskip("triton")


if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need Triton's interpreter or a GPU", allow_module_level=True)


# Draws and chains


@pytest.mark.parametrize("V", [5, 300, 65536])
def test_draw_and_race(V: int) -> None:
    g = generator(V)
    w = laws(g, 4, V) * torch.tensor([[1.0], [1e-3], [0.0], [1e-12]])
    other = laws(g, 4, V)
    U = torch.tensor([0, 2**32 - 1, 12345, 2**31])
    same(both(draw, w, U, other))
    same(both(draw, w[:2], U[:2]))
    same(both(race, other, torch.rand(4, V, generator=g) + 1e-3))
    same(both(race, torch.ones(1, V), torch.ones(1, V)))  # ties go to the lowest id
    chosen = draw(w.to(DEVICE), U.to(DEVICE), other.to(DEVICE), backend="triton").cpu()
    law = torch.where(torch.tensor([[True], [True], [False], [False]]), w, other)
    assert bool((law.gather(1, chosen[:, None]) > 0).all())


@FEW
@given(
    seed=st.integers(0, 999),
    size=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(2, 70)),
    full=st.booleans(),
    q=st.booleans(),
    onehot=st.booleans(),
    ragged=st.booleans(),
    fresh=st.booleans(),
    unbroken=st.booleans(),
)
def test_chain_any_shape(
    seed: int,
    size: tuple[int, int, int],
    full: bool,
    q: bool,
    onehot: bool,
    ragged: bool,
    fresh: bool,
    unbroken: bool,
) -> None:
    B, N, V = size
    D = N if full else N - 1
    case = chain_inputs(seed, B, N, D, V, q, onehot, ragged)
    extra = torch.randint(0, V, (B, N), generator=generator(seed)) if fresh else None
    same(both(chain_verify, **case, fresh=extra, unbroken=unbroken))


@pytest.mark.parametrize("relation", ["equal", "disjoint"])
@pytest.mark.parametrize("unbroken", [False, True])
def test_chain_extremes(relation: str, unbroken: bool) -> None:
    """q = p accepts everything whatever u; disjoint supports reject everything that p excludes."""
    case = chain_inputs(3, 3, 5, 4, 40, True, False, False, relation)
    case["u"] = torch.full((3, 4), 1 - 2.0**-24)
    results = both(chain_verify, **case, unbroken=unbroken)
    same(results)
    assert results[0][0].tolist() == ([4] * 3 if relation == "equal" else [0] * 3)


def test_chain_rounding_leftovers() -> None:
    """A rejection with an empty residual draws from p; impossible ids are never kept."""
    p = torch.zeros(2, 2, 6)
    p[:, :, 1:3] = 0.5
    draft = torch.tensor([[1], [4]])
    kwargs = {
        "numerator": torch.zeros(2, 1),  # a relaxed rule that refuses although p = q
        "u": torch.zeros(2, 1),
        "U": torch.tensor([[0, 0], [2**32 - 1, 0]]),
    }
    results = both(chain_verify, p, draft, p[:, :1].clone(), **kwargs)
    same(results)
    assert results[0][2][:, 0].tolist() == [1, 2]


def test_chain_large_vocabulary_and_views() -> None:
    """V = 65536 over several tiles, laws that are strided views, relaxed numerators."""
    case = chain_inputs(5, 2, 3, 2, 65536, True, True, True)
    wide = torch.zeros(2, 6, 65536)
    wide[:, ::2] = case["p"]
    case["p"] = wide[:, ::2]
    num, den = torch.rand(2, 2, generator=generator(1)), torch.rand(2, 2, generator=generator(2))
    same(both(chain_verify, **case, unbroken=True))
    same(both(chain_verify, **case, numerator=num, denominator=den))


def test_tile_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from visacc.kernels.triton import chain

    case = {k: to(DEVICE, v) for k, v in chain_inputs(11, 2, 4, 3, 200, True, False, False).items()}
    wanted = chain_verify(**case, unbroken=True, backend="triton")
    for tile in (16, 64):
        monkeypatch.setattr(chain, "row_tile", lambda V, t=tile: t)
        same((wanted, chain_verify(**case, unbroken=True, backend="triton")))


def test_window_resample() -> None:
    g = generator(2)
    p, q = laws(g, 5, 90), laws(g, 5, 90)
    x = torch.multinomial(q, 1, generator=g).squeeze(1)
    flags = torch.tensor([True, False, False, True, False])
    same(
        both(
            window_resample,
            p,
            q,
            x,
            torch.rand(5, generator=g),
            words32(g, 5),
            flags,
            has_draft=torch.tensor([True, True, False, True, True]),
        )
    )


# Logits


def close_laws(results: tuple[Tensor, Tensor]) -> None:
    a, b = results
    assert torch.equal(a > 0, b > 0)
    torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.fixture(params=["row", "stream"])
def logits_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kernels at small vocabularies."""
    from visacc.kernels.triton import logits

    if request.param == "stream":
        monkeypatch.setattr(logits, "ROW_LIMIT", 0)
        monkeypatch.setattr(logits, "STREAM_TILE", 128)
        monkeypatch.setattr(logits, "SEARCH_TILE", 128)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_stages(dtype: torch.dtype, logits_form: str) -> None:
    """Guidance on interleaved rows, allowed ids, temperature, top-k and top-p, as numbers and per row."""
    g = generator(7)
    R, V = 3, 300
    packed = (3 * torch.randn(2 * R, V, generator=g)).to(dtype)
    cond, uncond = packed[0::2], packed[1::2]
    allowed = torch.rand(R, V, generator=g) < 0.7
    allowed[:, 5] = True
    cases: list[dict[str, Any]] = [
        {},
        {"top_k": 17},
        {"uncond": uncond, "scale": 3.0, "top_p": 0.8},
        {"allowed": allowed[0], "temperature": 0.7, "top_k": 40, "top_p": 0.5},
        {
            "uncond": uncond,
            "scale": torch.tensor([1.0, 4.0, 7.5]),
            "allowed": allowed,
            "temperature": torch.tensor([1.0, 0.5, 2.0]),
            "top_k": torch.tensor([0, 30, 1], dtype=torch.int32),
            "top_p": torch.tensor([0.9, 1.0, 0.1]),
        },
    ]
    for case in cases:
        close_laws(both(process_logits, cond, **case))


def test_logits_edges(logits_form: str) -> None:
    """Ties kept, both zeros equal, -inf logits, one possible id, NaN rows, tiny vocabularies."""
    z = torch.zeros(5, 37)
    z[0, ::2] = -0.0
    z[1] = torch.arange(37) // 5
    z[2, 1:] = -torch.inf
    z[3, 3] = torch.nan
    z[4, :30] = -torch.inf
    for case in ({"top_k": 10}, {"top_p": 0.5}, {"top_k": 12, "top_p": 0.6}):
        a, b = both(process_logits, z, **case)
        good = torch.tensor([0, 1, 2, 4], device=DEVICE)
        close_laws((a[good], b[good]))
        assert bool(a[3].isnan().all())
        assert bool(b[3].isnan().all())
    close_laws(both(process_logits, torch.tensor([[0.3], [2.0]]), top_k=1, top_p=0.5))


def test_logits_65536() -> None:
    """The streaming kernel at its real tiles."""
    z = 4 * torch.randn(1, 65536, generator=generator(1))
    close_laws(both(process_logits, z.to(torch.bfloat16), top_k=2000, top_p=0.95))


def test_logits_golden(golden_root: Any) -> None:
    from test_golden_kernels import load, logits_cases

    tensors = load(golden_root, "logits_process.safetensors")
    for case in logits_cases(golden_root):
        name = case["name"]
        allowed = None
        if case["suppress"]:
            ids = torch.arange(case["vocab"])
            allowed = ((ids < case["suppress"][0]) | (ids >= case["suppress"][1])).to(DEVICE)
        got = process_logits(
            tensors[f"{name}.cond"].to(DEVICE),
            None if case["cfg_scale"] is None else tensors[f"{name}.uncond"].to(DEVICE),
            case["cfg_scale"],
            allowed,
            case["temperature"],
            case["top_k"],
            case["top_p"],
            backend="triton",
        ).cpu()
        want = tensors[f"{name}.probs_inclusive"]
        assert torch.equal(got > 0, want > 0), name
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


# Relaxed masses


@pytest.mark.parametrize("K", [1, 9, 300])
def test_neighbour_mass(K: int) -> None:
    g = generator(K)
    p = laws(g, 5, 400)
    ids = torch.randint(-1, 400, (5, K), generator=g, dtype=torch.int32)
    same(both(neighbour_mass, p, ids, torch.tensor([0.0, 1e-3, 0.1, 0.4, 1.0])))


@pytest.mark.parametrize(("V", "size"), [(9, 14), (70, 6), (70, 1)])
def test_group_sums(V: int, size: int) -> None:
    g = generator(V + size)
    p, q, code = laws(g, 2, V), laws(g, 2, V), 0.3 * torch.randn(V, 4, generator=g)
    x = torch.multinomial(q, 1, generator=g).squeeze(1)
    same(both(group_sums, p, q, x, torch.tensor([True, False]), code, size, 0.15, 0.5))
    same(both(group_sums, p[:1], None, x[:1], None, code, size, 0.15, 0.5))


def test_custom_ops_pass_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas, mutation and fake tensors of the ops that stand inside of compiled forwards."""
    g = generator(0)
    q, k, v = (
        torch.randn(*s, generator=g).to(DEVICE) for s in ((1, 3, 2, 16), (1, 1, 20, 16), (1, 1, 20, 16))
    )
    lengths = torch.tensor([9], device=DEVICE)
    attention = torch.ops.visacc.tree_attention.default
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention, (q, k, v, lengths, None, None, 0.25, None, None), test_utils=tests)
    kv = torch.randn(2, 1, 1, 20, 16, generator=g).to(DEVICE)
    path, n = torch.tensor([[0, 2, 3]], device=DEVICE), torch.tensor([3], device=DEVICE)
    torch.library.opcheck(torch.ops.visacc.commit_kv.default, (kv, path, n, lengths), test_utils=tests)


def test_every_pattern_of_two_drafts() -> None:
    """All accept/reject patterns of a two-draft chain end in the same place on both sides."""
    case = chain_inputs(0, 4, 3, 2, 12, True, False, False)
    for i, (a, b) in enumerate(itertools.product((0.0, 1 - 2.0**-24), repeat=2)):
        case["u"][i] = torch.tensor([a, b])
    same(both(chain_verify, **case))
    same(both(chain_verify, **case, unbroken=True))
