"""Loading transformers checkpoints: what each family finds by itself, and one clear line for everything that is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hf_tiny
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import visacc
from visacc.cli import main
from visacc.models.hf import Chameleon, Emu3, Emu35, Lumina, is_hf, load_hf, wrap
from visacc.models.hf.settings import family_defaults
from visacc.models.hf.taming import FILE, read_decoder

PICTURES = {"janus": (8, 8), "emu3": (8, 6), "emu3.5": (8, 6), "chameleon": (8, 8), "lumina-mgpt": (12, 8)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: build(root / name) for name, build in hf_tiny.BUILDERS.items()}


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", [f for f in hf_tiny.BUILDERS if f != "glm-image"])
def test_command_line_writes_pictures(
    family: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "a red circle", "--model", str(folders[family]), "--decoder", "mc-sjd"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--window", "4", "--seed", "1", "--out", str(tmp_path), "--quiet"])
    assert stop.value.code == 0, capsys.readouterr().err
    assert len(list(tmp_path.glob("0*.png"))) == 1
    record = json.loads((tmp_path / "stats.json").read_text())
    assert record["decoder"] == "mc-sjd"
    with Image.open(next(tmp_path.glob("0*.png"))) as picture:
        assert picture.size == PICTURES[family]
        assert len(picture.getcolors(1 << 20) or ()) > 1


def test_command_line_takes_sizes(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(family: str, size: str) -> tuple[object, str]:
        arguments = ["generate", "two", "--model", str(folders[family]), "--image-size", size]
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--out", str(tmp_path / size), "--quiet"])
        return stop.value.code, capsys.readouterr().err

    for size, pixels in (("8x12", (12, 8)), ("4", (4, 4))):
        assert draw("emu3", size)[0] == 0
        with Image.open(next((tmp_path / size).glob("0*.png"))) as picture:
            assert picture.size == pixels
    code, error = draw("janus", "384")
    assert (code, error.count("\n")) == (2, 1)
    assert "8x8 pixels only" in error
    assert visacc.load(folders["emu3"], image_size=(8, 12)).model.layout.grid == (1, 4, 6)


def test_glm_image_has_no_pictures_of_its_own(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "two", "--model", str(folders["glm-image"]), "--out", str(tmp_path), "--quiet"])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert "GlmImagePipeline turns into pixels" in error
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("family", ["chameleon", "lumina-mgpt", "emu3.5", "glm-image"])
def test_missing_pixel_decoders_are_named_before_decoding(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no picture may be begun")

    options = {} if family == "glm-image" else {"vq": False}
    pipe = visacc.load(folders[family], model_options=options)
    assert pipe("two", seed=1, output_type="codes").codes.shape[0] == 1
    monkeypatch.setattr("visacc.pipeline.decode", never)
    with pytest.raises(ValueError, match="output_type='codes'"):
        pipe("two", seed=1)


def test_prompts_of_each_family(folders: dict[str, Path]) -> None:
    """Templates and headers, token by token."""

    def text(model: Any, ids: list[int]) -> str:
        return model.tokenizer.decode(ids)

    janus: Any = load_hf(folders["janus"])
    assert text(janus, janus.prompt_ids("cat")) == "<bos><|User|>: cat\n\n<|Assistant|>:<begin_of_image>"
    assert janus.uncond_ids([5, 1, 9, 3], None) == [0, 1, 0, 3]
    emu3: Any = load_hf(folders["emu3"])
    head = "<|image start|>3*4<|image token|>"
    prompt = emu3.prompt_ids("cat")
    assert text(emu3, prompt) == f"<|extra_203|>cat masterpiece, film grained, best quality.{head}"
    assert text(emu3, emu3.uncond_ids(prompt, None)).startswith("<|extra_203|>lowres, bad anatomy")
    assert text(emu3, emu3.uncond_ids(prompt, "dull")) == f"<|extra_203|>dull{head}"
    chameleon: Any = load_hf(folders["chameleon"], prefix="Generate an image of ")
    prompt = chameleon.prompt_ids("cat")
    assert text(chameleon, prompt) == "<s>Generate an image of cat<reserved08706><racm3:break>"
    assert text(chameleon, chameleon.uncond_ids(prompt, None)) == "<s><racm3:break>"
    lumina: Any = load_hf(folders["lumina-mgpt"])
    prompt = lumina.prompt_ids("cat")
    frame = "Generate an image of 96x64 according to the following prompt:\ncat"
    size = "<racm3:break><reserved08802><reserved08803>"
    assert text(lumina, prompt) == f"<s>{frame}<reserved08706>{size}"
    assert text(lumina, lumina.uncond_ids(prompt, None)) == size
    sjd: Any = load_hf(folders["lumina-mgpt"], uncond="last-token")
    assert text(sjd, sjd.uncond_ids(prompt, None)) == f"<reserved08706>{size}"
    emu35: Any = load_hf(folders["emu3.5"])
    prompt = emu35.prompt_ids("cat")
    task = "You are a helpful assistant for t2i task. USER: cat ASSISTANT: <|extra_100|>"
    assert text(emu35, prompt) == f"<|extra_203|>{task}{head}"
    free = "You are a helpful assistant. USER:  ASSISTANT: <|extra_100|>"
    assert text(emu35, emu35.uncond_ids(prompt, None)) == f"<|extra_203|>{free}{head}"
    glm: Any = load_hf(folders["glm-image"])
    assert text(glm, glm.prompt_ids("cat")) == "cat<sop>3 2<eop><sop>19 13<eop><bos>"


def test_layouts(folders: dict[str, Path]) -> None:
    emu3 = load_hf(folders["emu3"])
    names = emu3.module.config.vocabulary_map  # type: ignore[union-attr]
    eol, eof, eoi, eos = (
        names[n] for n in ("<|extra_200|>", "<|extra_201|>", "<|image end|>", "<|extra_204|>")
    )
    assert emu3.layout.forced == ((-1,) * 4 + (eol,)) * 3 + (eof, eoi, eos)
    emu35 = load_hf(folders["emu3.5"])
    assert emu35.layout.forced == ((-1,) * 4 + (7,)) * 2 + (-1,) * 4 + (5,)
    lumina = load_hf(folders["lumina-mgpt"])
    assert lumina.layout.forced == ((-1,) * 6 + (7,)) * 4 + (3,)
    chameleon = load_hf(folders["chameleon"], size=16)
    assert chameleon.layout.grid == (1, 8, 8)
    assert chameleon.layout.forced == (-1,) * 64 + (3,)


def test_sizes(folders: dict[str, Path]) -> None:
    assert load_hf(folders["emu3"], size="8x12").layout.grid == (1, 4, 6)
    assert load_hf(folders["emu3"], size=(4, 6)).layout.grid == (1, 2, 3)
    assert load_hf(folders["janus"], size=8).layout.grid == (1, 4, 4)
    assert load_hf(folders["lumina-mgpt"], size=(64, 32), vq=False).layout.grid == (1, 4, 2)
    for family, size, words in (
        ("janus", 384, "8x8 pixels only"),
        ("emu3", 7, "steps of 2 pixels"),
        ("lumina-mgpt", 100, "steps of 32"),
        ("lumina-mgpt", (320, 64), "at most 4:1"),
        ("emu3", "wide", "size must be pixels"),
        ("emu3", -4, "size must be pixels"),
    ):
        with pytest.raises(ValueError, match=words):
            load_hf(folders[family], size=size)


def test_sampling_defaults() -> None:
    config = transformers.GenerationConfig(temperature=0.6, do_sample=True)
    found = family_defaults({"top_k": 2048, "guidance_scale": 3.0}, config, take=("temperature", "top_k"))
    assert found == {"top_k": 2048, "guidance_scale": 3.0, "temperature": 0.6}  # no top_k=50
    config.visacc = {"sampling": {"top_k": 7}}  # type: ignore[attr-defined]
    assert family_defaults({"top_k": 2048}, config, take=())["top_k"] == 7


# -- bad input ----------------------------------------------------------------------------------------------


def refuse(words: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_hf(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_models_that_do_not_draw(tmp_path: Path) -> None:
    for name, config, words in (
        ("llm", {"model_type": "llama", "vocab_size": 100}, "has no image tokens and cannot draw"),
        ("qwen", {"model_type": "qwen3", "vocab_size": 151936}, "has no image tokens and cannot draw"),
        ("vlm", {"model_type": "llava", "vision_config": {}}, "reads images but does not draw them"),
        ("janus", {"model_type": "multi_modality"}, "deepseek-community/Janus-Pro-1B"),
        ("emu3", {"model_type": "Emu3", "vocab_size": 184622}, "BAAI/Emu3-Gen-hf"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        refuse(words, tmp_path / name)
    (tmp_path / "empty").mkdir()
    refuse("no transformers checkpoint", tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    refuse("not valid JSON", tmp_path / "broken")
    assert not is_hf(tmp_path / "empty")
    assert is_hf(tmp_path / "llm")
    assert is_hf("BAAI/Emu3-Gen-hf")
    assert not is_hf("shapes-t2i")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    refuse("neither a folder here, nor in the local hub cache", "nobody/no-such-model")


def test_missing_and_foreign_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    broken = copied(folders["janus"], tmp_path / "missing")
    weights = load_file(broken / "model.safetensors")
    del weights["model.generation_head.proj_out.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    refuse("lacks 1 weights of janus", broken)
    # Emu3.5's weights under Emu3's class: the norms would be dropped without a word
    norms = copied(folders["emu3"], tmp_path / "norms")
    weights = load_file(norms / "model.safetensors")
    weights["model.text_model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(weights, norms / "model.safetensors", {"format": "pt"})
    refuse("these are Emu3.5 weights", norms)
    # and the other way round
    bare = copied(folders["emu3.5"], tmp_path / "bare")
    weights = {k: v for k, v in load_file(bare / "model.safetensors").items() if "q_norm" not in k}
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    refuse("no query norms", bare)


def test_emu35_in_its_own_format(folders: dict[str, Path], tmp_path: Path) -> None:
    """The official configuration (model_type Emu3) is read as a Qwen3 one; same tokens."""
    official = copied(folders["emu3.5"], tmp_path / "official")
    config = json.loads((official / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {k: config[k] for k in (*names, "num_key_value_heads", "head_dim", "max_position_embeddings")}
    kept |= {"model_type": "Emu3", "rope_theta": 10000.0, "rms_norm_eps": config["rms_norm_eps"]}
    (official / "config.json").write_text(json.dumps(kept))
    one = load_hf(official, family="emu3.5", tokenizer=load_hf(folders["emu3.5"]).tokenizer)
    other = load_hf(folders["emu3.5"])
    with torch.inference_mode():
        got = [m.prefill(m.encode(["cat"]), guidance=True, window=1)[1].logits for m in (one, other)]
    assert torch.equal(*got)
    edit(official / "config.json", rope_scaling={"type": "linear"})
    refuse("scales its rotary positions", official, family="emu3.5")


def test_vq_decoder_is_found_or_missed(folders: dict[str, Path], tmp_path: Path) -> None:
    bare = copied(folders["chameleon"], tmp_path / "bare")
    (bare / FILE).rename(tmp_path / FILE)
    refuse(r"holds no VQ decoder weights.*vq=<tokenizer/vqgan.ckpt", bare)
    codes_only: Any = load_hf(bare, vq=False)
    with pytest.raises(ValueError, match="output_type='codes'"):
        codes_only.decode(torch.zeros(1, 1, 4, 4, dtype=torch.long))
    assert codes_only.encode(["a"]).batch == 1
    refuse("does not exist", bare, vq=tmp_path / "nowhere")
    refuse("has its pixel decoder inside", folders["janus"], vq=tmp_path)
    wanted = load_hf(folders["chameleon"]).decode(torch.ones(1, 1, 4, 4, dtype=torch.long))
    tensors = read_decoder(tmp_path / FILE)
    # the original file, and a checkpoint that kept the decoder among its weights
    torch.save({"state_dict": {**tensors, "loss.weight": torch.ones(1)}}, tmp_path / "vqgan.ckpt")
    assert torch.equal(
        load_hf(bare, vq=tmp_path / "vqgan.ckpt").decode(torch.ones(1, 1, 4, 4).long()), wanted
    )
    kept = {f"model.vqmodel.{k}": v for k, v in tensors.items() if not k.startswith("quantize")}
    weights = load_file(bare / "model.safetensors") | kept
    weights["model.vqmodel.quantize.embedding.weight"] = tensors["quantize.embedding.weight"]
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    assert torch.equal(load_hf(bare).decode(torch.ones(1, 1, 4, 4).long()), wanted)
    (tmp_path / "noise.ckpt").write_bytes(b"no tensors here")
    refuse("cannot be read", bare, vq=tmp_path / "noise.ckpt")
    small = hf_tiny.taming(16, 8, 1)
    small.save_pretrained(tmp_path / "small")
    refuse("has 16 codes, the model 32", bare, vq=tmp_path / "small")


def test_chameleon_without_its_vq_half(folders: dict[str, Path], tmp_path: Path) -> None:
    """Lumina-mGPT's releases drop the VQ half; the code vectors then come from the pixel decoder."""
    bare = copied(folders["lumina-mgpt"], tmp_path / "bare")
    weights = {k: v for k, v in load_file(bare / "model.safetensors").items() if ".vqmodel." not in k}
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    found = load_hf(bare)
    assert "codebook" in found.provides
    assert torch.equal(found.codebook, read_decoder(bare / FILE)["quantize.embedding.weight"])  # type: ignore[arg-type]
    assert "codebook" not in load_hf(bare, vq=False).provides


