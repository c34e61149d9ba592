"""Export of drafters to the files that inference servers read.

| format | read by | for |
|---|---|---|
| ``speculators`` | vLLM, the speculators library (type ``eagle3``) | EAGLE-3 drafters |
| ``eagle3-sglang`` | SGLang's ``LlamaForCausalLMEagle3`` | EAGLE-3 drafters |
| ``eagle-sglang`` | SGLang's ``LlamaForCausalLMEagle`` (EAGLE-1/2) | EAGLE, MSD, FLASH with one head and no latents |

A server builds its own network from the file, so a drafter whose arithmetic that network does not have is refused with
every reason. What was written is read back and compared before the export counts as done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.drafters.checkpoint import OURS as IMAGE_DRAFTER
from visacc.speculate.checkpoints import load_drafter, official_names, read_files
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.writing import write_json, write_safetensors

FORMATS = ("speculators", "eagle3-sglang", "eagle-sglang")
_EAGLE3 = ("speculators", "eagle3-sglang")
_BELONGS = {
    "eagle": "eagle-sglang",
    "msd": "eagle-sglang",
    "flash": "eagle-sglang",
    "eagle3": "speculators or eagle3-sglang",
}
_NOWHERE = {
    "dream": "its cross-attention reads the target's features of all earlier positions for every drafted token, and no"
    " server keeps keys and values of those",
    "vispec": "it pools the pictures and adds a picture vector to every text row, for which servers have no module",
}
_NO_IMAGES = (
    "it is a drafter for image tokens: those are drawn with guidance, on a conditional and an unconditional row for every"
    " picture, at places of a grid, and no server runs a drafter that way"
)
_NOT_HELD = {
    "target",
    "tree",
    "fc_bias",
    "target_hidden_size",
    "num_q",
    "prune",
    "uniform_first_row",
    "official_cross_mask",
}
"""Fields of a drafter's configuration that serving formats do not hold, or hold in another way."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote. ``notes`` say what the server does differently, and with which options to start it."""

    folder: Path
    format: str
    notes: tuple[str, ...]


