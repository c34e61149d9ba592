"""The sweep of neighbour-corrected coupling: a loop over positions as the definition, the reference, and the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, generator, laws, sample, to, words32
from torch import Tensor

from visacc.decoders.neighbour_tables import IMAGE_OFFSETS, neighbour_slots
from visacc.kernels import neighbour_sweep, race, window_resample
from visacc.kernels.dispatch import interpreting, triton_installed
from visacc.models.base import Layout

RUNS_KERNEL = triton_installed() and (interpreting() or torch.cuda.is_available())


def case(
    seed: int,
    B: int = 3,
    W: int = 9,
    V: int = 40,
    rank: int = 4,
    grid: tuple[int, int, int] = (1, 4, 6),
    coupling: str = "maximal",
    with_q: bool = True,
    banned: float = 0.3,
    strength: float = 1.0,
    gated: bool = False,
) -> dict[str, Any]:
    """Rows of unequal progress in a window over a grid; about every third token in front of it or in it has moved."""
    g = generator(seed)
    layout = Layout(grid, V)
    S = layout.total
    offsets = IMAGE_OFFSETS if grid[0] == 1 else (*IMAGE_OFFSETS, (-1, 0, 0))
    p, q = laws(g, B, W, V, banned=banned), laws(g, B, W, V, banned=banned)
    q = torch.where(torch.rand(B, W, 1, generator=g) < 0.6, p, q)  # most drafts stand, as in a real window
    seen = torch.randint(0, V, (B, S), generator=g)
    moved = torch.rand(B, S, generator=g) < 0.3
    arguments: dict[str, Any] = {
        "p": p,
        "draft": sample(g, q),
        "known": torch.where(moved, torch.randint(0, V, (B, S), generator=g), seen),
        "seen": seen,
        "first": torch.randint(0, S, (B,), generator=g),
        "neighbour": neighbour_slots(layout, offsets),
        "left": strength * torch.randn(len(offsets), V, rank, generator=g) / rank**0.5,
        "right": torch.randn(len(offsets), rank, V, generator=g),
        "fresh": torch.arange(W) >= W - torch.randint(0, W + 1, (B, 1), generator=g),
        "given": torch.rand(B, W, generator=g) < 0.15,
        "gate": 2 * torch.rand(B, W, len(offsets), rank, generator=g) if gated else None,
    }
    if coupling == "race":
        return {**arguments, "E": torch.rand(B, W, V, generator=g) + 1e-3}
    has = (torch.rand(B, W, generator=g) < 0.9) & ~arguments["fresh"]
    arguments |= {"has_draft": has, "u": torch.rand(B, W, generator=g), "U": words32(g, B, W)}
    if with_q:
        arguments |= {"q": q, "q_onehot": torch.rand(B, W, generator=g) < 0.2}
    return arguments


def by_definition(a: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The formula of the docstring, one position after the other: tokens, laws and whether a neighbour moved."""
    tokens, result, corrected = a["draft"].clone(), a["p"].clone(), torch.zeros_like(a["fresh"])
    S = a["known"].shape[1]
    for b in range(tokens.shape[0]):
        now, seen = a["known"][b].tolist(), a["seen"][b].tolist()
        for k in range(tokens.shape[1]):
            slot = int(a["first"][b]) + k
            if slot >= S:
                continue
            if a["given"] is None or not a["given"][b, k]:
                shift, moved = torch.zeros(a["p"].shape[2]), False
                for o, cell in enumerate(a["neighbour"][:, slot].tolist()):
                    if cell < 0 or (not a["fresh"][b, k] and now[cell] == seen[cell]):
                        continue
                    row = a["left"][o, now[cell]]
                    row = row if a["fresh"][b, k] else row - a["left"][o, seen[cell]]
                    shift += (row if a["gate"] is None else row * a["gate"][b, k, o]) @ a["right"][o]
                    moved = True
                law = (a["p"][b, k].log() + shift).softmax(0) if moved else a["p"][b, k]
                result[b, k], corrected[b, k] = law, moved
                if "E" in a:
                    tokens[b, k] = race(law[None], a["E"][b, k][None], backend="reference")[0]
                else:
                    at = slice(k, k + 1)
                    _, new = window_resample(
                        law[None],
                        None if a.get("q") is None else a["q"][b, at],
                        a["draft"][b, at],
                        a["u"][b, at],
                        a["U"][b, at],
                        None if a.get("q") is None else a["q_onehot"][b, at],
                        has_draft=a["has_draft"][b, at],
                        backend="reference",
                    )
                    tokens[b, k] = new[0]
            now[slot] = int(tokens[b, k])
    return tokens, result, corrected


