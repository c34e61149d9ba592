"""CLIP image and text towers from open_clip: CMMD, CLIP-FD, CLIP score, HPS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class ClipModel:
    """An open_clip model with its tokenizer.

    model: architecture, e.g. "ViT-B-32". pretrained: open_clip tag ("openai" implies quick-GELU), or weights:
    a file. A checkpoint trained with quick-GELU given as a file needs the "-quickgelu" architecture name.
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str | None = "openai",
        weights: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        open_clip = require("open_clip", "open_clip_torch")
        self.device = pick_device(device)
        if model not in open_clip.list_models():
            raise ValueError(f"open_clip knows no architecture {model!r}; see open_clip.list_models()")
        if weights is not None:
            # the file first: it may be none, and the network takes gigabytes
            state = {k.removeprefix("module."): v for k, v in load_state(weights).items()}
            net = open_clip.create_model(model, pretrained=None)
            fill(net, state, weights, f"open_clip's {model}")
        else:
            try:
                net = open_clip.create_model(model, pretrained=pretrained)
            except Exception as error:
                raise download_failed(
                    f"open_clip weights {model}/{pretrained}", "weights=PATH", error
                ) from error
        self.net = net.requires_grad_(False).eval().to(self.device)
        self.dtype = dtype
        self.name, self.weights = f"open_clip-{model}", parameter_digest(net)
        self.tokenizer: Any = open_clip.get_tokenizer(model)
        size = net.visual.image_size
        self.side = int(size[0] if isinstance(size, tuple | list) else size)
        self.mean = channels(getattr(net.visual, "image_mean", None) or CLIP_MEAN, self.device)
        self.std = channels(getattr(net.visual, "image_std", None) or CLIP_STD, self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @torch.inference_mode()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [b, 3, s, s] -> projected embeddings [b, d] float32, not normalised."""
        with self._autocast():
            return self.net.encode_image(pixels).float()

    @torch.inference_mode()
    def encode_tokens(self, tokens: Tensor) -> Tensor:
        """Token ids [b, 77] -> projected embeddings [b, d] float32, not normalised."""
        with self._autocast():
            return self.net.encode_text(tokens.to(self.device)).float()

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        return self.encode_tokens(self.tokenizer(list(texts)))

    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [b, 3, h, w] -> CLIP's validation transform: short side bicubic (PIL), centre crop,
        normalise.
        """
        h, w = images.shape[2:]
        if h <= w:
            size = (self.side, int(self.side * w / h))
        else:
            size = (int(self.side * h / w), self.side)
        x = images.float() if (h, w) == size else RULES["pil-bicubic"](images, size)
        top, left = round((size[0] - self.side) / 2), round((size[1] - self.side) / 2)
        x = x[:, :, top : top + self.side, left : left + self.side].to(self.device)
        return (x / 255 - self.mean) / self.std

    def encode_images(self, images: Tensor) -> Tensor:
        return self.encode_pixels(self.pixels(images))


class ClipExtractor(Extractor):
    """CLIP image embeddings as features. resize "clip" = CLIP's transform, else a rule of `resize.RULES`.

    `ClipExtractor("ViT-L-14-336", resize="torch-bicubic", normalise=True)` is CMMD's (arXiv 2401.09603):
    whole image to 336 x 336 bicubic without antialias, unit-norm embeddings.
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str | None = "openai",
        weights: str | Path | None = None,
        *,
        resize: str = "clip",
        normalise: bool = False,
        device: str | torch.device | None = None,
    ):
        if resize != "clip" and resize not in RULES:
            raise ValueError(f"unknown resize rule {resize!r}; known: clip, {', '.join(RULES)}")
        self.clip = ClipModel(model, pretrained, weights, device)
        self.device, self.resize, self.normalise = self.clip.device, resize, normalise
        self.name, self.weights = self.clip.name, self.clip.weights
        self.preprocess = f"{resize}-{self.clip.side}" + ("-unit" if normalise else "")
        probe = self.clip.encode_pixels(torch.zeros(1, 3, self.clip.side, self.clip.side, device=self.device))
        self.heads = {"features": int(probe.shape[1])}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.resize == "clip":
            pixels = self.clip.pixels(images)
        else:
            x = RULES[self.resize](images, (self.clip.side, self.clip.side))
            pixels = (x / 255 - self.clip.mean) / self.clip.std
        rows = self.clip.encode_pixels(pixels)
        return {"features": F.normalize(rows, dim=1) if self.normalise else rows}