def export_drafter(
    drafter: Drafter | str | Path,
    folder: str | Path,
    format: str,
    target: Any,
    *,
    method: str | None = None,
    dtype: torch.dtype | None = None,
    tokens: int = 5,
) -> Exported:
    """Write a drafter as ``config.json`` and ``model.safetensors`` of a serving format.

    Args:
        drafter: the drafter, or its folder (ours or official).
        folder: new or empty folder to write to.
        format: one of :data:`FORMATS`.
        target: the model the drafter was trained for: folder, hub id, ``"shapes-captioner"`` or its transformers
            configuration. The file names it and takes the longest context from it.
        method: of a folder with official EAGLE, MSD or FLASH files.
        dtype: of the tensors; default: as they lie in the drafter's folder, or the drafter's own.
        tokens: ``speculators``: tokens to draft by default.

    Raises:
        ValueError: unknown format, a drafter that the format cannot hold (with all reasons), another target, or a folder
            that is not empty.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown serving format {format!r}; choose one of {', '.join(FORMATS)}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    out = Path(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; an export needs a folder of its own")
    if not isinstance(drafter, Drafter):
        dtype = dtype or _stored_dtype(Path(drafter))
        drafter = load_drafter(drafter, method)
    config, name = _target_config(target)
    c = drafter.config
    reasons = [*refusals(c, format), *_misfits(c, config)]
    if reasons:
        raise ValueError(f"this {c.method} drafter cannot be exported as {format}: {'; '.join(reasons)}")
    tensors = _tensors(drafter, format, dtype)
    shape = _layer_config(c, config.get_text_config())
    if format == "speculators":
        written = _speculators(c, shape, name, config, tokens)
    else:
        written = _sglang(c, shape, format)
    written["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    write_json(out / "config.json", written)
    write_safetensors(out / "model.safetensors", tensors)
    _read_back(out, drafter, dtype)
    return Exported(out, format, tuple(_notes(c, format)))


def refusals(c: DrafterConfig, format: str) -> list[str]:
    """Why ``format`` cannot hold a drafter of this configuration; empty if it can."""
    if c.method in _NOWHERE:
        return [_NOWHERE[c.method]]
    found = []
    if c.method == "flash":
        if c.heads_ahead > 1:
            found.append(
                f"it predicts {c.heads_ahead} tokens from one row with a head of its own; servers' EAGLE models predict one"
            )
        if c.latents:
            found.append(
                f"it replaces every picture by {c.latents} learned rows, which servers do not compute"
            )
        if found:
            return found
    if (c.method == "eagle3") != (format in _EAGLE3):
        what = "EAGLE-1/2 layer, fc([e; h]) without norms" if c.method != "eagle3" else "EAGLE-3 layer"
        return [f"it has the {what}, which is another network; use --format {_BELONGS[c.method]}"]
    if format == "eagle-sglang" and c.input_norm:
        found.append("its layer has an input norm, which the server's EAGLE layer leaves out")
    if format == "speculators" and c.mrope_sections:
        found.append(
            "it rotates by grid positions (M-RoPE), the layer of the speculators library by one position; use"
            " --format eagle3-sglang"
        )
    if format == "eagle3-sglang":
        if c.qkv_bias:
            found.append("its attention has biases, SGLang's EAGLE-3 layer has none")
        if c.norm_before_residual:
            found.append(
                "its residual is the normed state (norm_before_residual), SGLang's is the state itself"
            )
        if 0 in c.taps:
            found.append("it reads the target's embeddings (layer 0), SGLang captures outputs of layers only")
    return found


def _misfits(c: DrafterConfig, config: Any) -> list[str]:
    """How the drafter and the named target disagree."""
    text = config.get_text_config()
    actual = {
        "model_type": config.model_type,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "layers": text.num_hidden_layers,
    }
    known = {"hidden_size": c.hidden_size, "vocab_size": c.vocab_size, **c.target}
    found = [
        f"it was made for a target with {key}={value!r}, this one has {actual[key]!r}"
        for key, value in known.items()
        if key in actual and actual[key] != value
    ]
    if str(text.model_type).startswith("gemma"):
        found.append("the target scales its embeddings, and servers give a drafter the unscaled ones")
    if c.taps and max(c.taps) >= text.num_hidden_layers:
        found.append(f"it reads layers {c.taps} of a target with {text.num_hidden_layers}")
    return found


def _target_config(target: Any) -> tuple[Any, str | None]:
    """transformers configuration of the target, and the name that leads to it."""
    if not isinstance(target, (str, Path)):
        return target, getattr(target, "_name_or_path", None) or None
    from transformers import AutoConfig

    from visacc.speculate.pipeline import EMBEDDED

    name = str(target)
    if name == EMBEDDED:
        from visacc.models.vlm.captioner import ASSETS

        name = str(ASSETS)
    try:
        return AutoConfig.from_pretrained(name), name
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"the configuration of the target {name!r} cannot be read ({reason}); name its folder or hub id"
        ) from error


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Precision of a drafter folder's weights. Refuses drafters for image models, which have another reader."""
    if not folder.is_dir():
        if str(folder) == "ngram":
            raise ValueError(
                "ngram has no weights to export: SGLang and vLLM have n-gram drafting of their own"
            )
        raise ValueError(f"drafter folder {str(folder)!r} does not exist")
    raw, tensors = read_files(folder)
    chameleon = "layers.0.self_attn.q_norm.weight" in tensors and "layers.0.hidden_norm.weight" not in tensors
    if IMAGE_DRAFTER in raw or "input_type" in raw or chameleon:
        raise ValueError(f"{folder} cannot be exported: {_NO_IMAGES}")
    return next((t.dtype for t in tensors.values() if t.is_floating_point()), None)


