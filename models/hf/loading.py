"""From a folder or hub id to an adapter: which family it is, whether its weights are complete, what is
missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from visacc.models.hf.chameleon import Chameleon
from visacc.models.hf.driver import HFImageModel
from visacc.models.hf.emu3 import Emu3
from visacc.models.hf.emu35 import CODES as EMU35_CODES
from visacc.models.hf.emu35 import FIRST_CODE as EMU35_FIRST
from visacc.models.hf.emu35 import Emu35
from visacc.models.hf.glm_image import GlmImage
from visacc.models.hf.janus import Janus
from visacc.models.hf.lumina import Lumina
from visacc.models.hf.settings import own_settings
from visacc.models.hf.taming import FILE, TamingDecoder, find_decoder, read_decoder

FAMILIES: dict[str, type[HFImageModel]] = {
    cls.family: cls for cls in (Janus, Emu3, Emu35, Chameleon, Lumina, GlmImage)
}
CLASSES = {
    "janus": "JanusForConditionalGeneration",
    "emu3": "Emu3ForConditionalGeneration",
    "chameleon": "ChameleonForConditionalGeneration",
    "glm_image": "GlmImageForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
}
ALIASES = {"anole": "chameleon", "lumina": "lumina-mgpt", "emu35": "emu3.5"}
EMU35_TOKENIZER = "BAAI/Emu3.5-VisionTokenizer"
_NEEDS_VQ = ("chameleon", "lumina-mgpt", "emu3.5")


def is_hf(name_or_path: str | Path) -> bool:
    """Whether this can be a transformers checkpoint: a folder with a ``model_type``, or something like a
    hub id."""
    path = Path(name_or_path)
    if path.is_dir():
        return _config_file(path) is not None
    return not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)) is not None


def load_hf(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
    size: Any = None,
    revision: str | None = None,
    family: str | None = None,
    vq: str | Path | bool | None = None,
    attn_implementation: str = "sdpa",
    device_map: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> HFImageModel:
    """Load a checkpoint that transformers can read and wrap it.

    Args:
        name_or_path: folder saved by ``save_pretrained``, or hub id.
        size: picture size in pixels, e.g. 512, "768x512" (height x width), (768, 512); the family's own by
            default.
        family: one of ``janus, emu3, emu3.5, chameleon, anole, lumina-mgpt, glm-image``; found out by
            default.
        vq: pixel decoder of families whose class has none (Chameleon, Anole, Lumina-mGPT, Emu3.5): a folder
            or file, ``False`` to do without (codes only), by default looked for beside the weights.
        attn_implementation: "sdpa", "eager" or "visacc_tree".
        device_map: passed to ``from_pretrained`` in place of ``device``.
        options: of the family's class, see there.

    Raises:
        ValueError: with one line that says what is wrong and what would be right.
    """
    from transformers import __version__ as transformers_version

    config, folder = _read_config(name_or_path, revision)
    kind, cls = _family(config, name_or_path, family)
    architecture = _architecture(config, kind)
    if attn_implementation == "visacc_tree":
        from visacc.models.hf.attention import register_tree_attention

        register_tree_attention()
    import transformers

    if not hasattr(transformers, architecture):
        raise ValueError(
            f"transformers {transformers_version} has no {architecture}; install transformers 5 or newer"
        )
    source = str(folder) if folder else str(name_or_path)
    where: dict[str, Any] = {"device_map": device_map} if device_map is not None else {}
    if kind == "emu3.5" and config.get("model_type") != "qwen3":
        where["config"] = _qwen3_config(config)
    model, info = _guarded(
        name_or_path,
        lambda: getattr(transformers, architecture).from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **({} if folder else {"revision": revision}),
            **where,
        ),
    )
    if config["visacc_settings"]:
        model.generation_config.visacc = config["visacc_settings"]
    missing_vq = _check_weights(kind, info, name_or_path)
    if device is not None and device_map is None:
        model = model.to(device)
    if kind in _NEEDS_VQ:
        options["vq"] = _load_vq(kind, name_or_path, folder, vq, revision)
        if kind != "emu3.5":
            options["codebook"] = not missing_vq
    elif vq not in (None, False):
        raise ValueError(f"{kind} has its pixel decoder inside the checkpoint; leave vq out")
    if kind == "glm-image":
        options.setdefault("processor", _beside(name_or_path, folder, revision, "AutoProcessor"))
    else:
        tokenizer = tokenizer or _beside(name_or_path, folder, revision, "AutoTokenizer")
    return cls(model, size=size, **({} if tokenizer is None else {"tokenizer": tokenizer}), **options)


def wrap(model: Any, *, family: str | None = None, size: Any = None, **options: Any) -> HFImageModel:
    """Adapter around a transformers model that is already in memory.

    Args:
        options: ``tokenizer`` or ``processor``, ``vq`` (a :class:`TamingDecoder`), and those of the family's
            class.

    Raises:
        ValueError: a model that makes no images.
    """
    config = {
        **model.config.to_dict(),
        "visacc_settings": own_settings(getattr(model, "generation_config", None)),
    }
    kind, cls = _family(config, getattr(model.config, "_name_or_path", ""), family)
    if type(model).__name__ != CLASSES.get(config.get("model_type", ""), ""):
        raise ValueError(
            f"{type(model).__name__} has no image head; {kind} images need {CLASSES[config['model_type']]}"
        )
    processor = options.pop("processor", None)
    if processor is not None:
        if kind == "glm-image":
            options["processor"] = processor
        else:
            options.setdefault("tokenizer", getattr(processor, "tokenizer", processor))
    return cls(model, size=size, **options)


# -- configuration ---------------------------------------------------------------------------------


def _config_file(folder: Path) -> Path | None:
    """config.json of a checkpoint folder, of GLM-Image's language half where the folder is a diffusers
    pipeline."""
    for name in ("config.json", "vision_language_encoder/config.json"):
        file = folder / name
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise ValueError(f"{file} is not valid JSON") from None
            if isinstance(found, dict) and "model_type" in found:
                return file
    return None


def _read_config(name_or_path: str | Path, revision: str | None) -> tuple[dict[str, Any], Path | None]:
    """(config.json, folder that holds it); the folder is ``None`` for a hub id."""
    path = Path(name_or_path)
    if path.exists():
        file = _config_file(path) if path.is_dir() else None
        if file is None:
            raise ValueError(
                f"{path} is no transformers checkpoint: a folder with config.json (with a model_type),"
                " weights and"
                " tokenizer files is needed, as save_pretrained writes it"
            )
        config, folder = json.loads(file.read_text(encoding="utf-8")), file.parent
        settings = folder / "generation_config.json"
        return {**config, "visacc_settings": _settings(settings if settings.is_file() else None)}, folder
    from transformers.utils import cached_file

    def fetch(file: str, required: bool) -> str | None:
        quiet = {} if required else {"_raise_exceptions_for_missing_entries": False}
        return cached_file(str(name_or_path), file, revision=revision, **quiet)

    found = _guarded(name_or_path, lambda: fetch("config.json", True))
    config = json.loads(Path(found).read_text(encoding="utf-8"))
    return {**config, "visacc_settings": _settings(_guarded(name_or_path, lambda: fetch("generation_config.json", False)))}, None


def _settings(file: str | Path | None) -> dict[str, Any]:
    """The key ``visacc`` of a generation_config.json (transformers drops it where the file was made from config.json)."""
    if file is None:
        return {}
    return json.loads(Path(file).read_text(encoding="utf-8")).get("visacc") or {}


def _guarded(name: str | Path, action: Callable[[], Any]) -> Any:
    """Run a transformers loading call; its errors become one line."""
    try:
        return action()
    except OSError as error:
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


def _family(config: dict[str, Any], name: str | Path, asked: str | None) -> tuple[str, type[HFImageModel]]:
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
        return asked, FAMILIES[asked]
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
    return found, FAMILIES[found]


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


def _architecture(config: dict[str, Any], kind: str) -> str:
    return CLASSES["qwen3"] if kind == "emu3.5" else CLASSES[config["model_type"]]


def _qwen3_config(config: dict[str, Any]) -> Any:
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


# -- weights ---------------------------------------------------------------------------------------


def _check_weights(kind: str, info: Any, name: str | Path) -> bool:
    """Refuse checkpoints that only half fit. Returns whether Chameleon's VQ half is missing."""
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if kind == "emu3" and any(".q_norm." in k for k in unexpected):
        raise ValueError(
            f"{name} has query norms, so these are Emu3.5 weights: loading them as Emu3 would drop the norms"
            " and draw noise;"
            " load it as family='emu3.5'"
        )
    if kind == "emu3.5" and any(".q_norm." in k for k in missing):
        raise ValueError(
            f"{name} has no query norms, so it is not Emu3.5; use the transformers format of Emu3"
        )
    vq = {k for k in missing if k.startswith("model.vqmodel.")}
    left = missing - vq if kind in ("chameleon", "lumina-mgpt") else missing
    if left:
        shown = ", ".join(sorted(left)[:3])
        raise ValueError(
            f"{name} lacks {len(left)} weights of {kind} ({shown}, ...): they would be random; get the whole"
            " model"
        )
    mismatched = info.get("mismatched_keys")
    if mismatched:
        raise ValueError(f"{name}: {len(mismatched)} weights have another shape than its config.json says")
    return bool(vq)


