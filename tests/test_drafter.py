"""Drafter training: data alignment, losses, accumulation, resuming, and that it learns."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny_llamagen

from visacc.drafters.checkpoint import load_drafter
from visacc.sampling import SamplingParams
from visacc.train.cli import training_prompts
from visacc.train.drafter import DrafterTraining, accepted_length, new_drafter, rate, train_drafter
from visacc.train.harvest import Harvest, make_batch, read_features
from visacc.train.loss import DraftBatch, LossSpec, draft_loss

SAMPLING = SamplingParams(guidance_scale=2.0, top_k=16)


@pytest.fixture(scope="module")
def model():
    return tiny_llamagen(grid=4, vocab=16)


def harvest(model, **changes):
    values = {"batch": 2, "pool": 4, "reuse": 2, "seed": 1} | changes
    return Harvest(model, list(range(8)), SAMPLING, **values)


def test_features_and_ids_are_aligned(model):
    """Column j: the target's feature that predicts token j, and the id of token j + 1 behind it."""
    _, codes = harvest(model).sample(0, 3)
    cond = model.encode([harvest(model).prompt_of(i) for i in range(3)])
    batch = make_batch(model, cond, codes, SAMPLING)
    assert batch.ids.shape == batch.features.shape[:2] == (6, 16)
    assert torch.equal(batch.ids[:3], codes)
    assert torch.equal(batch.ids[3:], codes)
    gpt = model.gpt
    with torch.no_grad():
        logits = gpt(codes, cond.data["cond"])
        null = gpt(codes, gpt.null_condition(3))
    torch.testing.assert_close(model.head(batch.features[:3]), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.head(batch.features[3:]), null, atol=1e-4, rtol=1e-4)
    assert batch.mask[:, 0].all()
    assert not batch.mask[:, -1].any()
    assert torch.equal(batch.targets[:, :-1], batch.features[:, 1:])


