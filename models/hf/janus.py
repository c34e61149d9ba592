"""Janus and Janus-Pro (arXiv 2410.13848, 2501.17811): a Llama with separate input vectors and head for image
codes.

Image codes are not text ids: they enter as ``generation_aligner(generation_embeddings(code))`` and leave
through ``generation_head``; ``lm_head`` plays no part. There are no structure tokens: 24 x 24 codes, 384 x
384 pixels, fixed.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from visacc.models.base import Layout
from visacc.models.hf.driver import HFImageModel
from visacc.models.hf.prompts import parse_size
from visacc.models.hf.settings import family_defaults

PRO_TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"
PLAIN_TEMPLATE = "User: {prompt}\n\nAssistant:"


class Janus(HFImageModel):
    """Adapter of ``JanusForConditionalGeneration``.

    Args:
        model: the transformers model.
        size: must be the model's own picture size where given.
        template: prompt frame with ``{prompt}``; default: Janus-Pro's, or Janus-1.3B's plain one where the
            tokenizer lacks the role tokens.
        kwargs: see :class:`visacc.models.hf.driver.HFImageModel`. ``positions="slot"`` reproduces
            transformers' batches bit for bit in low precision.

    Raises:
        ValueError: another size, or a configuration without the begin-of-image id.
    """

    family = "janus"

    def __init__(self, model: Any, *, size: Any = None, template: str | None = None, **kwargs: Any) -> None:
        vq = model.config.vq_config
        side = vq.num_patches
        pixels = side * 2 ** (len(vq.channel_multiplier) - 1)
        if size is not None and parse_size(size, (pixels, pixels)) != (pixels, pixels):
            height, width = parse_size(size, (pixels, pixels))
            raise ValueError(
                f"Janus draws {pixels}x{pixels} pixels only, not {height}x{width}; leave size out"
            )
        super().__init__(model, Layout((1, side, side), vq.num_embeddings), **kwargs)
        config = model.generation_config
        extra = getattr(config, "generation_kwargs", None) or {}
        text = model.config.text_config
        self.bos = _needed("bos_token_id", config.bos_token_id, text.bos_token_id)
        self._pad = _needed("pad_token_id", config.pad_token_id, text.pad_token_id)
        self.boi = _needed(
            '"generation_kwargs": {"boi_token_id": ...}',
            extra.get("boi_token_id"),
            self._named("<begin_of_image>"),
        )
        if template is None:
            template = PRO_TEMPLATE if self._named("<|User|>") is not None else PLAIN_TEMPLATE
        self.template = template
        self.settings = family_defaults({"guidance_scale": 5.0}, config, take=("guidance_scale",))

    def _named(self, token: str) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.get_vocab().get(token)

    @property
    def text_model(self) -> Any:
        return self.model.model.language_model

    @property
    def pad(self) -> int:
        return self._pad

    @property
    def codebook(self) -> Tensor:
        return F.normalize(self.model.model.vqmodel.quantize.embedding.weight.float(), dim=-1)

    def prompt_ids(self, text: str) -> list[int]:
        return [self.bos, *self.text_ids(self.template.format(prompt=text)), self.boi]

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        """The prompt with everything but BOS and BOI replaced by padding, which stays visible."""
        if negative is not None:
            raise ValueError(
                "Janus knows no negative prompts: its unconditional branch is the blanked prompt; leave it"
                " out"
            )
        return [i if i in (self.bos, self.boi) else self.pad for i in prompt]

    def embed_codes(self, codes: Tensor, slots: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(codes)

    def code_logits(self, hidden: Tensor) -> Tensor:
        return self.model.model.generation_head(hidden)

    def pixels(self, codes: Tensor) -> Tensor:
        return self.float_module(self.model.model.vqmodel).decode(codes.flatten(1))


def _needed(name: str, *values: int | None) -> int:
    """The first value that is known."""
    for value in values:
        if value is not None:
            return value
    raise ValueError(f"the checkpoint's generation_config.json lacks {name}, which Janus prompts need")
