"""Public ops and the verifier: policies, equal descriptions, independent rows, no host synchronisation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import chain_inputs, generator, good_tree, laws, random_tree, sibling_tokens, words32
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy import TableModel

import visacc.kernels
from visacc.kernels import (
    attention_mask,
    chain_verify,
    pack_bits,
    process_logits,
    tree_index,
    tree_verify,
)
from visacc.kernels.reference.attention import unpack_bits
from visacc.verify import (
    DraftTree,
    Grouped,
    Lantern,
    Traversal,
    TreeShape,
    Typical,
    verify,
)
from visacc.verify.policies import (
    PUBLISHED,
    ordered_paths,
    published_paths,
    select_best,
    static_tree,
)

# Trees and policies


def test_published_trees() -> None:
    sizes = {name: static_tree(name).slots - 1 for name in PUBLISHED}
    assert sizes == {
        "mc_sim_7b_63": 25,
        "naive_extend_57": 57,
        "mc_sim_7b_63_balanced": 25,
        "reverse_balanced_25": 25,
        "medusa_2_7b_63": 63,
        "chain": 5,
    }
    assert static_tree("chain").parent == (-1, 0, 1, 2, 3, 4)
    assert static_tree([[0], [1], [0, 0], [1, 0]]).parent == (-1, 0, 0, 1, 2)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one path"),
        ([[]], "the empty path is the root"),
        ([[0], [0]], r"path \[0\] occurs twice"),
        ([[0, 0]], r"path \[0, 0\] has no parent \[0\]"),
        ([[0], [2]], r"path \[2\] skips child rank 1"),
    ],
)
def test_bad_paths(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ordered_paths(paths)
    with pytest.raises(ValueError, match="unknown tree 'oak'"):
        published_paths("oak")
    with pytest.raises(ValueError, match="slot 2 has parent 2"):
        TreeShape((-1, 0, 2))


def test_dynamic_selection_is_closed_under_ties() -> None:
    """Forced tokens have log-probability 0: a child ties with its parent, and the earlier node must win."""
    g = generator(0)
    for _ in range(50):
        M = 30
        parent, score = torch.full((1, M), -1), torch.zeros(1, M)
        for i in range(M):
            parent[0, i] = -1 if i < 3 else int(torch.randint(0, i, (1,), generator=g))
            step = 0.0 if torch.rand(1, generator=g) < 0.7 else float(-torch.rand(1, generator=g))
            score[0, i] = step + (score[0, parent[0, i]] if parent[0, i] >= 0 else 0.0)
        kept, up, live = select_best(score, parent, 12)
        assert bool(live.all())
        inside = set(kept[0].tolist())
        for slot, node in enumerate(kept[0].tolist(), 1):
            above = int(parent[0, node])
            assert above < 0 or above in inside
            assert int(up[0, slot]) == (0 if above < 0 else kept[0].tolist().index(above) + 1)
    assert up[0, 0] == -1
    _, _, live = select_best(torch.tensor([[0.0, -torch.inf, -1.0]]), torch.tensor([[-1, -1, 0]]), 3)
    assert live.tolist() == [[True, True, False, True]]


def test_index_bits_round_trip() -> None:
    parent, live = random_tree(generator(1), 3, 70)
    index = tree_index(parent, live)
    assert torch.equal(unpack_bits(index.words, 70), index.ancestors)
    for b in range(3):
        for s in range(70):
            chain, at = {s}, s
            while live[b, s] and parent[b, at] >= 0:
                at = int(parent[b, at])
                chain.add(at)
            assert set(index.ancestors[b, s].nonzero()[:, 0].tolist()) == chain
            assert int(index.depth[b, s]) == len(chain) - 1


def test_static_and_dynamic_descriptions_agree() -> None:
    """The same tree with a host-side shape and as plain tensors, every rule, rows with dead slots
    included."""
    g = generator(4)
    shape = static_tree("mc_sim_7b_63")
    B, T, V = 6, shape.slots, 40
    parent = torch.tensor(shape.parent).expand(B, T)
    q, p = laws(g, B, T, V, banned=0.6), laws(g, B, T, V, banned=0.6)
    tokens, live = sibling_tokens(g, parent, torch.ones(B, T, dtype=torch.bool), q)
    rows = torch.tensor(shape.internal)
    static = DraftTree.of_shape(shape, tokens, live=live, q_kind="without_replacement", q_rows=q[:, rows])
    loose = DraftTree(tokens, parent, live, "without_replacement", q, torch.arange(T).expand(B, T))
    u, U = torch.rand(B, T, generator=g) * 0.7, words32(g, B, T)
    near = torch.randint(0, V, (V, 6), generator=g)
    rules = (None, Traversal(), Lantern(near, 6, delta=0.2), Grouped(torch.randn(V, 3, generator=g), 6))
    for rule in rules:
        given = () if rule is None else (rule,)
        a = verify(static, p, *given, u=u, U=U, validate=True)
        b = verify(loose, p, *given, u=u, U=U, validate=True)
        assert torch.equal(a.n, b.n)
        assert torch.equal(a.next_root, b.next_root)
        assert torch.equal(a.path, b.path[:, : a.path.shape[1]])
        assert bool((a.tokens == -1).eq(torch.arange(a.path.shape[1]) >= a.n[:, None]).all())
    assert int(a.n.max()) > 1


def test_rows_do_not_depend_on_each_other() -> None:
    """A batch with different accept counts equals its rows alone."""
    tree, args = good_tree()
    whole = verify(tree, **args)
    for b in range(2):
        row = slice(b, b + 1)
        assert tree.q_rows is not None
        assert tree.q_row_of is not None
        one = DraftTree(
            tree.tokens[row],
            tree.parent[row],
            tree.live[row],
            tree.q_kind,
            tree.q_rows[row],
            tree.q_row_of[row],
        )
        step = verify(one, **{k: v[row] for k, v in args.items()})
        assert torch.equal(step.path, whole.path[row])
        assert torch.equal(step.next_root, whole.next_root[row])


def test_chain_and_tree_agree() -> None:
    """A window judged as a chain and as a tree of width one: same run, same next token."""
    case = chain_inputs(8, 40, 5, 4, 12, True, False, True)
    n, _, tokens = chain_verify(**case)
    tree = DraftTree.chain(torch.zeros(40, dtype=torch.int64), case["draft"], case["n_draft"], case["q"])
    u = torch.cat((torch.zeros(40, 1), case["u"]), 1)
    step = verify(tree, case["p"], u=u, U=case["U"])
    assert torch.equal(step.n - 1, n)
    assert torch.equal(step.next_root, tokens.gather(1, n[:, None]).squeeze(1))


def test_attention_mask_by_hand() -> None:
    visible = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.bool)
    mask = attention_mask(torch.tensor([3]), torch.tensor([1]), pack_bits(visible), 2, 6)
    assert mask.int().tolist() == [[[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0]]]
    slide = attention_mask(torch.tensor([3]), None, pack_bits(visible), 2, 6, 2, torch.tensor([[0, 0]]))
    assert slide.int().tolist() == [[[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0]]]


# No host synchronisation

FORBIDDEN = {"item", "cpu", "tolist", "nonzero", "masked_select", "synchronize"}


def test_sources_have_no_synchronising_calls() -> None:
    """Ops and verifier never call what waits for the device. `checks` may: it runs on request only."""
    root = Path(visacc.kernels.__file__).parent
    # the CPU's sweep plans its waves on the host and redraws rejected positions only; a GPU walks the window in a kernel
    host = {"sweep.py": {"_waves", "choose"}}
    files = [f for f in root.rglob("*.py") if f != root / "checks.py"]
    files += list((Path(visacc.__file__).parent / "verify").glob("*.py"))
    assert len(files) > 20
    for file in files:
        for top in ast.parse(file.read_text()).body:
            if file.parent.name == "reference" and getattr(top, "name", "") in host.get(file.name, set()):
                continue
            for node in ast.walk(top):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr not in FORBIDDEN, (
                        f"{file.name}:{node.lineno} calls .{node.func.attr}()"
                    )


class Synchronisations(TorchDispatchMode):
    """Counts operators that make the host wait for values: scalars read, indices of unknown number."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] if i is not None
        )
        if masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"):
            self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    with Synchronisations() as mode:
        for name in ("cpu", "tolist", "item"):
            original = getattr(Tensor, name)

            def counting(self: Tensor, *args: Any, _n: str = name, _f: Any = original) -> Any:
                mode.count[_n] = mode.count.get(_n, 0) + 1
                return _f(self, *args)

            monkeypatch.setattr(Tensor, name, counting)
        yield mode.count
        monkeypatch.undo()


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4)
    with host_reads(monkeypatch) as reads:
        bool(x[x > 1].sum() > 0)
        x.tolist()
    assert set(reads) == {"index", "_local_scalar_dense", "tolist"}


