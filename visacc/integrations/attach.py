"""``visacc.attach``: any decoder on a transformers model that is already in memory, without touching its class."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.base import Decoder
from visacc.models.hf.attention import check_implementation
from visacc.models.hf.loading import wrap
from visacc.pipeline import TextToImagePipeline
from visacc.stats import DecodeStats


class Attachment:
    """A model with a decoder, see :func:`attach`.

    Attributes:
        pipe: the :class:`visacc.pipeline.TextToImagePipeline` behind it.
        stats: statistics of the last call.
    """

    def __init__(
        self, model: Any, decoder: str | Decoder, decoder_options: dict[str, Any], **options: Any
    ) -> None:
        self.model = model
        self.stats: DecodeStats | None = None
        self._was_training = bool(model.training)
        self._implementation = self._make_maskable()
        try:
            self.pipe = TextToImagePipeline(wrap(model, **options), decoder, **decoder_options)
        except BaseException:
            self.detach()
            raise

    def _make_maskable(self) -> str | None:
        """Switch a model with flash or flex attention to SDPA; returns what to switch back to."""
        config = self.model.config.get_text_config()
        name = config._attn_implementation
        try:
            check_implementation(name)
        except ValueError:
            self.model.set_attn_implementation("sdpa")
            return name
        return None

    def detach(self) -> None:
        """Give the model back as it was: attention implementation and training mode."""
        if self._implementation is not None:
            self.model.set_attn_implementation(self._implementation)
            self._implementation = None
        self.model.train(self._was_training)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def generate_codes(self, prompts: Any, **options: Any) -> Tensor:
        """Draw codes int64 [B, H, W] ([B, T, H, W] for video).

        Args:
            prompts: text or token ids (a complete prefix), or a list of them.
            options: of :meth:`visacc.pipeline.TextToImagePipeline.__call__`: ``seed``, ``generator``,
                ``guidance_scale``, ``temperature``, ``top_k``, ``top_p``, ``negative_prompt``, ...
        """
        output = self.pipe(prompts, output_type="codes", **options)
        self.stats = output.stats
        codes = output.codes
        return codes[:, 0] if codes.shape[1] == 1 else codes

    @torch.no_grad()
    def to_images(self, codes: Tensor, output_type: str = "pil") -> Any:
        """Codes of :meth:`generate_codes` to pictures: "pil", "np" (uint8 [B, H, W, 3]) or "pt" (float [0, 1])."""
        if output_type not in ("pil", "np", "pt"):
            raise ValueError(f"unknown output_type {output_type!r}; choose pil, np or pt")
        cells = codes[:, None] if codes.ndim == 3 else codes
        return self.pipe._output(self.pipe.model.decode(cells), output_type)


def attach(
    model: Any,
    decoder: str | Decoder = "mc-sjd",
    *,
    processor: Any = None,
    tokenizer: Any = None,
    size: Any = None,
    family: str | None = None,
    vq: Any = None,
    model_options: dict[str, Any] | None = None,
    **decoder_options: Any,
) -> Attachment:
    """Put a decoder on a transformers model.

    ``with visacc.attach(model, decoder="mc-sjd", processor=processor, window=32) as run: run.generate_codes("a bike")``

    Args:
        processor, tokenizer: either turns text prompts into ids; without one, prompts are token ids.
        size: picture size in pixels, where the family has several.
        family: where the model's configuration does not tell (Anole and Lumina-mGPT share Chameleon's).
        vq: pixel decoder of families without one, a :class:`visacc.models.hf.TamingDecoder`.
        model_options: further options of the adapter (``{"grid": (48, 48)}``).
        decoder_options: of the decoder (``window=32``).

    Raises:
        ValueError: a model that draws no images, unknown decoder or option.
    """
    options = {
        "processor": processor,
        "tokenizer": tokenizer,
        "family": family,
        "vq": vq,
        **(model_options or {}),
    }
    given = {name: value for name, value in options.items() if value is not None}
    return Attachment(model, decoder, decoder_options, size=size, **given)
