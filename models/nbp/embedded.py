"""The embedded video models of the moving-shapes world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visacc.models.assets_io import read_asset
from visacc.models.nbp import moving
from visacc.models.nbp.adapter import NBPModel
from visacc.models.nbp.gpt import NBP, NBPConfig
from visacc.models.nbp.magvit2 import Magvit2, Magvit2Config

ASSETS = Path(__file__).parent / "assets"
NAMES = {
    "moving-nbp": "embedded video model of moving shapes, next-block prediction (decoder nbp)",
    "moving-ntp": "embedded video model of moving shapes, next-token prediction (decoders ar, sjd, mc-sjd, ...)",
}
FPS = 8


def load_tokenizer(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Magvit2:
    """The world's tokenizer: 17 frames of 32x32 pixels -> 5x8x8 codes of 1000."""
    state, config, _ = read_asset(ASSETS / "moving-tokenizer.safetensors")
    model = Magvit2(Magvit2Config(**config))
    model.load_state_dict(state)
    return model.to(device=device, dtype=dtype).eval()


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
    state, config, _ = read_asset(ASSETS / f"{name}.safetensors")
    net = NBP(NBPConfig(**config))
    net.load_state_dict(state)
    return NBPModel(
        net.to(device=device, dtype=dtype),
        load_tokenizer(device),
        given_frames=given_frames,
        read_text=moving.read_text,
        name=name,
        defaults={"top_p": 0.95, "guidance_scale": 1.0},
    )
