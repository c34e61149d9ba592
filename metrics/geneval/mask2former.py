"""GenEval's detector in transformers: mmdet's Mask2Former Swin-S, with mmdet's own pre- and post-processing.

The library's image processor and `post_process_instance_segmentation` are not used: they pad differently,
antialias, score masks on a 384 x 384 grid, resize masks to the nearest pixel and round scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visacc.metrics.extractors.base import download_failed, load_state, parameter_digest, pick_device
from visacc.metrics.geneval.detectors import Detections, group
from visacc.metrics.geneval.logic import CLASSES, Options

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
Size = tuple[int, int]


def _axis(n_in: int, n_out: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(low index, high index, weight of high in 1/2048) per output pixel, half-pixel centres, not yet
    clipped.
    """
    position = ((np.arange(n_out) + 0.5) * (n_in / n_out) - 0.5).astype(np.float32)
    low = np.floor(position).astype(np.int64)
    weight = np.rint((position - low) * 2048).astype(np.int64)
    return low, low + 1, weight


def resize_uint8(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """OpenCV's bilinear resize of uint8 [h, w, 3], bit for bit: 11-bit fixed-point weights, no antialias.

    At the left and right border OpenCV takes one pixel; at the top and bottom it interpolates the border row
    with itself, which rounds twice.
    """
    if image.shape[:2] == size:
        return image
    h, w = image.shape[:2]
    y0, y1, wy = _axis(h, size[0])
    x0, x1, wx = _axis(w, size[1])
    wx = np.where((x0 < 0) | (x1 >= w), 0, wx)
    x = image.astype(np.int64)
    x0, x1, y0, y1 = x0.clip(0, w - 1), x1.clip(0, w - 1), y0.clip(0, h - 1), y1.clip(0, h - 1)
    rows = x[:, x0] * (2048 - wx)[None, :, None] + x[:, x1] * wx[None, :, None]
    top, bottom = rows[y0] >> 4, rows[y1] >> 4
    high = wy[:, None, None]
    return ((((2048 - high) * top >> 16) + (high * bottom >> 16) + 2) >> 2).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Prepared:
    """pixels [3, H, W] uint8 padded; resized: size before padding; original: size of the file."""

    pixels: Tensor
    resized: Size
    original: Size


def prepare(image: Image.Image, scale: Size = (1333, 800), divisor: int = 32, pad: int = 128) -> Prepared:
    """Fit into scale (long side, short side), pad right and bottom with grey to a multiple of divisor."""
    array = np.asarray(image.convert("RGB"))
    h, w = array.shape[:2]
    factor = min(max(scale) / max(h, w), min(scale) / min(h, w))
    size = (int(h * factor + 0.5), int(w * factor + 0.5))
    small = resize_uint8(array, size)
    padded = np.full((-(-size[0] // divisor) * divisor, -(-size[1] // divisor) * divisor, 3), pad, np.uint8)
    padded[: size[0], : size[1]] = small
    return Prepared(torch.from_numpy(padded).permute(2, 0, 1).contiguous(), size, (h, w))


def normalise(pixels: Tensor) -> Tensor:
    """uint8 [b, 3, H, W] -> network input."""
    mean = torch.tensor(MEAN, device=pixels.device)[:, None, None]
    std = torch.tensor(STD, device=pixels.device)[:, None, None]
    return (pixels.float() - mean) / std


@dataclass(frozen=True)
class Instances:
    """labels [n], boxes [n, 5] (x1, y1, x2, y2, score) float32, masks [n, h, w] bool, all in the same
    order.
    """

    labels: Tensor
    boxes: Tensor
    masks: Tensor


def postprocess(
    class_logits: Tensor, mask_logits: Tensor, padded: Size, resized: Size, original: Size, limit: int = 100
) -> Instances:
    """mmdet's instance fusion head for one image: class_logits [Q, C+1], mask_logits [Q, h, w].

    The `limit` best (query, class) pairs; a query may appear with several classes. Score = class probability
    times the mean sigmoid inside the mask; the box is the mask's tight integer box, zeros for an empty mask.
    """
    maps = F.interpolate(mask_logits[None].float(), padded, mode="bilinear", align_corners=False)
    maps = maps[:, :, : resized[0], : resized[1]]
    maps = F.interpolate(maps, original, mode="bilinear", align_corners=False)[0]
    p = class_logits.float().softmax(dim=-1)[:, :-1]
    scores, flat = p.flatten().topk(min(limit, p.numel()))
    labels, queries = flat % p.shape[1], flat // p.shape[1]
    binary = maps > 0
    inside = binary.flatten(1).float()
    quality = (maps.sigmoid().flatten(1) * inside).sum(1) / (inside.sum(1) + 1e-6)
    boxes = mask_boxes(binary)
    table = torch.cat([boxes[queries], (scores * quality[queries])[:, None]], dim=1)
    return Instances(labels, table, binary[queries])


def mask_boxes(masks: Tensor) -> Tensor:
    """[n, 4] (xmin, ymin, xmax + 1, ymax + 1) of bool masks [n, h, w]; zeros where empty."""
    columns, rows = masks.any(dim=1), masks.any(dim=2)

    def span(hits: Tensor) -> tuple[Tensor, Tensor]:
        n = hits.shape[1]
        first = hits.float().argmax(dim=1)
        last = n - hits.flip(1).float().argmax(dim=1)
        return first, last

    (x1, x2), (y1, y2) = span(columns), span(rows)
    boxes = torch.stack([x1, y1, x2, y2], dim=1).float()
    return boxes * columns.any(dim=1)[:, None]


class Mask2FormerDetector:
    """Detector over a transformers Mask2Former with COCO's 80 things."""

    knows_colours = False
    classes = CLASSES
    options = Options()

    def __init__(
        self, model: Any, id: str, *, device: str | torch.device | None = None, keep_masks: float = 0.3
    ):
        if model.config.num_labels != len(CLASSES):
            raise ValueError(
                f"this Mask2Former has {model.config.num_labels} classes, GenEval needs {len(CLASSES)}"
            )
        self.device = pick_device(device)
        self.model = model.requires_grad_(False).eval().to(self.device)
        self.keep_masks = keep_masks  # masks of objects at or below this score are never looked at
        self.id = f"{id}@{parameter_digest(self.model)}"

    @classmethod
    def official(cls, weights: str | Path | None = None, **options: Any) -> Mask2FormerDetector:
        """The checkpoint GenEval uses (mmdet's .pth) or a folder written by `convert_checkpoint`."""
        from visacc.metrics.geneval.convert_mmdet import CHECKPOINT, URL, build

        if weights is None:
            try:
                state = torch.hub.load_state_dict_from_url(URL, map_location="cpu", weights_only=True)[
                    "state_dict"
                ]
            except Exception as error:
                raise download_failed(f"GenEval's detector {CHECKPOINT}", "weights=PATH", error) from error
            return cls(build(state), "mmdet-mask2former-swin-s", **options)
        path = Path(weights)
        if path.is_dir():
            return cls(_from_folder(path), "mmdet-mask2former-swin-s", **options)
        return cls(build(load_state(path)), "mmdet-mask2former-swin-s", **options)

    @classmethod
    def facebook(cls, weights: str | Path | None = None, **options: Any) -> Mask2FormerDetector:
        """Facebook's own training of the same architecture: another detector, label results "GenEval
        (fb-m2f)".
        """
        source = "facebook/mask2former-swin-small-coco-instance" if weights is None else Path(weights)
        return cls(_from_folder(source), "fb-m2f-swin-small", **options)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image]) -> list[Detections]:
        """Batched where padded sizes agree; results do not depend on the grouping beyond rounding."""
        prepared = [prepare(image) for image in images]
        out: list[Detections | None] = [None] * len(images)
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, p in enumerate(prepared):
            groups.setdefault(tuple(p.pixels.shape), []).append(i)
        for shape, index in groups.items():
            batch = normalise(torch.stack([prepared[i].pixels for i in index]).to(self.device))
            # mmdet's decoder has no padding mask here: the padded area is ordinary grey input
            result = self.model(pixel_values=batch, pixel_mask=torch.ones_like(batch[:, 0], dtype=torch.long))
            for row, i in enumerate(index):
                found = postprocess(
                    result.class_queries_logits[row],
                    result.masks_queries_logits[row],
                    (shape[1], shape[2]),
                    prepared[i].resized,
                    prepared[i].original,
                )
                out[i] = self._detections(found)
        return [d for d in out if d is not None]

    def _detections(self, found: Instances) -> Detections:
        boxes = found.boxes.cpu().numpy()
        keep = boxes[:, 4] > self.keep_masks
        masks: list[NDArray[np.bool_] | None] = [None] * len(boxes)
        for i in np.flatnonzero(keep):
            masks[i] = found.masks[i].cpu().numpy()
        return group(found.labels.cpu().numpy(), boxes, masks)


def _from_folder(source: str | Path) -> Any:
    from transformers import Mask2FormerForUniversalSegmentation

    try:
        return Mask2FormerForUniversalSegmentation.from_pretrained(source)
    except OSError as error:
        raise download_failed(f"Mask2Former {source}", "weights=FOLDER", error) from error
