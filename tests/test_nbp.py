"""NBP: block decoding on any batch, guidance, continuation, the next-token twin under Jacobi decoders, bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import recorded
from typer.testing import CliRunner

from visacc.decoders.ar import AR
from visacc.decoders.jacobi import MCSJD, SJD
from visacc.decoders.nbp import NBP
from visacc.engine import DecodeResult, decode
from visacc.models.base import Conditioning
from visacc.models.fit import Fit, fit
from visacc.models.nbp import Magvit2, Magvit2Config, NBPConfig, NBPModel, moving, to_next_block
from visacc.models.nbp.gpt import NBP as Net
from visacc.models.nbp.released import config_of, load_nbp
from visacc.models.video_prompt import VideoPrompt
from visacc.sampling import SamplingParams
from visacc.train.cli import app as train_app
from visacc.video_models import default_decoder, load_video_model


def build(block: int = 4, given: int = 0, text: bool = True, **options: Any) -> NBPModel:
    torch.manual_seed(2)
    shape: dict[str, Any] = {
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "grid": (3, 4, 4),
        "block": block,
        "video_vocab": 24,
        "text_vocab": 20 if text else 0,
        "cond_tokens": 3 if text else 0,
        "positions": 70,
        "cond_drop": 0.1 if text else 0.0,
        **options,
    }
    net = Net(NBPConfig(**shape))
    with torch.no_grad():
        net.head.weight.mul_(25)
    return NBPModel(net, given_frames=given, defaults={})


def condition(model: NBPModel, batch: int) -> Conditioning:
    generator = torch.Generator().manual_seed(9)
    cfg = model.net.config
    data: dict[str, Tensor] = {"given": torch.randint(24, (batch, model.given_tokens), generator=generator)}
    if cfg.hybrid:
        data["text"] = torch.randint(3, 20, (batch, 3), generator=generator)
    return model.conditioning(data, batch)


def run(model: NBPModel, decoder: Any, batch: int = 3, **sampling: float) -> DecodeResult:
    params = SamplingParams(**{"temperature": 1.0, "top_p": 0.9, **sampling})  # type: ignore[arg-type]
    return decode(model, decoder, condition(model, batch), params, list(range(10, 10 + batch)))


@pytest.mark.parametrize(("text", "given"), [(True, 0), (True, 1), (True, 2), (False, 1), (False, 2)])
def test_cached_blocks_equal_the_training_form(text: bool, given: int) -> None:
    model = build(given=given, text=text)
    found = recorded(model)
    result = run(model, NBP())
    cond = condition(model, 3)
    video = torch.cat([cond.data["given"], result.sequence], dim=1)
    with torch.no_grad():
        whole = model.net(video, cond.data.get("text"))
    start = model.given_tokens if text else model.given_tokens - 4
    shift = model.net.config.video_shift
    torch.testing.assert_close(torch.cat(found, dim=1), whole[:, start:, shift:], atol=1e-4, rtol=1e-4)
    blocks = model.layout.total // 4
    assert result.stats.forwards == (blocks + 3 if text and given == 0 else blocks)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_video_does_not_depend_on_its_batch(scale: float) -> None:
    model = build()
    together = run(model, NBP(), guidance_scale=scale)
    cond = condition(model, 3)
    for i in range(3):
        part = model.conditioning({k: v[i : i + 1] for k, v in cond.data.items()}, 1)
        alone = decode(model, NBP(), part, SamplingParams(top_p=0.9, guidance_scale=scale), [10 + i])
        assert torch.equal(alone.sequence[0], together.sequence[i])


def test_guidance_uses_the_null_text() -> None:
    model = build(block=1)
    outputs: list[Any] = []
    call = model.prefill

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        outputs.append(result[1])
        return result

    model.prefill = wrapped  # type: ignore[method-assign]
    run(model, AR(), guidance_scale=2.0)
    null = {"text": torch.zeros(3, 3, dtype=torch.long), "no_text": torch.ones(3, dtype=torch.bool)}
    null["given"] = torch.empty(3, 0, dtype=torch.long)
    _, expected = call(model.conditioning(null, 3), guidance=False, window=1)
    # texts hide pads from each other in next-token models, so compare with pad-free null ids
    torch.testing.assert_close(outputs[0].uncond, expected.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_gumbel_exact_equals_plain_decoding_on_the_twin(given: int, scale: float) -> None:
    model = build(block=1, given=given)
    plain = run(model, AR(), guidance_scale=scale)
    for window in (3, 16):
        fast = run(model, MCSJD(window=window, coupling="gumbel-exact"), guidance_scale=scale)
        assert torch.equal(fast.sequence, plain.sequence)
        assert fast.stats.forwards < plain.stats.forwards
    assert run(model, SJD(window=8)).stats.nfe < plain.stats.nfe


def test_block_models_refuse_next_token_decoders() -> None:
    with pytest.raises(ValueError, match="use 'nbp'"):
        run(build(), AR())


def test_next_block_from_next_token() -> None:
    twin = build(block=1).net
    net = to_next_block(twin, 4)
    old, new = twin.state_dict(), net.state_dict()
    assert torch.equal(old["tok_emb.weight"][1:], new["tok_emb.weight"][4:])
    assert torch.equal(old["head.weight"][:1], new["head.weight"][:1])
    assert torch.equal(old["pos_emb"], new["pos_emb"])
    middle = new["tok_emb.weight"][1:4] - old["tok_emb.weight"][:1]
    assert 0 < float(middle.abs().max()) < 0.15
    with pytest.raises(ValueError, match="block size 1"):
        to_next_block(net, 8)


def test_vocabularies_are_inferred_or_refused() -> None:
    state = build().net.state_dict()
    cfg = config_of(state, heads=4, grid=(3, 4, 4), video_vocab=24, text_vocab=20)
    assert (cfg.block, cfg.cond_tokens, cfg.vocab) == (4, 3, 48)
    with pytest.raises(ValueError, match="other vocabularies"):
        config_of(state, heads=4, grid=(3, 4, 4), video_vocab=40, text_vocab=20)
    with pytest.raises(ValueError, match="block size 4, not 8"):
        config_of(state, heads=4, grid=(3, 4, 4), video_vocab=24, text_vocab=20, block=8)
    with pytest.raises(ValueError, match="how many heads"):
        config_of(state, grid=(3, 4, 4), video_vocab=24, text_vocab=20)


def tokenizer() -> Magvit2:
    torch.manual_seed(0)
    strides = ((1, 2, 2), (2, 2, 2))
    return Magvit2(
        Magvit2Config(widths=(4, 4, 4), units=(1, 1, 1), strides=strides, groups=2, levels=(4, 3, 2))
    ).eval()


def test_tokenizer_round_trip_shapes_and_causality() -> None:
    net, video = tokenizer(), torch.rand(2, 5, 3, 16, 16)
    codes = net.encode(video)
    assert codes.shape == (2, 3, 4, 4)
    assert net.decode(codes).shape == video.shape
    assert torch.equal(net.encode(video[:, :3]), codes[:, :2])
    with pytest.raises(ValueError, match=r"1 \+ 2 n frames"):
        net.encode(video[:, :4])
    with pytest.raises(ValueError, match="another tokenizer"):
        net.decode(codes + 24)


def test_prompts() -> None:
    tok = tokenizer()
    model = NBPModel(build(given=2).net, tok, given_frames=2)
    clip = torch.rand(3, 3, 16, 16)
    with pytest.raises(ValueError, match="text tokenizer"):
        model.encode([VideoPrompt("a", clip)])
    cond = model.encode([VideoPrompt(None, clip)])
    assert cond.data["given"].shape == (1, 32)
    with pytest.raises(ValueError, match="exactly 3 frames"):
        model.encode([VideoPrompt(None, clip[:2])])
    with pytest.raises(ValueError, match="another frame size"):
        model.encode([VideoPrompt(None, torch.rand(3, 3, 32, 32))])
    with pytest.raises(ValueError, match="given_frames"):
        build(text=False)
    with pytest.raises(ValueError, match="unconditional branch"):
        run(build(cond_drop=0.0), NBP(), guidance_scale=2.0)
    with pytest.raises(ValueError, match="another tokenizer"):
        NBPModel(build(video_vocab=30).net, tok)


def test_moving_world_is_read_back_by_its_judge() -> None:
    clips = [moving.sample(seed) for seed in range(9)]
    assert all(moving.judge(moving.render(clip)).agrees(clip) for clip in clips)
    frames = moving.render(clips[0])
    assert frames.shape == (moving.FRAMES, 32, 32, 3)
    assert np.array_equal(frames, moving.render(clips[0]))
    assert len({clip.motion for clip in clips}) >= 4


def test_moving_texts() -> None:
    ids = moving.read_text("A red circle moves left")
    assert ids.tolist()[0] == 1
    assert ids.tolist()[-1] == 2
    assert len(ids) == moving.TEXT_TOKENS
    with pytest.raises(ValueError, match="no word 'dog'"):
        moving.read_text("red dog moves left")
    with pytest.raises(ValueError, match="1 to 5 words"):
        moving.read_text("")


def test_fit_resumes_bit_for_bit(tmp_path: Any) -> None:
    data = torch.randn(16, 4)

    def train(folder: Any, stop_at: int | None) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)

        def loss(pick: Tensor) -> Tensor:
            if stop_at is not None and len(seen) == stop_at:
                raise KeyboardInterrupt
            seen.append(pick)
            return (model(data[pick] + 0.1 * torch.randn(len(pick), 4)) - 1).square().mean()

        seen: list[Tensor] = []
        settings = Fit(steps=12, batch=4, save_every=3, log_every=3, muon_lr=0)
        fit(model, loss, 16, folder, "m", settings)
        return torch.cat([p.flatten() for p in model.parameters()]).detach()

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", 7)
    assert torch.equal(train(tmp_path / "a", None), train(tmp_path / "b", None))


def test_train_command_fine_tunes_a_twin(tmp_path: Any) -> None:
    twin = build(block=1).net
    torch.save(
        {"state_dict": {f"transformer.{k}": v for k, v in twin.state_dict().items()}}, tmp_path / "ntp.ckpt"
    )
    np.save(tmp_path / "codes.npy", np.random.default_rng(0).integers(0, 24, (8, 3, 4, 4)))
    np.save(tmp_path / "texts.npy", np.full((8, 3), 5))
    shape = [
        "--heads",
        "4",
        "--grid",
        "3:4:4",
        "--video-vocab",
        "24",
        "--text-vocab",
        "20",
        "--device",
        "cpu",
    ]
    command = ["nbp", str(tmp_path), "--from", str(tmp_path / "ntp.ckpt"), "-o", str(tmp_path / "run")]
    result = CliRunner().invoke(train_app, [*command, "--block", "4", "--steps", "2", "--batch", "4", *shape])
    assert result.exit_code == 0, result.output
    made = tmp_path / "run/nbp.safetensors"
    net = load_nbp(made)
    assert (net.config.block, net.config.heads, net.config.grid) == (4, 4, (3, 4, 4))
    model = load_video_model(made)
    assert default_decoder(model) == "nbp"
    assert model.layout.grid == (3, 4, 4)
    command[3] = str(made)  # and on from there
    command[5] = str(tmp_path / "more")
    result = CliRunner().invoke(train_app, [*command, "--block", "4", "--steps", "1", "--batch", "4", *shape])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(train_app, [*command, "--block", "8", "--steps", "1", "--batch", "4", *shape])
    assert "block size 1" in str(result.exception)


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("block", [1, 4])
def test_check_interval_does_not_change_the_videos(block: int, given: int) -> None:
    model = build(block=block, given=given)
    made = []
    for every in (1, 7):
        decoder = AR() if block == 1 else NBP()
        made.append(decode(model, decoder, condition(model, 2), SamplingParams(), [1, 2], check_every=every))
    assert torch.equal(made[0].sequence, made[1].sequence)
    assert made[0].stats.forwards == made[1].stats.forwards


@pytest.mark.parametrize("check", [1, 5])
@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("block", [1, 4])
def test_promised_masks_are_the_real_ones(block: int, given: int, check: int) -> None:
    """Proposals that promise full sight: the pass without a mask gives what the pass with the mask gives."""
    model = build(block=block, given=given)
    call, promised = model.forward, []

    def both(state: Any, proposal: Any, **kwargs: Any) -> Any:
        promised.append(proposal.full)
        cache = state.kv.clone()
        masked = call(state, replace(proposal, full=False), **kwargs)
        after, state.kv = state.kv, cache
        plain = call(state, proposal, **kwargs)
        torch.testing.assert_close(plain.logits, masked.logits, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state.kv, after, atol=1e-5, rtol=1e-4)
        return plain

    model.forward = both  # type: ignore[method-assign]
    cond = condition(model, 3)
    made = decode(
        model, AR() if block == 1 else NBP(), cond, SamplingParams(top_p=0.9), [1, 2, 3], check_every=check
    )
    assert promised
    assert all(promised)
    assert not made.stats.unfinished


def test_joint_ids_reach_the_tokenizer_as_video_codes() -> None:
    """Ids of the joint vocabulary become codes once, on the way to the tokenizer."""
    plain = build()
    model = NBPModel(plain.net, joint_ids=True, defaults={})
    seen: list[Tensor] = []

    class Recorder:
        codebook_size = 24

        def decode(self, codes: Tensor) -> Tensor:
            seen.append(codes)
            return torch.zeros(len(codes), 3, 3, 4, 4)

    model.tokenizer = Recorder()  # type: ignore[assignment]
    cond = condition(model, 2)
    joint = torch.arange(2 * 48).view(2, 3, 4, 4) % 24 + model.net.config.video_shift
    whole = model.complete(cond, joint)
    model.decode(whole)
    assert torch.equal(seen[0], torch.arange(2 * 48).view(2, 3, 4, 4) % 24)
