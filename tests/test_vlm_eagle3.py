"""EAGLE-3 drafters: both file layouts load, the small vocabulary is mapped, the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import vlm_tiny
from safetensors.torch import load_file, save_file

from visacc.speculate.api import speculate
from visacc.speculate.checkpoints import load_drafter, save_drafter
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.speculate.views import AcceptedStep

SMALL = 40


def untrained() -> Drafter:
    torch.manual_seed(2)
    drafter = Drafter(
        DrafterConfig(
            method="eagle3",
            hidden_size=32,
            intermediate_size=48,
            num_heads=4,
            kv_heads=2,
            head_dim=8,
            vocab_size=vlm_tiny.VOCAB,
            draft_vocab_size=SMALL,
            taps=(2, 4, 5),
            tree={"kind": "dynamic", "depth": 2, "top_k": 3, "budget": 9},
        )
    )
    ids = torch.randperm(vlm_tiny.VOCAB)[:SMALL].sort().values
    drafter.head.d2t.copy_(ids - torch.arange(SMALL))
    return drafter


def official_folder(drafter: Drafter, path: Path, layout: str) -> Path:
    """The drafter as SpecForge or as the speculators project writes it."""
    save_drafter(drafter, path)
    tensors = load_file(path / "model.safetensors")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vlm_tiny.VOCAB,
        "rms_norm_eps": 1e-5,
    }
    config: dict[str, object] = {
        **shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": SMALL,
        # SpecForge numbers outputs of layers: the inputs of layers 2, 4, 5
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    tensors["embed_tokens.weight"] = torch.zeros(vlm_tiny.VOCAB, 32)
    tensors["t2d"] = torch.zeros(vlm_tiny.VOCAB, dtype=torch.bool)
    if layout == "speculators":
        tensors = {n.replace("midlayer.", "layers.0."): v for n, v in tensors.items()}
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": shape,
            "draft_vocab_size": SMALL,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_files_load_and_text_is_exact(layout: str, tmp_path: Path) -> None:
    drafter = untrained()
    loaded = load_drafter(official_folder(drafter, tmp_path, layout))
    assert loaded.config.taps == (2, 4, 5)
    assert loaded.config.draft_vocab_size == SMALL
    for a, b in zip(drafter.state_dict().values(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    case = vlm_tiny.llava(layers=8)
    case.model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = case.model.generate(**case.inputs, **options)
    out = speculate(case.model, loaded).generate(**case.inputs, **options)
    assert torch.equal(out, expected)


def test_only_mapped_tokens_are_drafted() -> None:
    case = vlm_tiny.llava(layers=8)
    drafter = untrained()
    speculator = speculate(case.model, drafter)
    allowed = set((torch.arange(SMALL) + drafter.head.d2t).tolist())
    with torch.inference_mode():
        done = speculator.target.prefill(case.inputs, room=32)
        state = drafter.prefill(done.view, done.feats, done.logits.argmax(1), room=32)
        assert speculator.policy is not None
        grown = speculator.policy.grow(drafter.session(state), state.root, state.feature, state.logits)
        assert set(grown.tokens[:, 1:][grown.live[:, 1:]].tolist()) <= allowed
        # a later round starts from the target's layers again
        kept = torch.zeros(2, 1, dtype=torch.int64)
        feats = type(done.feats)(done.feats.last[:, -1:], {i: x[:, -1:] for i, x in done.feats.taps.items()})
        one = torch.ones(2, dtype=torch.int64)
        drafter.observe(state, AcceptedStep(kept, one, state.root[:, None], feats, one * 5))
    assert state.kv.length.tolist() == [done.view.input_ids.shape[1] + 1] * 2


def test_refusals(tmp_path: Path) -> None:
    folder = official_folder(untrained(), tmp_path, "specforge")
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not say which target layers"):
        load_drafter(folder)
    assert load_drafter(folder, taps=(2, 4, 5)).config.taps == (2, 4, 5)
    with pytest.raises(ValueError, match="not a msd drafter of this shape"):
        load_drafter(folder, "msd")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load_drafter(folder)
