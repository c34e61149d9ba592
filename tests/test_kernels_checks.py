"""What the kernels and the verifier refuse: shapes, dtypes and devices always, values in debug checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from kernel_cases import chain_inputs, generator, good_tree, laws
from torch import Tensor

from visacc.kernels import (
    chain_verify,
    commit_kv,
    draw,
    process_logits,
    race,
    race_topk,
    tree_attention,
)
from visacc.kernels.dispatch import choose
from visacc.verify import (
    GREEDY,
    GUMBEL_EXACT,
    DraftTree,
    Grouped,
    Lantern,
    LanternPP,
    TreeShape,
    Typical,
    verify,
    verify_chain,
)

# Arguments


def test_shapes_types_and_devices_are_checked() -> None:
    p = torch.full((2, 4), 0.25)
    U = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"U must have shape \[R=2\], got \[3\]"):
        draw(p, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"U must be torch\.int64"):
        draw(p, U.int())
    with pytest.raises(ValueError, match=r"weights must be torch\.float32, got torch\.float16"):
        draw(p.half(), U)
    with pytest.raises(ValueError, match="give both or neither"):
        process_logits(p, p)
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        process_logits(p, temperature=0)
    with pytest.raises(ValueError, match=r"allowed must be \[V=4\] or \[R=2, V=4\]"):
        process_logits(p, allowed=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"m must be in 1..4"):
        race_topk(p, p, 5)
    with pytest.raises(ValueError, match="one device"):
        race(p, p.to("meta"))
    case = chain_inputs(0, 2, 3, 2, 5, True, False, False)
    with pytest.raises(ValueError, match=r"draft must have N-1=2 or N=3 columns, got 1"):
        chain_verify(case["p"], case["draft"][:, :1], u=case["u"], U=case["U"])
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        tree_attention(torch.zeros(1, 2, 3, 8), *[torch.zeros(1, 2, 9, 8)] * 2, torch.zeros(1).long())
    with pytest.raises(ValueError, match="kv must be"):
        commit_kv(torch.zeros(2, 3), torch.zeros(1, 1).int(), torch.ones(1).long(), torch.zeros(1).long())


def test_backend_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    p = torch.ones(1, 2)
    assert choose(None, (p,)) == "reference"
    assert choose("triton", (p,)) == "triton"
    assert choose("triton", (p.double(),)) == "reference"
    monkeypatch.setenv("VISACC_KERNELS", "reference")
    assert choose(None, (p,)) == "reference"
    monkeypatch.setenv("VISACC_KERNELS", "cuda")
    with pytest.raises(ValueError, match="auto, reference, triton"):
        choose(None, (p,))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose("triton", (p,))


def test_rules_reject_bad_options() -> None:
    near = torch.zeros(8, 3, dtype=torch.int32)
    for make, message in (
        (lambda: Lantern(near, 4), r"k must be in 1..3"),
        (lambda: Lantern(near, 2, delta=1.5), "LanternPP"),
        (lambda: LanternPP(near, 2, lam=0.5), "lam must be at least 1"),
        (lambda: Lantern(near.float(), 2), "integer tensor"),
        (lambda: Lantern(near, 2, residual="other"), "official-llamagen"),
        (lambda: Grouped(torch.zeros(8)), r"embedding must be \[V, d\]"),
        (lambda: Typical(eps=0), "0 < eps"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    p = torch.full((1, 2, 4), 0.25)
    with pytest.raises(ValueError, match="embedding has 8 rows but the vocabulary has 4 ids"):
        Grouped(torch.zeros(8, 2)).chain_ratio(p[:, :1], None, torch.zeros(1, 1).long(), None)
    one = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs uniforms u and integers U"):
        verify_chain(p, one, one[0], torch.zeros(1, 2).long())
    tree = DraftTree.chain(one[0], one)
    with pytest.raises(ValueError, match="Exact needs uniforms u"):
        verify(tree, p)
    with pytest.raises(ValueError, match=r"p must be \[B=1, T=2, V\]"):
        verify(tree, p[:, :1], u=torch.zeros(1, 2), U=torch.zeros(1, 2).long())
    with pytest.raises(ValueError, match="q_kind must be one of"):
        verify(
            DraftTree.of_shape(TreeShape((-1, 0)), torch.zeros(1, 2).long(), q_kind="greedy"),
            p,
            u=torch.zeros(1, 2),
            U=torch.zeros(1, 2).long(),
        )


# Values, in debug checks


def spoil(name: str, row: int, slot: int, value: float) -> Callable[[DraftTree, dict[str, Tensor]], None]:
    def change(tree: DraftTree, args: dict[str, Tensor]) -> None:
        target = getattr(tree, name) if hasattr(tree, name) else args[name]
        changed = target.clone()
        changed[row, slot] = value
        if hasattr(tree, name):
            setattr(tree, name, changed)
        else:
            args[name] = changed

    return change


def impossible_draft(tree: DraftTree, args: dict[str, Tensor]) -> None:
    assert tree.q_rows is not None
    tree.q_rows = tree.q_rows.clone()
    up, x = int(tree.parent[1, 3]), int(tree.tokens[1, 3])
    tree.q_rows[1, up, x] = 0
    tree.q_rows[1, up] /= tree.q_rows[1, up].sum()


def dead_parent(tree: DraftTree, args: dict[str, Tensor]) -> None:
    tree.live = tree.live.clone()
    tree.live[0, tree.parent[0].max()] = False


def repeated_draft(tree: DraftTree, args: dict[str, Tensor]) -> None:
    tree.parent, tree.tokens = tree.parent.clone(), tree.tokens.clone()
    tree.parent[1, 4:] = tree.parent[1, 3]
    tree.tokens[1, 5] = tree.tokens[1, 3]


BAD = {
    "child before parent": (spoil("parent", 1, 3, 4), "row 1, slot 3: parent comes after its child"),
    "cycle": (spoil("parent", 0, 2, 2), "row 0, slot 2: slot is its own parent"),
    "out of range": (spoil("parent", 1, 5, 17), r"row 1, slot 5: parent out of range 0..5"),
    "second root": (spoil("parent", 1, 4, -1), "row 1, slot 4: parent out of range"),
    "root has a parent": (spoil("parent", 0, 0, 0), "row 0, slot 0: the root must have parent -1"),
    "dead parent": (dead_parent, r"row 0, slot \d: live slot hangs below a dead parent"),
    "dead root": (spoil("live", 1, 0, False), "row 1, slot 0: the root must be live"),
    "nan": (spoil("p", 1, 2, torch.nan), "row 1, slot 2: p contains NaN"),
    "negative": (spoil("p", 0, 4, -0.1), "row 0, slot 4: p has a negative entry"),
    "zero sum": (spoil("p", 1, 0, 0.0), "row 1, slot 0: p sums to zero"),
    "not normalised": (spoil("p", 0, 1, 1.0), "row 0, slot 1: p does not sum to one"),
    "uniform": (spoil("u", 1, 1, 1.0), r"row 1, slot 1: u must lie in \[0, 1\)"),
    "token": (spoil("tokens", 0, 3, 9), r"row 0, slot 3: token outside the vocabulary 0..8"),
    "q excludes the draft": (impossible_draft, "row 1, slot 3: q gives the drafted token probability 0"),
    "drawn twice": (repeated_draft, "row 1, slot 5: token drawn twice"),
    "no law": (spoil("q_row_of", 0, 0, -1), r"row 0, slot \d: the parent's q_row_of is not in 0..5"),
}


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("name", list(BAD))
def test_bad_trees_name_row_and_slot(
    name: str, by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = BAD[name]
    tree, args = good_tree()
    verify(tree, **args, validate=True)
    change(tree, args)
    if by_environment:
        monkeypatch.setenv("VISACC_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        verify(tree, **args, validate=not by_environment)


def test_greedy_trees_take_logits() -> None:
    tree, args = good_tree()
    logits = args["p"].log()
    step, same = (verify(tree, p, GREEDY, validate=True) for p in (logits, args["p"]))
    assert torch.equal(step.path, same.path)
    assert torch.equal(step.next_root, same.next_root)
    for value, message in (
        (torch.nan, "row 1, slot 2: p contains NaN"),
        (-torch.inf, "row 1, slot 2: p has no finite"),
    ):
        bad = logits.clone()
        bad[1, 2] = value
        with pytest.raises(ValueError, match=message):
            verify(tree, bad, GREEDY, validate=True)
        verify(dataclasses.replace(tree, live=tree.live & (torch.arange(6) < 2)), bad, GREEDY, validate=True)
    with pytest.raises(ValueError, match="p has a negative entry"):
        verify(tree, logits.clamp(min=-9), **{k: args[k] for k in ("u", "U")}, validate=True)


@pytest.mark.parametrize(
    ("key", "where", "value", "message"),
    [
        ("p", (1, 2), torch.nan, "row 1, slot 2: p contains NaN"),
        ("q", (0, 1), 0.0, "row 0, slot 1: q sums to zero"),
        ("draft", (1, 0), 40, r"row 1, slot 0: draft token outside the vocabulary 0..39"),
        ("u", (0, 2), -0.5, "row 0, slot 2: u must lie in"),
    ],
)
def test_bad_chains_name_row_and_slot(key: str, where: tuple[int, int], value: float, message: str) -> None:
    case = chain_inputs(1, 2, 4, 3, 40, True, False, False)
    chain_verify(**case, validate=True)
    case[key] = case[key].clone()
    case[key][where] = value
    with pytest.raises(ValueError, match=message):
        chain_verify(**case, validate=True)


def test_bad_chains_of_matching_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and Gumbel-exact windows have no ratio test; their inputs are looked at all the same."""
    p = laws(generator(0), 2, 4, 9, banned=0)
    given = {
        "drafts": torch.ones(2, 3).long(),
        "n_draft": torch.tensor([3, 1]),
        "fresh": torch.ones(2, 4).long(),
    }
    verify_chain(p, **given, match=True, validate=True)

    def spoilt(key: str, where: tuple[int, ...], value: float) -> dict[str, Tensor]:
        changed = {"p": p, **given}
        changed[key] = changed[key].clone()
        changed[key][where] = value
        return changed

    monkeypatch.setenv("VISACC_DEBUG", "1")
    for key, where, value, message in (
        ("p", (1, 2), torch.nan, "row 1, slot 2: p contains NaN"),
        ("p", (0, 3), -0.5, "row 0, slot 3: p has a negative entry"),
        ("drafts", (0, 2), 9, r"row 0, slot 2: draft token outside the vocabulary 0\.\.8"),
        ("fresh", (1, 3), -1, r"row 1, slot 3: fresh token outside the vocabulary 0\.\.8"),
    ):
        for match in ({"match": True}, {"rule": GUMBEL_EXACT}):
            with pytest.raises(ValueError, match=message):
                verify_chain(**spoilt(key, where, value), **match)
    verify_chain(**spoilt("drafts", (1, 2), 9), match=True)  # padding
    monkeypatch.delenv("VISACC_DEBUG")
    with pytest.raises(ValueError, match=r"fresh must have shape \[B=2, N=4\], got \[2, 3\]"):
        verify_chain(p, given["drafts"], given["n_draft"], given["fresh"][:, :3], match=True)
    with pytest.raises(ValueError, match="one device"):
        verify_chain(p, given["drafts"].to("meta"), given["n_draft"], given["fresh"], match=True)


@pytest.mark.parametrize("key", ["p", "u", "U"])
def test_mixed_devices_are_refused_by_the_verifier(key: str) -> None:
    tree, args = good_tree()
    args[key] = args[key].to("meta")
    with pytest.raises(ValueError, match=r"one device, got \['cpu', 'meta'\]"):
        verify(tree, **args)
    case = chain_inputs(1, 2, 4, 3, 40, True, False, False)
    case[key] = case[key].to("meta")
    with pytest.raises(ValueError, match="one device"):
        chain_verify(**case)


def test_q_that_could_not_have_drawn_the_chain() -> None:
    case = chain_inputs(1, 2, 4, 3, 40, True, False, False)
    case["q"] = case["q"].clone()
    case["q"][1, 2, case["draft"][1, 2]] = 0
    case["q"][1, 2] /= case["q"][1, 2].sum()
    with pytest.raises(ValueError, match="row 1, slot 2: q gives the drafted token probability 0"):
        chain_verify(**case, validate=True)
    case["n_draft"] = torch.tensor([3, 2])  # the bad draft is padding now
    chain_verify(**case, validate=True)
