"""Reading and writing drafter checkpoints: the official formats and our own (official tensor names + our
config).

Tensor names are those of the released files. ``embed_tokens`` and, except for EAGLE-3, ``lm_head`` in a file
are
ignored: the target's own are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.reading import naming, read_object
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.weights import check_state, meta_module, read_weights, tensors_in
from visacc.writing import write_json, write_safetensors

OURS = "visacc_drafter"
FORMAT_VERSION = 1
_IGNORED = (
    "embed_tokens.weight",
    "rotary_emb.inv_freq",
    "t2d",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)
_OFFICIAL_TREES: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "dynamic", "depth": 5, "top_k": 10, "budget": 59},
    "msd": {"kind": "dynamic", "depth": 5, "top_k": 10, "budget": 58},
    "dream": {"kind": "dynamic", "depth": 6, "top_k": 4, "budget": 31},
    "flash": {"kind": "static"},
    "vispec": {"kind": "dynamic", "depth": 3, "top_k": 8, "budget": 29},
    "eagle3": {"kind": "dynamic", "depth": 5, "top_k": 10, "budget": 59},
}


def official_names(drafter: Drafter) -> dict[str, str]:
    """Our parameter name -> the name in official files."""
    names = {}
    for ours in drafter.state_dict():
        name = ours.split(".", 1)[1]  # rows. / backbone. / head.
        if drafter.config.method == "eagle3":
            name = name.replace("layers.0.", "midlayer.")
        names[ours] = name
    return names


def load_tensors(drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Fill a drafter from official tensors; every parameter must be there and nothing unknown may be left."""
    drafter.load_state_dict(_matched(drafter, tensors))


