"""LlamaGen text-to-image GPTs in the transformers-style layout that LANTERN's released targets use.

The conversion only renames and splits tensors (rotary pairs stay interleaved), so the network is the native one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.models.llamagen.config import GPTConfig
from visacc.models.llamagen.gpt import GPT
from visacc.reading import naming, read_object
from visacc.weights import blank, read_weights

_OUTER = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def is_converted(folder: Path) -> bool:
    """Whether a folder holds such a model: its ``config.json`` is of model type llama and speaks of captions."""
    path = folder / "config.json"
    return path.is_file() and {"caption_dim", "cls_token_num"} <= read_object(path).keys()


def native_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the official LlamaGen names. Raises ``ValueError`` for a tensor that has no place."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in _OUTER:
            result[_OUTER[name]] = value
        elif name.startswith("model.cls_embedding."):
            result[name.removeprefix("model.")] = value
        elif name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            inner = rest.removesuffix(".weight")
            if inner in _INNER:
                result[f"layers.{layer}.{_INNER[inner]}.weight"] = value
            elif inner == "self_attn.q_proj":
                parts = [state[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
                result[f"layers.{layer}.attention.wqkv.weight"] = torch.cat(parts)
            elif inner not in ("self_attn.k_proj", "self_attn.v_proj"):
                raise ValueError(f"not a converted LlamaGen model: unknown tensor {name}")
        elif not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"not a converted LlamaGen model: unknown tensor {name}")
    return result


def native_config(raw: Mapping[str, Any], state: Mapping[str, Tensor]) -> GPTConfig:
    """Configuration from the converted model's ``config.json`` and the native tensors."""
    dim, heads = raw["hidden_size"], raw["num_attention_heads"]
    hidden = state["layers.0.feed_forward.w1.weight"].shape[0]
    kv_heads = raw.get("num_key_value_heads") or heads
    return GPTConfig(
        dim=dim,
        n_layer=raw["num_hidden_layers"],
        n_head=heads,
        n_kv_head=None if kv_heads == heads else kv_heads,
        vocab_size=raw["vocab_size"],
        block_size=raw.get("block_size", 256),
        multiple_of=1,
        ffn_dim_multiplier=(hidden + 0.5) / int(2 * (4 * dim) / 3),
        rope_base=float(raw.get("rope_base", 10000)),
        norm_eps=raw.get("rms_norm_eps", 1e-5),
        model_type="t2i",
        caption_dim=raw.get("caption_dim", 2048),
        cls_token_num=raw.get("cls_token_num", 120),
        uncond_rows=state["cls_embedding.uncond_embedding"].shape[0],
    )


def load_converted(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> GPT:
    """A GPT from a folder with ``config.json`` and ``model.safetensors`` in the converted layout."""
    folder = Path(folder)
    for file in ("config.json", "model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no {file}: not a converted LlamaGen model")
    raw, (content, _) = read_object(folder / "config.json"), read_weights(folder / "model.safetensors")
    with naming(folder):
        state = native_state(content)
        config = native_config(raw, state)
    gpt = blank(folder, lambda: GPT(config), state, "its config.json")
    state = {k: v.to(device=device, dtype=dtype) for k, v in state.items()}
    gpt.load_state_dict(state, strict=True, assign=True)
    return gpt.eval().requires_grad_(False)
