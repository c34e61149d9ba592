"""Pictures of a run as data URIs: one gallery item per prompt and seed, with every method's picture and heat map."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from visacc.pictures import colourise, rgb
from visacc.report.model import Method, Picture
from visacc.traces import spaced

LARGEST = 64_000_000
"""Pixels of a picture beyond which a file is refused: no model here draws that much, a prepared file may."""


@dataclass(frozen=True)
class Shot:
    """One method's picture in an item: data URIs, last step of its map, whether it equals the first method's."""

    label: str
    image: str
    heat: str = ""
    last: int = 0
    steps: str = ""
    verdict: str = ""
    same_as: str = ""


@dataclass
class Item:
    """A prompt with a seed; ``shots`` has one entry per method, ``None`` where its picture is missing."""

    prompt: str
    seed: int
    width: int
    height: int
    shots: list[Shot | None] = field(default_factory=list)


def data_uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def load(path: Path) -> Image.Image:
    """RGB image of a file. Raises ``ValueError`` for files that are no (sane) pictures."""
    try:
        with Image.open(path) as image:
            if image.width * image.height > LARGEST:
                raise ValueError(
                    f"{path} has {image.width} x {image.height} pixels, more than a report takes"
                )
            return rgb(image)
    except Image.DecompressionBombError:
        raise ValueError(f"{path} has more pixels than a report takes") from None
    except Exception as error:  # decoders raise anything on damaged files
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} is not a readable picture: {error}") from None


def embed(image: Image.Image, side: int) -> str:
    """Data URI: PNG up to ``side`` pixels, larger pictures scaled down to it as WebP."""
    sink = io.BytesIO()
    if max(image.size) <= side:
        image.save(sink, "PNG", optimize=True)
        return data_uri(sink.getvalue(), "png")
    image = image.copy()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(sink, "WEBP", quality=90)
    return data_uri(sink.getvalue(), "webp")


def heat(grid: np.ndarray) -> tuple[str, int]:
    """(data URI, last step) of a grid [H, W] of steps, one pixel per cell, first step dark, last step bright."""
    first, last = float(grid.min()), float(grid.max())
    pixels = colourise((grid - first) / max(last - first, 1e-9))
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG", optimize=True)
    return data_uri(sink.getvalue(), "png"), round(last)


def gallery(methods: Sequence[Method], count: int, side: int) -> tuple[list[Item], list[str]]:
    """Up to ``count`` items, evenly spread over those that most methods have, and remarks on missing files.

    Raises:
        ValueError: a picture file is damaged.
    """
    have: dict[tuple[str, int], int] = {}
    for method in methods:
        for key in method.pictures:
            have[key] = have.get(key, 0) + 1
    most = max(have.values(), default=0)
    keys = [key for key, n in have.items() if n == most]
    items, missing = [], 0
    for i in spaced(len(keys), count):
        pictures = [method.pictures.get(keys[i]) for method in methods]
        present = [p if p is not None and p.path.is_file() else None for p in pictures]
        missing += sum(p is not None and q is None for p, q in zip(pictures, present, strict=True))
        if any(p is not None for p in present):
            items.append(_item(methods, present, side))
    return items, [f"{missing} picture files of this run are missing."] if missing else []


def _item(methods: Sequence[Method], pictures: Sequence[Picture | None], side: int) -> Item:
    shown = next(p for p in pictures if p is not None)
    item = Item(shown.prompt, shown.seed, 0, 0)
    first: dict[bytes, str] = {}  # pixels -> the method that drew them first
    uris: dict[bytes, str] = {}
    for method, picture in zip(methods, pictures, strict=True):
        if picture is None:
            item.shots.append(None)
            continue
        image = load(picture.path)
        if not item.width:
            item.width, item.height = image.size
        key = hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
        same = first.get(key, "")
        first.setdefault(key, method.label)
        if key not in uris:
            uris[key] = embed(image, side)
        uri, last = heat(picture.grid) if picture.grid is not None else ("", 0)
        steps = "" if picture.steps is None else f"{picture.steps:g} steps"
        item.shots.append(Shot(method.label, uris[key], uri, last, steps, picture.verdict, same))
    return item