def _matched(drafter: Drafter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a drafter from official tensors."""
    ours = {name: key for key, name in official_names(drafter).items()}
    state: dict[str, Tensor] = {}
    left = []
    for name, value in tensors.items():
        clean = (
            name.removeprefix("model.").replace("layers.0.", "midlayer.") if "midlayer" in str(ours) else name
        )
        if clean in ours:
            state[ours[clean]] = value
        elif not (
            any(clean.endswith(i) for i in _IGNORED)
            or clean == "lm_head.weight"
            # Llama layers with biases have one here as well; ours have none, which is the same as zeros
            or (clean.endswith("self_attn.o_proj.bias") and not value.any())
        ):
            left.append(name)
    missing = [n for n, key in ours.items() if key not in state]
    if drafter.config.method == "eagle3" and "d2t" in missing and not drafter.config.draft_vocab_size:
        missing.remove("d2t")
        state["head.d2t"] = torch.zeros_like(drafter.head.d2t)  # type: ignore[union-attr, arg-type]
    if missing or left:
        raise ValueError(
            f"not a {drafter.config.method} drafter of this shape: missing {missing or 'nothing'},"
            f" unknown {left or 'nothing'}"
        )
    return state


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and the tensors of ``model.safetensors`` or ``pytorch_model.bin``."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; copy the drafter's configuration beside its weights")
    config = read_object(path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return config, tensors_in(folder / name, read_weights(folder / name)[0])
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def detect_method(config: Mapping[str, Any], names: set[str]) -> str:
    """The method a checkpoint belongs to, from tensors only it has. EAGLE, MSD and FLASH share theirs."""
    if any("midlayer." in n for n in names) or config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    if any("cross_attn" in n for n in names):
        return "dream"
    if any(n.startswith("imadpt.") for n in names):
        return "vispec"
    if any("ar_proj" in n for n in names) or "A" in names:
        return "flash"
    raise ValueError(
        "eagle, msd and flash drafters have the same tensors, so the file does not tell which it is;"
        " pass method="
    )


def infer_config(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], method: str | None, **overrides: Any
) -> DrafterConfig:
    """Configuration of an official checkpoint, from its config.json and its tensor shapes."""
    method = method or detect_method(raw, set(tensors))
    c = dict(raw.get("transformer_layer_config") or raw.get("text_config") or raw)
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "mrope", None):
        raise ValueError(
            f"rope_scaling of type {kind!r} is not supported for drafters (supported: default, mrope)"
        )
    semi = "layers.q_proj.weight" in tensors
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    hidden = c["hidden_size"]
    head_dim = c.get("head_dim") or hidden // heads
    theta = c.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    values: dict[str, Any] = {
        "method": method,
        "hidden_size": hidden,
        "intermediate_size": c["intermediate_size"],
        "num_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": c["vocab_size"],
        "eps": c.get("rms_norm_eps", 1e-6),
        "rope_theta": 10000.0 if method == "flash" else float(theta),
        "input_norm": "layers.0.input_layernorm.weight" in tensors,
        "qkv_bias": any(n.endswith("self_attn.q_proj.bias") for n in tensors),
        "fc_bias": "fc.bias" in tensors,
        "tree": dict(_OFFICIAL_TREES[method]),
    }
    if method == "dream":
        values.update(uniform_first_row=True, input_norm=False)
    if method == "vispec":
        # the drafter is multi-head even where the target groups its heads
        values.update(kv_heads=tensors["layers.0.self_attn.k_proj.weight"].shape[0] // head_dim)
        values.update(num_q=tensors["imadpt.q"].shape[0], qkv_bias="imadpt.k_proj.bias" in tensors)
    if method == "flash" and semi:
        out = tensors["layers.ar_proj.2.weight"].shape[0]
        values.update(
            heads_ahead=out // hidden,
            kv_heads=tensors["layers.k_proj.weight"].shape[0] // head_dim,
            intermediate_size=tensors["layers.ar_proj.0.weight"].shape[0],
            latents=tensors["A"].shape[0] if "A" in tensors else 0,
            tree={"kind": "block", "ahead": out // hidden, "budget": 30},
        )
    if method == "eagle3":
        values.update(_eagle3({**raw, **overrides}, tensors, scaling))
    values.update(overrides)
    return DrafterConfig(**values)


def _eagle3(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], scaling: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields only EAGLE-3 files have (SpecForge and speculators)."""
    taps = raw.get("taps") or raw.get("eagle_aux_hidden_state_layer_ids")
    outputs = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not taps and outputs:
        # SpecForge and SGLang number the layers whose outputs are read, speculators and we those whose inputs are
        taps = [i + 1 for i in outputs]
    layers = raw.get("target_num_hidden_layers")
    if not taps and layers:
        taps = (2, layers // 2, layers - 3)
    if not taps:
        raise ValueError(
            "this EAGLE-3 checkpoint does not say which target layers it reads; pass taps=(2, n//2, n-3)"
            " for a target of n layers"
        )
    head = next(v for n, v in tensors.items() if n.endswith("lm_head.weight"))
    return {
        "taps": tuple(taps),
        "draft_vocab_size": head.shape[0] if "d2t" in tensors else 0,
        "target_hidden_size": raw.get("target_hidden_size") or 0,
        "norm_before_residual": bool(raw.get("norm_before_residual", False)),
        "norm_output": bool(raw.get("norm_output", False)),
        "fc_norm": any(n.startswith("fc_norm.") for n in tensors),
        "mrope_sections": tuple(scaling.get("mrope_section", ())),
    }


def load_drafter(source: str | Path, method: str | None = None, **overrides: Any) -> Drafter:
    """A drafter from a folder with ``config.json`` and weights, ours or official.

    Args:
        method: needed for official EAGLE, MSD and FLASH files, which cannot be told apart.
        overrides: fields of :class:`DrafterConfig` to set instead of what the file says.

    Raises:
        ValueError: no such files, or tensors that do not fit the method.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"drafter folder {str(source)!r} does not exist")
    raw, tensors = read_files(folder)
    with naming(folder):
        config, tensors = _interpret(folder, raw, tensors, method, overrides)
        # before anything of the sizes that the configuration claims is allocated
        shell = meta_module(lambda: Drafter(config), tensors)
        check_state(folder, shell, _matched(shell, tensors), f"its configuration ({config.method} drafter)")
    drafter = Drafter(config)
    load_tensors(drafter, tensors)
    return drafter.eval()


def _interpret(
    folder: Path,
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    method: str | None,
    overrides: dict[str, Any],
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration of a drafter folder, and its tensors under the names that go with it."""
    if OURS in raw:
        config = DrafterConfig.from_dict(raw[OURS])
        if method not in (None, config.method):
            raise ValueError(f"{folder} holds a {config.method} drafter, not {method}")
        return replace(config, **overrides), tensors
    if raw.get("speculators_model_type") == "eagle3":
        tensors = {n.replace("layers.0.", "midlayer."): v for n, v in tensors.items()}
    return infer_config(raw, tensors, method, **overrides), tensors


def save_drafter(drafter: Drafter, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors`` (official tensor names), loadable by
    :func:`load_drafter`.
    """
    folder = Path(folder)
    names = official_names(drafter)
    state = {}
    for ours, value in drafter.state_dict().items():
        cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        state[names[ours]] = cast
    write_safetensors(folder / "model.safetensors", state)
    config = {
        OURS: drafter.config.to_dict(),
        "format_version": FORMAT_VERSION,
        "architectures": ["VisaccDrafter"],
    }
    write_json(folder / "config.json", config)
