"""FID InceptionV3 ("2015-12-05", 1008 classes), run by torch-fidelity's module on four published
preprocessings.

heads: features 2048 (pool3), logits 1008 without bias (what every Inception Score uses), spatial 2023 (sFID:
first 7 channels of TensorFlow's mixed_6/conv, 17 x 17), and the shallow 64, 192, 768 poolings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from visacc.metrics.extractors.base import (
    Extractor,
    download_failed,
    load_state,
    parameter_digest,
    pick_device,
    require,
)
from visacc.metrics.resize import RULES

SIDE = 299


@dataclass(frozen=True)
class Flavour:
    resize: str
    scale: str  # "tf": (x - 128) / 128, "unit": 2 x / 255 - 1


FLAVOURS = {
    "torch-fidelity": Flavour("tf1", "tf"),  # = the original TensorFlow FID, ADM
    "pytorch-fid": Flavour("torch", "unit"),
    "clean-fid": Flavour("clean", "tf"),
    "torchmetrics": Flavour("torch-antialias", "tf"),  # its default; not comparable with published numbers
}
HEADS = {"64": 64, "192": 192, "768": 768, "features": 2048, "logits": 1008, "spatial": 2023}
_TRUNK = (
    ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1"),
    ("Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2"),
    ("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
    ("Mixed_7a", "Mixed_7b", "Mixed_7c"),
)


def _official_state() -> dict[str, Tensor]:
    module = require("torch_fidelity.feature_extractor_inceptionv3", "torch-fidelity")
    try:
        return torch.hub.load_state_dict_from_url(
            module.URL_INCEPTION_V3, map_location="cpu", check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise download_failed(
            "the FID-Inception weights weights-inception-2015-12-05-6726825d.pth (torch-fidelity v0.2.0)",
            "weights=PATH",
            error,
        ) from error


class InceptionFID(Extractor):
    """weights: a file with the 2015-12-05 parameters (torch-fidelity or pytorch-fid), None = download."""

    def __init__(
        self,
        weights: str | Path | None = None,
        flavour: str = "torch-fidelity",
        heads: Sequence[str] = ("features",),
        device: str | torch.device | None = None,
    ):
        if flavour not in FLAVOURS:
            raise ValueError(f"unknown Inception flavour {flavour!r}; known: {', '.join(FLAVOURS)}")
        unknown = [h for h in heads if h not in HEADS]
        if unknown or not heads:
            raise ValueError(f"unknown Inception heads {unknown}; known: {', '.join(HEADS)}")
        module = require("torch_fidelity.feature_extractor_inceptionv3", "torch-fidelity")
        state = _official_state() if weights is None else load_state(weights)
        self.flavour = FLAVOURS[flavour]
        self.name = "inception-2015-12-05"
        self.preprocess = f"{self.flavour.resize}-{SIDE}-{self.flavour.scale}"
        self.heads = {h: HEADS[h] for h in heads}
        self.device = pick_device(device)
        self.weights = parameter_digest(state)
        # torch-fidelity unpickles whatever file it is given, so it is given one we wrote ourselves
        handle, path = tempfile.mkstemp(suffix=".pth")
        try:
            with os.fdopen(handle, "wb") as f:
                torch.save(state, f)
            self.model = module.FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048"], feature_extractor_weights_path=path
            ).to(self.device)
        except RuntimeError as error:
            raise ValueError(f"{weights} does not hold FID-Inception weights: {error}") from error
        finally:
            os.unlink(path)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = RULES[self.flavour.resize](images, (SIDE, SIDE))
        x = (x - 128) / 128 if self.flavour.scale == "tf" else 2 * (x / 255) - 1
        net, found = self.model, {}
        for stage, head in zip(_TRUNK, ("64", "192", "768", "features"), strict=True):
            for block in stage:
                if block == "Mixed_6d" and "spatial" in self.heads:
                    found["spatial"] = net.Mixed_6d.branch1x1(x)[:, :7].permute(0, 2, 3, 1).flatten(1)
                x = getattr(net, block)(x)
            found[head] = x.mean(dim=(2, 3))
        found["logits"] = found["features"] @ net.fc.weight.T
        return {h: found[h] for h in self.heads}
