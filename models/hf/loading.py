"""From a folder or hub id to an adapter: which family it is, whether its weights are complete, what is
missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visacc.models.hf.chameleon import Chameleon
from visacc.models.hf.detect import CLASSES, architecture, detect, guarded, qwen3_config, read_config
from visacc.models.hf.driver import HFImageModel
from visacc.models.hf.emu3 import Emu3
from visacc.models.hf.emu35 import Emu35
from visacc.models.hf.glm_image import GlmImage
from visacc.models.hf.janus import Janus
from visacc.models.hf.lumina import Lumina
from visacc.models.hf.settings import own_settings
from visacc.models.hf.taming import FILE, TamingDecoder, find_decoder, read_decoder
from visacc.reading import naming

FAMILIES: dict[str, Any] = {cls.family: cls for cls in (Janus, Emu3, Emu35, Chameleon, Lumina, GlmImage)}
EMU35_TOKENIZER = "BAAI/Emu3.5-VisionTokenizer"
_NEEDS_VQ = ("chameleon", "lumina-mgpt", "emu3.5")


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
        tokenizer: object, folder or hub id, where it does not lie beside the weights.
        options: of the family's class, see there.

    Raises:
        ValueError: with one line that says what is wrong and what would be right.
    """
    from transformers import __version__ as transformers_version

    config, folder = read_config(name_or_path, revision)
    with naming(name_or_path):
        kind = detect(config, name_or_path, family)
    cls, class_name = FAMILIES[kind], architecture(config, kind)
    if attn_implementation == "visacc_tree":
        from visacc.models.hf.attention import register_tree_attention

        register_tree_attention()
    import transformers

    if not hasattr(transformers, class_name):
        raise ValueError(
            f"transformers {transformers_version} has no {class_name}; install transformers 5 or newer"
        )
    source = str(folder) if folder else str(name_or_path)
    where: dict[str, Any] = {"device_map": device_map} if device_map is not None else {}
    if kind == "emu3.5" and config.get("model_type") != "qwen3":
        where["config"] = guarded(name_or_path, lambda: qwen3_config(config))
    model, info = guarded(
        name_or_path,
        lambda: getattr(transformers, class_name).from_pretrained(
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
        model.generation_config._from_model_config = (
            False  # else transformers drops the key when it loads it again
        )
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
        if isinstance(tokenizer, (str, Path)):
            tokenizer = _beside(tokenizer, *_place(tokenizer), "AutoTokenizer")
        tokenizer = tokenizer or _beside(name_or_path, folder, revision, "AutoTokenizer")
    adapter = cls(model, size=size, **({} if tokenizer is None else {"tokenizer": tokenizer}), **options)
    adapter.folder = folder
    return adapter


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
    kind = detect(config, getattr(model.config, "_name_or_path", ""), family)
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
    return FAMILIES[kind](model, size=size, **options)


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
    return TamingDecoder.from_tensors(tensors, str(vq or name))


def _hub_folder(kind: str, name: str, revision: str | None) -> Path | None:
    """Local folder with the files of a hub repository that may hold the VQ decoder."""
    from huggingface_hub import snapshot_download

    patterns = [FILE, "*vqgan.ckpt", "model.ckpt"]
    if kind == "emu3.5":
        name, revision = EMU35_TOKENIZER, None
    elif kind == "chameleon":
        patterns.append("*.safetensors")
    found = guarded(name, lambda: snapshot_download(name, revision=revision, allow_patterns=patterns))
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
    try:
        loader = getattr(transformers, auto).from_pretrained
        kept = {"padding_side": "left", "trust_remote_code": False, **options}
        return guarded(name, lambda: loader(source, **kept))
    except (KeyError, ValueError, ImportError) as error:
        if isinstance(error.__cause__, OSError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the tokenizer of {name} cannot be loaded ({reason}); load it yourself (code of its own needs"
            " trust_remote_code=True) and pass it as tokenizer="
        ) from error


def _place(name: str | Path) -> tuple[Path | None, None]:
    """(folder, revision) of a tokenizer of its own."""
    return (Path(name) if Path(name).is_dir() else None), None


def _has(folder: Path, auto: str) -> bool:
    """Whether the folder holds what ``auto`` (AutoTokenizer or AutoProcessor) loads."""
    names = {
        "AutoTokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
        "AutoProcessor": ("processor_config.json", "preprocessor_config.json"),
    }
    return any((folder / name).is_file() for name in names[auto])
