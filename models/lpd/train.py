"""Training of LPD models: the published recipe's parts (arXiv 2507.01957) and one loop for any code data set."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image


def lr_at(epoch: float, *, peak: float, floor: float, warmup: float, decay_from: float, epochs: float) -> float:
    """Published learning rate at a fractional epoch: linear warm-up from 0, constant, then half a cosine to ``floor``."""
    if epoch < warmup:
        return peak * epoch / warmup
    if epoch < decay_from:
        return peak
    progress = (epoch - decay_from) / (epochs - decay_from)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def crop_adm(pixels: np.ndarray, size: int) -> np.ndarray:
    """ADM's centre crop, uint8 [H, W, 3] -> [size, size, 3]: halve by box filter while twice too large, then bicubic."""
    image = Image.fromarray(pixels)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    resized = (round(image.width * scale), round(image.height * scale))
    array = np.asarray(image.resize(resized, resample=Image.Resampling.BICUBIC))
    top, left = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[top : top + size, left : left + size]
