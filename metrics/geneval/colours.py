"""GenEval's colour step: cut the object out on grey, ask CLIP which of ten colours it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visacc.metrics.geneval.logic import COLORS, Found

TEMPLATES = (
    "a photo of a {colour} {name}",
    "a photo of a {colour}-colored {name}",
    "a photo of a {colour} object",
)
BATCH = 16


class Encoder(Protocol):
    """An image-text model: rows of any norm, [n, d]."""

    def text(self, texts: Sequence[str]) -> Tensor: ...

    def images(self, images: Sequence[Image.Image]) -> Tensor: ...


def cut_out(
    image: Image.Image,
    box: NDArray[np.float32] | Sequence[float],
    mask: NDArray[np.bool_] | None,
    *,
    background: str = "#999",
    crop: bool = True,
) -> Image.Image:
    """The object on a plain background ("original": left as is), cut to its box.

    Box coordinates are rounded half to even; outside the image is black (PIL's crop). No mask: background
    kept.
    """
    picture = image.convert("RGB")
    if mask is not None:
        if mask.shape != (image.height, image.width):
            raise ValueError(f"mask {mask.shape} does not fit an image of {image.height} x {image.width}")
        if background != "original":
            blank = Image.new("RGB", picture.size, color=background)
            picture = Image.composite(picture, blank, Image.fromarray(mask))
    return picture.crop(tuple(float(v) for v in box[:4])) if crop else picture  # type: ignore[arg-type]


def class_weights(encoder: Encoder, name: str) -> Tensor:
    """[d, 10]: per colour the normalised mean of the three normalised prompt embeddings."""
    columns = []
    for colour in COLORS:
        rows = encoder.text([t.format(colour=colour, name=name) for t in TEMPLATES])
        columns.append(F.normalize(F.normalize(rows.float(), dim=1).mean(dim=0), dim=0))
    return torch.stack(columns, dim=1)


class ColourClassifier:
    """Zero-shot colour names of objects; class weights are computed once per class."""

    def __init__(self, encoder: Encoder, *, background: str = "#999", crop: bool = True):
        self.encoder, self.background, self.crop = encoder, background, crop
        self._weights: dict[str, Tensor] = {}

    def logits(self, image: Image.Image, name: str, objects: Sequence[Found]) -> Tensor:
        """[n, 10]: 100 times the cosine with each colour."""
        if name not in self._weights:
            self._weights[name] = class_weights(self.encoder, name)
        weights = self._weights[name]
        crops = [cut_out(image, o.box, o.mask, background=self.background, crop=self.crop) for o in objects]
        rows = torch.cat([self.encoder.images(crops[i : i + BATCH]) for i in range(0, len(crops), BATCH)])
        return 100.0 * F.normalize(rows.float(), dim=1) @ weights.to(rows.device)

    def __call__(self, image: Image.Image, name: str, objects: Sequence[Found]) -> list[str]:
        best = self.logits(image, name, objects).argmax(dim=1)
        return [COLORS[i] for i in best.tolist()]


class OpenClipEncoder:
    """CLIP by open_clip; the original uses ViT-L-14 "openai" under CUDA fp16 autocast
    (dtype=torch.float16).
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str | None = "openai",
        weights: str | None = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
    ):
        from visacc.metrics.extractors.base import pick_device
        from visacc.metrics.extractors.clip_models import ClipModel

        place = pick_device(device)
        dtype = dtype or (torch.float16 if place.type == "cuda" else torch.float32)
        self.clip = ClipModel(model, pretrained, weights, place, dtype)
        self.id = f"{self.clip.name}@{self.clip.weights}/{str(dtype).removeprefix('torch.')}"

    def text(self, texts: Sequence[str]) -> Tensor:
        return self.clip.encode_text(texts)

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        from visacc.metrics.images import pil_to_tensor

        pixels = [self.clip.pixels(pil_to_tensor(_at_least_one_pixel(image))[None]) for image in images]
        return self.clip.encode_pixels(torch.cat(pixels))


def _at_least_one_pixel(image: Image.Image) -> Image.Image:
    """An empty mask gives an empty box; the original would crash in the resize, a grey pixel has no colour
    either.
    """
    return image if image.width and image.height else Image.new("RGB", (1, 1), "#999")
