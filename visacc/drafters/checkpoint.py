"""Reading and writing drafters: the released folders and our own (same tensor names, our configuration).

A folder holds ``config.json`` and ``pytorch_model.bin`` or ``model.safetensors`` with flat tensors. LANTERN's
drafters for LlamaGen, Anole and Lumina-mGPT and EAGLE-1/2 drafters are told apart by their tensors and configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.drafters.config import DrafterConfig
from visacc.drafters.network import EagleNetwork
from visacc.reading import naming
from visacc.speculate.checkpoints import read_files
from visacc.weights import blank
from visacc.writing import write_json, write_safetensors

OURS = "visacc_image_drafter"
_GRIDS = {"t2i": (120, 16), "t2i2": (120, 32), "c2i": (1, 24)}
"""``input_type`` of a released LlamaGen drafter -> prompt slots and grid side."""
_EMBEDDING = "embed_tokens.weight"


def load_drafter(source: str | Path, *, embedding: Tensor | None = None) -> EagleNetwork:
    """A drafter from a folder, in evaluation mode, float32.

    Args:
        embedding: the target's input embedding [V, D]; used only if the file has none of its own.

    Raises:
        ValueError: no such files, a format that is not known, or tensors that do not fit.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"drafter folder {str(source)!r} does not exist")
    raw, tensors = read_files(folder)
    with naming(folder):
        if OURS in raw:
            config = DrafterConfig.from_dict(raw[OURS])
        else:
            config = released_config(raw, tensors, folder)
    if _EMBEDDING not in tensors:
        if embedding is None:
            raise ValueError(f"{folder} has no {_EMBEDDING}; pass the target's input embedding")
        tensors[_EMBEDDING] = embedding
    tensors = {name: value.float() for name, value in tensors.items() if not name.endswith("inv_freq")}
    what = f"its configuration ({config.family} drafter)"
    network = blank(folder, lambda: EagleNetwork(config), tensors, what)
    network.load_state_dict(tensors, strict=True, assign=True)
    return network.eval().requires_grad_(False)


def released_config(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> DrafterConfig:
    """Configuration of a released drafter from its ``config.json`` and tensors."""
    if any(name.startswith("midlayer.") for name in tensors):
        raise ValueError(f"{folder} is an EAGLE-3 drafter; load it with visacc.speculate")
    if "fc.weight" not in tensors:
        raise ValueError(f"{folder} is not an EAGLE-type drafter: it has no fc.weight")
    heads = raw["num_attention_heads"]
    values: dict[str, Any] = {
        "family": "eagle",
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "vocab_size": raw["vocab_size"],
        "num_layers": raw.get("num_hidden_layers", 1),
        "eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": float(raw.get("rope_theta") or 10000.0),
        "fc_bias": "fc.bias" in tensors,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors,
    }
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    if norm is not None:
        family = "anole" if norm.shape[0] == heads else "lumina"
        scale = float(raw.get("embed_upscale", 1.0))
        return DrafterConfig(
            **values | {"family": family, "norm_shards": norm.shape[0], "embed_scale": scale}
        )
    kind = raw.get("input_type")
    if kind is None:
        return DrafterConfig(**values)
    if kind not in _GRIDS:
        raise ValueError(f"{folder}: unknown input_type {kind!r}; known: {', '.join(_GRIDS)}")
    prefix, grid = _GRIDS[kind]
    # released LlamaGen drafters are multi-head whatever the configuration file they were copied from says
    tree = "naive_extend_57"
    return DrafterConfig(
        **values | {"family": "llamagen", "prefix": prefix, "grid": grid, "kv_heads": heads, "tree": tree}
    )


def save_drafter(network: EagleNetwork, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write ``config.json`` and ``model.safetensors`` atomically; :func:`load_drafter` reads them back."""
    folder = Path(folder)
    write_safetensors(folder / "model.safetensors", {k: v.to(dtype) for k, v in network.state_dict().items()})
    write_json(folder / "config.json", {OURS: network.config.to_dict()})
