"""Triton kernels against the torch references: in the interpreter, or on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, chain_inputs, generator, laws, random_tree, sibling_tokens, to, words32
from torch import Tensor

from visacc.kernels import (
    INDEPENDENT,
    WITHOUT_REPLACEMENT,
    chain_verify,
    commit_kv,
    draw,
    group_sums,
    neighbour_mass,
    pack_bits,
    process_logits,
    race,
    rng,
    tree_attention,
    tree_index,
    tree_verify,
    tree_walk,
    window_resample,
)
from visacc.kernels.dispatch import interpreting

pytest.importorskip("triton")
if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need Triton's interpreter or a GPU", allow_module_level=True)

FEW = settings(max_examples=10, deadline=None, derandomize=True)


def both(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Results of the reference and of the kernel."""
    args = tuple(to(DEVICE, a) for a in args)
    kwargs = {k: to(DEVICE, v) for k, v in kwargs.items()}
    return op(*args, **kwargs, backend="reference"), op(*args, **kwargs, backend="triton")


def same(results: tuple[Any, Any]) -> None:
    """Bit-equal, element by element."""
    a, b = results
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),):
        if x is None:
            assert y is None
            continue
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


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
