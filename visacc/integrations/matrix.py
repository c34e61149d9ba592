"""Which decoder runs on which next-token model: ``visacc list --matrix``. The test suite runs every pair marked here."""

from __future__ import annotations

import importlib
import logging

import torch
from torch import Tensor, nn

from visacc.models.base import Conditioning, DecodeState, ImageModel, Layout, ModelOutput, Proposal
from visacc.registry import DecoderEntry, decoder_entries

EXACT, LOSSY, DRAFTER, NO = "exact", "lossy", "drafter", "-"
ADAPTERS = {
    "llamagen": "visacc.models.llamagen.adapter:LlamaGen",
    "janus": "visacc.models.hf.janus:Janus",
    "emu3": "visacc.models.hf.emu3:Emu3",
    "emu3.5": "visacc.models.hf.emu35:Emu35",
    "chameleon": "visacc.models.hf.chameleon:Chameleon",
    "lumina-mgpt": "visacc.models.hf.lumina:Lumina",
    "glm-image": "visacc.models.hf.glm_image:GlmImage",
}
_CODES = 64


def adapter_class(family: str) -> type[ImageModel]:
    """The adapter class of a model family."""
    module, _, name = ADAPTERS[family].partition(":")
    return getattr(importlib.import_module(module), name)


def example_layout(family: str) -> Layout:
    """A small layout of the family: its structure tokens matter to some decoders."""
    from visacc.models.hf.chameleon import eoi_layout
    from visacc.models.hf.emu3 import emu3_layout
    from visacc.models.hf.emu35 import emu35_layout
    from visacc.models.hf.glm_image import PreviewLayout
    from visacc.models.hf.lumina import lumina_layout

    grid = (4, 4)
    if family == "emu3":
        return emu3_layout(grid, _CODES, eol=0, eof=1, eoi=2, eos=3)
    if family == "emu3.5":
        return emu35_layout(grid, _CODES, eol=0, eoi=1)
    if family == "lumina-mgpt":
        return lumina_layout(grid, _CODES, eol=0, eoi=1)
    if family == "chameleon":
        return eoi_layout(grid, _CODES, eoi=0)
    if family == "glm-image":
        return PreviewLayout((1, *grid), _CODES, preview=(2, 2))
    return Layout((1, *grid), _CODES)


class _Example(ImageModel):
    """The facts of a family without a network, for :meth:`visacc.decoders.Decoder.check`."""

    def __init__(self, family: str) -> None:
        cls = adapter_class(family)
        self.name, self.layout = family, example_layout(family)
        self.provides, self.only_decoders, self.block = cls.provides, cls.only_decoders, cls.block
        self._network = nn.Linear(1, 1)

    @property
    def module(self) -> nn.Module:
        return self._network

    @property
    def codebook(self) -> Tensor | None:
        return torch.eye(self.layout.vocab) if "codebook" in self.provides else None

    def encode(self, prompts: object, negative: object = None) -> Conditioning:
        raise NotImplementedError

    def prefill(self, cond: Conditioning, *, guidance: bool, window: int) -> tuple[DecodeState, ModelOutput]:
        raise NotImplementedError

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


def pair(entry: DecoderEntry, model: ImageModel) -> str:
    """``exact``, ``lossy``, ``drafter`` (runs with a drafter trained for the model) or ``-``."""
    if not entry.cls.requires <= model.provides:
        return NO
    if "drafter" in entry.options:
        # drafters cover plain grids so far, see visacc.drafters.bind.check_target
        return DRAFTER if model.layout.forced is None and "grid" in model.provides else NO
    decoder = entry.cls()
    try:
        decoder.check(model)
    except ValueError:
        return NO
    return EXACT if decoder.lossless else LOSSY


def matrix() -> dict[str, dict[str, str]]:
    """{model family: {decoder: mark}} for all registered decoders, at their default options."""
    log = logging.getLogger("visacc")
    level = log.level
    log.setLevel(logging.ERROR)  # advice about one model or another is out of place here
    try:
        entries = decoder_entries()
        return {f: {e.name: pair(e, _Example(f)) for e in entries} for f in ADAPTERS}
    finally:
        log.setLevel(level)
