"""Training drafters: it learns, it resumes exactly, and features from files equal features made online."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import vlm_tiny

from visacc.models.vlm.target import VLMTarget
from visacc.speculate.checkpoints import load_drafter
from visacc.speculate.drafter import Drafter
from visacc.speculate.harvest import Answered, OfflineStore, OnlineHarvester
from visacc.speculate.losses import (
    DraftBatch,
    DraftLoss,
    LossSpec,
    attention_entropy,
    candidate_layers,
)
from visacc.speculate.train import (
    DrafterTraining,
    default_config,
    mixed,
    resampled,
    train_drafter,
    visual_share,
)

QUICK = DrafterTraining(steps=6, lr=3e-3, warmup=2, check_every=3, log_every=3, autocast=False, clip=1.0)


@pytest.fixture(scope="module")
def target() -> VLMTarget:
    return VLMTarget(vlm_tiny.llava().model)


@pytest.fixture(scope="module")
def batch(target: VLMTarget) -> DraftBatch:
    inputs = vlm_tiny.llava().inputs
    return OnlineHarvester(target, max_new_tokens=24, mid=True)(inputs)


def test_harvest(target: VLMTarget, batch: DraftBatch) -> None:
    """The features of prompt + answer are those of one full forward, the mask marks the answer."""
    assert batch.loss_mask.sum(1).tolist() == [24, 24]
    assert bool(batch.loss_mask[:, -24:].all())
    case = vlm_tiny.llava()
    answer = batch.view.input_ids[1, -24:]
    logits = target.logits(batch.feats.last)[1, -25:]
    assert (logits - case.full_logits(1, answer)).abs().max() < 1e-5
    # greedy answers: every token is the arg-max behind the one before
    assert torch.equal(logits[:-1].argmax(1), answer)
    assert batch.mid is not None
    assert batch.mid.shape == batch.feats.last.shape


@pytest.mark.parametrize("method", ["msd", "dream", "flash", "vispec"])
def test_learns(target: VLMTarget, batch: DraftBatch, method: str, tmp_path: Path) -> None:
    """Forty steps on two texts raise the agreement with the target a lot."""
    extra = {"heads_ahead": 2, "latents": 2} if method == "flash" else {}
    config = default_config(method, target, **extra)
    spec = LossSpec(
        smooth_l1=0.2,
        soft_ce=1.0,
        mid_smooth_l1=float(method == "dream"),
        again=int(method == "msd"),
        noise=0,
    )
    options = DrafterTraining(
        steps=40, lr=4e-3, warmup=4, check_every=40, log_every=40, autocast=False, clip=1.0
    )

    def agreement(drafter: Drafter) -> float:
        with torch.no_grad():
            return float(DraftLoss(drafter, spec, target.logits).eval()(batch)["agreement"])

    torch.manual_seed(0)
    fresh = Drafter(config)
    fresh.bind(target.embed, target.logits, hidden_size=32, vocab_size=vlm_tiny.VOCAB)
    before = agreement(fresh)
    drafter = train_drafter(target, config, resampled([batch]), tmp_path, options, spec=spec)
    assert agreement(drafter) > before + 0.25
    saved = load_drafter(tmp_path / "drafter")
    assert saved.config == config
    for ours, theirs in zip(saved.state_dict().values(), drafter.state_dict().values(), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=1e-2)


def test_resume_is_exact(target: VLMTarget, batch: DraftBatch, tmp_path: Path) -> None:
    config = default_config("msd", target)
    spec = LossSpec(noise=0.0)
    source = resampled([batch])
    whole = train_drafter(target, config, source, tmp_path / "a", QUICK, spec=spec)

    class Stop(Exception):
        pass

    def interrupted(number: int) -> DraftBatch:
        if number == 4:
            raise Stop
        return source(number)

    with pytest.raises(Stop):
        train_drafter(target, config, interrupted, tmp_path / "b", QUICK, spec=spec)
    resumed = train_drafter(target, config, source, tmp_path / "b", QUICK, spec=spec)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_store_equals_online(target: VLMTarget, batch: DraftBatch, tmp_path: Path) -> None:
    inputs = vlm_tiny.llava().inputs
    count = OnlineHarvester(target, max_new_tokens=24, mid=True).dump([inputs], tmp_path)
    assert count == 2
    back = OfflineStore(tmp_path, target).batch(range(2))
    for name in ("input_ids", "visual", "image_index", "valid", "seq_pos"):
        ours, theirs = getattr(back.view, name), getattr(batch.view, name)
        assert torch.equal(ours[batch.view.valid], theirs[batch.view.valid]), name
    keep = batch.view.valid
    assert torch.equal(back.view.inputs_embeds[keep], batch.view.inputs_embeds[keep])
    assert torch.equal(back.feats.last[keep], batch.feats.last[keep])
    assert torch.equal(back.loss_mask, batch.loss_mask)
    header = json.loads((tmp_path / "header.json").read_text())
    header["target"]["vocab_size"] = 7
    (tmp_path / "header.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match="stored features are of"):
        OfflineStore(tmp_path, target)


def test_given_answers(target: VLMTarget) -> None:
    inputs = vlm_tiny.llava().inputs
    done = OnlineHarvester(target, answers="dataset")(Answered(inputs, [[5, 6, 2], [7, 2]]))
    assert done.view.input_ids[0, -3:].tolist() == [5, 6, 2]
    assert done.loss_mask.sum(1).tolist() == [3, 2]
    with pytest.raises(ValueError, match="needs answers"):
        OnlineHarvester(target, answers="dataset")(inputs)


def test_curriculum(batch: DraftBatch) -> None:
    shares = [visual_share(e, 40) for e in range(1, 41)]
    assert shares[:20] == [0.0] * 20
    assert shares[20] == pytest.approx(0.05)
    assert shares[-1] == 1.0
    used = []
    source = mixed(lambda i: used.append("t") or batch, lambda i: used.append("v") or batch, steps=400)  # type: ignore[func-returns-value]
    for i in range(400):
        source(i)
    assert "v" not in used[:200]
    assert used[-10:] == ["v"] * 10


def test_candidate_layers() -> None:
    assert candidate_layers(32) == tuple(range(1, 11))
    assert candidate_layers(6) == (1,)


def test_sharpest_layer_is_chosen() -> None:
    """With several candidate layers the intermediate target follows the attention entropies, token by token."""
    case = vlm_tiny.llava(layers=10)
    target = VLMTarget(case.model)
    assert candidate_layers(10) == (1, 2)
    harvester = OnlineHarvester(target, answers="dataset", mid=True)
    given = Answered(case.inputs, [[5, 6, 2], [7, 2]])
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        harvester(given)
    case.model.set_attn_implementation("eager")
    done = harvester(given)
    assert done.mid is not None
    with torch.no_grad():
        out = target.text(
            inputs_embeds=done.view.inputs_embeds[:1],
            output_attentions=True,
            output_hidden_states=True,
            use_cache=False,
        )
    entropy = torch.stack([attention_entropy(out.attentions[i])[0] for i in (1, 2)])
    states = torch.stack([out.hidden_states[i][0] for i in (1, 2)])
    best = entropy.argmin(0)
    assert 0 < int(best.sum()) < len(best)
    chosen = states[best, torch.arange(len(best))]
    assert torch.allclose(done.mid[0], chosen, atol=1e-5)
