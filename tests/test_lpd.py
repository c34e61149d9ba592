"""LPD decoder: the cached path equals the training form, any number of steps, given cells, batches, bad input."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy import recorded
from typer.testing import CliRunner

from visacc.decoders.ar import AR
from visacc.decoders.lpd import LPD
from visacc.engine import DecodeResult, decode
from visacc.models.fit import Fit
from visacc.models.llamagen.vq import VQConfig, VQModel
from visacc.models.lpd import LPDConfig, LPDModel, load_lpd, lpd_group_sizes, lpd_order, training_lists
from visacc.models.lpd.model import LPD as Net
from visacc.models.lpd.parts import attend, split_mask, training_mask
from visacc.models.lpd.train import train_lpd
from visacc.pipeline import TextToImagePipeline
from visacc.sampling import SamplingParams
from visacc.train.cli import app as train_app

GRID = 6


def build(**options: Any) -> LPDModel:
    torch.manual_seed(1)
    shape = {"dim": 32, "depth": 2, "heads": 4, "vocab": 24, "classes": 5, "grid": GRID, **options}
    net = Net(LPDConfig(**shape))
    with torch.no_grad():
        net.head.weight.mul_(3)
        net.fake_latent.normal_()
        net.class_emb.weight.mul_(30)
    reader = (lambda text: torch.tensor([len(text) % 7 + 1, 1, 0, 0])) if options.get("text_len") else None
    return LPDModel(net, read_caption=reader, class_names=("ant", "bee", "cat", "dog", "eel"))


def run(
    model: LPDModel, decoder: LPD, prompts: list[Any], seeds: list[int], scale: float = 1.0
) -> DecodeResult:
    params = SamplingParams(guidance_scale=scale, temperature=1.0)
    return decode(model, decoder, model.encode(prompts), params, seeds)


@given(st.lists(st.integers(1, 90), min_size=2, max_size=12), st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_attention_by_parts_is_masked_attention(sizes: list[int], prefix: int) -> None:
    mask = training_mask(sizes, prefix)
    parts = split_mask(mask, len(mask) - sum(sizes), torch.device("cpu"))
    assert [i for part in parts for i in range(part.rows.start, part.rows.stop)] == list(range(len(mask)))
    torch.manual_seed(len(sizes))
    q, k, v = torch.randn(3, 1, 2, len(mask), 4, dtype=torch.float64).unbind()
    found = [attend(q[:, :, part.rows], part.columns_of(k), part.columns_of(v), part.mask) for part in parts]
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.allclose(torch.cat(found, dim=2), whole, atol=1e-12)


@pytest.mark.parametrize("text_len", [0, 4])
def test_cached_steps_equal_the_training_form(text_len: int) -> None:
    model = build(text_len=text_len, text_vocab=8 if text_len else 0)
    found = recorded(model)
    decoder = LPD(steps=7, repulsion=1)
    prompts: list[Any] = ["some words", 2] if text_len else [0, 3]
    result = run(model, decoder, prompts, [5, 6])
    sizes = lpd_group_sizes(GRID**2, 7)
    orders = decoder.state["order"]
    assert orders is not None
    cond = model.encode(prompts).data
    with torch.no_grad():
        whole = model.net(result.sequence, cond["labels"], orders, sizes, cond.get("words"))
    torch.testing.assert_close(torch.cat(found, dim=1), whole, atol=1e-4, rtol=1e-4)
    assert result.stats.forwards == 7


@pytest.mark.parametrize("steps", [2, 5, 13, GRID**2])
def test_any_number_of_steps(steps: int) -> None:
    result = run(build(), LPD(steps=steps), [1, None, 4], [1, 2, 3], scale=3.0)
    assert result.stats.forwards == steps
    assert bool((result.stats.step_of > 0).all())
    assert not result.stats.unfinished


def test_image_does_not_depend_on_its_batch() -> None:
    model = build()
    together = run(model, LPD(steps=9), [1, 2, 3], [7, 8, 9], scale=4.0)
    for i in range(3):
        alone = run(model, LPD(steps=9), [i + 1], [7 + i], scale=4.0)
        assert torch.equal(alone.sequence[0], together.sequence[i])
    assert not torch.equal(together.stats.step_of[0], together.stats.step_of[1])  # orders are per image


@pytest.mark.parametrize("steps", [5, 9])
def test_check_interval_does_not_change_the_images(steps: int) -> None:
    """The host knows when the last group is drawn, however seldom it looks at the device."""
    model, params = build(), SamplingParams(guidance_scale=2.0)
    often, seldom = (
        decode(model, LPD(steps=steps), model.encode([1, 2]), params, [5, 6], check_every=every)
        for every in (1, 8)
    )
    assert torch.equal(often.sequence, seldom.sequence)
    assert seldom.stats.forwards == steps


def test_given_cells_are_kept_and_seen() -> None:
    model = build()
    known = torch.full((GRID, GRID), -1)
    known[:3] = torch.arange(3 * GRID).view(3, GRID) % 24
    found = recorded(model)
    for steps in (1, 4):
        found.clear()
        decoder = LPD(steps=steps, known=known)
        result = run(model, decoder, [0, 1], [1, 2], scale=1.0)
        assert torch.equal(result.codes[:, 0, :3], known[:3].expand(2, -1, -1))
        assert result.stats.forwards == steps
        assert bool((result.stats.step_of.view(2, GRID, GRID)[:, :3] == 0).all())
        assert bool((result.stats.step_of.view(2, GRID, GRID)[:, 3:] > 0).all())
        sizes = (3 * GRID, *lpd_group_sizes(3 * GRID, steps, free_start=True))
        free = decoder.state["order"]
        assert free is not None
        orders = torch.cat([torch.arange(3 * GRID).expand(2, -1), free], dim=1)
        with torch.no_grad():
            whole = model.net(result.sequence, torch.tensor([0, 1]), orders, sizes)
        torch.testing.assert_close(torch.cat(found, dim=1), whole[:, 3 * GRID :], atol=1e-4, rtol=1e-4)


def test_guidance_grows_over_the_order() -> None:
    model = build()
    weights: list[Tensor] = []

    class Spy(LPD):
        def guidance(self, run: Any, slots: Tensor) -> Tensor | None:
            scale = super().guidance(run, slots)
            assert scale is not None
            weights.append(scale)
            return scale

    run(model, Spy(steps=5), [1, 2], [1, 2], scale=3.0)
    expected = 1 + 2 * torch.arange(GRID**2) / GRID**2
    torch.testing.assert_close(torch.cat(weights, dim=1), expected.expand(2, -1))


def test_group_sizes_for_any_steps() -> None:
    for tokens in (16, 36, 256, 1024):
        for steps in {2, 3, tokens // 5, tokens // 2, tokens}:
            sizes = lpd_group_sizes(tokens, steps)
            assert len(sizes) == steps
            assert sum(sizes) == tokens
            assert sizes[0] == 1
            assert list(sizes[1:]) == sorted(sizes[1:])
    assert [len(training_lists(n)) for n in (256, 1024)] == [9, 14]
    assert lpd_group_sizes(20, 1, free_start=True) == (20,)


def test_orders_are_permutations_with_distance() -> None:
    sizes = lpd_group_sizes(256, 20)
    order = lpd_order(sizes, 16, repulsion=2, rng=random.Random(3))
    assert sorted(order) == list(range(256))
    assert order == lpd_order(sizes, 16, repulsion=2, rng=random.Random(3))
    rows = lpd_order((1, 3, 11), (3, 5), rng=random.Random(1))
    assert sorted(rows) == list(range(15))


def test_bad_input() -> None:
    model = build()
    with pytest.raises(ValueError, match="steps must be"):
        LPD(steps=0)
    with pytest.raises(ValueError, match="guidance_schedule"):
        LPD(guidance_schedule="cosine")
    with pytest.raises(ValueError, match="number of tokens"):
        run(model, LPD(steps=37), [1], [1])
    with pytest.raises(ValueError, match="sum to"):
        run(model, LPD(group_sizes=(1, 4)), [1], [1])
    with pytest.raises(ValueError, match="permutation"):
        run(model, LPD(steps=4, orders=[0] * 36), [1], [1])
    with pytest.raises(ValueError, match="first group"):
        lpd_order((4, 32), 6)
    with pytest.raises(ValueError, match="every cell is known"):
        run(model, LPD(steps=4, known=torch.zeros(6, 6, dtype=torch.long)), [1], [1])
    with pytest.raises(ValueError, match="another tokenizer"):
        run(model, LPD(steps=4, known=torch.full((6, 6), 99)), [1], [1])
    with pytest.raises(ValueError, match=r"classes 0\.\.4"):
        model.encode([5])
    with pytest.raises(ValueError, match="use 'lpd'"):
        decode(model, AR(), model.encode([1]), SamplingParams(), [1])
    with pytest.raises(ValueError, match="without a tokenizer"):
        model.decode(torch.zeros(1, 1, 6, 6, dtype=torch.long))


def test_class_names_are_prompts() -> None:
    model = build()
    assert model.encode(["cat", 1]).data["labels"].tolist() == [2, 1]
    with pytest.raises(ValueError, match="class names"):
        model.encode(["cow"])


def test_training_learns(tmp_path: Any) -> None:
    codes = (torch.arange(GRID**2) % 24).expand(8, -1).contiguous()
    labels = torch.zeros(8, dtype=torch.long)

    def train(folder: Any, steps: int) -> Net:
        torch.manual_seed(0)
        net = Net(LPDConfig(dim=32, depth=1, heads=2, vocab=24, classes=5, grid=GRID, dropout=0.0))
        settings = Fit(steps=steps, batch=4, warmup=5, save_every=20, log_every=20)
        return train_lpd(net, codes, labels, None, folder, settings)

    model = LPDModel(train(tmp_path, 40))
    sizes = lpd_group_sizes(GRID**2, 6)
    orders = torch.arange(GRID**2).expand(8, -1)
    with torch.no_grad():
        logits = model.net(codes, labels, orders, sizes)
    assert float((logits.argmax(2) == codes).float().mean()) > 0.5


def test_train_command(tmp_path: Any) -> None:
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "codes.npy", np.tile(np.arange(16, dtype=np.uint16) % 8, (8, 1)))
    np.save(data / "labels.npy", np.arange(8) % 3)
    shape = ["--size", "32:1:2", "--grid", "4", "--vocab", "8", "--classes", "3", "--device", "cpu"]
    command = ["lpd", str(data), "-o", str(tmp_path / "run"), "--epochs", "2", "--batch", "4", *shape]
    result = CliRunner().invoke(train_app, command)
    assert result.exit_code == 0, result.output
    net = load_lpd(tmp_path / "run/lpd.safetensors")
    assert (net.config.grid, net.config.heads) == (
        4,
        2,
    )  # heads are no matter of shapes: they come with the file
    np.save(data / "codes.npy", np.full((8, 16), 9))
    result = CliRunner().invoke(train_app, command)
    assert "another tokenizer" in str(result.exception)


def test_train_command_with_captions(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """From codes, labels and texts to pictures by ``visacc generate``, by class and by caption."""
    import json

    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from visacc.cli import main
    from visacc.models.llamagen.checkpoint import save_model

    data, run_folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    np.save(data / "codes.npy", np.tile(np.arange(16, dtype=np.uint16) % 8, (8, 1)))
    np.save(data / "labels.npy", np.array([0, 1, 2, -1] * 2))
    np.save(data / "texts.npy", np.array([[1, 2, 0]] * 8))
    vq = VQModel(
        VQConfig(ch=8, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, codebook_size=8, norm_groups=4)
    )
    save_model(tmp_path / "vq.safetensors", vq, torch.float32)
    core = Tokenizer(models.WordLevel({"[unk]": 0, "red": 1, "cat": 2, "cow": 9}, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path / "words")

    def call(*words: object) -> int:
        with pytest.raises(SystemExit) as stop:
            main([str(w) for w in words])
        return int(str(stop.value.code))

    shape = ["--size", "32:1:2", "--grid", 4, "--vocab", 8, "--classes", 3, "--device", "cpu"]
    train = ["train", "lpd", data, "-o", run_folder, "--epochs", 2, "--batch", 4, *shape]
    assert call(*train) == 2
    assert "reads no captions: give --text-vocab" in capsys.readouterr().err
    assert call(*train, "--text-vocab", 2) == 2
    assert "ids outside 0..1" in capsys.readouterr().err
    assert call(*train, "--text-vocab", 8) == 0
    weights = run_folder / "lpd.safetensors"
    draw = [
        "generate",
        "-m",
        weights,
        "--model-option",
        f"vq={tmp_path / 'vq.safetensors'}",
        "-d",
        "lpd",
        "-q",
    ]
    draw += ["--model-option", f"text_tokenizer={tmp_path / 'words'}", "-O", "steps=3", "--device", "cpu"]
    assert call(*draw, "red cat", 2, "-o", tmp_path / "out", "--seed", 1) == 0
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert [image["prompt"] for image in stats["images"]] == ["red cat", 2]
    capsys.readouterr()
    assert call(*draw, "red cow", "-o", tmp_path / "out") == 2
    assert "writes id 9, the model knows 8 words: another tokenizer" in capsys.readouterr().err
    elsewhere = ["vq=none.pt" if str(word).startswith("vq=") else word for word in draw]
    assert call(*elsewhere, "a cat", "-o", tmp_path / "out") == 2
    assert "none.pt does not exist" in capsys.readouterr().err
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert call("generate", 1, "-m", tmp_path / "other.safetensors", "-o", tmp_path / "out") == 2
    save_model(tmp_path / "vq.safetensors", VQModel(replace(vq.config, codebook_size=9)), torch.float32)
    assert call(*draw, 1, "-o", tmp_path / "out") == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_pipeline_with_given_codes() -> None:
    vq = VQModel(
        VQConfig(ch=8, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, codebook_size=24, norm_groups=4)
    )
    model = build()
    model.vq = vq.eval()
    pipe = TextToImagePipeline(model, "lpd", steps=8, repulsion=1)
    out = pipe([1, "dog"], guidance_scale=2.0, seed=3)
    assert out.images[0].size == (12, 12)
    assert out.stats.forwards == 8
    known = out.codes[0, 0].clone()
    known[2:4, 2:4] = -1
    again = pipe(4, seed=5, known=known, steps=2)
    kept = known >= 0
    assert torch.equal(again.codes[0, 0][kept], known[kept])
    assert again.stats.forwards == 2
    with pytest.raises(ValueError, match="no option 'rho'"):
        pipe(1, rho=2)


def test_given_codes_and_orders_follow_the_batches() -> None:
    """One row an image of the whole call, however it is cut into batches."""
    pipe = TextToImagePipeline(build(), "lpd", steps=4, repulsion=1)
    known = torch.full((5, GRID, GRID), -1)
    known[:, 0] = torch.arange(5 * GRID).view(5, GRID) % 24
    free = torch.arange(GRID, GRID**2)
    orders = torch.stack([free.roll(i) for i in range(5)])
    call: dict[str, Any] = {"seed": [4] * 5, "known": known, "orders": orders, "output_type": "codes"}
    whole = pipe([1] * 5, batch_size=5, **call).codes
    assert torch.equal(whole[:, 0, 0], known[:, 0])
    for size in (1, 2):
        assert torch.equal(pipe([1] * 5, batch_size=size, **call).codes, whole)
    with pytest.raises(ValueError, match="known is given for 5 images, the call makes 10"):
        pipe([1] * 10, batch_size=5, seed=1, known=known, output_type="codes")