def test_prompt_features_are_not_trained(model):
    torch.manual_seed(0)
    from visacc.models.llamagen import GPT, GPTConfig, LlamaGen, VQConfig, VQModel

    cfg = GPTConfig(
        dim=16,
        n_layer=1,
        n_head=1,
        vocab_size=16,
        block_size=16,
        model_type="t2i",
        caption_dim=8,
        cls_token_num=5,
        uncond_rows=5,
    )
    text = LlamaGen(GPT(cfg).eval(), VQModel(VQConfig(ch=32, ch_mult=(1,), codebook_size=16)))
    cond = text.condition(torch.randn(2, 5, 8), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    codes = torch.randint(16, (2, 16))
    batch = make_batch(text, cond, codes, SAMPLING, padding="half")
    assert batch.ids.shape == (4, 20)
    assert not batch.ids[:, :4].any()
    assert torch.equal(batch.ids[:2, 4:], codes)
    assert batch.mask.sum(1).tolist() == [15.0] * 4
    other = read_features(text, cond, codes, guidance=True, padding="self")
    assert not torch.allclose(other[0, 1], batch.features[0, 1])
    torch.testing.assert_close(other[:, 5:], batch.features[:, 5:])


def test_stream_is_reproducible_and_resumable(model, tmp_path):
    first = [next_.ids for next_, _ in zip(harvest(model).batches(), range(6), strict=False)]
    again = [next_.ids for next_, _ in zip(harvest(model).batches(start=3), range(3), strict=False)]
    assert all(torch.equal(a, b) for a, b in zip(first[3:], again, strict=True))
    kept = harvest(model, folder=tmp_path)
    assert torch.equal(next(kept.batches()).ids, first[0])
    assert (tmp_path / "samples-0.safetensors").is_file()
    kept.sample = None  # a second stream takes the samples from the folder
    assert torch.equal(next(kept.batches()).ids, first[0])
    other = next(harvest(model).batches(worker=1, workers=2)).ids
    assert not torch.equal(other, first[0])


def test_loss_is_smallest_for_the_target_itself(model):
    """A network that outputs the next feature has no feature loss, and the law's entropy as cross entropy."""
    _, codes = harvest(model).sample(0, 2)
    batch = make_batch(model, model.encode([1, 2]), codes, SAMPLING)

    class Oracle(torch.nn.Module):
        training = True

        def __call__(self, ids, features, positions, mask):
            return batch.targets

    _, parts = draft_loss(Oracle(), model.head, batch, LossSpec(guided=1.0, noise=0.0))
    assert float(parts["feature"]) == 0
    assert float(parts["alpha"]) == pytest.approx(1, abs=1e-4)
    law = model.head(batch.targets).softmax(-1)
    entropy = (torch.special.entr(law).sum(-1) * batch.mask).sum() / batch.mask.sum()
    assert float(parts["law"]) == pytest.approx(float(entropy.detach()), rel=1e-4)
    _, wrong = draft_loss(
        new_drafter(model, DrafterTraining()).train(), model.head, batch, LossSpec(guided=1.0, noise=0.0)
    )
    assert wrong["feature"] > 0
    assert wrong["guided"] > parts["guided"]


def run(model, out, steps=4, batch=2, accumulate=1, **changes):
    changes = {"loss": LossSpec(0.1, 1.0, 1.0, noise=0.0), "lr": 2e-3} | changes
    settings = DrafterTraining(
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        pool=8,
        reuse=4,
        eval_every=1000,
        eval_prompts=2,
        save_every=2,
        log_every=1,
        tree="chain-2",
        **changes,
    )
    lines = []
    network = train_drafter(model, list(range(8)), [8, 9], out, settings, SAMPLING, echo=lines.append)
    return network, [json.loads(line) for line in lines]


def test_accumulation_equals_one_large_batch(model, tmp_path):
    small, _ = run(model, tmp_path / "a", steps=2, batch=2, accumulate=2, clip=1e9)
    # the same four samples as one batch: pools of whole batches are cut in the same order
    large, _ = run(model, tmp_path / "b", steps=2, batch=4, accumulate=1, clip=1e9)
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


def test_resumed_run_equals_an_uninterrupted_one(model, tmp_path):
    whole, lines = run(model, tmp_path / "whole", steps=4)

    class Interrupt(RuntimeError):
        pass

    def train_two():
        from visacc.train import drafter as module

        original = module._save

        def stop(path, network, optim, step, settings, target):
            original(path, network, optim, step, settings, target)
            raise Interrupt

        module._save = stop
        try:
            run(model, tmp_path / "cut", steps=4)
        except Interrupt:
            pass
        finally:
            module._save = original

    train_two()
    resumed, later = run(model, tmp_path / "cut", steps=4)
    assert [line["step"] for line in later if "loss" in line] == [3, 4]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert any("tau" in line for line in lines)
    with pytest.raises(ValueError, match="other settings"):
        run(model, tmp_path / "cut", steps=4, seed=5)
    loaded = load_drafter(tmp_path / "cut" / "drafter")
    for a, b in zip(resumed.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    settings = DrafterTraining(steps=1, batch=2, pool=8, lr=1e-12, eval_prompts=1, tree="chain-2")
    init = tmp_path / "cut" / "drafter"
    prompts = list(range(8))
    warm = train_drafter(
        model, prompts, [9], tmp_path / "warm", settings, SAMPLING, init=init, echo=lambda line: None
    )
    for a, b in zip(resumed.parameters(), warm.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="its grid is 4"):
        train_drafter(
            tiny_llamagen(grid=5, vocab=16), prompts, [9], tmp_path / "no", settings, SAMPLING, init=init
        )
    assert loaded.config.target["name"] == "tiny"
    assert loaded.config.tree == "chain-2"


def test_training_raises_accepted_length(model, tmp_path):
    before = new_drafter(model, DrafterTraining())
    prompts = list(range(8)) * 2
    start = accepted_length(model, before, prompts, SAMPLING, tree="chain-2")["tau"]
    network, lines = run(model, tmp_path, steps=80, batch=8, precision="fp32", train_embedding=True)
    losses = [line for line in lines if "alpha" in line]
    assert losses[-1]["alpha"] > losses[0]["alpha"] + 0.05
    assert accepted_length(model, network, prompts, SAMPLING, tree="chain-2")["tau"] > start + 0.05


def test_bf16_runs(model, tmp_path):
    _, lines = run(model, tmp_path, steps=2, precision="bf16")
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in lines if "loss" in line)


def test_rate():
    settings = DrafterTraining(steps=100, warmup=0.1)
    rates = [rate(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1
    assert rates[10] == 1
    assert rates[99] == pytest.approx(1 / 90)


def test_bad_input(model, tmp_path):
    for options, match in (
        ({"steps": 0}, "steps"),
        ({"precision": "fp16"}, "precision"),
        ({"lr": -1.0}, "lr"),
        ({"warmup": 1.0}, "warmup"),
    ):
        with pytest.raises(ValueError, match=match):
            DrafterTraining(**options)
    with pytest.raises(ValueError, match="at least one loss term"):
        LossSpec(0, 0, 0)
    with pytest.raises(ValueError, match="both trained on and held out"):
        train_drafter(model, [1, 2], [2], tmp_path, echo=lambda line: None)
    with pytest.raises(ValueError, match="held-out"):
        train_drafter(model, [1, 2], [], tmp_path, echo=lambda line: None)
    with pytest.raises(ValueError, match="at least one prompt"):
        Harvest(model, [], SAMPLING, 1, 1, 1, 0)
    from toy import TableModel

    with pytest.raises(ValueError, match=r"LlamaGen-type.*table is a TableModel"):
        new_drafter(TableModel(4, 4), DrafterTraining())


def test_prompts(model, tmp_path):
    texts, kept = training_prompts(model, None, 2)
    assert (texts, kept) == (list(range(8)), [8, 9])
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\n\na\nc\n")
    assert training_prompts(model, path, 1) == (["a", "b"], ["c"])
    with pytest.raises(ValueError, match="leave none"):
        training_prompts(model, path, 3)
    with pytest.raises(ValueError, match="does not exist"):
        training_prompts(model, tmp_path / "none.txt", 1)


def test_batch_of_one_branch():
    batch = DraftBatch(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, 2), torch.ones(1, 3))
    assert torch.equal(batch.targets[:, -1], torch.zeros(1, 2))
