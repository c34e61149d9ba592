"""Chameleon (arXiv 2405.09818) and Anole (2407.06135): 32 x 32 codes without row ends, then the end-of-image
token.

transformers' class blanks the image logits in its forward and carries no VQ decoder. So the stack below the
head is called directly, with our own product with the head's image rows, and the decoder is
:mod:`visacc.models.hf.taming`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visacc.models.base import Layout
from visacc.models.hf.prompts import grid_of
from visacc.models.hf.settings import family_defaults, own_settings
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.models.hf.taming import FILE, TamingDecoder
from visacc.models.hf.vocab import chameleon_vocab, token_id

BOS, PAD, EOI, BOI, SEPARATOR = "<s>", "<pad>", "<eoss>", "<racm3:break>", "<reserved08706>"


class ChameleonBase(SharedVocabularyModel):
    """What Chameleon, Anole and Lumina-mGPT share: the class, the vocabulary, the pixel decoder.

    Args:
        vq: the pixel decoder, ``None`` for codes only.
        codebook: whether the model's own VQ half holds trained weights.
        kwargs: see :class:`visacc.models.hf.driver.HFImageModel`.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        *,
        vq: TamingDecoder | None = None,
        codebook: bool = True,
        **kwargs: Any,
    ) -> None:
        names = model.config.vocabulary_map
        tokenizer = kwargs.get("tokenizer")
        self.bos, self._pad, self.boi, self.separator = (
            token_id(names, name, tokenizer) for name in (BOS, PAD, BOI, SEPARATOR)
        )
        super().__init__(model, layout, chameleon_vocab(names).tensor(), **kwargs)
        if vq is not None and vq.config.codes != layout.vocab:
            raise ValueError(f"the VQ decoder has {vq.config.codes} codes, the model {layout.vocab}")
        self.vq = vq
        if vq is None and not codebook:
            self._lacks_codebook()

    @property
    def text_model(self) -> Any:
        return self.model.model

    @property
    def pad(self) -> int:
        return self._pad

    @property
    def codebook(self) -> Tensor:
        if self.vq is not None:
            return self.vq.codebook
        return self.model.model.vqmodel.quantize.embedding.weight.float()

    def check_pixels(self) -> None:
        if self.vq is None:
            raise ValueError(
                f"{self.name} was loaded without a VQ decoder and cannot draw: load it with"
                f" vq=<folder or file with vqgan.ckpt or {FILE}>, or ask for output_type='codes'"
            )

    def pixels(self, codes: Tensor) -> Tensor:
        self.check_pixels()
        assert self.vq is not None
        self.vq.to(codes.device)
        return self.vq(codes)


def eoi_layout(grid: tuple[int, int], vocab: int, *, eoi: int) -> Layout:
    """H x W codes without row ends, then EOI."""
    height, width = grid
    return Layout((1, height, width), vocab, (-1,) * (height * width) + (eoi,))


class Chameleon(ChameleonBase):
    """Adapter of ``ChameleonForConditionalGeneration`` for Chameleon and Anole.

    Args:
        size: pixels, in steps of 16; default the tokenizer's own (512 x 512, 32 x 32 codes).
        grid: codes instead of pixels, (rows, columns).
        vq: the pixel decoder, ``None`` for codes only.
        prefix: put before text prompts (speculative Jacobi decoding's Anole runs use "Generate an image of
            ").
        kwargs: see :class:`visacc.models.hf.driver.HFImageModel`.

    Guidance of a text-only prompt: Anole's two unconditional rows (text blanked, everything blanked) are then
    the same sequence, so one row and the text scale 3 are its full rule.
    """

    family = "chameleon"

    def __init__(
        self,
        model: Any,
        *,
        size: Any = None,
        grid: tuple[int, int] | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        names = model.config.vocabulary_map
        vq = model.config.vq_config
        factor = 2 ** (len(vq.channel_multiplier) - 1)
        own = own_settings(model.generation_config)
        side = vq.resolution // factor
        cells = grid or grid_of(size, tuple(own.get("grid", (side, side))), factor, "Chameleon")
        eoi = token_id(names, EOI, kwargs.get("tokenizer"))
        super().__init__(model, eoi_layout(cells, len(chameleon_vocab(names)), eoi=eoi), **kwargs)
        self.prefix = prefix
        self.settings = family_defaults(
            {"guidance_scale": 3.0, "temperature": 0.7, "top_p": 0.9},
            model.generation_config,
            take=("guidance_scale", "temperature", "top_p", "top_k"),
        )

    def prompt_ids(self, text: str) -> list[int]:
        return [self.bos, *self.text_ids(self.prefix + text), self.separator, self.boi]

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        if negative is not None:
            return self.prompt_ids(negative)
        return [self.bos, self.boi]
