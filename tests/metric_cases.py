"""Small pictures and an extractor, for tests of the metrics."""

from __future__ import annotations

import torch

from visacc.metrics.extractors.base import Extractor


class Patches(Extractor):
    """Mean colour of a 3 x 3 grid: 27 features, fast and deterministic."""

    def __init__(self, preprocess: str = "area-3"):
        self.name, self.preprocess, self.weights = "patches", preprocess, "none"
        self.heads, self.device = {"features": 27, "logits": 27}, torch.device("cpu")

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 3).flatten(1)
        return {"features": rows, "logits": 5 * rows}


def pictures(n: int, seed: int, size: int = 12, shift: float = 0.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    low = torch.rand(n, 3, 4, 4, generator=g) * (1 - shift) + shift
    return (torch.nn.functional.interpolate(low, size, mode="bilinear") * 255).to(torch.uint8)
