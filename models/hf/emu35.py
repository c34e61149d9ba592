"""Emu3.5 (BAAI/Emu3.5, BAAI/Emu3.5-Image): a Qwen3-shaped backbone with Emu3's grammar and an IBQ tokenizer.

transformers has no class for it, and its Emu3 class drops the query and key norms without a word. The
official weights fit ``Qwen3ForCausalLM`` exactly. Rows 1..H-1 end in EOL; where the last EOL would stand is
EOI: H (W + 1) slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visacc.models.base import Layout
from visacc.models.hf.prompts import grid_of, tail_from
from visacc.models.hf.settings import family_defaults, own_settings
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.models.hf.taming import TamingDecoder
from visacc.models.hf.vocab import token_id

FIRST_CODE, CODES, PATCH = 151854, 131072, 16
TEMPLATE = "You are a helpful assistant for t2i task. USER: {prompt} ASSISTANT: "
UNCOND = "You are a helpful assistant. USER:  ASSISTANT: "
IDS = {
    "<|endoftext|>": 151643,
    "<|extra_200|>": 151846,
    "<|extra_203|>": 151849,
    "<|image token|>": 151851,
    "<|image start|>": 151852,
    "<|image end|>": 151853,
}
ANSWER = "<|extra_100|>"


def emu35_layout(grid: tuple[int, int], vocab: int, *, eol: int, eoi: int) -> Layout:
    """H rows of W codes, EOL between them, EOI after the last: H (W + 1) slots."""
    height, width = grid
    rows = ((-1,) * width + (eol,)) * height
    return Layout((1, height, width), vocab, (*rows[:-1], eoi))


class Emu35(SharedVocabularyModel):
    """Adapter of ``Qwen3ForCausalLM`` holding Emu3.5's weights.

    Args:
        size: pixels, in steps of 16; default 1024 x 1024 (64 x 64 codes). The model was trained on 64x64,
            55x73, 47x85, 52x78, 41x97 codes and their transposes.
        grid: codes instead of pixels, (rows, columns).
        vq: the IBQ decoder, ``None`` for codes only.
        kwargs: see :class:`visacc.models.hf.driver.HFImageModel`.

    A checkpoint whose vocabulary differs from the released one states it under ``visacc`` in its generation
    config: ``{"first_code": .., "codes": .., "ids": {"<|extra_200|>": ..}}``.
    """

    family = "emu3.5"

    def __init__(
        self,
        model: Any,
        *,
        size: Any = None,
        grid: tuple[int, int] | None = None,
        vq: TamingDecoder | None = None,
        **kwargs: Any,
    ) -> None:
        own = own_settings(model.generation_config)
        tokenizer = kwargs.get("tokenizer")
        self._ids_by_name = {**IDS, **own.get("ids", {})}
        first, codes = own.get("first_code", FIRST_CODE), own.get("codes", CODES)
        if model.get_input_embeddings().weight.shape[0] < first + codes:
            raise ValueError(
                f"this Qwen3 model has {model.get_input_embeddings().weight.shape[0]} ids; Emu3.5 has"
                f" {first + codes}."
                " It is a language model without image codes"
            )
        if getattr(model.config, "rope_scaling", None):
            rope = (
                model.config.rope_parameters
                if hasattr(model.config, "rope_parameters")
                else model.config.rope_scaling
            )
            if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
                raise ValueError("Emu3.5 uses plain rotary positions; this configuration scales them")
        cells = grid or grid_of(size, tuple(own.get("grid", (64, 64))), PATCH, "Emu3.5")
        eol, eoi = self._named("<|extra_200|>"), self._named("<|image end|>")
        layout = emu35_layout(cells, codes, eol=eol, eoi=eoi)
        super().__init__(model, layout, torch.arange(first, first + codes), **kwargs)
        if vq is not None and vq.config.codes != codes:
            raise ValueError(f"the VQ decoder has {vq.config.codes} codes, the model {codes}")
        self.vq = vq
        if vq is None:
            self._lacks_codebook()
        if tokenizer is not None:
            self._answer = token_id({}, ANSWER, tokenizer)
        self.settings = family_defaults(
            {"guidance_scale": 5.0, "top_k": 5120}, model.generation_config, take=()
        )

    def _named(self, name: str) -> int:
        return self._ids_by_name[name]

    @property
    def text_model(self) -> Any:
        return self.model.model

    @property
    def pad(self) -> int:
        return self._named("<|endoftext|>")

    @property
    def codebook(self) -> Tensor | None:
        return None if self.vq is None else self.vq.codebook

    def _frame(self, text: str) -> list[int]:
        _, height, width = self.layout.grid
        header = [
            self._named("<|image start|>"),
            *self.text_ids(f"{height}*{width}"),
            self._named("<|image token|>"),
        ]
        return [self._named("<|extra_203|>"), *self.text_ids(text), self._answer, *header]

    def prompt_ids(self, text: str) -> list[int]:
        return self._frame(TEMPLATE.format(prompt=text))

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        if negative is not None:
            return self._frame(TEMPLATE.format(prompt=negative))
        if self.tokenizer is None:
            return [self._named("<|extra_203|>"), *tail_from(prompt, self._named("<|image start|>"))]
        return self._frame(UNCOND)

    def check_pixels(self) -> None:
        if self.vq is None:
            raise ValueError(
                f"{self.name} was loaded without its vision tokenizer and cannot draw: load it with"
                " vq=<folder of BAAI/Emu3.5-VisionTokenizer>, or ask for output_type='codes'"
            )

    def pixels(self, codes: Tensor) -> Tensor:
        self.check_pixels()
        assert self.vq is not None
        self.vq.to(codes.device)
        return self.vq(codes)
