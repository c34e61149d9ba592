"""Target adapters: a tree's logits equal the logits of each path run alone, for every family, over several
rounds.
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
import vlm_tiny
from torch import Tensor
from vlm_tiny import Tiny

from visacc.models.base import Proposal
from visacc.models.vlm.families import family_of
from visacc.models.vlm.target import VLMTarget

TOLERANCE = 1e-5
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 6, 4, 5, 8])


@functools.cache
def tiny(name: str) -> Tiny:
    torch.manual_seed(0)
    return vlm_tiny.FAMILIES[name]()


def ancestors(parent: Tensor) -> tuple[Tensor, Tensor]:
    """bool [T, T] ancestors-or-self and int64 [T] depth."""
    size = len(parent)
    seen, depth = torch.eye(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    for i in range(1, size):
        seen[i] |= seen[parent[i]]
        depth[i] = depth[parent[i]] + 1
    return seen, depth


def path_to(parent: Tensor, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parent[node])
    return path[::-1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(vlm_tiny.FAMILIES))
@torch.no_grad()
def test_tree_equals_paths(name: str, attention: str) -> None:
    """Three rounds of a 12-node tree, two rows with different trees and different accepted lengths."""
    case = tiny(name)
    case.model.set_attn_implementation(attention)
    target = VLMTarget(case.model, taps=(1, 2))
    g = torch.Generator().manual_seed(3)
    done = target.prefill(case.inputs, room=64)
    for row in range(2):
        expected = case.full_logits(row, torch.zeros(0, dtype=torch.int64))[-1]
        assert (done.logits[row] - expected).abs().max() < TOLERANCE
    assert bool((done.view.visual == (case.inputs["input_ids"] == vlm_tiny.IMAGE)).all())
    assert done.view.image_index.amax() == 0
    committed = [torch.zeros(0, dtype=torch.int64) for _ in range(2)]
    state = done.state
    parents = torch.stack([PARENTS, torch.tensor([-1, 0, 0, 0, 1, 4, 4, 2, 7, 7, 3, 10])])
    for _ in range(3):
        tokens = torch.randint(3, 80, (2, 12), generator=g)
        shapes = [ancestors(p) for p in parents]
        proposal = Proposal(
            tokens,
            torch.stack([s[1] for s in shapes]),
            torch.ones_like(tokens, dtype=torch.bool),
            visible=torch.stack([s[0] for s in shapes]),
        )
        state.limit = state.prefix + int(state.lengths.max()) + 12
        logits, feats = target.step(state, proposal)
        kept = torch.zeros(2, 4, dtype=torch.int64)
        n = torch.zeros(2, dtype=torch.int64)
        for row in range(2):
            for leaf in (8, 11):
                path = path_to(parents[row], leaf)
                ids = torch.cat([committed[row], tokens[row, path]])
                expected = case.full_logits(row, ids)[-len(path) :]
                assert (logits[row, path] - expected).abs().max() < TOLERANCE, (row, leaf)
            path = path_to(parents[row], 8 if row == 0 else 9)[: 4 - row]
            kept[row, : len(path)] = torch.tensor(path)
            n[row] = len(path)
            committed[row] = torch.cat([committed[row], tokens[row, path]])
        assert feats.taps[1].shape == feats.last.shape
        target.commit(state, kept, n)


@pytest.mark.parametrize("name", list(vlm_tiny.FAMILIES))
@torch.no_grad()
def test_features_are_hidden_states(name: str) -> None:
    """Taps are ``hidden_states[i]``, the embeddings are ``hidden_states[0]``, ``last`` is what the head
    reads.
    """
    case = tiny(name)
    case.model.set_attn_implementation("sdpa")
    target = VLMTarget(case.model, taps=(1,))
    done = target.prefill(case.inputs, room=8)
    given = {k: v for k, v in case.inputs.items() if k not in case.images(0)}
    given = {k: v[:1] for k, v in given.items()} | case.images(0)
    out = case.model.model(**given, use_cache=False)
    assert torch.allclose(done.feats.last[0], out.last_hidden_state[0], atol=TOLERANCE)
    direct = target.text(
        inputs_embeds=done.view.inputs_embeds[:1, :1],
        position_ids=torch.zeros(1, 1, dtype=torch.int64),
        output_hidden_states=True,
        use_cache=False,
    ).hidden_states
    # the first position sees only itself, so it can be run alone
    assert torch.allclose(done.feats.taps[1][:1, :1], direct[1], atol=TOLERANCE)
    assert torch.allclose(done.view.inputs_embeds[:1, :1], direct[0], atol=TOLERANCE)


def test_missing_type_ids_are_built() -> None:
    """Without the type ids transformers is silently wrong for these families; the adapter builds them."""
    for name, key in (("qwen2.5", "mm_token_type_ids"), ("gemma3", "token_type_ids")):
        case = tiny(name)
        case.model.set_attn_implementation("sdpa")
        target = VLMTarget(case.model)
        with torch.no_grad():
            full = target.prefill(case.inputs, room=8)
            bare = target.prefill({k: v for k, v in case.inputs.items() if k != key}, room=8)
        assert torch.equal(full.logits, bare.logits)


def test_pixtral_rows_are_one_image() -> None:
    case = tiny("pixtral")
    target = VLMTarget(case.model)
    with torch.no_grad():
        view = target.prefill(case.inputs, room=8).view
    assert set(view.image_index[view.visual].tolist()) == {0}
    assert int((view.image_index == 0).sum()) == 12


def test_refusals() -> None:
    case = tiny("llava")
    target = VLMTarget(case.model)
    inputs = case.inputs
    with pytest.raises(ValueError, match="padded on the left"):
        target.prefill({**inputs, "attention_mask": inputs["attention_mask"].flip(1)}, room=8)
    with pytest.raises(ValueError, match="no pixel_values"):
        target.prefill({k: v for k, v in inputs.items() if k != "pixel_values"}, room=8)
    with pytest.raises(ValueError, match="no image placeholder"):
        target.prefill({**inputs, "input_ids": inputs["input_ids"].clamp(max=50)}, room=8)
    long = torch.full((1, 300), 5)
    with pytest.raises(ValueError, match="context is 256"):
        target.prefill({"input_ids": long}, room=8)
    with pytest.raises(ValueError, match="no layers of a text model"):
        VLMTarget(case.model, taps=(7,))
    with pytest.raises(ValueError, match="'bert' are not supported"):
        family_of(transformers.BertConfig())
