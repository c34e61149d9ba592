"""LPD models by name or file: the embedded one, and published checkpoints that lie on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from visacc.models.assets_io import read_asset
from visacc.models.llamagen import load_vq as load_any_vq
from visacc.models.lpd.adapter import LPDModel
from visacc.models.lpd.model import LPD, LPDConfig
from visacc.models.lpd.released import PRESETS, load_lpd, load_vq
from visacc.models.shapes import ASSETS as SHAPES_ASSETS
from visacc.weights import tensor_names

ASSETS = Path(__file__).parent / "assets"
_FILES = sorted({preset.file for preset in PRESETS.values()})
#: names that :func:`load` knows, with a line about each
NAMES = {
    "shapes-lpd": "embedded class- and caption-conditional LPD model of coloured shapes (decoder lpd)"
} | {
    file.removesuffix(".pth").replace(
        "_", "-"
    ): f"published LPD model (give `file`, its {file}, and `vq`, vq_ds16_c2i.pt)"
    for file in _FILES
}


def available() -> dict[str, str]:
    """:data:`NAMES` without an embedded model whose weights are not installed."""
    missing = not (ASSETS / "shapes-lpd.safetensors").is_file()
    return {name: line for name, line in NAMES.items() if not (missing and name == "shapes-lpd")}


def is_lpd(path: Path) -> bool:
    """Whether a path names a published LPD checkpoint, or one that ``visacc train lpd`` wrote."""
    if path.suffix == ".safetensors" and path.is_file():
        return {"fake_latent", "mask_token", "pos_embed"} <= tensor_names(path)
    return path.name in _FILES


def load(
    name_or_path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    image_size: int | None = None,
    file: str | Path | None = None,
    vq: str | Path | None = None,
    text_tokenizer: str | Path | None = None,
) -> LPDModel:
    """An LPD model.

    Args:
        image_size: refused unless it is the model's own.
        file: checkpoint of a published model that is given by name.
        vq: tokenizer file; without it only codes can be generated.
        text_tokenizer: folder of a transformers tokenizer, for own models with captions.
    """
    name = str(name_or_path)
    if name == "shapes-lpd":
        if file is not None or vq is not None or text_tokenizer is not None:
            raise ValueError("shapes-lpd brings its own weights and tokenizers")
        model = load_shapes(device=device, dtype=dtype)
    else:
        path = Path(file) if file is not None else Path(name)
        if name in NAMES and file is None:
            raise ValueError(
                f"{name} is not bundled: give its downloaded {name.replace('-', '_')}.pth as `file`"
            )
        net = load_lpd(path, dtype=dtype).to(device)
        tokenizer = None
        if vq is not None:  # the published models share one tokenizer, own ones have theirs
            tokenizer = (load_vq if path.name in _FILES else load_any_vq)(vq).to(device)
        model = LPDModel(
            net,
            tokenizer,
            name=path.stem.replace("_", "-"),
            read_caption=None if text_tokenizer is None else _reader(net, path, text_tokenizer),
        )
    pixels = model.layout.grid[2] * (model.vq.config.downsample if model.vq else 16)
    if image_size not in (None, pixels):
        raise ValueError(f"{model.name} makes pictures of {pixels} pixels, not {image_size}")
    return model


def _reader(net: LPD, path: Path, folder: str | Path) -> Callable[[str], torch.Tensor]:
    """Caption -> ids [text_len] as ``texts.npy`` holds them: padded on the right with 0, cut where they are too long."""
    from transformers import AutoTokenizer

    config = net.config
    if not config.text_len:
        raise ValueError(f"{path} has no captions, so it takes no text tokenizer")
    if not Path(folder).is_dir():
        raise ValueError(f"text_tokenizer must be the folder of a tokenizer; there is no {folder}")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))

    def read(text: str) -> torch.Tensor:
        ids = list(tokenizer(text)["input_ids"])[: config.text_len]
        if ids and max(ids) >= config.text_vocab:
            raise ValueError(
                f"{folder} writes id {max(ids)}, the model knows {config.text_vocab} words: another tokenizer"
            )
        return torch.tensor(ids + [0] * (config.text_len - len(ids)))

    return read


def load_shapes(
    path: Path | None = None,
    *,
    name: str = "shapes-lpd",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LPDModel:
    """An LPD model of the shapes world from a file that ``scripts/train_lpd_shapes.py export`` wrote; the shipped one
    by default.

    Raises:
        ValueError: there is no such file, or it is not of this kind.
    """
    from visacc.models.lpd.train import CLASS_NAMES, caption_reader

    path = path or ASSETS / "shapes-lpd.safetensors"
    if not path.is_file():
        raise ValueError(f"{name} has no weights at {path}: train them with scripts/train_lpd_shapes.py")
    state, config, facts = read_asset(path)
    net = LPD(LPDConfig(**config))
    net.load_state_dict(state)
    # the pictures' codes are those of the world's text-to-image model
    vq = load_any_vq(SHAPES_ASSETS / "t2i" / "vq.safetensors", device=device)
    model = LPDModel(
        net.to(device=device, dtype=dtype),
        vq,
        name=name,
        read_caption=caption_reader(),
        class_names=CLASS_NAMES,
    )
    defaults: dict[str, Any] = facts.get("defaults", {"guidance_scale": 3.0})
    model.defaults = defaults  # type: ignore[misc]
    return model