def test_families_by_configuration(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = copied(folders["chameleon"], tmp_path / "plain")
    edit(plain / "generation_config.json", visacc={"grid": [4, 4]})
    assert isinstance(load_hf(plain), Chameleon)
    assert isinstance(load_hf(plain, family="lumina"), Lumina)
    edit(plain / "config.json", z_loss_weight=0.0)
    assert isinstance(load_hf(plain), Lumina)
    assert isinstance(load_hf(plain, family="anole"), Chameleon)
    refuse("unknown family 'sd'", plain, family="sd")
    refuse("cannot be used as family 'emu3'", plain, family="emu3")
    assert isinstance(load_hf(folders["emu3.5"]), Emu35)


def test_prompts_that_cannot_be(folders: dict[str, Path], tmp_path: Path) -> None:
    emu3, janus = load_hf(folders["emu3"]), load_hf(folders["janus"])
    for model, prompt, negative, words in (
        (emu3, "x" * 600, None, "do not fit into the context.*shorten the prompt to"),
        (emu3, 7, None, "takes text prompts"),
        (emu3, [1, 5000], None, "prompt ids must lie in"),
        (emu3, "a", 3, "negative prompt must be text"),
        (janus, "a", "ugly", "knows no negative prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            model.encode([prompt], None if negative is None else [negative])
    with pytest.raises(ValueError, match="as many negative prompts"):
        emu3.encode(["a", "b"], ["c"])
    bare = copied(folders["emu3"], tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (bare / file).unlink()
    mute = load_hf(bare)
    with pytest.raises(ValueError, match="without a tokenizer"):
        mute.encode(["a"])
    assert mute.encode([[1, 4, 5, 6]]).data["uncond_ids"].tolist() == [[1, 4, 5, 6]]
    with pytest.raises(ValueError, match="ask for a smaller picture"):
        load_hf(folders["emu3"], grid=(40, 40)).encode(["a"])


def test_tokenizer_from_elsewhere(folders: dict[str, Path], tmp_path: Path) -> None:
    bare = copied(folders["emu3"], tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (bare / file).unlink()
    elsewhere: Any = load_hf(bare, tokenizer=folders["emu3"])
    assert elsewhere.prompt_ids("cat") == load_hf(folders["emu3"]).prompt_ids("cat")  # type: ignore[attr-defined]
    remote = copied(folders["emu3"], tmp_path / "remote")
    code = {"AutoTokenizer": ["tokenization_own.Own", None]}
    edit(remote / "tokenizer_config.json", auto_map=code, tokenizer_class="Own")
    (remote / "tokenizer.json").unlink()
    refuse("pass it as tokenizer=", remote)


def test_guidance_without_an_unconditional_branch(folders: dict[str, Path]) -> None:
    pipe = visacc.load(folders["glm-image"])
    with pytest.raises(
        ValueError, match=r"guidance_scale=2.0 needs an unconditional branch.*guidance_scale=1"
    ):
        pipe("a", guidance_scale=2.0, output_type="codes")


def test_wrap_refuses_heads_without_images(folders: dict[str, Path]) -> None:
    inner = transformers.Emu3Model.from_pretrained(folders["emu3"])
    with pytest.raises(ValueError, match="Emu3Model has no image head"):
        wrap(inner)
    assert isinstance(wrap(load_hf(folders["emu3"]).module, grid=(2, 2)), Emu3)


def test_other_bad_options(folders: dict[str, Path]) -> None:
    refuse("positions must be", folders["janus"], positions="absolute")
    refuse("uncond must be one of", folders["lumina-mgpt"], uncond="none")
    broken: Any = transformers.JanusForConditionalGeneration.from_pretrained(folders["janus"])
    broken.generation_config.generation_kwargs = {}
    with pytest.raises(ValueError, match="boi_token_id"):
        wrap(broken)
