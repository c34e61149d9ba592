"""Cosmos adapter: every next-token decoder runs on it; lossless ones agree with plain decoding."""

from __future__ import annotations

import pytest
import torch

from visacc.decoders.ar import AR
from visacc.decoders.jacobi import MCSJD, SJD
from visacc.engine import DecodeResult, decode
from visacc.models.base import Conditioning
from visacc.models.cosmos import (
    Cosmos,
    CosmosConfig,
    CosmosModel,
    CosmosTokenizer,
    TokenizerConfig,
    Yarn,
    fit_frames,
)
from visacc.models.video_prompt import VideoPrompt
from visacc.sampling import SamplingParams


def build(context_dim: int = 0, given: int = 1, grid: tuple[int, int, int] = (3, 4, 5)) -> CosmosModel:
    torch.manual_seed(3)
    yarn = Yarn((2, 4, 5)) if context_dim else None
    cfg = CosmosConfig(
        dim=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_dim=64,
        vocab=32,
        grid=grid,
        context_dim=context_dim,
        yarn=yarn,
    )
    net = Cosmos(cfg)
    with torch.no_grad():
        net.output.weight.mul_(4)
    return CosmosModel(net, given_frames=given)


def prompt(model: CosmosModel, batch: int) -> Conditioning:
    generator = torch.Generator().manual_seed(5)
    cfg = model.net.config
    given = torch.randint(cfg.vocab, (batch, model.given_tokens), generator=generator)
    context = torch.randn(batch, 6, cfg.context_dim, generator=generator) if cfg.text else None
    return model.conditioning(given, context)


def run(model: CosmosModel, decoder: object, batch: int = 3, **sampling: float) -> DecodeResult:
    params = SamplingParams(**{"temperature": 1.0, "top_p": 0.8, **sampling})
    return decode(model, decoder, prompt(model, batch), params, list(range(batch)))  # type: ignore[arg-type]


@pytest.mark.parametrize("context_dim", [0, 20])
def test_gumbel_exact_equals_plain_decoding(context_dim: int) -> None:
    model = build(context_dim)
    with torch.no_grad():
        model.net.output.weight.mul_(0.5)  # laws that depend less on the drafts: many stand, on any machine
    plain = run(model, AR())
    for window in (4, 64):
        fast = run(model, MCSJD(window=window, coupling="gumbel-exact"))
        assert torch.equal(fast.sequence, plain.sequence)
        assert fast.stats.forwards < plain.stats.forwards


@pytest.mark.parametrize(
    "decoder",
    [AR(), SJD(window=16), MCSJD(window=64), MCSJD(window=128), MCSJD(window=64, coupling="maximal")],
)
def test_greedy_equals_teacher_forcing(decoder: object) -> None:
    model = build(given=2)
    cond = prompt(model, 2)
    result = decode(model, decoder, cond, SamplingParams(temperature=0), [1, 2])  # type: ignore[arg-type]
    whole = model.complete(cond, result.codes).flatten(1)
    logits = model.net(whole)[:, model.given_tokens - 1 : -1]
    assert torch.equal(logits.argmax(2), result.sequence)


def test_row_of_a_batch_equals_the_row_alone() -> None:
    model = build(20)
    together = run(model, MCSJD(window=8), batch=3)
    cond = prompt(model, 3)
    for i in range(3):
        data = {k: v[i : i + 1] for k, v in cond.data.items()}
        alone = decode(
            model,
            MCSJD(window=8),
            Conditioning(1, data, has_uncond=False),
            SamplingParams(temperature=1.0, top_p=0.8),
            [i],
        )
        assert torch.equal(alone.sequence[0], together.sequence[i])


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="1 or 2 latent frames"):
        build(given=3)
    model = build()
    with pytest.raises(ValueError, match="without a tokenizer"):
        model.encode([VideoPrompt(frames=torch.rand(1, 3, 64, 80))])
    with pytest.raises(ValueError, match="unconditional branch"):
        run(model, AR(), guidance_scale=2.0)
    with pytest.raises(ValueError, match="no text input"):
        model.encode([VideoPrompt("a car", torch.rand(1, 3, 64, 80))])
    with pytest.raises(ValueError, match="another tokenizer"):
        CosmosModel(
            model.net, CosmosTokenizer(TokenizerConfig(channels=2, z_channels=8, blocks=1)), given_frames=1
        )


def test_frames_of_wrong_number_and_size() -> None:
    tokenizer = CosmosTokenizer(TokenizerConfig(channels=2, z_channels=8, blocks=1, levels=(8, 2, 2)))
    model = CosmosModel(build().net, tokenizer, given_frames=1)
    cond = model.encode([VideoPrompt(frames=torch.rand(1, 3, 64, 80))])
    assert cond.data["given"].shape == (1, 20)
    with pytest.raises(ValueError, match="exactly 1 frames"):
        model.encode([VideoPrompt(frames=torch.rand(9, 3, 64, 80))])
    with pytest.raises(ValueError, match="another frame size"):
        model.encode([VideoPrompt(frames=torch.rand(1, 3, 32, 80))])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        model.encode([VideoPrompt(frames=torch.rand(1, 3, 64, 80) * 255)])
    with pytest.raises(ValueError, match="brings none"):
        model.encode([VideoPrompt()])


def test_fit_frames_covers_and_crops() -> None:
    assert fit_frames(torch.rand(2, 3, 100, 90), (64, 80)).shape == (2, 3, 64, 80)
    assert fit_frames(torch.rand(2, 3, 33, 200), (64, 80)).shape == (2, 3, 64, 80)