def _load_vq(
    kind: str, name: str | Path, folder: Path | None, vq: str | Path | bool | None, revision: str | None
) -> TamingDecoder | None:
    if vq is False:
        return None
    tensors: dict[str, Any] = {}
    if vq is None:
        roots = [folder, folder / "vision_tokenizer"] if folder else [_hub_folder(kind, str(name), revision)]
        for root in roots:
            if root is not None and root.is_dir() and not tensors:
                tensors = find_decoder(root)
    else:
        path = Path(str(vq))
        if not path.exists():
            raise ValueError(f"the VQ decoder {path} does not exist")
        tensors = find_decoder(path) if path.is_dir() else read_decoder(path)
    if not tensors:
        origin = (
            "pass vq=<tokenizer/vqgan.ckpt of the original Chameleon release>, or load a checkpoint that kept"
        )
        origin += " it, such as leloy/Anole-7b-v0.1-hf"
        if kind == "emu3.5":
            origin = f"pass vq=<folder of {EMU35_TOKENIZER}>"
        raise ValueError(
            f"{vq or name} holds no VQ decoder weights (decoder.up.*), so no pictures can be made: {origin};"
            " vq=False"
            " loads the model for codes only"
        )
    return TamingDecoder.from_tensors(tensors)


def _hub_folder(kind: str, name: str, revision: str | None) -> Path | None:
    """Local folder with the files of a hub repository that may hold the VQ decoder."""
    from huggingface_hub import snapshot_download

    patterns = [FILE, "*vqgan.ckpt", "model.ckpt"]
    if kind == "emu3.5":
        name, revision = EMU35_TOKENIZER, None
    elif kind == "chameleon":
        patterns.append("*.safetensors")
    found = _guarded(name, lambda: snapshot_download(name, revision=revision, allow_patterns=patterns))
    return Path(found)


def _beside(name: str | Path, folder: Path | None, revision: str | None, auto: str) -> Any:
    """Tokenizer or processor saved with the weights, or ``None``."""
    import transformers

    roots: list[tuple[str, dict[str, Any]]] = []
    if folder is not None:
        roots = [(str(folder), {})]
        if (folder.parent / "processor").is_dir():
            roots.insert(0, (str(folder.parent / "processor"), {}))
        roots = [(root, options) for root, options in roots if _has(Path(root), auto)]
        if not roots:
            return None
    else:
        roots = [(str(name), {"revision": revision})]
    source, options = roots[0]
    return _guarded(
        name, lambda: getattr(transformers, auto).from_pretrained(source, padding_side="left", **options)
    )


def _has(folder: Path, auto: str) -> bool:
    """Whether the folder holds what ``auto`` (AutoTokenizer or AutoProcessor) loads."""
    names = {
        "AutoTokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
        "AutoProcessor": ("processor_config.json", "preprocessor_config.json"),
    }
    return any((folder / name).is_file() for name in names[auto])
