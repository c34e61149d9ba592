"""Image folders: natural order, checked reading, batches of equal size, named faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visacc.pictures import read_image
from visacc.reading import read_object

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".tif", ".tiff")


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key that puts 2.png before 10.png on every machine."""
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", text) if t]


def list_images(folder: str | Path, recursive: bool = False) -> list[Path]:
    """Image files of a folder in natural order of their relative path; an empty folder is refused.

    Of a folder that ``visacc generate`` finished, its images: no contact sheet, no traces, nothing of an earlier run.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder of images")
    files = _generated(root) or (root.rglob("*") if recursive else root.iterdir())
    found = [
        f for f in files if f.suffix.lower() in EXTENSIONS and f.is_file() and not f.name.startswith(".")
    ]
    if not found:
        raise ValueError(f"no images in {root} (looked for {', '.join(EXTENSIONS)})")
    return sorted(found, key=lambda f: natural_key(f.relative_to(root).as_posix()))


def _generated(root: Path) -> list[Path]:
    """The images that the ``stats.json`` of a generation run names; empty where there is no such run."""
    stats = root / "stats.json"
    if not stats.is_file():
        return []
    try:
        record = read_object(stats)
    except ValueError:
        return []
    rows = record.get("images")
    if "decoder" not in record or not isinstance(rows, list):
        return []
    names = [row.get("file") if isinstance(row, dict) else None for row in rows]
    files = [root / name for name in names if isinstance(name, str) and Path(name).name == name]
    return files if len(files) == len(rows) and all(f.is_file() for f in files) else []


def load_image(path: str | Path, *, exif: bool = False) -> Image.Image:
    """RGB image, fully decoded (:func:`visacc.pictures.read_image`). Transparency is dropped as `convert("RGB")` drops
    it; exif: turn as the tag says.
    """
    return read_image(path, exif=exif)


def to_uint8(images: Tensor | np.ndarray, encoding: str = "round") -> Tensor:
    """Checked images as uint8 [b, 3, h, w]. Float input must lie in [0, 1].

    encoding: "round" = round(255 x) (LPD, torchvision), "trunc" = floor(127.5 (2x - 1) + 128) (ADM,
    LlamaGen); equal except at exact ties. A plain floor(255 x) shifts half of all bytes and is not offered.
    """
    t = torch.as_tensor(images)
    if t.ndim == 3:
        t = t[None]
    if t.ndim != 4 or t.shape[1] != 3:
        raise ValueError(f"images must be [b, 3, h, w], got {tuple(t.shape)}")
    if t.dtype == torch.uint8:
        return t
    if not t.is_floating_point():
        raise ValueError(f"images must be uint8 or float in [0, 1], got {t.dtype}")
    t = t.float()
    if t.numel() == 0:
        return t.to(torch.uint8)
    low, high = float(t.min()), float(t.max())
    if not (low >= 0 and high <= 1):  # also catches NaN
        raise ValueError(f"float images must lie in [0, 1], got values in [{low:.4g}, {high:.4g}]")
    if encoding == "round":
        return (t * 255).round().to(torch.uint8)
    if encoding == "trunc":
        return (127.5 * (2 * t - 1) + 128).clamp(0, 255).to(torch.uint8)
    raise ValueError(f"encoding must be 'round' or 'trunc', got {encoding!r}")


def pil_to_tensor(image: Image.Image) -> Tensor:
    """uint8 [3, h, w]."""
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1).contiguous()


def tensor_to_pil(image: Tensor) -> Image.Image:
    """PIL image of uint8 [3, h, w]."""
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy())


def _center_crop_lanczos_256(image: Image.Image) -> Image.Image:
    side = min(image.size)
    left, top = (
        round((image.width - side) / 2),
        round((image.height - side) / 2),
    )  # half to even, as torchvision
    return image.crop((left, top, left + side, top + side)).resize((256, 256), Image.Resampling.LANCZOS)


def _bicubic_256(image: Image.Image) -> Image.Image:
    if image.size == (256, 256):
        return image
    x = torch.nn.functional.interpolate(pil_to_tensor(image)[None].float() / 255, (256, 256), mode="bicubic")
    return tensor_to_pil(to_uint8(x.clamp(0, 1), "trunc")[0])


def _squeeze_299(image: Image.Image) -> Image.Image:
    """299 x 299 whatever the aspect ratio, bilinear without antialias, back to bytes."""
    x = torch.nn.functional.interpolate(pil_to_tensor(image)[None].float(), (299, 299), mode="bilinear")
    return tensor_to_pil(x.round().to(torch.uint8)[0])


PREPARE: dict[str, Callable[[Image.Image], Image.Image]] = {
    "as-is": lambda image: image,
    "center-crop-lanczos-256": _center_crop_lanczos_256,  # GigaGAN's script: LANTERN, LlamaGen text to image
    "squeeze-299": _squeeze_299,  # SJD's Inception Score and CLIP score
    "bicubic-256": _bicubic_256,  # LlamaGen class-conditional: bicubic without antialias
}


@dataclass
class ImageFolder:
    """A folder (or list) of images read in order.

    mixed_sizes: allow images of different sizes (a reference of photos); refused by default for generated
    sets. on_error: "raise" at an unreadable file, or "skip" it, collecting its name in `skipped`.
    """

    files: Sequence[Path]
    prepare: str = "as-is"
    mixed_sizes: bool = False
    on_error: str = "raise"
    skipped: list[str] = field(default_factory=list)
    _first: tuple[Path, tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.prepare not in PREPARE:
            raise ValueError(f"unknown image preparation {self.prepare!r}; known: {', '.join(PREPARE)}")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")

    @classmethod
    def of(cls, folder: str | Path, **options: object) -> ImageFolder:
        return cls(list_images(folder), **options)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, path: Path) -> Tensor | None:
        """uint8 [3, h, w], None for a skipped file."""
        try:
            image = load_image(path)
        except ValueError as error:
            if self.on_error == "raise":
                raise ValueError(
                    f"{error} (on_error='skip' leaves unreadable files out and counts them)"
                ) from error
            self.skipped.append(str(path))
            return None
        image = PREPARE[self.prepare](image)
        if not self.mixed_sizes:
            if self._first is None:
                self._first = (path, image.size)
            elif image.size != self._first[1]:
                raise ValueError(
                    f"images of different sizes: {self._first[0].name} is {self._first[1]}, "
                    f"{path.name} is {image.size}; a generated set must be uniform "
                    "(mixed_sizes=True reads it anyway)"
                )
        return pil_to_tensor(image)

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[list[Tensor]]:
        """Lists of up to `size` images uint8 [3, h, w] of files start..stop; boundaries depend on indices
        only.
        """
        stop = len(self.files) if stop is None else min(stop, len(self.files))
        for i in range(start, stop, size):
            batch = [
                image for f in self.files[i : min(i + size, stop)] if (image := self.read(f)) is not None
            ]
            if batch:
                yield batch


def prepared(path: str | Path, prepare: str = "as-is") -> Tensor:
    """One image file after its preparation, uint8 [3, h, w]."""
    if prepare not in PREPARE:
        raise ValueError(f"unknown image preparation {prepare!r}; known: {', '.join(PREPARE)}")
    return pil_to_tensor(PREPARE[prepare](load_image(path)))


def resolution_name(sizes: Iterable[tuple[int, int]]) -> str:
    """(width, height) pairs as protocols state them: "512x512", "mixed", or "" if there are none."""
    found: set[tuple[int, int]] = set()
    for size in sizes:
        found.add(tuple(size))  # type: ignore[arg-type]
        if len(found) > 1:
            return "mixed"
    return "{}x{}".format(*found.pop()) if found else ""


def file_sizes(files: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """(width, height) of image files, read from their headers; unreadable ones are left out."""
    for path in files:
        try:
            with Image.open(path) as image:
                yield image.size
        except Exception:  # decoders raise anything on damaged files
            continue


def group_by_size(images: Sequence[Tensor]) -> list[tuple[list[int], Tensor]]:
    """[(indices, stacked [k, 3, h, w])] so that resizing runs on whole batches."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, image in enumerate(images):
        groups.setdefault(tuple(image.shape), []).append(i)
    return [(index, torch.stack([images[i] for i in index])) for index in groups.values()]