def _tensors(drafter: Drafter, format: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The drafter's tensors under the format's names, with those that the server's network has in addition."""
    c = drafter.config
    names = official_names(drafter)
    found: dict[str, Tensor] = {}
    for ours, value in drafter.state_dict().items():
        cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        name = names[ours]
        if format == "speculators":
            name = name.replace("midlayer.", "layers.0.")
        found[name] = cast.detach().cpu().contiguous()
    if c.qkv_bias:
        # a Llama layer has biases on all four projections or on none
        found["layers.0.self_attn.o_proj.bias"] = torch.zeros_like(
            found["layers.0.post_attention_layernorm.weight"]
        )
    if format == "eagle-sglang" and not c.fc_bias:
        found["fc.bias"] = torch.zeros_like(found["layers.0.post_attention_layernorm.weight"])
    if c.method == "eagle3":
        if c.draft_vocab_size in (0, c.vocab_size):
            del found["d2t"]
        else:
            kept = torch.zeros(c.vocab_size, dtype=torch.bool)
            kept[torch.arange(c.draft_vocab_size) + found["d2t"]] = True
            found["t2d"] = kept
    return found


def _layer_config(c: DrafterConfig, text: Any) -> dict[str, Any]:
    """The one decoder layer as a Llama configuration."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.mrope_sections:
        rope["mrope_section"] = list(c.mrope_sections)
    shape = {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": rope,
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", 0) or 2048),
        "attention_bias": c.qkv_bias,
        "mlp_bias": False,
        # the server puts the target's embedding (EAGLE-1/2: and head) in place; tying would undo that
        "tie_word_embeddings": False,
    }
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            shape[name] = getattr(text, name)
    return shape


def _speculators(
    c: DrafterConfig, shape: Mapping[str, Any], name: str | None, config: Any, tokens: int
) -> dict[str, Any]:
    if name is None:
        raise ValueError("the speculators format names its target; pass the target's folder or hub id")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": list(config.architectures or [])},
        },
        "transformer_layer_config": dict(shape),
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "tie_word_embeddings": False,
    }


def _sglang(c: DrafterConfig, shape: Mapping[str, Any], format: str) -> dict[str, Any]:
    if format == "eagle-sglang":
        return {"architectures": ["LlamaForCausalLMEagle"], **shape}
    found = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shape,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        # numbers of the layers whose outputs are read: one less than those whose inputs are
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in c.taps],
        },
    }
    if c.mrope_sections:
        found["rope_scaling"] = dict(shape["rope_parameters"])
    return found


def _read_back(folder: Path, drafter: Drafter, dtype: torch.dtype | None) -> None:
    """Load what was written and compare every tensor and every field that the format holds."""
    # a FLASH drafter that can be exported is an EAGLE drafter
    c = replace(drafter.config, method="eagle") if drafter.config.method == "flash" else drafter.config
    loaded = load_drafter(folder, c.method)
    state = loaded.state_dict()
    for name, value in drafter.state_dict().items():
        cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        if not torch.equal(state[name], cast.detach().cpu().to(state[name].dtype)):
            raise RuntimeError(f"the export in {folder} does not read back: {name} differs")
    held = {f.name for f in fields(DrafterConfig)} - _NOT_HELD
    full = c.draft_vocab_size in (0, c.vocab_size)
    for name in sorted(held - ({"draft_vocab_size"} if full else set())):
        if getattr(loaded.config, name) != getattr(c, name):
            raise RuntimeError(
                f"the export in {folder} does not read back: {name} is {getattr(loaded.config, name)!r},"
                f" not {getattr(c, name)!r}"
            )


def _notes(c: DrafterConfig, format: str) -> list[str]:
    depth, width = c.tree.get("depth", 5), c.tree.get("top_k", 8)
    nodes = c.tree.get("budget", 31) + 1
    flags = f"--speculative-num-steps {depth} --speculative-eagle-topk {width} --speculative-num-draft-tokens {nodes}"
    if format == "speculators":
        return ["vLLM drafts a chain of tokens, not a tree"]
    if format == "eagle3-sglang":
        notes = [f"start SGLang with --speculative-algorithm EAGLE3 {flags}"]
        newer = [name for name in ("fc_norm", "norm_output") if getattr(c, name)]
        if newer:
            notes.append(
                f"needs an SGLang that knows {' and '.join(newer)}; older ones ignore them and draft badly"
            )
        return notes
    notes = [f"start SGLang with --speculative-algorithm EAGLE {flags}"]
    pictures = (
        "SGLang's EAGLE-1/2 model embeds token ids only: rows of pictures read the placeholder's embedding"
    )
    if c.method == "msd":
        pictures += " and are fused with the target's state, which MSD does not do"
    notes.append(
        f"{pictures}. Text rows are this drafter's; answers stay exact, after pictures fewer drafts may stand"
    )
    return notes
