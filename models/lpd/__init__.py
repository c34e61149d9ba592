"""LPD: locality-aware parallel decoding (arXiv 2507.01957)."""

from visacc.models.lpd.adapter import LPDModel
from visacc.models.lpd.groups import lpd_group_sizes, training_lists
from visacc.models.lpd.model import LPD, LPDConfig
from visacc.models.lpd.order import lpd_order
from visacc.models.lpd.parts import training_mask
from visacc.models.lpd.released import PRESETS, load_lpd, load_vq, resize_positions, upscale

__all__ = [
    "LPD",
    "PRESETS",
    "LPDConfig",
    "LPDModel",
    "load_lpd",
    "load_vq",
    "lpd_group_sizes",
    "lpd_order",
    "resize_positions",
    "training_lists",
    "training_mask",
    "upscale",
]