def test_verifier_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, args = good_tree()
    case = chain_inputs(3, 4, 5, 4, 20, True, True, True)
    near = torch.randint(0, 9, (9, 4))
    p = args["p"]
    dynamic = DraftTree(tree.tokens, tree.parent, tree.live)
    with host_reads(monkeypatch) as reads:
        for rule in (Traversal(), Lantern(near, 4), Grouped(torch.randn(9, 2), 4)):
            verify(tree, p, rule, u=args["u"], U=args["U"])
        for each in (tree, dynamic):
            verify(each, p, u=args["u"], U=args["U"])
        verify(dynamic, p, Typical(), U=args["U"])
        chain_verify(**case)
        chain_verify(**case, unbroken=True)
        process_logits(
            p.flatten(0, 1), top_k=torch.full((12,), 3), top_p=torch.full((12,), 0.9), temperature=0.7
        )
    assert reads == {}


@pytest.mark.parametrize("coupling", ["maximal", "gumbel", "gumbel-exact", "independent"])
def test_decode_steps_do_not_wait(coupling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole decode reads the device only at its periodic checks, which are counted apart."""
    from visacc.decoders import Jacobi
    from visacc.engine import decode
    from visacc.models.base import Conditioning
    from visacc.sampling import SamplingParams

    def run(check_every: int) -> dict[str, int]:
        model = TableModel(vocab=4, total=6)
        with host_reads(monkeypatch) as reads:
            decode(
                model,
                Jacobi(window=4, coupling=coupling),
                Conditioning(2, {}),
                SamplingParams(),
                [0, 1],
                check_every=check_every,
            )
        return dict(reads)

    run(1)  # lazily built tables
    often, never = run(1), run(100)
    assert sum(never.values()) < sum(often.values())
    assert all(never[name] <= 6 for name in never), never


@pytest.mark.gpu
def test_decode_step_on_a_gpu_never_waits() -> None:
    """tree and chain verification under torch's own detector of synchronisations."""
    tree, args = good_tree()
    case = {
        k: v.cuda() if isinstance(v, Tensor) else v
        for k, v in chain_inputs(3, 4, 5, 4, 20, True, True, True).items()
    }
    args = {k: v.cuda() for k, v in args.items()}
    assert tree.q_rows is not None
    assert tree.q_row_of is not None
    moved = DraftTree(
        tree.tokens.cuda(),
        tree.parent.cuda(),
        tree.live.cuda(),
        tree.q_kind,
        tree.q_rows.cuda(),
        tree.q_row_of.cuda(),
    )
    for attempt in range(2):  # the first round compiles
        if attempt:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            verify(moved, **args)
            chain_verify(**case, unbroken=True)
            visacc.kernels.rng.uniform(torch.zeros(4, device="cuda", dtype=torch.int64), 0, 1, 2, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_mc_sjd_step_on_a_gpu_never_waits() -> None:
    """Steps 3 to 20 of a real decode under the same detector; no periodic check falls among them."""
    from tiny import tiny_llamagen

    from visacc.decoders import Jacobi
    from visacc.engine import StepInfo, decode
    from visacc.sampling import SamplingParams

    model = tiny_llamagen()
    model.module.to("cuda")

    def watch(info: StepInfo) -> bool:
        if info.step == 3:
            torch.cuda.set_sync_debug_mode("error")
        if info.step == 20:
            torch.cuda.set_sync_debug_mode("default")
        return info.step < 21

    sampling = SamplingParams(guidance_scale=2.0, top_k=8, temperature=0.9)
    cond = model.encode([1, 2])
    for seeds in ([0, 1], [2, 3]):  # the first decode compiles the kernels
        try:
            decode(
                model,
                Jacobi(window=4, coupling="maximal"),
                cond,
                sampling,
                seeds,
                callback=watch if seeds[0] else None,
                check_every=1000 if seeds[0] else 1,
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_tree_verify_needs_consistent_q() -> None:
    tree, args = good_tree()
    given = (args["p"], tree.tokens, tree.parent, tree.live, tree.index)
    with pytest.raises(ValueError, match="both q_rows and q_row_of"):
        tree_verify(*given, u=args["u"], U=args["U"], q_rows=tree.q_rows)
    with pytest.raises(ValueError, match="other than point drafts need q_rows"):
        tree_verify(*given, u=args["u"], U=args["U"], kind=1)
