"""YOLOv3-tiny from a Darknet weights file: a small real COCO detector for end-to-end runs without a large
download.

Boxes only, and far weaker than GenEval's detector: results carry its own id and are no GenEval scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from visacc.metrics.extractors.base import parameter_digest, pick_device
from visacc.metrics.geneval.detectors import Detections, group
from visacc.metrics.geneval.logic import CLASSES, Options

SIDE, GREY = 416, 128
ANCHORS = ((10, 14), (23, 27), (37, 58), (81, 82), (135, 169), (344, 319))
OUTPUTS = 3 * (5 + len(CLASSES))
# fmt: off
# (in, out, kernel, batch norm): order of the file
_CONVS = ((3, 16, 3, True), (16, 32, 3, True), (32, 64, 3, True), (64, 128, 3, True), (128, 256, 3, True),
          (256, 512, 3, True), (512, 1024, 3, True), (1024, 256, 1, True), (256, 512, 3, True),
          (512, OUTPUTS, 1, False), (256, 128, 1, True), (384, 256, 3, True), (256, OUTPUTS, 1, False))
# fmt: on


class Network(nn.Module):
    """Darknet's yolov3-tiny: two heads, strides 32 and 16."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, padding=k // 2, bias=not bn) for i, o, k, bn in _CONVS)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(o, eps=1e-5) if bn else nn.Identity() for _, o, _, bn in _CONVS
        )

    def _layer(self, i: int, x: Tensor) -> Tensor:
        x = self.norms[i](self.convs[i](x))
        return F.leaky_relu(x, 0.1) if _CONVS[i][3] else x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[b, 3, 416, 416] -> ([b, 255, 13, 13], [b, 255, 26, 26])."""
        for i in range(4):
            x = F.max_pool2d(self._layer(i, x), 2)
        middle = self._layer(4, x)
        x = self._layer(5, F.max_pool2d(middle, 2))
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 2, stride=1)
        x = self._layer(7, self._layer(6, x))
        coarse = self._layer(9, self._layer(8, x))
        up = F.interpolate(self._layer(10, x), scale_factor=2.0, mode="nearest")
        return coarse, self._layer(12, self._layer(11, torch.cat([up, middle], dim=1)))


def load_darknet(path: str | Path) -> Network:
    """Read a Darknet file: 20-byte header, then float32 bias, BN weight, mean, variance (or bias alone),
    kernel.
    """
    if not Path(path).is_file():
        raise ValueError(f"no weights file {path}")
    data = np.fromfile(path, dtype=np.float32, offset=min(20, Path(path).stat().st_size))
    net, at = Network(), 0

    def take(target: Tensor) -> None:
        nonlocal at
        n = target.numel()
        if at + n > len(data):
            raise ValueError(
                f"{path} ends early: {len(data)} numbers, needed more than {at}; not yolov3-tiny?"
            )
        with torch.no_grad():
            target.copy_(torch.from_numpy(data[at : at + n].copy()).view_as(target))
        at += n

    for conv, norm in zip(net.convs, net.norms, strict=True):
        if isinstance(norm, nn.BatchNorm2d):
            for t in (norm.bias, norm.weight, norm.running_mean, norm.running_var):
                take(t)  # type: ignore[arg-type]
        else:
            take(conv.bias)  # type: ignore[arg-type]
        take(conv.weight)  # type: ignore[arg-type]
    if at != len(data):
        raise ValueError(f"{path} holds {len(data)} numbers, yolov3-tiny has {at}: another network")
    return net.eval().requires_grad_(False)


def letterbox(image: Image.Image) -> tuple[Tensor, float, tuple[int, int]]:
    """(pixels [3, 416, 416] in [0, 1], scale, (left, top)): aspect kept, centred on grey."""
    scale = min(SIDE / image.width, SIDE / image.height)
    w, h = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    canvas = Image.new("RGB", (SIDE, SIDE), (GREY, GREY, GREY))
    left, top = (SIDE - w) // 2, (SIDE - h) // 2
    canvas.paste(image.convert("RGB").resize((w, h), Image.Resampling.BILINEAR), (left, top))
    pixels = torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).float() / 255
    return pixels, scale, (left, top)


def decode(head: Tensor, anchors: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """One head [255, s, s] -> boxes [3 s s, 4] (x1, y1, x2, y2 in the 416 frame), class scores [3 s s,
    80].
    """
    s = head.shape[-1]
    t = head.view(3, 5 + len(CLASSES), s, s).permute(0, 2, 3, 1)
    grid = torch.arange(s, device=head.device)
    cell = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), dim=-1)
    centre = (t[..., :2].sigmoid() + cell) * (SIDE / s)
    size = t[..., 2:4].exp() * torch.tensor(anchors, device=head.device, dtype=head.dtype)[:, None, None]
    boxes = torch.cat([centre - size / 2, centre + size / 2], dim=-1).reshape(-1, 4)
    scores = (t[..., 4:5].sigmoid() * t[..., 5:].sigmoid()).reshape(-1, len(CLASSES))
    return boxes, scores


def suppress(boxes: NDArray[np.float32], limit: float) -> list[int]:
    """Greedy non-maximum suppression of boxes [n, 5]; kept rows, best first."""
    order = list(np.argsort(-boxes[:, 4], kind="stable"))
    area = (boxes[:, 2] - boxes[:, 0]).clip(0) * (boxes[:, 3] - boxes[:, 1]).clip(0)
    kept: list[int] = []
    while order:
        best = int(order.pop(0))
        kept.append(best)
        if order:
            rest = np.array(order)
            low, high = (
                np.maximum(boxes[best, :2], boxes[rest, :2]),
                np.minimum(boxes[best, 2:4], boxes[rest, 2:4]),
            )
            both = (high - low).clip(0).prod(axis=1)
            order = rest[both / (area[best] + area[rest] - both + 1e-9) <= limit].tolist()
    return kept


class YoloV3Tiny:
    """Detector protocol over a Darknet file; class order of coco.names is GenEval's."""

    knows_colours = False
    classes = CLASSES
    options = Options(threshold=0.3, counting_threshold=0.3)

    def __init__(
        self,
        weights: str | Path,
        *,
        floor: float = 0.1,
        overlap: float = 0.45,
        device: str | torch.device | None = None,
    ):
        self.device = pick_device(device)
        self.net = load_darknet(weights).to(self.device)
        self.floor, self.overlap = floor, overlap
        self.id = f"yolov3-tiny@{parameter_digest(self.net)}"

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image]) -> list[Detections]:
        frames = [letterbox(image) for image in images]
        coarse, fine = self.net(torch.stack([f[0] for f in frames]).to(self.device))
        out = []
        for i, (image, (_, scale, (left, top))) in enumerate(zip(images, frames, strict=True)):
            pairs = [decode(coarse[i], ANCHORS[3:]), decode(fine[i], ANCHORS[:3])]
            boxes = torch.cat([b for b, _ in pairs]).cpu().numpy()
            scores = torch.cat([s for _, s in pairs]).cpu().numpy()
            boxes = (boxes - np.array([left, top, left, top], np.float32)) / scale
            boxes = boxes.clip(0, [image.width, image.height, image.width, image.height]).astype(np.float32)
            labels, tables = [], []
            for label in np.flatnonzero((scores > self.floor).any(axis=0)):
                rows = np.flatnonzero(scores[:, label] > self.floor)
                table = np.concatenate([boxes[rows], scores[rows, label, None]], axis=1).astype(np.float32)
                kept = suppress(table, self.overlap)
                labels += [label] * len(kept)
                tables.append(table[kept])
            flat = np.concatenate(tables) if tables else np.zeros((0, 5), np.float32)
            out.append(group(np.array(labels, np.int64), flat, None))
        return out
