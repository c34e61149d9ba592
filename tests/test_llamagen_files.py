"""Loading LlamaGen: files that fit and files that do not, whole models, released names, captions."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llamagen_tiny import CODES, LENGTH, WIDTH, gpt_config, make_gpt, make_text, make_vq
from safetensors.torch import load_file, save_file
from torch import Tensor

import visacc
from visacc.models.llamagen import (
    GPT,
    RELEASED,
    GPTConfig,
    TextConditioner,
    load,
    load_gpt,
    load_vq,
    save_model,
)
from visacc.models.llamagen.released import SIZES, Released, fetch
from visacc.models.llamagen.text import left_pad


def same(a: torch.nn.Module, b: torch.nn.Module | dict[str, Tensor]) -> bool:
    left, right = a.state_dict(), b.state_dict() if isinstance(b, torch.nn.Module) else b
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model as the embedded ones are stored."""
    path = tmp_path_factory.mktemp("model")
    save_model(path / "gpt.safetensors", make_gpt())
    save_model(path / "vq.safetensors", make_vq())
    make_text(path / "text")
    (path / "model.json").write_text(json.dumps({"name": "tiny", "defaults": {"guidance_scale": 3.0}}))
    return path


# ---- files that fit ---------------------------------------------------------------------------------------
def test_safetensors_round_trip_needs_no_options(tmp_path):
    gpt, vq = make_gpt(), make_vq()
    save_model(tmp_path / "a.safetensors", gpt)
    save_model(tmp_path / "b.safetensors", vq)
    save_model(tmp_path / "half.safetensors", gpt, torch.float16)
    again, tokenizer = load_gpt(tmp_path / "a.safetensors"), load_vq(tmp_path / "b.safetensors")
    assert again.config == gpt.config
    assert tokenizer.config == vq.config
    assert same(again, gpt)
    assert same(tokenizer, vq)
    assert not again.training
    half = load_gpt(tmp_path / "half.safetensors")
    assert half.output.weight.dtype == torch.float32
    assert same(half, {k: v.half().float() for k, v in gpt.state_dict().items()})
    assert load_gpt(tmp_path / "a.safetensors", dtype=torch.bfloat16).output.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("nesting", ["flat", "model", "module", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_of_training_frameworks(tmp_path, nesting, prefix):
    gpt = make_gpt("c2i")
    state = {prefix + name: tensor for name, tensor in gpt.state_dict().items()}
    state["freqs_cis"] = torch.zeros(17, 8, 2)
    torch.save(state if nesting == "flat" else {nesting: state, "steps": 3}, tmp_path / "x.pt")
    assert same(load_gpt(tmp_path / "x.pt", config=gpt.config), gpt)


def test_averaged_weights_of_a_tokenizer_are_a_choice(tmp_path):
    vq, ema = make_vq(), make_vq()
    with torch.no_grad():
        ema.quant_conv.bias.add_(1)
    torch.save({"model": vq.state_dict(), "ema": ema.state_dict()}, tmp_path / "vq.pt")
    assert same(load_vq(tmp_path / "vq.pt"), vq)
    assert same(load_vq(tmp_path / "vq.pt", prefer_ema=True), ema)


def test_sizes_come_from_the_tensors(tmp_path):
    """A released width/depth gives the head count; hidden sizes, grouped heads and classes are read off."""
    layers, heads, dim = SIZES["B"]
    config = GPTConfig(dim=dim, n_layer=layers, n_head=heads, vocab_size=32, num_classes=7)
    with torch.device("meta"):
        state = GPT(config).state_dict()
    state = {name: torch.zeros(1).expand(tensor.shape) for name, tensor in state.items()}
    from visacc.models.llamagen.checkpoint import infer_gpt_config

    assert infer_gpt_config(state, {}, 256) == config
    odd = gpt_config(n_kv_head=1, ffn_dim_multiplier=1.3)
    with torch.device("meta"):
        state = GPT(odd).state_dict()
    found = infer_gpt_config(state, {"n_head": 2}, 16)
    assert (found.n_kv_head, found.ffn_dim, found.caption_dim) == (1, odd.ffn_dim, WIDTH)


def test_loaded_weights_do_not_depend_on_the_file(tmp_path):
    for name in ("x.pt", "x.safetensors"):
        gpt = make_gpt()
        if name == "x.pt":
            torch.save(gpt.state_dict(), tmp_path / name)
        else:
            save_model(tmp_path / name, gpt)
        loaded = load_gpt(tmp_path / name, config=gpt.config)
        with open(tmp_path / name, "r+b") as file:
            file.write(b"\0" * (tmp_path / name).stat().st_size)
        assert same(loaded, gpt)


# ---- files that do not ------------------------------------------------------------------------------------
def fails(message: str, path: Path, loader=load_gpt, **options: object) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        loader(path, **options)
    assert path.name in str(caught.value)


def test_wrong_kind_of_file(tmp_path):
    gpt, vq = tmp_path / "gpt.safetensors", tmp_path / "vq.safetensors"
    save_model(gpt, make_gpt("c2i"))
    save_model(vq, make_vq())
    fails("class-conditional LlamaGen GPT.*takes class labels, t2i weights are needed", gpt, kind="t2i")
    fails("VQ tokenizer, a LlamaGen GPT is needed; load it with load_vq", vq)
    fails("class-conditional LlamaGen GPT.*tokenizer is needed; load it with load_gpt", gpt, load_vq)
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    fails(r"not a LlamaGen model \(tensors lm_head.weight\)", tmp_path / "other.safetensors")
    fails("not a LlamaGen model", tmp_path / "other.safetensors", load_vq)


def test_missing_and_damaged_files(tmp_path):
    fails("does not exist", tmp_path / "nothing.pt")
    (tmp_path / "folder.pt").mkdir()
    fails("is not a file", tmp_path / "folder.pt")
    for name, save in (
        ("a.pt", lambda path: torch.save(make_gpt().state_dict(), path)),
        (
            "b.pt",
            lambda path: torch.save(make_gpt().state_dict(), path, _use_new_zipfile_serialization=False),
        ),
        ("c.safetensors", lambda path: save_model(path, make_gpt())),
    ):
        path = tmp_path / name
        save(path)
        content = path.read_bytes()
        for cut in (len(content) // 2, 9, 0):
            path.write_bytes(content[:cut])
            fails("truncated or not a", path)
    (tmp_path / "text.pt").write_text("<html>404</html>")
    fails("truncated or not a checkpoint", tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    fails("holds a list, not a state dict", tmp_path / "list.pt")
    torch.save({"steps": 3}, tmp_path / "empty.pt")
    fails("holds no weights; its top level has steps", tmp_path / "empty.pt")


def test_foreign_missing_and_misshapen_tensors_are_named(tmp_path):
    state = make_gpt("c2i").state_dict()
    path, config = tmp_path / "x.pt", gpt_config("c2i")
    torch.save(state | {"lora.weight": torch.zeros(1)}, path)
    fails("foreign lora.weight", path, config=config)
    torch.save({k: v for k, v in state.items() if k != "layers.1.ffn_norm.weight"}, path)
    fails("missing layers.1.ffn_norm.weight", path, config=config)
    torch.save({k: v for k, v in state.items() if "wqkv" not in k}, path)
    fails("incomplete.*layers.0.attention.wqkv.weight", path, config=config)
    torch.save(state | {"norm.weight": torch.zeros(31)}, path)
    fails(r"norm.weight \(31,\) instead of \(32,\)", path, config=config)
    vq = make_vq().state_dict()
    torch.save({k: v for k, v in vq.items() if k != "decoder.conv_out.bias"}, path)
    fails("missing decoder.conv_out.bias", path, load_vq)


def test_what_a_file_does_not_tell_must_be_given(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(make_gpt("c2i").state_dict(), path)
    fails("does not tell its resolution", path)
    fails("width 32 with 2 layers is no released size", path, image_size=64)
    assert load_gpt(path, config=gpt_config("c2i")).config.grid == 4
    (tmp_path / "x.json").write_text(json.dumps({"config": {"n_head": 2}}))
    assert load_gpt(path, image_size=128).config.grid == 8
    with pytest.raises(ValueError, match="image_size 100 is not a multiple of 16"):
        load_gpt(path, image_size=100)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is not valid JSON"):
        load_gpt(path, image_size=128)


def test_resolution_must_fit_the_file(tmp_path, monkeypatch):
    save_model(tmp_path / "x.safetensors", make_gpt())
    assert load_gpt(tmp_path / "x.safetensors", 64).config.grid == 4
    fails("trained at 64 px: it cannot make 128 px", tmp_path / "x.safetensors", image_size=128)
    stage2 = tmp_path / RELEASED["llamagen-t2i-xl-512"].file
    stage2.write_bytes(b"x")
    fails("GPT-XL, text-conditional, 512 px.*cannot make 256 px images, ask for 512", stage2, image_size=256)
    fails("is truncated: 1 bytes", stage2)
    torch.save(make_gpt().state_dict(), stage2)
    monkeypatch.setattr(Released, "min_bytes", 0)
    fails(
        "has the name of llamagen-t2i-xl-512.*but holds a text-conditional LlamaGen GPT of width 32", stage2
    )


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


def test_pickled_code_is_not_executed(tmp_path, capsys):
    gpt = make_gpt("c2i")
    torch.save({"model": gpt.state_dict(), "extra": Evil()}, tmp_path / "evil.pt")
    fails("pickled objects other than weights", tmp_path / "evil.pt", config=gpt.config)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks on the pickle protocol
        fails("not loaded|truncated or not a checkpoint", tmp_path / "plain.pt", config=gpt.config)
    assert "executed" not in capsys.readouterr().out
    training = {"model": gpt.state_dict(), "args": argparse.Namespace(lr=1e-4), "steps": 3}
    torch.save(training, tmp_path / "training.pt")
    fails("pass allow_training_state=True", tmp_path / "training.pt", config=gpt.config)
    assert same(load_gpt(tmp_path / "training.pt", config=gpt.config, allow_training_state=True), gpt)


# ---- whole models -----------------------------------------------------------------------------------------
def test_folder_to_picture(folder):
    from visacc.pipeline import TextToImagePipeline

    model = load(folder)
    assert model.name == "tiny"
    assert model.defaults == {"guidance_scale": 3.0}
    assert same(model.gpt, make_gpt())
    out = TextToImagePipeline(model)(["a red circle", "a blue square"], seed=1, output_type="np")
    assert out.images.shape == (2, 8, 8, 3)
    alone = TextToImagePipeline(model)("a blue square", seed=out.seeds[1], output_type="np")
    assert (alone.images[0] == out.images[1]).all()
    other = TextToImagePipeline(model)("a red square", seed=out.seeds[1], output_type="codes")
    assert not torch.equal(other.codes[0], out.codes[1])


def test_converted_layout(folder, tmp_path):
    """A folder in the layout of LANTERN's released targets draws what the official one draws."""
    official = load_gpt(folder / "gpt.safetensors")
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    inner = {"attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
             "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    state = {}
    for name, value in official.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in names:
            state[f"{names[stem]}.weight"] = value
        elif not stem.startswith("layers."):
            state[f"model.{name}"] = value
        elif stem.endswith("attention.wqkv"):
            layer = stem.split(".")[1]
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                state[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = rows.clone()
        else:
            _, layer, rest = stem.split(".", 2)
            state[f"model.layers.{layer}.{inner[rest]}.weight"] = value
    copy = tmp_path / "converted"
    shutil.copytree(folder, copy)
    (copy / "gpt.safetensors").unlink()
    save_file(state, copy / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "vocab_size": CODES, "block_size": 16, "caption_dim": WIDTH, "cls_token_num": LENGTH}  # fmt: skip
    (copy / "config.json").write_text(json.dumps(config))
    prompts, options = ["a red circle"], {"seed": 3, "output_type": "codes", "guidance_scale": 2.0}
    drawn = [visacc.load(f, device="cpu")(prompts, **options).codes for f in (folder, copy)]
    assert torch.equal(*drawn)


def test_negative_prompts_take_their_own_mask(folder):
    model = load(folder)
    plain = model.encode(["a red circle", "a blue square"])
    mixed = model.encode(["a red circle", "a blue square"], ["", "circle"])
    _, base = model.prefill(plain, guidance=True, window=1)
    _, out = model.prefill(mixed, guidance=True, window=1)
    torch.testing.assert_close(out.logits, base.logits)
    torch.testing.assert_close(out.uncond[0], base.uncond[0])
    _, negative = model.prefill(model.encode(["circle"]), guidance=False, window=1)
    torch.testing.assert_close(out.uncond[1], negative.logits[0])
    assert not torch.allclose(out.uncond[1], base.uncond[1])


def test_folders_and_names_that_do_not_work(folder, tmp_path):
    with pytest.raises(ValueError, match="holds no LlamaGen GPT"):
        load(tmp_path)
    with pytest.raises(
        ValueError, match=r"neither a file, a folder nor a released model.*llamagen-t2i-xl-512"
    ):
        load("llamagen-t2i-xl-513")
    with pytest.raises(ValueError, match="is a tokenizer"):
        load("llamagen-vq-16-t2i")
    for name in ("llamagen-c2i-b-256", "llamagen-c2i-l-256"):
        (tmp_path / RELEASED[name].file).write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GPTs, name one: c2i_B_256\.pt, c2i_L_256\.pt"):
        load(tmp_path)
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    save_model(lonely / "gpt.safetensors", make_gpt())
    with pytest.raises(ValueError, match=r"no tokenizer beside .*vq\.safetensors"):
        load(lonely)
    save_model(lonely / "vq.safetensors", make_vq())
    with pytest.raises(ValueError, match="cannot load the T5 text encoder"):
        load(lonely, text_encoder=tmp_path / "absent")
    assert load(lonely, text_encoder=folder / "text").name == "gpt"
    save_model(lonely / "gpt.safetensors", GPT(replace(gpt_config(), caption_dim=12)))
    with pytest.raises(ValueError, match="captions of 8 x 12 features, the text encoder gives 8 x 16"):
        load(lonely, text_encoder=folder / "text")


def test_released_names(tmp_path, monkeypatch):
    entry = RELEASED["llamagen-c2i-b-384"]
    (tmp_path / entry.file).write_bytes(b"")
    assert fetch(entry.name, tmp_path) == tmp_path / entry.file
    with pytest.raises(ValueError, match=r"does not hold c2i_L_384\.pt"):
        fetch("llamagen-c2i-l-384", tmp_path)
    with pytest.raises(ValueError, match="unknown LlamaGen file"):
        fetch("llamagen-c2i-b-512")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot get c2i_B_384\.pt .*FoundationVision/LlamaGen"):
        load("llamagen-c2i-b-384")


# ---- captions ---------------------------------------------------------------------------------------------
def test_text_features(folder):
    text = TextConditioner.from_pretrained(folder / "text", LENGTH)
    features, mask = text(["a red circle", "a Blue square square"])
    assert mask.sum(1).tolist() == [4, 5]  # the end token counts
    assert mask[:, -1].all()
    assert (features[~mask] == 0).all()
    ids = text.tokenizer(["a red circle"], return_tensors="pt")
    alone = text.encoder(**{k: ids[k] for k in ("input_ids", "attention_mask")}).last_hidden_state
    torch.testing.assert_close(features[0, -4:], alone[0])
    raw = TextConditioner(text.encoder, text.tokenizer, LENGTH, clean=False)
    assert not torch.allclose(raw(["a Blue square"])[0], text(["a Blue square"])[0])


def test_bad_prompts(folder):
    text = TextConditioner.from_pretrained(folder / "text", LENGTH)
    with pytest.raises(ValueError, match="the prompt is empty"):
        text(["a red circle", "  "])
    with pytest.raises(ValueError, match="must be a string, got int"):
        text([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="leaves nothing of the prompt '6640vc231'"):
        text(["6640vc231"])
    with pytest.warns(UserWarning, match="prompt of 11 tokens cut to 8"):
        _, mask = text([" ".join(["red circle"] * 5)])
    assert mask.all()


def test_left_padding():
    features = torch.arange(1.0, 9).view(2, 4, 1)
    rolled, mask = left_pad(features, torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]))
    assert rolled[..., 0].tolist() == [[0, 0, 0, 1], [5, 6, 7, 8]]
    assert mask.tolist() == [[False, False, False, True], [True] * 4]


def test_files_hold_only_the_official_names(folder):
    assert load_file(folder / "gpt.safetensors").keys() == make_gpt().state_dict().keys()
    assert not any("rope" in name or "freqs" in name for name in make_gpt().state_dict())
