"""Cosmos 1.0 autoregressive video models and their discrete tokenizer (arXiv 2501.03575)."""

from visacc.models.cosmos.adapter import CosmosModel, fit_frames, t5_reader
from visacc.models.cosmos.positions import Yarn
from visacc.models.cosmos.released import RELEASED, load_cosmos
from visacc.models.cosmos.tokenizer import CosmosTokenizer, TokenizerConfig, load_tokenizer
from visacc.models.cosmos.transformer import Cosmos, CosmosConfig

__all__ = [
    "RELEASED",
    "Cosmos",
    "CosmosConfig",
    "CosmosModel",
    "CosmosTokenizer",
    "TokenizerConfig",
    "Yarn",
    "fit_frames",
    "load_cosmos",
    "load_tokenizer",
    "t5_reader",
]