def check(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All implementations take the same decisions under the same laws. Returns them."""
    tokens, expected, corrected = by_definition(arguments)
    results = [neighbour_sweep(**arguments, backend="reference")]
    if RUNS_KERNEL:
        device = {k: to(DEVICE, v) for k, v in arguments.items()}
        results.append(tuple(t.cpu() for t in neighbour_sweep(**device, backend="triton")))
    for found, law in results:
        assert torch.equal(found, tokens)
        torch.testing.assert_close(law, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(law == 0, expected == 0)
        assert torch.equal(law[~corrected], arguments["p"][~corrected])  # where nothing moved, bit for bit
    return results[0]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    size=st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(2, 70)),
    rank=st.sampled_from([1, 2, 3, 8]),
    grid=st.sampled_from([(1, 4, 6), (1, 1, 9), (1, 9, 1), (3, 2, 3)]),
    coupling=st.sampled_from(["maximal", "race"]),
    with_q=st.booleans(),
    gated=st.booleans(),
)
def test_any_shape(
    seed: int,
    size: tuple[int, int, int],
    rank: int,
    grid: tuple[int, int, int],
    coupling: str,
    with_q: bool,
    gated: bool,
) -> None:
    B, W, V = size
    check(case(seed, B, W, V, rank, grid, coupling, with_q, gated=gated))


@pytest.mark.parametrize("coupling", ["maximal", "race"])
def test_a_change_travels_through_the_window(coupling: str) -> None:
    """Strong tables: most tokens move because one before them did, further than one round of decisions reaches."""
    arguments = case(1, 2, 14, 30, 2, coupling=coupling, strength=3.0)
    arguments["fresh"][:] = False
    arguments["first"][:] = torch.tensor([1, 3])
    arguments["given"] = None
    tokens, _ = check(arguments)
    still = arguments | {"left": torch.zeros_like(arguments["left"])}
    unmoved, plain = check(still)
    torch.testing.assert_close(plain, arguments["p"])
    assert float((tokens != unmoved).float().mean()) > 0.3


@pytest.mark.parametrize("coupling", ["maximal", "race"])
def test_several_tiles_and_views(coupling: str) -> None:
    """A vocabulary of more than one tile and no power of two; laws that are strided views."""
    arguments = case(2, 1, 4, 5000, 2, coupling=coupling, gated=True)
    for name in ("p", "q", "E"):
        if name in arguments:
            wide = torch.zeros(1, 8, 5000)
            wide[:, ::2] = arguments[name]
            arguments[name] = wide[:, ::2]
    check(arguments)


def test_nothing_is_drawn_that_is_impossible() -> None:
    """Support stays support: an impossible token has law 0 after any correction and is never drawn."""
    arguments = case(3, 4, 12, 50, banned=0.8, strength=5.0)
    tokens, found = check(arguments)
    inside = (arguments["first"][:, None] + torch.arange(12) < 24) & ~arguments["given"]
    assert bool((found.gather(2, tokens[..., None])[..., 0][inside] > 0).all())
    assert torch.equal(found == 0, arguments["p"] == 0)
    torch.testing.assert_close(found.sum(2), torch.ones(4, 12))


def test_laws_depend_on_what_lies_before_only() -> None:
    """Another draft at position k changes no law at or before k."""
    arguments = case(4, 2, 10, 20)
    arguments["first"][:] = 3
    _, before = neighbour_sweep(**arguments, backend="reference")
    other = {**arguments, "draft": arguments["draft"].clone(), "given": arguments["given"].clone()}
    other["draft"][:, 5] = (other["draft"][:, 5] + 1) % 20
    other["given"][:, 5] = True
    arguments["given"][:, 5] = True
    _, before = neighbour_sweep(**arguments, backend="reference")
    _, after = neighbour_sweep(**other, backend="reference")
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6], after[:, 6])


def test_arguments_are_checked() -> None:
    arguments = case(5)
    for name, bad in (
        ("draft", arguments["draft"][:, 1:]),
        ("known", arguments["known"][:, 1:]),
        ("left", arguments["left"][:, 1:]),
        ("right", arguments["right"][:, :, 1:]),
        ("q", arguments["q"][:, 1:]),
        ("first", arguments["first"][1:]),
        ("gate", torch.ones(3, 9, 5, 3)),
    ):
        with pytest.raises(ValueError, match=name):
            neighbour_sweep(**{**arguments, name: bad})
    with pytest.raises(ValueError, match="u and U"):
        neighbour_sweep(**{**arguments, "u": None})
    with pytest.raises(ValueError, match="float32"):
        neighbour_sweep(**{**arguments, "p": arguments["p"].half()})
    neighbour_sweep(**arguments, validate=True)
    ahead = arguments["neighbour"].clone()
    ahead[0, 2] = 3
    with pytest.raises(ValueError, match="looks ahead"):
        neighbour_sweep(**{**arguments, "neighbour": ahead}, validate=True)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        neighbour_sweep(**{**arguments, "draft": arguments["draft"] + 40}, validate=True)
