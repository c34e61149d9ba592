"""Loading video models by name or file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from visacc.models.base import ImageModel
from visacc.registry import unknown


def known_video_models() -> dict[str, str]:
    """Names that :func:`load_video_model` knows, with a line about each."""
    from visacc.models.cosmos import RELEASED
    from visacc.models.nbp.embedded import ASSETS, NAMES
    from visacc.models.nbp.released import HEADS

    found = {name: text for name, text in NAMES.items() if (ASSETS / f"{name}.safetensors").is_file()}
    found |= dict.fromkeys(HEADS, "NBP checkpoint (give its path and the tokenizer's)")
    return found | dict.fromkeys(
        RELEASED, "Cosmos 1.0 autoregressive (give the folder with model.pt as `file`)"
    )


def default_decoder(model: ImageModel) -> str:
    """The decoder to use when the caller names none: ``nbp`` for next-block models, ``ar`` else."""
    return "nbp" if model.block > 1 else "ar"


def load_video_model(
    name_or_path: str | Path,
    *,
    given_frames: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    file: str | Path | None = None,
    tokenizer: str | Path | None = None,
    text_tokenizer: str | Path | None = None,
    text_encoder: str | Path | None = None,
) -> ImageModel:
    """An embedded model, an NBP checkpoint (.ckpt, or what ``visacc train nbp`` wrote), or a Cosmos model by name.

    Args:
        given_frames: latent frames that prompts bring; ``None`` takes what the model is for (0 with a class text, 2 for
            K600 and Cosmos).
        file: checkpoint of a model given by name.
        tokenizer: file (NBP) or folder (Cosmos) of the video tokenizer; without it only codes can be generated.
        text_tokenizer: folder of a LLaMA tokenizer (UCF models).
        text_encoder: folder of T5-11B (Cosmos Video2World).
    """
    from visacc.models.cosmos import RELEASED
    from visacc.models.nbp import embedded

    name = str(name_or_path)
    if name in embedded.NAMES:
        files = {
            "file": file,
            "tokenizer": tokenizer,
            "text_tokenizer": text_tokenizer,
            "text_encoder": text_encoder,
        }
        given = [key for key, value in files.items() if value is not None]
        if given:
            raise ValueError(f"{name} is embedded and brings everything along: leave {', '.join(given)} out")
        return embedded.load(name, given_frames=given_frames or 0, device=device, dtype=dtype)
    if name in RELEASED:
        if file is None:
            raise ValueError(f"{name} is not bundled: give its downloaded model.pt (or folder) as `file`")
        return _load_cosmos(name, file, given_frames, device, dtype, tokenizer, text_encoder)
    if str(file or name).endswith((".ckpt", ".safetensors")):
        return _load_nbp(file or name, given_frames, device, dtype, tokenizer, text_tokenizer)
    raise unknown("video model", name, known_video_models())


def _load_cosmos(
    name: str,
    file: str | Path,
    given_frames: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
    tokenizer: str | Path | None,
    text_encoder: str | Path | None,
) -> ImageModel:
    from visacc.models.cosmos import RELEASED, CosmosModel, load_cosmos, load_tokenizer, t5_reader

    net = load_cosmos(file, dtype=dtype, device=device)
    expected = RELEASED[name]
    if net.config != expected:
        raise ValueError(
            f"{file} is not {name}: {net.config.layers} layers of width {net.config.dim} were found"
        )
    video = None if tokenizer is None else load_tokenizer(tokenizer, dtype=dtype).to(device)
    read = None
    if expected.text and text_encoder is not None:
        read = t5_reader(text_encoder, device)
    return CosmosModel(
        net, video, given_frames=2 if given_frames is None else given_frames, read_texts=read, name=name
    )


def _load_nbp(
    file: str | Path,
    given_frames: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
    tokenizer: str | Path | None,
    text_tokenizer: str | Path | None,
) -> ImageModel:
    from visacc.models.nbp import NBPModel, load_magvit2, load_nbp
    from visacc.models.nbp.released import llama_reader, ucf_text

    net = load_nbp(file, dtype=dtype).to(device)
    read: Callable[[str], torch.Tensor] | None = None
    if net.config.hybrid and text_tokenizer is not None:
        from transformers import AutoTokenizer

        ids = llama_reader(AutoTokenizer.from_pretrained(str(text_tokenizer)), net.config.cond_tokens)

        def read_class(text: str) -> torch.Tensor:
            return ids(ucf_text(text))

        read = read_class
    frames = (0 if net.config.hybrid else 2) if given_frames is None else given_frames
    video = None if tokenizer is None else load_magvit2(tokenizer).to(device)
    options: dict[str, Any] = {"given_frames": frames, "read_text": read, "name": Path(file).stem}
    return NBPModel(net, video, **options)
