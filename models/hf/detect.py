"""Which family a checkpoint belongs to, from its configuration; errors of the hub in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visacc.memory import out_of_memory
from visacc.models.hf.emu35 import CODES as EMU35_CODES
from visacc.models.hf.emu35 import FIRST_CODE as EMU35_FIRST
from visacc.reading import read_object

FAMILIES = ("janus", "emu3", "emu3.5", "chameleon", "lumina-mgpt", "glm-image")
ALIASES = {"anole": "chameleon", "lumina": "lumina-mgpt", "emu35": "emu3.5"}
CLASSES = {
    "janus": "JanusForConditionalGeneration",
    "emu3": "Emu3ForConditionalGeneration",
    "chameleon": "ChameleonForConditionalGeneration",
    "glm_image": "GlmImageForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
}


def is_hf(name_or_path: str | Path) -> bool:
    """Whether this can be a transformers checkpoint: a folder with a ``model_type``, or something like a
    hub id."""
    path = Path(name_or_path)
    if path.is_dir():
        return config_file(path) is not None
    return not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)) is not None


def config_file(folder: Path) -> Path | None:
    """config.json of a checkpoint folder, of GLM-Image's language half where the folder is a diffusers
    pipeline."""
    for name in ("config.json", "vision_language_encoder/config.json"):
        file = folder / name
        if file.is_file() and "model_type" in read_object(file):
            return file
    return None


def read_config(name_or_path: str | Path, revision: str | None) -> tuple[dict[str, Any], Path | None]:
    """(config.json, folder that holds it); the folder is ``None`` for a hub id."""
    path = Path(name_or_path)
    if path.exists():
        file = config_file(path) if path.is_dir() else None
        if file is None:
            raise ValueError(
                f"{path} is no transformers checkpoint: a folder with config.json (with a model_type),"
                " weights and"
                " tokenizer files is needed, as save_pretrained writes it"
            )
        config, folder = read_object(file), file.parent
        settings = folder / "generation_config.json"
        return {**config, "visacc_settings": _settings(settings if settings.is_file() else None)}, folder
    from transformers.utils import cached_file

    def fetch(file: str, required: bool) -> str | None:
        quiet = {} if required else {"_raise_exceptions_for_missing_entries": False}
        return cached_file(str(name_or_path), file, revision=revision, **quiet)

    found = guarded(name_or_path, lambda: fetch("config.json", True))
    settings_file = guarded(name_or_path, lambda: fetch("generation_config.json", False))
    config = read_object(found)
    return {**config, "visacc_settings": _settings(settings_file)}, None


def _settings(file: str | Path | None) -> dict[str, Any]:
    """The key ``visacc`` of a generation_config.json (transformers drops it where it made the file itself)."""
    if file is None:
        return {}
    found = read_object(file).get("visacc") or {}
    if not isinstance(found, dict):
        raise ValueError(f"'visacc' in {file} must be an object of settings, got {found!r}")
    return found


def guarded(name: str | Path, action: Callable[[], Any]) -> Any:
    """Run a transformers loading call; its errors become one line."""
    try:
        return action()
    except Exception as error:
        if out_of_memory(error):
            raise
        if not isinstance(error, OSError):  # damaged files of a folder raise anything
            if not Path(name).exists():
                raise
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            raise ValueError(f"{name} cannot be loaded: {reason}") from error
        text = str(error)
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        if Path(name).exists():
            raise ValueError(f"{name} cannot be loaded: {first}") from error
        if "gated" in text or "401" in text or "403" in text:
            raise ValueError(
                f"{name} is gated or private on the Hugging Face hub: accept its licence there and run 'hf"
                " auth login'"
            ) from error
        raise ValueError(
            f"{name!r} is neither a folder here, nor in the local hub cache, nor reachable on the Hugging"
            " Face hub: check"
            f" the spelling and the connection, or download it elsewhere and pass the folder ({first})"
        ) from error


def detect(config: dict[str, Any], name: str | Path, asked: str | None) -> str:
    """The family of a configuration. Raises ``ValueError`` where it makes no images."""
    kind = config.get("model_type", "")
    if asked is None:
        asked = config.get("visacc_settings", {}).get("family")
    if asked is not None:
        asked = ALIASES.get(asked, asked)
        if asked not in FAMILIES:
            raise ValueError(f"unknown family {asked!r}; choose one of {', '.join(sorted(FAMILIES))}")
        fits = {"chameleon": ("chameleon", "lumina-mgpt"), "qwen3": ("emu3.5",), "Emu3": ("emu3.5",)}
        if asked not in fits.get(kind, (kind.replace("_", "-"),)):
            raise ValueError(f"{name} is a {kind!r} model and cannot be used as family {asked!r}")
        return asked
    if kind == "chameleon":
        lumina = "lumina" in str(name).lower() or "z_loss_weight" in config or "mask_image_logits" in config
        lumina = lumina or any("XLLMX" in a for a in config.get("architectures") or [])
        found = "lumina-mgpt" if lumina else "chameleon"
    elif kind == "qwen3" and config.get("vocab_size", 0) >= EMU35_FIRST + EMU35_CODES:
        found = "emu3.5"
    elif kind == "Emu3":
        if config.get("vocab_size", 0) < EMU35_FIRST + EMU35_CODES:
            raise ValueError(
                f"{name} is Emu3 in its first release's own format; use the transformers format,"
                " BAAI/Emu3-Gen-hf"
            )
        found = "emu3.5"
    elif kind in CLASSES and kind != "qwen3":
        found = kind.replace("_", "-")
    else:
        raise ValueError(_no_images(kind, config, name))
    return found


def _no_images(kind: str, config: dict[str, Any], name: str | Path) -> str:
    known = "Janus(-Pro), Emu3-Gen, Emu3.5, Chameleon, Anole, Lumina-mGPT, GLM-Image"
    if kind == "multi_modality":
        hint = "use the transformers format, deepseek-community/Janus-Pro-1B"
        return f"{name} is Janus in its first release's own format; {hint}"
    if "vision_config" in config or "vision_tower" in config:
        return f"{name} ({kind}) reads images but does not draw them; models that draw: {known}"
    return (
        f"{name} ({kind or 'no model_type'}) has no image tokens and cannot draw; models that draw: {known}"
    )


def architecture(config: dict[str, Any], kind: str) -> str:
    return CLASSES["qwen3"] if kind == "emu3.5" else CLASSES[config["model_type"]]


def qwen3_config(config: dict[str, Any]) -> Any:
    """Emu3.5's official configuration as transformers' Qwen3 one (the backbones are the same function)."""
    from transformers import Qwen3Config

    if config.get("rope_scaling"):
        raise ValueError(
            "this Emu3.5 configuration scales its rotary positions, which the released models do not"
        )
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    kept = {name: config[name] for name in names if config.get(name) is not None}
    kept.setdefault("head_dim", kept["hidden_size"] // kept["num_attention_heads"])
    return Qwen3Config(**kept, tie_word_embeddings=config.get("tie_word_embeddings", False))
