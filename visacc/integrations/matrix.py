"""Which decoder runs on which kind of model: ``visacc list --matrix``. The test suite runs every pair marked here."""

from __future__ import annotations

import importlib

from visacc.models.base import ImageModel
from visacc.registry import DecoderEntry, decoder_entries

EXACT, LOSSY, DRAFTER, NO = "exact", "lossy", "drafter", "-"
ADAPTERS = {
    "llamagen": "visacc.models.llamagen.adapter:LlamaGen",
    "lpd": "visacc.models.lpd.adapter:LPDModel",
    "nbp": "visacc.models.nbp.adapter:NBPModel",
    "cosmos": "visacc.models.cosmos.adapter:CosmosModel",
    "janus": "visacc.models.hf.janus:Janus",
    "emu3": "visacc.models.hf.emu3:Emu3",
    "emu3.5": "visacc.models.hf.emu35:Emu35",
    "chameleon": "visacc.models.hf.chameleon:Chameleon",
    "lumina-mgpt": "visacc.models.hf.lumina:Lumina",
    "glm-image": "visacc.models.hf.glm_image:GlmImage",
}


def adapter_class(family: str) -> type[ImageModel]:
    """The adapter class of a model family."""
    module, _, name = ADAPTERS[family].partition(":")
    return getattr(importlib.import_module(module), name)


def pair(entry: DecoderEntry, model: type[ImageModel]) -> str:
    """``exact``, ``lossy``, ``drafter`` (runs with a drafter trained for the model) or ``-``."""
    if not entry.cls.requires <= model.provides:
        return NO
    if model.only_decoders and entry.name not in model.only_decoders:
        return NO
    if "drafter" in entry.options:
        return DRAFTER
    return EXACT if entry.cls().lossless else LOSSY


def matrix() -> dict[str, dict[str, str]]:
    """{model family: {decoder: mark}} for all registered decoders."""
    entries = decoder_entries()
    return {family: {e.name: pair(e, adapter_class(family)) for e in entries} for family in ADAPTERS}
