"""Exports for inference servers: every format reads back, servers' own loaders agree, what cannot go is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vlm_tiny
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from visacc.cli import main
from visacc.drafters import network as image_network
from visacc.drafters.checkpoint import save_drafter as save_image_drafter
from visacc.drafters.config import DrafterConfig as ImageConfig
from visacc.models.vlm.target import VLMTarget
from visacc.speculate.api import speculate
from visacc.speculate.checkpoints import load_drafter, save_drafter
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.speculate.serving import FORMATS, export_drafter

D, SMALL = 32, 40


def config(method: str, **changes: Any) -> DrafterConfig:
    base: dict[str, Any] = {
        "method": method,
        "hidden_size": D,
        "intermediate_size": 48,
        "num_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab_size": vlm_tiny.VOCAB,
        "rope_theta": 5000.0,
    }
    if method == "eagle3":
        base |= {"taps": (2, 4, 5), "draft_vocab_size": SMALL}
    return DrafterConfig(**{**base, **changes})


def drafter_of(method: str, **changes: Any) -> Drafter:
    torch.manual_seed(5)
    made = Drafter(config(method, **changes))
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + ("norm" in name))
    if method == "eagle3" and made.config.draft_vocab_size == SMALL:
        ids = torch.randperm(vlm_tiny.VOCAB)[:SMALL].sort().values
        made.head.d2t.copy_(ids - torch.arange(SMALL))
    return made.eval()


@pytest.fixture(scope="module")
def case() -> vlm_tiny.Tiny:
    return vlm_tiny.llava(layers=8)


@pytest.fixture(scope="module")
def folder(case: vlm_tiny.Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    case.model.save_pretrained(path)
    return path


@torch.no_grad()
def outputs(drafter: Drafter, case: vlm_tiny.Tiny) -> Tensor:
    """Draft logits of every row of the two prompts."""
    target = VLMTarget(case.model, drafter.taps)
    drafter.bind(target.embed, target.logits, hidden_size=D, vocab_size=vlm_tiny.VOCAB)
    done = target.prefill(case.inputs, room=0)
    rows = drafter.rows.prefill(done.view, done.feats, target.embed(done.logits.argmax(1)))
    out, _ = drafter.teach(rows)
    return drafter.logits(out)[rows.valid]


CASES = [
    ("eagle", "eagle-sglang", {}),
    ("eagle", "eagle-sglang", {"qkv_bias": True}),
    ("eagle", "eagle-sglang", {"fc_bias": False}),
    ("msd", "eagle-sglang", {}),
    ("flash", "eagle-sglang", {}),
    ("eagle3", "speculators", {}),
    ("eagle3", "speculators", {"qkv_bias": True, "norm_before_residual": True}),
    ("eagle3", "speculators", {"fc_norm": True, "norm_output": True, "draft_vocab_size": 0}),
    ("eagle3", "eagle3-sglang", {}),
    ("eagle3", "eagle3-sglang", {"fc_norm": True, "norm_output": True, "draft_vocab_size": vlm_tiny.VOCAB}),
]


@pytest.mark.parametrize(("method", "format", "changes"), CASES)
def test_round_trip(
    case: vlm_tiny.Tiny, folder: Path, tmp_path: Path, method: str, format: str, changes: dict[str, Any]
) -> None:
    drafter = drafter_of(method, **changes)
    done = export_drafter(drafter, tmp_path / "out", format, folder)
    assert done.notes
    # a FLASH drafter with one head and no latents is an EAGLE drafter
    back = load_drafter(tmp_path / "out", "eagle" if method == "flash" else method)
    torch.testing.assert_close(outputs(back, case), outputs(drafter, case), atol=1e-5, rtol=0)
    case.model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    text = speculate(case.model, back, tree={"kind": "dynamic", "depth": 2, "top_k": 3, "budget": 6})
    assert torch.equal(text.generate(**case.inputs, **options), case.model.generate(**case.inputs, **options))


def test_sglang_files(folder: Path, tmp_path: Path) -> None:
    """Names, numbers of layers and vocabulary maps are those that SGLang's loader expects."""
    drafter = drafter_of("eagle3")
    export_drafter(drafter, tmp_path / "three", "eagle3-sglang", folder)
    raw = json.loads((tmp_path / "three" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    # the outputs of layers 1, 3, 4 are the inputs of layers 2, 4, 5
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert raw["max_position_embeddings"] == 256
    read = AutoConfig.from_pretrained(tmp_path / "three")
    assert isinstance(read, LlamaConfig)
    assert read.rope_parameters["rope_theta"] == 5000.0
    assert (read.draft_vocab_size, read.head_dim, read.tie_word_embeddings) == (SMALL, 8, False)
    tensors = load_file(tmp_path / "three" / "model.safetensors")
    layer = {
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    }
    assert set(tensors) == layer | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    ids = torch.arange(SMALL) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)

    export_drafter(drafter_of("eagle"), tmp_path / "one", "eagle-sglang", folder, dtype=torch.bfloat16)
    raw = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (raw["architectures"], raw["torch_dtype"]) == (["LlamaForCausalLMEagle"], "bfloat16")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    layer = {name.replace("midlayer", "layers.0") for name in layer}
    layer -= {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"}
    assert set(tensors) == layer | {"fc.weight", "fc.bias"}
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "norm_before_residual": True},
        {"fc_norm": True, "norm_output": True, "draft_vocab_size": 0},
    ],
)
def test_speculators_package_loads_it(
    case: vlm_tiny.Tiny, folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The library's schema accepts the configuration, and its network gives our drafter's logits."""
    pytest.importorskip("speculators")
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    drafter = drafter_of("eagle3", **changes)
    text = {"input_ids": torch.randint(3, 80, (1, 11)), "attention_mask": torch.ones(1, 11, dtype=torch.long)}
    text_case = replace(case, inputs=text)
    ours = outputs(drafter, text_case)

    export_drafter(drafter, tmp_path / "out", "speculators", folder, tokens=4)
    read = SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    assert isinstance(read, Eagle3SpeculatorConfig)
    assert read.speculators_config.verifier.architectures == ["LlavaForConditionalGeneration"]
    assert read.speculators_config.proposal_methods[0].speculative_tokens == 4
    assert read.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert read.transformer_layer_config.rope_parameters["rope_theta"] == 5000.0
    read.transformer_layer_config._attn_implementation = "eager"

    # the library takes embedding and head from a text model's file, so the weights are put in by hand
    model = Eagle3DraftModel(read)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown
    assert set(missing) <= {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    model.embed_tokens.weight.data.copy_(case.model.get_input_embeddings().weight)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    target = VLMTarget(case.model, drafter.taps)
    with torch.no_grad():
        done = target.prefill(text, room=0)
        following = torch.cat([text["input_ids"][:, 1:], done.logits.argmax(1)[:, None]], dim=1)
        model.eval()(
            torch.cat([done.feats.taps[i] for i in drafter.taps], dim=-1),
            following,
            torch.zeros(1, 11, dtype=torch.long),
            ttt_steps=1,
        )
    theirs = seen[0]
    if drafter.config.draft_vocab_size:
        ours = ours[:, torch.arange(SMALL) + drafter.head.d2t]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-5


def test_speculators_converter_reads_the_sglang_file(folder: Path, tmp_path: Path) -> None:
    """The library converts EAGLE-3 files as SpecForge writes them: ours must come out as our other export."""
    pytest.importorskip("speculators")
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    drafter = drafter_of("eagle3")
    export_drafter(drafter, tmp_path / "sglang", "eagle3-sglang", folder)
    export_drafter(drafter, tmp_path / "ours", "speculators", folder)
    Eagle3Converter().convert(
        tmp_path / "sglang",
        tmp_path / "theirs",
        str(folder),
        validate=False,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
    )
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(ours) <= set(theirs)
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name
    assert load_drafter(tmp_path / "theirs").config == load_drafter(tmp_path / "ours").config


REFUSED = [
    ("dream", {}, "eagle-sglang", "cross-attention"),
    ("vispec", {}, "eagle-sglang", "pools the pictures"),
    ("flash", {"heads_ahead": 3, "latents": 4}, "eagle-sglang", "3 tokens from one row.*4 learned rows"),
    ("eagle", {}, "speculators", "use --format eagle-sglang"),
    ("msd", {}, "eagle3-sglang", "use --format eagle-sglang"),
    ("eagle3", {}, "eagle-sglang", "use --format speculators or eagle3-sglang"),
    ("eagle", {"input_norm": True}, "eagle-sglang", "input norm"),
    ("eagle3", {"mrope_sections": (1, 1, 2)}, "speculators", "M-RoPE"),
    ("eagle3", {"qkv_bias": True, "norm_before_residual": True}, "eagle3-sglang", "biases.*normed state"),
    ("eagle3", {"taps": (0, 4, 5)}, "eagle3-sglang", r"embeddings \(layer 0\)"),
    ("eagle3", {"taps": (2, 4, 9)}, "speculators", "target with 8"),
    ("eagle", {"target": {"layers": 3, "model_type": "llava"}}, "eagle-sglang", "layers=3, this one has 8"),
    ("eagle", {"vocab_size": 64}, "eagle-sglang", "vocab_size=64"),
]


@pytest.mark.parametrize(("method", "changes", "format", "message"), REFUSED)
def test_refusals(
    folder: Path, tmp_path: Path, method: str, changes: dict[str, Any], format: str, message: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"this {method} drafter cannot be exported as {format}: .*{message}"
    ):
        export_drafter(drafter_of(method, **changes), tmp_path / "out", format, folder)
    assert not (tmp_path / "out").exists()


def test_other_bad_input(folder: Path, tmp_path: Path) -> None:
    drafter = drafter_of("eagle")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="unknown serving format 'gguf'"):
        export_drafter(drafter, out, "gguf", folder)
    with pytest.raises(ValueError, match=r"configuration of the target .*nowhere' cannot be read"):
        export_drafter(drafter, out, "eagle-sglang", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="ngram has no weights"):
        export_drafter("ngram", out, "eagle-sglang", folder)
    gemma = vlm_tiny.gemma3().model.config
    with pytest.raises(ValueError, match="scales its embeddings"):
        export_drafter(drafter, out, "eagle-sglang", gemma)
    out.mkdir()
    (out / "kept.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        export_drafter(drafter, out, "eagle-sglang", folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "vocab_size": 8}
    image = image_network.EagleNetwork(ImageConfig(family="llamagen", prefix=1, grid=2, **shape))  # type: ignore[arg-type]
    save_image_drafter(image, tmp_path / "image")
    for format in FORMATS:
        with pytest.raises(ValueError, match="drafter for image tokens"):
            export_drafter(tmp_path / "image", tmp_path / "other", format, folder)


def test_mrope_goes_to_sglang(tmp_path: Path) -> None:
    target = vlm_tiny.qwen("2.5").model.config
    target.text_config.num_hidden_layers = 8
    drafter = drafter_of("eagle3", mrope_sections=(1, 1, 2))
    export_drafter(drafter, tmp_path / "out", "eagle3-sglang", target)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rope_scaling"]["mrope_section"] == [1, 1, 2]
    assert load_drafter(tmp_path / "out").config.mrope_sections == (1, 1, 2)


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(drafter_of("msd"), tmp_path / "msd", dtype=torch.float16)
    line = ["export-drafter", str(tmp_path / "msd"), "--target", str(folder), "-f"]
    with pytest.raises(SystemExit) as stop:
        main([*line, "eagle-sglang", "-o", str(tmp_path / "out")])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "reads back equal" in shown
    assert "--speculative-algorithm EAGLE " in shown
    assert "MSD does not do" in shown
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == torch.float16
    with pytest.raises(SystemExit) as stop:
        main([*line, "speculators", "-o", str(tmp_path / "no")])
    assert stop.value.code == 2
    assert "use --format eagle-sglang" in capsys.readouterr().err
