"""Features of the embedded world's own tokenizer: a distance that needs no download.

Mean and standard deviation over the grid of the encoder's 64 last activations: 128 numbers per picture. Sensitive to
colours, edges and noise of coloured shapes; says nothing about photographs. Its distances are never called FID.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.metrics.extractors.base import Extractor, parameter_digest, pick_device


class ShapesVQ(Extractor):
    """weights: the tokenizer that ships inside the package."""

    def __init__(self, device: str | torch.device | None = None):
        from visacc.models.llamagen import load_vq
        from visacc.models.shapes import ASSETS

        self.device = pick_device(device)
        self.vq = (
            load_vq(ASSETS / "t2i" / "vq.safetensors").float().eval().requires_grad_(False).to(self.device)
        )
        self.name, self.preprocess, self.weights = "shapes-vq-128", "as-is", parameter_digest(self.vq)
        self.heads = {"features": 2 * self.vq.encoder.norm_out.num_channels}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        step, encoder = self.vq.config.downsample, self.vq.encoder
        if images.shape[2] % step or images.shape[3] % step:
            raise ValueError(f"pictures must have sides divisible by {step}, got {tuple(images.shape[2:])}")
        x = encoder.conv_in(images.float() / 127.5 - 1)
        for block in (*encoder.conv_blocks, *encoder.mid):
            x = block(x)
        x = F.silu(encoder.norm_out(x)).flatten(2)
        return {"features": torch.cat([x.mean(dim=2), x.std(dim=2)], dim=1)}
