"""LlamaGen: class- and text-conditional autoregressive image models (arXiv 2406.06525)."""

from visacc.models.llamagen.config import GPTConfig
from visacc.models.llamagen.gpt import GPT
from visacc.models.llamagen.vq import VQConfig, VQModel, to_uint8

__all__ = ["GPT", "GPTConfig", "VQConfig", "VQModel", "to_uint8"]
