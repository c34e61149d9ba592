"""Lumina-mGPT (arXiv 2408.02657): Chameleon's class and vocabulary, any size, rows closed by an end-of-line
token.

The answer starts with BOI and two size tokens. They are put into the prompt here, so that the picture has the
size that was asked for; the original program samples them (without guidance) and may draw another size.
"""

from __future__ import annotations

from typing import Any

from visacc.models.base import Layout
from visacc.models.hf.chameleon import EOI, ChameleonBase
from visacc.models.hf.prompts import parse_size
from visacc.models.hf.settings import family_defaults, own_settings
from visacc.models.hf.vocab import chameleon_vocab, token_id

EOL = "<reserved08799>"
TEMPLATE = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
MAX_ASPECT = 4
_GRID_PIXELS = 32
_UNCOND = ("image", "last-token")


def lumina_layout(grid: tuple[int, int], vocab: int, *, eol: int, eoi: int) -> Layout:
    """H rows of W codes and EOL (the last row too), then EOI: H (W + 1) + 1 slots."""
    height, width = grid
    return Layout((1, height, width), vocab, ((-1,) * width + (eol,)) * height + (eoi,))


class Lumina(ChameleonBase):
    """Adapter of ``ChameleonForConditionalGeneration`` for Lumina-mGPT.

    Args:
        size: pixels, in steps of 32, sides at most 4 : 1; default 768 x 768 (48 x 48 codes).
        grid: codes instead of pixels, (rows, columns), both even.
        uncond: ``"image"`` starts the unconditional branch at the begin-of-image token, as the original
            program does; ``"last-token"`` one token before, as the speculative Jacobi decoding program does.
        kwargs: see :class:`ChameleonBase` and :class:`visacc.models.hf.driver.HFImageModel`.

    Sampling defaults are the original program's; the generation config of these checkpoints holds text
    settings.
    """

    family = "lumina-mgpt"

    def __init__(
        self,
        model: Any,
        *,
        size: Any = None,
        grid: tuple[int, int] | None = None,
        uncond: str = "image",
        **kwargs: Any,
    ) -> None:
        if uncond not in _UNCOND:
            raise ValueError(f"uncond must be one of {', '.join(_UNCOND)}, got {uncond!r}")
        names = model.config.vocabulary_map
        tokenizer = kwargs.get("tokenizer")
        own = own_settings(model.generation_config)
        cells = grid or (_cells(size) if size is not None else tuple(own.get("grid", (48, 48))))
        eol, eoi = token_id(names, EOL, tokenizer), token_id(names, EOI, tokenizer)
        self.uncond, self._names = uncond, names
        super().__init__(model, lumina_layout(cells, len(chameleon_vocab(names)), eol=eol, eoi=eoi), **kwargs)
        self.settings = family_defaults(
            {"guidance_scale": 4.0, "top_k": 2000}, model.generation_config, take=()
        )

    def _size_token(self, cells: int) -> int:
        """Token that states ``cells // 2`` grid units of 32 pixels."""
        return token_id(self._names, f"<reserved{8800 + cells // 2:05d}>", self.tokenizer)

    def header(self) -> list[int]:
        """BOI, height, width."""
        _, height, width = self.layout.grid
        return [self.boi, self._size_token(height), self._size_token(width)]

    def prompt_ids(self, text: str) -> list[int]:
        _, height, width = self.layout.grid
        framed = TEMPLATE.format(width=16 * width, height=16 * height, prompt=text)
        return [self.bos, *self.text_ids(framed), self.separator, *self.header()]

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        if negative is not None:
            return self.prompt_ids(negative)
        return [self.separator, *self.header()] if self.uncond == "last-token" else self.header()


def _cells(size: Any) -> tuple[int, int]:
    height, width = parse_size(size, (768, 768))
    if height % _GRID_PIXELS or width % _GRID_PIXELS:
        raise ValueError(
            f"Lumina-mGPT draws sizes in steps of {_GRID_PIXELS} pixels, {height}x{width} is none"
        )
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"Lumina-mGPT draws sides of at most {MAX_ASPECT}:1, {height}x{width} is longer")
    return height // 16, width // 16
