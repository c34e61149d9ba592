"""Emu3-Gen (arXiv 2409.18869): one vocabulary for text and image codes, rows closed by an end-of-line token.

After the header ``BOI H*W IMG`` come H rows of W codes and an EOL (the last row too), then EOF, EOI, EOS: all
of those are known in advance and forced by the layout, never sampled.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visacc.models.base import Layout
from visacc.models.hf.prompts import grid_of, tail_from
from visacc.models.hf.settings import family_defaults, own_settings
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.models.hf.vocab import emu3_vocab, token_id

QUALITY = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst"
    " quality,"
    " low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


def emu3_layout(grid: tuple[int, int], vocab: int, *, eol: int, eof: int, eoi: int, eos: int) -> Layout:
    """H rows of W codes and EOL, then EOF, EOI, EOS: H (W + 1) + 3 slots."""
    height, width = grid
    forced = ((-1,) * width + (eol,)) * height + (eof, eoi, eos)
    return Layout((1, height, width), vocab, forced)


class Emu3(SharedVocabularyModel):
    """Adapter of ``Emu3ForConditionalGeneration``.

    Args:
        size: pixels, in steps of 8; default 720 x 720 (90 x 90 codes).
        grid: codes instead of pixels, (rows, columns).
        quality: appended to text prompts, as the official script does; ``""`` leaves them alone.
        kwargs: see :class:`visacc.models.hf.driver.HFImageModel`.

    The unconditional branch is the negative prompt (:data:`NEGATIVE` unless another is given) with the same
    size header.
    """

    family = "emu3"

    def __init__(
        self,
        model: Any,
        *,
        size: Any = None,
        grid: tuple[int, int] | None = None,
        quality: str = QUALITY,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        names = model.config.vocabulary_map
        own = own_settings(model.generation_config)
        factor = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)
        cells = grid or grid_of(size, tuple(own.get("grid", (720 // factor, 720 // factor))), factor, "Emu3")
        vocab = emu3_vocab(names)
        self.bos, eol, eof, self.boi, self.img, eoi = (
            token_id(names, name, tokenizer)
            for name in (
                "<|extra_203|>",
                "<|extra_200|>",
                "<|extra_201|>",
                "<|image start|>",
                "<|image token|>",
                "<|image end|>",
            )
        )
        eos = token_id(names, "<|extra_204|>", tokenizer)
        layout = emu3_layout(cells, len(vocab), eol=eol, eof=eof, eoi=eoi, eos=eos)
        self._pad = token_id(names, "<|endoftext|>", tokenizer)
        self.quality = quality
        super().__init__(model, layout, vocab.tensor(), tokenizer=tokenizer, **kwargs)
        self.settings = family_defaults(
            {"guidance_scale": 3.0, "top_k": 2048},
            model.generation_config,
            take=("guidance_scale", "top_k", "temperature", "top_p"),
        )

    @property
    def text_model(self) -> Any:
        return self.model.model.text_model

    @property
    def pad(self) -> int:
        return self._pad

    @property
    def codebook(self) -> Tensor:
        return self.model.model.vqmodel.quantize.embedding.weight.float()

    def _frame(self, text: str) -> list[int]:
        _, height, width = self.layout.grid
        return [self.bos, *self.text_ids(text), self.boi, *self.text_ids(f"{height}*{width}"), self.img]

    def prompt_ids(self, text: str) -> list[int]:
        return self._frame(text + self.quality)

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        if self.tokenizer is None and negative is None:
            # no text to be had: an empty negative prompt under the same header
            return [self.bos, *tail_from(prompt, self.boi)]
        return self._frame(NEGATIVE if negative is None else negative)

    def pixels(self, codes: Tensor) -> Tensor:
        return self.float_module(self.model.model.vqmodel).decode(codes)
