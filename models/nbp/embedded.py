"""The embedded video models of the moving-shapes world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visacc.models.assets_io import read_asset
from visacc.models.llamagen import load_vq
from visacc.models.nbp import moving
from visacc.models.nbp.adapter import NBPModel
from visacc.models.nbp.frames import FrameTokenizer
from visacc.models.nbp.gpt import NBP, NBPConfig
from visacc.models.shapes import ASSETS as SHAPES_ASSETS

ASSETS = Path(__file__).parent / "assets"
NAMES = {
    "moving-nbp": "embedded video model of moving shapes, next-block prediction (decoder nbp)",
    "moving-ntp": "embedded video model of moving shapes, next-token prediction (decoders ar, sjd, mc-sjd, ...)",
}


def load_tokenizer(device: torch.device | str = "cpu") -> FrameTokenizer:
    """The tokenizer of the shapes world on every frame: 32x32 pixels -> 8x8 codes of 512."""
    return FrameTokenizer(load_vq(SHAPES_ASSETS / "t2i" / "vq.safetensors", device=device)).eval()


def load(
    name: str,
    *,
    given_frames: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **unused: Any,
) -> NBPModel:
    """An embedded model, to generate from text (``given_frames=0``) or to continue that many latent frames."""
    if name not in NAMES:
        raise ValueError(f"unknown embedded video model {name!r}; there are {', '.join(NAMES)}")
    path = ASSETS / f"{name}.safetensors"
    if not path.is_file():
        raise ValueError(f"{name} has no weights at {path}: train them with scripts/train_nbp_moving.py")
    state, config, _ = read_asset(path)
    net = NBP(NBPConfig(**config))
    net.load_state_dict(state)
    model = NBPModel(
        net.to(device=device, dtype=dtype),
        load_tokenizer(device),
        given_frames=given_frames,
        read_text=moving.read_text,
        name=name,
        defaults={"top_p": 0.95, "guidance_scale": 1.0},
    )
    model.folder = ASSETS / name  # of companion files, where there are any
    return model
