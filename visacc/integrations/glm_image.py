"""GLM-Image inside the stock diffusers pipeline: its prior tokens from any decoder here.

>>> tokens = prior_tokens(pipe.vision_language_encoder, pipe.processor, prompt, 1024, 1024, decoder="sjd")
>>> image = pipe(prompt=prompt, prior_token_ids=tokens, height=1024, width=1024).images[0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.decoders.base import Decoder
from visacc.models.hf.glm_image import GlmImage
from visacc.pipeline import TextToImagePipeline


def prior_tokens(
    model: Any,
    processor: Any,
    prompt: str | Sequence[str],
    height: int = 1152,
    width: int = 768,
    *,
    decoder: str | Decoder = "mc-sjd",
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    num_images_per_prompt: int = 1,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **decoder_options: Any,
) -> Tensor:
    """Prior tokens for ``GlmImagePipeline(prior_token_ids=...)``.

    Args:
        model: ``pipe.vision_language_encoder``.
        processor: ``pipe.processor``.
        height, width: pixels, in steps of 32; the same as the pipeline is called with.
        seed, generator: see :meth:`visacc.pipeline.TextToImagePipeline.__call__`; the global generators are not touched
            (the pipeline itself reseeds them).
        temperature, top_k, top_p: default those of the checkpoint, with top-k 50 as the original program has it.

    Returns:
        int64 [B, 4 h w]: the picture's codes, each repeated 2 x 2.
    """
    adapter = GlmImage(model, size=(height, width), processor=processor)
    pipe = TextToImagePipeline(adapter, decoder, **decoder_options)
    codes = pipe(
        prompt,
        seed=seed,
        generator=generator,
        num_images_per_prompt=num_images_per_prompt,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        output_type="codes",
    ).codes
    doubled = F.interpolate(codes.double(), scale_factor=2, mode="nearest")
    return doubled.long().flatten(1)
