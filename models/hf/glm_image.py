"""The autoregressive half of GLM-Image (zai-org/GLM-Image): prior tokens for the diffusion half in diffusers.

The language model first draws a small preview (about 16 x 16 codes), then the picture (one code per 32 x 32
pixels), in raster order, without row ends and without guidance. Positions have three axes (time, row,
column).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.models.base import DecodeState, Layout
from visacc.models.hf.prompts import grid_of
from visacc.models.hf.settings import family_defaults, own_settings
from visacc.models.hf.shared_vocab import SharedVocabularyModel

PATCH = 32


def preview_grid(grid: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the preview of a (rows, columns) picture."""
    ratio = grid[0] / grid[1]
    half = PATCH // 2
    return int(math.sqrt(ratio) * half), int(math.sqrt(1 / ratio) * half)


@dataclass(frozen=True)
class PreviewLayout(Layout):
    """A preview grid before the picture grid. Grid cells are the picture's; preview slots lie outside of the
    grid.

    ``neighbour`` works inside each of the two; ``dt=-1`` leads from a picture cell to the preview cell above
    it.
    """

    preview: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.forced is not None:
            raise ValueError("a layout with a preview has no forced slots")

    @property
    def n_preview(self) -> int:
        return self.preview[0] * self.preview[1]

    @property
    def total(self) -> int:
        return self.n_preview + self.n_image

    @cached_property
    def cell_slots(self) -> Tensor:
        return torch.arange(self.n_image) + self.n_preview

    def neighbour(self, dt: int = 0, dy: int = 0, dx: int = 0) -> Tensor:
        if dt not in (0, -1):
            raise ValueError("a picture with a preview has no frames")
        small = Layout((1, *self.preview), self.vocab).neighbour(dy=dy, dx=dx)
        large = Layout(self.grid, self.vocab).neighbour(dy=dy, dx=dx)
        if dt == 0:
            return torch.cat([small, torch.where(large >= 0, large + self.n_preview, -1)])
        (_, height, width), (rows, columns) = self.grid, self.preview
        cell = torch.where(large >= 0, large, 0)
        above = (cell // width * rows // height) * columns + cell % width * columns // width
        return torch.cat([torch.full((self.n_preview,), -1), torch.where(large >= 0, above, -1)])

    @cached_property
    def position_table(self) -> Tensor:
        """int64 [3, total]: (time, row, column) position of every slot, counted from the end of the
        prompt."""
        parts, start = [], 0
        for rows, columns in (self.preview, self.grid[1:]):
            cell = torch.arange(rows * columns)
            parts.append(start + torch.stack([torch.zeros_like(cell), cell // columns, cell % columns]))
            start += max(rows, columns)
        return torch.cat(parts, dim=1)


class GlmImage(SharedVocabularyModel):
    """Adapter of ``GlmImageForConditionalGeneration``.

    Args:
        size: pixels, in steps of 32; default 1152 x 768.
        grid: codes instead of pixels, (rows, columns).
        processor: the checkpoint's processor; it frames text prompts.
        kwargs: see :class:`visacc.models.hf.driver.HFImageModel`.

    Only image codes can be drawn (the original program may draw the end token in the middle of a picture and
    then fails). Sampling defaults are those of the original program, its implicit top-k of 50 included.
    """

    family = "glm-image"
    pixel_rule = "round"  # what diffusers' image processor does with the finished picture
    provides = frozenset({"tree_mask", "hidden", "codebook"})

    def __init__(
        self,
        model: Any,
        *,
        size: Any = None,
        grid: tuple[int, int] | None = None,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        own = own_settings(model.generation_config)
        cells = grid or grid_of(
            size, tuple(own.get("grid", (1152 // PATCH, 768 // PATCH))), PATCH, "GLM-Image"
        )
        codes = model.config.vq_config.num_embeddings
        self.processor = processor
        if processor is not None:
            kwargs.setdefault("tokenizer", getattr(processor, "tokenizer", None))
        layout = PreviewLayout((1, *cells), codes, preview=preview_grid(cells))
        super().__init__(model, layout, torch.arange(codes), **kwargs)
        self.settings = family_defaults(
            {"temperature": 0.9, "top_p": 0.75, "top_k": 50},
            model.generation_config,
            take=("temperature", "top_p", "top_k"),
        )

    @property
    def text_model(self) -> Any:
        return self.model.model.language_model

    @property
    def pad(self) -> int:
        return self.text_config.pad_token_id or 0

    @property
    def codebook(self) -> Tensor:
        return F.normalize(self.model.model.vqmodel.quantize.embedding.weight.float(), dim=-1)

    def prompt_ids(self, text: str) -> list[int]:
        if self.processor is None:
            raise ValueError(
                "GLM-Image frames prompts with its processor; pass"
                " processor=AutoProcessor.from_pretrained(...), or give"
                " prompts as token ids"
            )
        _, height, width = self.layout.grid
        message = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        target: dict[str, Any] = {"target_h": height * PATCH, "target_w": width * PATCH}
        if "processor_kwargs" in inspect.signature(self.processor.apply_chat_template).parameters:
            target = {"processor_kwargs": target}
        found = self.processor.apply_chat_template(
            [message], tokenize=True, return_dict=True, return_tensors="pt", **target
        )
        return found["input_ids"][0].tolist()

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        if negative is not None:
            raise ValueError("GLM-Image's language model knows no negative prompts; leave it out")
        return prompt

    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Any:
        cond = super().encode(prompts, negative)
        cond.has_uncond = False
        return cond

    def prompt_positions(self, numbers: Tensor) -> Tensor:
        return numbers.expand(3, -1, -1)

    def slot_positions(self, state: DecodeState, slots: Tensor) -> Tensor:
        assert isinstance(self.layout, PreviewLayout)
        return self.layout.position_table.to(slots.device)[:, slots] + state.extra["base"][:, None]

    def check_pixels(self) -> None:
        raise ValueError(_NO_PIXELS)

    def pixels(self, codes: Tensor) -> Tensor:
        raise ValueError(_NO_PIXELS)


_NO_PIXELS = (
    "GLM-Image's language model draws prior tokens, which diffusers' GlmImagePipeline turns into pixels: ask for"
    " output_type='codes', or see visacc.integrations.glm_image.prior_tokens"
)
