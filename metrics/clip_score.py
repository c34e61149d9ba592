"""Image-text agreement: CLIP score in its three scales, and HPS v2.

The cosine is what is stored. Printed CLIP scores are 100 cos (torchmetrics, SJD), plain cos with a prompt
prefix (GigaGAN's script: LANTERN, LlamaGen) or 2.5 max(cos, 0) (the CLIPScore paper, arXiv 2104.08718); a
number without its scale and model says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.metrics.extractors.clip_models import ClipModel
from visacc.metrics.images import resolution_name, to_uint8
from visacc.metrics.protocol import Protocol, Score

SCALES = ("cosine", "100cos", "gigagan", "clipscore")
PREFIX = "A photo depicts"
HPS_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


def scale_cosines(cosines: np.ndarray, scale: str) -> np.ndarray:
    """Cosines in the units of a published scale."""
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if scale == "100cos":
        return 100 * cosines
    return 2.5 * np.maximum(cosines, 0) if scale == "clipscore" else cosines


def prefixed_tokens(tokens: Tensor, prefix: Tensor, end: int) -> Tensor:
    """[b, 77] with the prefix's tokens inserted after the start token; overlong rows end with the end token.

    GigaGAN's script: cut to the context length, and a last position that was in use becomes the end token.
    """
    width = tokens.shape[1]
    rows = torch.cat([tokens[:, :1], prefix.expand(len(tokens), -1), tokens[:, 1:]], dim=1)[:, :width].clone()
    rows[:, -1] = torch.where(rows[:, -1] > 0, end, rows[:, -1])
    return rows


@dataclass
class ClipScore:
    """Mean image-text agreement; `update` with uint8 or [0, 1] images and as many texts.

    scale: see SCALES. The image goes through CLIP's own transform once, at its own size.
    """

    model: ClipModel
    scale: str = "100cos"
    prompts: str = ""
    cosines: list[float] = field(default_factory=list)
    sizes: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {self.scale!r}")

    def _tokens(self, texts: Sequence[str]) -> Tensor:
        tokens = self.model.tokenizer(list(texts))
        if self.scale != "gigagan":
            return tokens
        prefix = self.model.tokenizer([PREFIX])[0]
        body = prefix[1 : int(prefix.argmax())]  # between start and end token, which has the largest id
        return prefixed_tokens(tokens, body, int(prefix.max()))

    def similarity(self, images: Tensor | Sequence[Tensor], texts: Sequence[str]) -> Tensor:
        """[n] cosines of images with their texts."""
        if len(images) != len(texts):
            raise ValueError(f"{len(images)} images but {len(texts)} texts: one text per image is needed")
        if len(texts) == 0:
            raise ValueError("no images to score")
        if any(not t.strip() for t in texts):
            raise ValueError(f"text {next(i for i, t in enumerate(texts) if not t.strip())} is empty")
        pixels = torch.cat([self.model.pixels(to_uint8(image)) for image in images])
        image_rows = F.normalize(self.model.encode_pixels(pixels), dim=1)
        text_rows = F.normalize(self.model.encode_tokens(self._tokens(texts)), dim=1)
        return (image_rows * text_rows).sum(dim=1).cpu()

    def update(self, images: Tensor | Sequence[Tensor], texts: Sequence[str]) -> None:
        self.cosines += self.similarity(images, texts).tolist()
        self.sizes |= {(int(image.shape[-1]), int(image.shape[-2])) for image in images}

    def merge_state(self, other: ClipScore) -> None:
        if (other.scale, other.model.weights) != (self.scale, self.model.weights):
            raise ValueError("cannot merge CLIP scores of another model or scale")
        self.cosines += other.cosines
        self.sizes |= other.sizes

    def reset(self) -> None:
        self.cosines, self.sizes = [], set()

    def compute(self) -> Score:
        return mean_score(
            scale_cosines(np.array(self.cosines), self.scale),
            "clip",
            self.model,
            {"scale": self.scale, "prompts": self.prompts},
            resolution=resolution_name(self.sizes),
        )


def mean_score(
    values: np.ndarray,
    metric: str,
    model: Any,
    settings: dict[str, str],
    *,
    images: str = "as-is",
    resolution: str = "",
    name: str = "custom",
) -> Score:
    """Mean with a 95 % normal interval over images. images, resolution, name: see Protocol."""
    if len(values) == 0:
        raise ValueError(f"no images were scored for {metric}")
    protocol = Protocol(
        metric,
        model.name,
        model.weights,
        "clip-transform",
        images,
        resolution,
        n_gen=len(values),
        name=name,
    ).with_settings(**{k: v for k, v in settings.items() if v})
    mean, ci = float(values.mean()), None
    if len(values) > 1:
        half = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5
        ci = (mean - half, mean + half)
    return Score(mean, protocol, ci=ci)


def hps_model(
    version: str,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    architecture: str = "ViT-H-14",
) -> ClipModel:
    """HPS v2's network (open_clip ViT-H-14), loaded once. version: "v2.0" or "v2.1", no default on purpose.

    weights: HPS_v2_compressed.pt or HPS_v2.1_compressed.pt; None downloads from the hub id xswu/HPSv2.
    """
    if version not in HPS_FILES:
        raise ValueError(f"HPS version must be one of {', '.join(HPS_FILES)}, got {version!r}")
    if weights is None:
        from visacc.metrics.extractors.base import download_failed, require

        hub = require("huggingface_hub", "huggingface_hub")
        try:
            weights = hub.hf_hub_download("xswu/HPSv2", HPS_FILES[version])
        except Exception as error:
            raise download_failed(f"HPS {version} ({HPS_FILES[version]})", "weights=PATH", error) from error
    place = torch.device(device) if device else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if place.type == "cuda" else torch.float32
    model = ClipModel(architecture, None, weights, place, dtype)
    model.name = f"hps-{version}"
    return model


@dataclass
class HPS(ClipScore):
    """HPS v2 (arXiv 2306.09341): cosine of a CLIP tuned on human choices. Build with
    `HPS(hps_model("v2.1"))`.
    """

    scale: str = "cosine"

    def compute(self) -> Score:
        settings, resolution = {"prompts": self.prompts}, resolution_name(self.sizes)
        return mean_score(np.array(self.cosines), "hps", self.model, settings, resolution=resolution)
