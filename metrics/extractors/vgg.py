"""VGG16 fc2 features for LANTERN's precision/recall: 224 px PIL bilinear, second 4096-d layer before its
ReLU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from visacc.metrics.extractors.base import (
    Extractor,
    channels,
    download_failed,
    fill,
    load_state,
    parameter_digest,
    pick_device,
    require,
)
from visacc.metrics.extractors.timm_models import IMAGENET_MEAN, IMAGENET_STD
from visacc.metrics.resize import RULES


class VGG16(Extractor):
    """weights: torchvision's vgg16-397923af.pth, None = download. Use with `prdc(k=3, strict=True)`."""

    def __init__(self, weights: str | Path | None = None, device: str | torch.device | None = None):
        models = require("torchvision.models", "torchvision")
        self.device = pick_device(device)
        if weights is None:
            try:
                net = models.vgg16(weights=models.VGG16_Weights.IMAGENET1K_V1)
            except OSError as error:
                raise download_failed("torchvision's VGG16 weights", "weights=PATH", error) from error
        else:
            net = models.vgg16(weights=None)
            fill(net, load_state(weights), weights, "torchvision's VGG16")
        self.model = net.requires_grad_(False).eval().to(self.device)
        self.mean, self.std = channels(IMAGENET_MEAN, self.device), channels(IMAGENET_STD, self.device)
        self.name, self.preprocess, self.weights = "vgg16-fc2", "pil-bilinear-224", parameter_digest(net)
        self.heads = {"features": 4096}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = (RULES["pil-bilinear"](images, (224, 224)) / 255 - self.mean) / self.std
        x = self.model.avgpool(self.model.features(x)).flatten(1)
        return {"features": self.model.classifier[:4](x)}
