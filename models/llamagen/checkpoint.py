"""Reading and writing LlamaGen weights: official ``.pt`` files, dumps derived from them, and safetensors.

Everything is loaded strictly and without executing pickled code. Sizes and variant come from the tensors.
What the tensors cannot tell (head count of unusual sizes, grid side) comes from, in this order: an explicit
argument, the ``config`` entry of the safetensors metadata, a JSON file of the same name beside the weights,
the table of released files, the requested image size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from visacc.models.llamagen.config import GPTConfig
from visacc.models.llamagen.gpt import GPT
from visacc.models.llamagen.released import HEADS, SIZE_NAMES, Released, released_file
from visacc.models.llamagen.vq import VQConfig, VQModel
from visacc.reading import naming, read_entry, read_object
from visacc.weights import State, blank, read_weights, some, tensors_in
from visacc.writing import write_safetensors

M = TypeVar("M", bound=nn.Module)


# ---- files ------------------------------------------------------------------------------------------------
def read_state(
    path: str | Path, *, prefer_ema: bool = False, allow_training_state: bool = False
) -> tuple[State, dict[str, Any]]:
    """Tensors by their official names, and the configuration stored in or beside the file (else empty).

    Descends into ``model`` / ``module`` / ``state_dict`` (``ema`` first with ``prefer_ema``), strips wrapper
    prefixes and drops a stored rotary table. ``allow_training_state`` additionally accepts the ``argparse``
    namespace that the official training scripts put into their checkpoints.
    """
    path = Path(path)
    known = released_file(path)
    size = path.stat().st_size if path.is_file() else 0
    if path.is_file() and known is not None and size < known.min_bytes:
        raise ValueError(f"{path} is truncated: {size:,} bytes, {known} has at least {known.min_bytes:,}")
    # zip files can be mapped: a 12 GB file need not fit into memory twice
    raw, metadata = read_weights(path, mapped=True, allow_training_state=allow_training_state)
    keys = (("ema",) if prefer_ema else ()) + ("model", "module", "state_dict")
    state: State = {}
    for name, value in tensors_in(path, raw, keys).items():
        while name.startswith(("module.", "_orig_mod.")):
            name = name.split(".", 1)[1]
        if name != "freqs_cis":
            state[name] = value
    return state, read_entry(path, metadata, "config") or _read_sidecar(path.with_suffix(".json"))


def _read_sidecar(path: Path) -> dict[str, Any]:
    """The ``config`` entry of a JSON file, empty if there is no such file or entry."""
    if not path.is_file():
        return {}
    config = read_object(path).get("config", {})
    if not isinstance(config, dict):
        raise ValueError(f"the 'config' entry of {path} must be an object of hyper-parameters")
    return config


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if name not in state:
        raise ValueError(f"incomplete: {describe(state)} without {name}")
    return tuple(state[name].shape)


def _fill(module: M, state: State, dtype: torch.dtype, device: torch.device | str) -> M:
    """Turn a meta-device module into a real one. Copies, so that no tensor depends on the mapped file."""
    filled = {
        name: value.to(device=device, dtype=dtype if value.is_floating_point() else None, copy=True)
        for name, value in state.items()
    }
    module.load_state_dict(filled, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def save_model(path: str | Path, model: GPT | VQModel, dtype: torch.dtype | None = None) -> None:
    """Write safetensors: official names, the configuration as metadata. ``load_*`` reads it back."""
    state = {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    write_safetensors(Path(path), state, {"format": "pt", "config": json.dumps(asdict(model.config))})


# ---- GPT --------------------------------------------------------------------------------------------------
def describe(state: Mapping[str, Tensor]) -> str:
    """What kind of file these tensors are, in words for error messages."""
    if "encoder.conv_in.weight" in state and "quantize.embedding.weight" in state:
        return "a LlamaGen VQ tokenizer"
    if "tok_embeddings.weight" in state and "output.weight" in state:
        layers = _count(state, "layers.")
        dim = state["tok_embeddings.weight"].shape[1]
        kind = "text" if "cls_embedding.cap_proj.fc1.weight" in state else "class"
        size = SIZE_NAMES.get((dim, layers))
        label = f"GPT-{size}" if size else f"GPT of width {dim} with {layers} layers"
        return f"a {kind}-conditional LlamaGen {label}"
    return f"not a LlamaGen model (tensors {some(state)})"


def _count(state: Iterable[str], prefix: str) -> int:
    """Number of distinct integers that follow ``prefix`` in the tensor names."""
    depth = prefix.count(".")
    return len({name.split(".")[depth] for name in state if name.startswith(prefix)})


def infer_gpt_config(state: Mapping[str, Tensor], stored: Mapping[str, Any], block_size: int) -> GPTConfig:
    """Configuration of the GPT that holds these tensors; ``stored`` supplies what tensors do not show."""
    vocab, dim = _shape(state, "tok_embeddings.weight")
    layers = _count(state, "layers.")
    heads = stored.get("n_head") or HEADS.get((dim, layers))
    if heads is None:
        raise ValueError(
            f"a GPT of width {dim} with {layers} layers is no released size: its number of heads is unknown; "
            "pass config=GPTConfig(...) or keep a JSON file with a 'config' entry beside the weights"
        )
    head_dim = dim // heads
    kv_heads = (_shape(state, "layers.0.attention.wqkv.weight")[0] // head_dim - heads) // 2
    known = {f.name for f in fields(GPTConfig)}
    values = {name: value for name, value in stored.items() if name in known}
    values |= {
        "dim": dim,
        "n_layer": layers,
        "n_head": heads,
        "n_kv_head": None if kv_heads == heads else kv_heads,
        "vocab_size": vocab,
        "block_size": block_size,
    }
    if "cls_embedding.cap_proj.fc1.weight" in state:
        rows = _shape(state, "cls_embedding.uncond_embedding")[0]
        values |= {
            "model_type": "t2i",
            "caption_dim": _shape(state, "cls_embedding.cap_proj.fc1.weight")[1],
            "uncond_rows": rows,
            "cls_token_num": stored.get("cls_token_num", rows),
        }
    else:
        classes = _shape(state, "cls_embedding.embedding_table.weight")[0] - 1
        values |= {"model_type": "c2i", "num_classes": classes, "cls_token_num": 1}
    hidden = _shape(state, "layers.0.feed_forward.w1.weight")[0]
    if GPTConfig(**values).ffn_dim != hidden:
        # an unrounded multiplier reproduces any hidden size; the file does not say which rounding was used
        values |= {"multiple_of": 1, "ffn_dim_multiplier": (hidden + 0.5) / int(2 * (4 * dim) / 3)}
    return GPTConfig(**values)


def _block_size(
    path: Path, known: Released | None, stored: Mapping[str, Any], image_size: int | None, downsample: int
) -> int:
    """Number of image tokens; a request that contradicts what is known of the file is an error."""
    recorded = known.image_size if known is not None else None
    if recorded is None and stored.get("block_size"):
        recorded = math.isqrt(stored["block_size"]) * downsample
    if image_size is None and recorded is None:
        raise ValueError(
            f"{path} does not tell its resolution (the tensors are the same for every grid); pass image_size="
        )
    if image_size is not None and recorded is not None and image_size != recorded:
        label = str(known) if known is not None else f"a model trained at {recorded} px"
        raise ValueError(f"{path} is {label}: it cannot make {image_size} px images, ask for {recorded}")
    size = image_size or recorded or 0
    if size % downsample:
        raise ValueError(f"image_size {size} is not a multiple of {downsample}, the tokenizer's factor")
    return (size // downsample) ** 2


def load_gpt(
    path: str | Path,
    image_size: int | None = None,
    *,
    kind: Literal["c2i", "t2i"] | None = None,
    config: GPTConfig | None = None,
    downsample: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    allow_training_state: bool = False,
) -> GPT:
    """Load a LlamaGen GPT strictly, in eval mode without gradients.

    Args:
        path: official ``.pt`` file, a dump derived from it, or safetensors.
        image_size: pixels along a side; needed where neither the file nor its name tells it.
        kind: what the caller is going to do with it; the wrong kind of file is an error.
        config: full configuration, for sizes that are not in the table.
        downsample: pixels per token along a side of the tokenizer that goes with it.
    """
    path = Path(path)
    known = released_file(path)
    if (
        known is not None and known.kind != "vq"
    ):  # contradictions in the request show before gigabytes are read
        _block_size(path, known, {}, image_size, downsample)
    state, stored = read_state(path, allow_training_state=allow_training_state)
    what = describe(state)
    if "GPT" not in what:
        hint = "; load it with load_vq" if "tokenizer" in what else ""
        raise ValueError(f"{path} is {what}, a LlamaGen GPT is needed{hint}")
    if known is not None and f"GPT-{known.size}" not in what.split():
        raise ValueError(f"{path} has the name of {known} but holds {what}")
    found = "t2i" if "text-conditional" in what else "c2i"
    if kind is not None and kind != found:
        need = "class labels" if found == "c2i" else "text prompts"
        raise ValueError(f"{path} is {what}: it takes {need}, {kind} weights are needed")
    if config is not None:
        stored = asdict(config)
    block_size = _block_size(path, known, stored, image_size, downsample)
    with naming(path):
        found_config = infer_gpt_config(state, stored, block_size)
    model = blank(path, lambda: GPT(found_config), state, f"{what} as it should be")
    return _fill(model, state, dtype, device)


# ---- VQ ---------------------------------------------------------------------------------------------------
def infer_vq_config(state: Mapping[str, Tensor], stored: Mapping[str, Any]) -> VQConfig:
    """Configuration of the tokenizer that holds these tensors."""
    ch, in_channels = _shape(state, "encoder.conv_in.weight")[:2]
    levels = _count(state, "encoder.conv_blocks.")
    widths = [_shape(state, f"encoder.conv_blocks.{i}.res.0.conv1.weight")[0] for i in range(levels)]
    known = {f.name for f in fields(VQConfig)}
    values = {name: value for name, value in stored.items() if name in known}
    size, width = _shape(state, "quantize.embedding.weight")
    values |= {
        "ch": ch,
        "ch_mult": tuple(w // ch for w in widths),
        "num_res_blocks": _count(state, "encoder.conv_blocks.0.res."),
        "z_channels": _shape(state, "encoder.conv_out.weight")[0],
        "in_channels": in_channels,
        "codebook_size": size,
        "codebook_dim": width,
    }
    return VQConfig(**values)


def load_vq(
    path: str | Path,
    *,
    prefer_ema: bool = False,
    device: torch.device | str = "cpu",
    allow_training_state: bool = False,
) -> VQModel:
    """Load a LlamaGen tokenizer strictly. It stays float32: the official programs never cast it.

    ``prefer_ema`` takes the averaged weights of a training checkpoint where there are some, as the official
    reconstruction scripts do (the generation scripts do not).
    """
    path = Path(path)
    state, stored = read_state(path, prefer_ema=prefer_ema, allow_training_state=allow_training_state)
    what = describe(state)
    if "tokenizer" not in what:
        hint = "; load it with load_gpt" if "GPT" in what else ""
        raise ValueError(f"{path} is {what}, a LlamaGen VQ tokenizer is needed{hint}")
    state.pop("quantize.codebook_used", None)  # usage statistics of the training
    with naming(path):
        config = infer_vq_config(state, stored)
    model = blank(path, lambda: VQModel(config), state, "the tokenizer its first layers describe")
    return _fill(model, state, torch.float32, device)
