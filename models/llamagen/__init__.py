"""LlamaGen: class- and text-conditional autoregressive image models (arXiv 2406.06525)."""

from visacc.models.llamagen.adapter import LlamaGen, load
from visacc.models.llamagen.checkpoint import load_gpt, load_vq, save_model
from visacc.models.llamagen.config import GPTConfig
from visacc.models.llamagen.gpt import GPT
from visacc.models.llamagen.released import RELEASED
from visacc.models.llamagen.text import TextConditioner, clean_caption
from visacc.models.llamagen.vq import VQConfig, VQModel, to_uint8

__all__ = [
    "GPT",
    "RELEASED",
    "GPTConfig",
    "LlamaGen",
    "TextConditioner",
    "VQConfig",
    "VQModel",
    "clean_caption",
    "load",
    "load_gpt",
    "load_vq",
    "save_model",
    "to_uint8",
]
