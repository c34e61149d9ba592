"""Verification rules and tree buffers of LANTERN, LANTERN++ and EAGLE against the original programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import leaf_paths
from torch import Tensor

from visacc.kernels import tree_verify
from visacc.verify import DraftTree, Greedy, Lantern, LanternPP, TreeShape, verify
from visacc.verify.policies import PUBLISHED, ordered_paths, published_paths, static_tree

pytestmark = pytest.mark.golden


def load(root: Path, name: str) -> Any:
    path = root / "lantern" / name
    if not path.exists():
        pytest.skip(f"{path} is missing")
    if path.suffix == ".json":
        return json.loads(path.read_text())
    from safetensors.torch import load_file

    return load_file(path)


def test_tree_buffers(golden_root: Path) -> None:
    """Slot order, masks, depths and leaf rows of every recorded tree; published path lists by name."""
    for name, entry in load(golden_root, "trees/tree_buffers.json").items():
        paths = [tuple(p) for p in entry["tree"]]
        if name in PUBLISHED:
            assert sorted(published_paths(name)) == sorted(paths), name
        shape, want = static_tree(paths), entry["verify"]
        nodes = [(), *ordered_paths(paths)]
        assert [nodes[up] for up in shape.parent[1:]] == [n[:-1] for n in nodes[1:]], name
        assert list(shape.depth) == want["tree_position_ids"], name
        ancestors = shape.tensors("cpu").index.ancestors[0]
        assert ancestors.int().tolist() == want["tree_attn_mask"], name
        assert leaf_paths(shape) == want["retrieve_indices"], name
        rows = {n: i for i, n in enumerate(nodes[s] for s in shape.internal)}
        index = [0] + [1 + 10 * rows[n[:-1]] + n[-1] for n in nodes[1:]]
        assert index == want["tree_indices"], name
        for leaf, row_b, row_p in zip(
            want["retrieve_indices"], want["b_indices"], want["p_indices"], strict=True
        ):
            for slot, earlier, p_row in zip(leaf, row_b, row_p, strict=True):
                if slot <= 0:  # the root and padding
                    continue
                up = shape.parent[slot]
                siblings = [s for s in shape.children[up] if s < slot]
                assert siblings == earlier, name
                level = [s for s in shape.internal if shape.depth[s] == shape.depth[up]]
                assert level.index(up) == p_row, name


class Case:
    """One file of recorded decisions: shared inputs, many rules."""

    def __init__(self, root: Path, name: str) -> None:
        self.t: dict[str, Tensor] = load(root, f"verify/{name}.safetensors")
        self.meta = load(root, f"verify/{name}.json")
        self.shape = TreeShape(tuple(self.t["parent"].tolist()))
        self.leaves = self.t["retrieve_indices"]
        self.p = self.t["target_logits"].softmax(-1)
        assert tuple(self.t["internal_nodes"].tolist()) == self.shape.internal

    def tree(self, kind: str) -> DraftTree:
        if kind == "static":
            return DraftTree.of_shape(
                self.shape,
                self.t["static.tokens"],
                live=self.live_children(),
                q_kind="without_replacement",
                q_rows=self.t["static.q_rows"],
            )
        return DraftTree.of_shape(self.shape, self.t["dynamic.tokens"])

    def live_children(self) -> Tensor:
        """Draws beyond the support of q are dead, and so is what hangs below them."""
        live = torch.ones_like(self.t["static.tokens"], dtype=torch.bool)
        live[:, 1:] = self.t["static.cond_q"][:, 1:] > 0
        for slot, up in enumerate(self.shape.parent[1:], 1):
            live[:, slot] &= live[:, up]
        return live

    def rule(self, spec: dict[str, Any], residual: str) -> Lantern | LanternPP | None:
        if not spec["lantern"]:
            return None
        offset, neighbours = self.meta["image_token_offset"], self.t["neighbours"].int()
        if spec["delta"] > 1:
            return LanternPP(neighbours, spec["k"], offset, residual, lam=spec["delta"])
        return Lantern(neighbours, spec["k"], offset, residual, delta=spec["delta"])

    def expected_path(self, key: str) -> list[list[int]]:
        rows = self.leaves[self.t[f"{key}.best_row"]]
        return [r[: n + 1] for r, n in zip(rows.tolist(), self.t[f"{key}.accepted"].tolist(), strict=True)]


def residual_name(model: str, kind: str) -> str:
    if kind == "dynamic":
        return "official-dynamic"
    return "official-lumina" if model == "lumina" else "official-llamagen"


def run(case: Case, tree: DraftTree, rule: Lantern | LanternPP | None, u: Tensor) -> Any:
    """The walk with details, with the arguments that `verify` would pass."""
    delta, growth = rule.slack if rule else (0.0, 0.0)
    return tree_verify(
        case.p,
        tree.tokens,
        tree.parent,
        tree.live,
        tree.index,
        u=u,
        U=torch.zeros_like(tree.tokens),
        q_rows=tree.q_rows,
        q_row_of=tree.q_row_of,
        kind=tree.kind,
        companions=None
        if rule is None
        else rule.companions(tree.tokens, extra=int(rule.residual != "ordinary")),
        delta=delta,
        growth=growth,
        official=None if rule is None else rule.residual,
        nodes=torch.tensor(case.shape.internal),
        max_children=case.shape.max_children,
        width=case.shape.max_depth + 1,
        details=True,
    )


def by_slot(
    shape: TreeShape, live: Tensor, path: list[int], row: int, in_order: list[float]
) -> dict[int, float]:
    """Recorded values in order of tests -> slots, following the recorded path."""
    out, at = {}, 0
    for here, node in enumerate(path):
        for child in shape.children[node]:
            if not live[row, child]:
                continue
            out[child] = in_order[at]
            at += 1
            if here + 1 < len(path) and child == path[here + 1]:
                break
    return out


@pytest.mark.parametrize("name", ["plain", "offset"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_sampling_rules(golden_root: Path, name: str, kind: str) -> None:
    """Exact and relaxed walks: ratios of every test, accepted path and next law, with the recorded
    uniforms."""
    case = Case(golden_root, name)
    tree = case.tree(kind)
    checked = 0
    for model in ("llamagen", "anole", "lumina"):
        for spec in case.meta["rules"]:
            key = f"{model}.{kind}.{spec['name']}"
            if f"{key}.accepted" not in case.t:
                continue
            rule = case.rule(spec, residual_name(model, kind))
            paths = case.expected_path(key)
            u = torch.full(case.p.shape[:2], 0.5)
            wanted: list[dict[int, float]] = []
            for b, path in enumerate(paths):
                used = by_slot(case.shape, tree.live, path, b, case.t["uniforms"][b].tolist())
                wanted.append(
                    by_slot(case.shape, tree.live, path, b, case.t[f"{key}.accept_ratio"][b].tolist())
                )
                assert len(used) == int(case.t[f"{key}.uniforms_used"][b]), key
                for slot, value in used.items():
                    u[b, slot] = value
            path, n, _, details = run(case, tree, rule, u)
            assert [r[:m] for r, m in zip(path.tolist(), n.tolist(), strict=True)] == paths, key
            for b, ratios in enumerate(wanted):
                for slot, ratio in ratios.items():
                    torch.testing.assert_close(
                        details.ratios[b, slot].item(), ratio, atol=1e-5, rtol=1e-4, msg=f"{key} {b} {slot}"
                    )
            law = details.weights / details.weights.sum(1, keepdim=True)
            torch.testing.assert_close(law, case.t[f"{key}.next_dist"], atol=1e-5, rtol=1e-4)
            checked += len(paths)
    assert checked > 0


@pytest.mark.parametrize("name", ["plain", "offset"])
def test_greedy_rules(golden_root: Path, name: str) -> None:
    """Greedy decoding, plain and with neighbour mass: path, and the next token as arg-max of the recorded
    logits."""
    case = Case(golden_root, name)
    tree = case.tree("dynamic")
    checked = 0
    for model in ("llamagen", "anole", "lumina"):
        for spec in case.meta["rules"]:
            key = f"{model}.greedy.{spec['name']}"
            if f"{key}.accepted" not in case.t:
                continue
            step = verify(tree, case.p, Greedy(case.rule(spec, "ordinary")))
            paths = [r[:m] for r, m in zip(step.path.tolist(), step.n.tolist(), strict=True)]
            assert paths == case.expected_path(key), key
            assert torch.equal(step.next_root, case.t[f"{key}.next_dist"].argmax(1)), key
            checked += len(paths)
    assert checked > 0


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_verify_follows_the_exact_walk(golden_root: Path, kind: str) -> None:
    """The public entry takes the same decisions as the recorded exact walk."""
    case = Case(golden_root, "plain")
    tree, key = case.tree(kind), f"llamagen.{kind}.exact"
    paths = case.expected_path(key)
    u = torch.full(case.p.shape[:2], 0.5)
    for b, path in enumerate(paths):
        for slot, value in by_slot(case.shape, tree.live, path, b, case.t["uniforms"][b].tolist()).items():
            u[b, slot] = value
    step = verify(tree, case.p, u=u, U=torch.zeros_like(tree.tokens), validate=True)
    assert [r[:m] for r, m in zip(step.path.tolist(), step.n.tolist(), strict=True)] == paths
