"""DREAM's visual token pruning: the score is the attention tokens receive, the text stays the model's own."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import vlm_tiny
from test_vlm_generate import GREEDY, drafter, plain, tiny

from visacc.models.vlm import received as module
from visacc.models.vlm.target import VLMTarget
from visacc.speculate.api import Speculator, speculate
from visacc.speculate.drafter import Drafter
from visacc.speculate.harvest import OfflineStore, OnlineHarvester
from visacc.speculate.losses import DraftLoss, LossSpec


@functools.cache
def fresh(name: str) -> vlm_tiny.Tiny:
    return vlm_tiny.FAMILIES[name]()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(vlm_tiny.FAMILIES))
@torch.no_grad()
def test_score_is_attention_received(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the maps of eager attention, row by row; the prompt's own forward is untouched."""
    monkeypatch.setattr(module, "_BLOCK", 5)
    case = fresh(name)
    case.model.set_attn_implementation(attention)
    scored = VLMTarget(case.model, score=True).prefill(case.inputs, room=8)
    without = VLMTarget(case.model).prefill(case.inputs, room=8)
    assert without.view.visual_score is None
    assert torch.equal(scored.logits, without.logits)
    assert scored.view.visual_score is not None
    text = VLMTarget(case.model).text
    case.model.set_attn_implementation("eager")
    maps: list[torch.Tensor] = []
    handle = text.layers[-1].self_attn.register_forward_hook(lambda m, a, out: maps.append(out[1]))
    VLMTarget(case.model).prefill(case.inputs, room=8)
    handle.remove()
    valid = scored.view.valid
    share = torch.where(valid[..., None], maps[0].float().mean(1), 0.0).sum(1) / valid.sum(1, keepdim=True)
    torch.testing.assert_close(scored.view.visual_score[valid], share[valid], atol=1e-5, rtol=1e-4)
    total = scored.view.visual_score.masked_fill(~valid, 0).sum(1)
    torch.testing.assert_close(total, torch.ones(2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", list(vlm_tiny.FAMILIES))
def test_text_with_pruning_is_generates(name: str) -> None:
    case = tiny(name)
    made = drafter("dream", prune=0.5)
    assert isinstance(made, Drafter)
    lengths = []
    prefill = made.rows.prefill

    def watched(*args: object) -> object:
        rows = prefill(*args)
        lengths.append(rows.valid.sum(1))
        return rows

    made.rows.prefill = watched
    out = speculate(case.model, made).generate(**case.inputs, **GREEDY)
    assert torch.equal(out, plain(name))
    ids = case.inputs["input_ids"]
    images = (ids == vlm_tiny.IMAGE).sum(1)
    expected = case.inputs["attention_mask"].sum(1) - images + (images * 0.5).long().clamp(min=1) + 1
    assert torch.equal(lengths[0], expected)


def test_training_with_pruning(tmp_path: Path) -> None:
    """Teacher forcing prunes as drafting does, online and from files."""
    case = tiny("llava")
    made = drafter("dream", prune=0.5)
    assert isinstance(made, Drafter)
    target = Speculator(case.model, made).target
    assert target.score
    harvester = OnlineHarvester(target, max_new_tokens=8, mid=True)
    online = harvester(case.inputs)
    harvester.dump([case.inputs], tmp_path)
    stored = OfflineStore(tmp_path, target).batch(range(2))
    loss = DraftLoss(made, LossSpec(mid_smooth_l1=1.0, noise=0.0), target.logits)
    with torch.no_grad():
        values = [loss(batch) for batch in (online, stored)]
    torch.testing.assert_close(values[0], values[1])
    assert float(values[0]["loss"]) > 0
    with torch.no_grad():
        full = DraftLoss(drafter("dream"), LossSpec(mid_smooth_l1=1.0, noise=0.0), target.logits)  # type: ignore[arg-type]
        full.drafter.bind(target.embed, target.logits, hidden_size=32, vocab_size=vlm_tiny.VOCAB)
        assert float(full(online)["loss"]) != float(values[0]["loss"])
