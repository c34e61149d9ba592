"""Pictures about a generation: contact sheet and commit-order heat map. Files are written whole or not at all."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps, UnidentifiedImageError

from visacc.writing import write_atomic, write_json

_VIRIDIS = np.array(
    [
        [68, 1, 84],
        [72, 40, 120],
        [62, 74, 137],
        [49, 104, 142],
        [38, 130, 142],
        [31, 158, 137],
        [53, 183, 121],
        [110, 206, 88],
        [181, 222, 43],
        [253, 231, 37],
    ],
    dtype=np.float64,
)


def save_image(image: Image.Image, path: Path) -> None:
    write_atomic(path, image.save)


def save_json(data: Any, path: Path) -> None:
    """The record of a run; its prompts may hold what no UTF-8 file can."""
    write_json(path, data, indent=2, ascii_only=True)


def read_image(path: str | Path, *, exif: bool = False) -> Image.Image:
    """RGB picture of a file, fully decoded; of an animated one the first frame.

    Transparency is dropped, 16 bits become 8 by scaling (Pillow alone would clip them to white).

    Args:
        exif: turn the picture as its orientation tag says.

    Raises:
        ValueError: no picture, truncated, or of more pixels than ``PIL.Image.MAX_IMAGE_PIXELS`` (89 million), which is
            looked at before anything is decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on odd metadata; too many pixels are refused below
            with Image.open(path) as file:
                _check_size(file, path)
                file.load()
                return rgb(ImageOps.exif_transpose(file) if exif else file)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnidentifiedImageError as error:
        raise ValueError(f"cannot read image {path}: not a picture") from error
    except Exception as error:  # decoders raise anything on damaged files
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"cannot read image {path}: {error or type(error).__name__}") from error


def rgb(image: Image.Image) -> Image.Image:
    """A picture of any mode as RGB."""
    if image.mode == "F":
        raise ValueError(
            "its pixels are floating-point numbers, whose range is not known; save it with 8 or 16 bits"
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(
                "its pixels are 32-bit numbers, whose range is not known; save it with 8 or 16 bits"
            )
        image = Image.fromarray((values * 255 // 65535).astype(np.uint8))
    return image.convert("RGB")


def _check_size(image: Image.Image, path: str | Path) -> None:
    width, height = image.size
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise ValueError(
            f"{path} has {width} x {height} pixels, more than {limit:,}; raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        )
    if not width * height:
        raise ValueError(f"{path} has no pixels ({width} x {height})")


def contact_sheet(
    images: list[Image.Image], columns: int | None = None, cell: int = 128, gap: int = 4
) -> Image.Image:
    """All images on one sheet, scaled to at least ``cell`` pixels without smoothing small ones away."""
    width, height = images[0].size
    factor = max(1, cell // max(width, height))
    size = (width * factor, height * factor)
    columns = columns or min(len(images), max(1, round(len(images) ** 0.5 + 0.49)))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (size[0] + gap) + gap, rows * (size[1] + gap) + gap), "white")
    for i, image in enumerate(images):
        corner = (gap + i % columns * (size[0] + gap), gap + i // columns * (size[1] + gap))
        sheet.paste(image.convert("RGB").resize(size, Image.Resampling.NEAREST), corner)
    return sheet


def colourise(values: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1] -> uint8 RGB by the viridis map."""
    place = np.clip(values, 0, 1) * (len(_VIRIDIS) - 1)
    low = np.minimum(place.astype(int), len(_VIRIDIS) - 2)
    part = (place - low)[..., None]
    return (_VIRIDIS[low] * (1 - part) + _VIRIDIS[low + 1] * part).round().astype(np.uint8)


def commit_map(image: Image.Image, steps: np.ndarray, side: int = 384) -> Image.Image:
    """The picture beside the map of which step committed each token.

    Args:
        steps: int [H, W] step per grid cell (0 = never committed).
    """
    last = max(int(steps.max()), 1)
    heat = Image.fromarray(colourise((steps - 1) / max(last - 1, 1))).resize(
        (side, side), Image.Resampling.NEAREST
    )
    shown = image.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
    bar, gap, foot = 16, 12, 34
    canvas = Image.new("RGB", (2 * side + bar + 5 * gap + 24, side + 2 * gap + foot), "white")
    canvas.paste(shown, (gap, gap))
    canvas.paste(heat, (2 * gap + side, gap))
    scale = colourise(np.linspace(1, 0, side)[:, None].repeat(bar, 1))
    left = 3 * gap + 2 * side
    canvas.paste(Image.fromarray(scale), (left, gap))
    pen = ImageDraw.Draw(canvas)
    pen.text((left + bar + 4, gap), str(last), fill="black")
    pen.text((left + bar + 4, gap + side - 12), "1", fill="black")
    done = int((steps > 0).sum())
    pen.text(
        (gap, side + 2 * gap),
        f"step that committed each token: {done} tokens in {last} steps ({done / last:.2f} tokens a step)",
        fill="black",
    )
    return canvas
