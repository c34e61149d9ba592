"""Statistics and image files of other programs.

pytorch-fid, clean-fid custom statistics and LPD: keys mu, sigma. ADM reference: mu, sigma (pool), mu_s,
sigma_s (spatial), arr_0 (10 000 uint8 images). ADM samples: arr_0 [n, h, w, 3], optionally arr_1 labels.
Ours: mu, sigma, n, extractor. Images are streamed out of the archive, never loaded whole.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image

from visacc.metrics.stats import FeatureStats, Gaussian
from visacc.reading import naming
from visacc.writing import write_atomic


def save_stats(path: str | Path, stats: FeatureStats | Gaussian) -> None:
    """Write mu, sigma, n, extractor; readable by pytorch-fid, clean-fid and LPD's torch-fidelity fork."""
    g = stats.gaussian() if isinstance(stats, FeatureStats) else stats

    def write(part: Path) -> None:
        with open(part, "wb") as file:  # a path without the suffix would get a second one
            np.savez(
                file,
                mu=g.mean.cpu().numpy(),
                sigma=g.cov.cpu().numpy(),
                n=np.int64(-1 if g.n is None else g.n),
                extractor=np.array(g.extractor or ""),
            )

    write_atomic(Path(path), write)


def load_stats(path: str | Path, *, spatial: bool = False, extractor: str | None = None) -> Gaussian:
    """Statistics of any of the layouts above; spatial: the sFID pair of an ADM file.

    extractor: what a file without a record of its own is taken to hold. A recorded one that differs is
    refused.
    """
    keys = ("mu_s", "sigma_s") if spatial else ("mu", "sigma")
    held = members(path)
    missing = [k for k in keys if k not in held]
    if missing:
        raise ValueError(
            f"{path} is no statistics file: it holds {held}, needed {list(keys)}"
            + (" (sample images: give them as images, not as statistics)" if "arr_0" in held else "")
        )
    # shapes come before contents: a small file can inflate to gigabytes
    mean, cov = (_small(path, key, LARGEST**power) for power, key in enumerate(keys, 1))
    n = _small(path, "n", 1).reshape(()) if "n" in held else np.int64(-1)
    recorded = str(_small(path, "extractor", 1).reshape(())) if "extractor" in held else ""
    if any(array.dtype.kind not in "fiu" for array in (mean, cov, n)):
        raise ValueError(f"{path} holds no numbers in {keys[0]}, {keys[1]} or n")
    if recorded and extractor and recorded != extractor:
        raise ValueError(f"{path} was made with {recorded!r}, not with {extractor!r}")
    with naming(path):
        return Gaussian(
            torch.from_numpy(mean.astype(np.float64)),
            torch.from_numpy(cov.astype(np.float64)),
            int(n) if n > 0 else None,
            recorded or extractor,
            Path(path).name,
        )


LARGEST = 1 << 14
"""Features beyond which statistics are refused: their covariance would take more than 2 GB."""


def members(path: str | Path) -> list[str]:
    """Names of the arrays in an ``.npz`` file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"cannot read {path}: truncated or not an .npz file ({error})") from error


def _small(path: str | Path, key: str, most: int) -> np.ndarray:
    """One array of an ``.npz`` file, of at most so many elements by its header."""
    with _Member(Path(path), key) as (_, shape, _, dtype):
        if math.prod(shape) > most or dtype.itemsize > 4096:
            raise ValueError(f"{path}: {key} of shape {shape} is larger than any statistics")
        if dtype.hasobject:
            raise ValueError(f"{path}: {key} holds objects, not numbers; it is not loaded")
    try:
        with np.load(path, allow_pickle=False) as data:
            return data[key]
    except Exception as error:  # zip, zlib and header errors have no common class
        raise ValueError(f"cannot read statistics {path}: {error}") from error


class NpzImages:
    """The arr_0 array [n, h, w, 3] uint8 of an ADM file, read row block by row block."""

    def __init__(self, path: str | Path, key: str = "arr_0"):
        self.path, self.key = Path(path), key
        with self._open() as (_, shape, fortran, dtype):
            if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] != 3:
                raise ValueError(
                    f"{self.path}: {self.key} must be uint8 [n, h, w, 3] in C order, got {dtype} {shape}"
                )
            if not 0 < shape[1] * shape[2] <= (Image.MAX_IMAGE_PIXELS or math.inf):
                raise ValueError(f"{self.path}: no image has {shape[1]} x {shape[2]} pixels")
            self.shape = shape

    def _open(self) -> _Member:
        return _Member(self.path, self.key)

    def __len__(self) -> int:
        return self.shape[0]

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """uint8 tensors [b, 3, h, w] of rows start..stop, in file order."""
        n, h, w, c = self.shape
        stop = n if stop is None else min(stop, n)
        row = h * w * c
        with self._open() as (stream, *_):
            self._skip(stream, start * row)
            for i in range(start, stop, size):
                b = min(size, stop - i)
                data = self._read(stream, b * row)
                if len(data) != b * row:
                    raise ValueError(f"{self.path}: {self.key} is truncated after {i} images of {n}")
                block = np.frombuffer(data, np.uint8).reshape(b, h, w, c)
                yield torch.from_numpy(block.copy()).permute(0, 3, 1, 2).contiguous()

    def _read(self, stream: IO[bytes], nbytes: int) -> bytes:
        try:
            return stream.read(nbytes)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
            raise ValueError(f"{self.path}: {self.key} is damaged ({error})") from error

    def _skip(self, stream: IO[bytes], nbytes: int) -> None:
        while nbytes > 0:
            got = len(self._read(stream, min(nbytes, 1 << 24)))
            if got == 0:
                raise ValueError(f"{self.path} ends before the first requested image")
            nbytes -= got


class _Member:
    """Context manager: (stream after the .npy header, shape, Fortran order, dtype)."""

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key

    def __enter__(self) -> tuple[IO[bytes], tuple[int, ...], bool, np.dtype]:
        self.open = ExitStack()
        try:
            return self._enter()
        except BaseException:
            self.open.close()
            raise

    def _enter(self) -> tuple[IO[bytes], tuple[int, ...], bool, np.dtype]:
        held = members(self.path)
        if self.key not in held:
            raise ValueError(f"{self.path} has no array {self.key!r}: it holds {held}")
        try:
            archive = self.open.enter_context(zipfile.ZipFile(self.path))
            stream = self.open.enter_context(archive.open(f"{self.key}.npy"))
            old = np.lib.format.read_magic(stream) == (1, 0)
            reader = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = reader(stream)
        except Exception as error:  # zip, zlib and header errors have no common class
            raise ValueError(f"cannot read {self.key} of {self.path}: {error}") from error
        if any(side < 0 for side in shape):
            raise ValueError(f"{self.path}: {self.key} has shape {shape}")
        return stream, shape, fortran, dtype

    def __exit__(self, *_: object) -> None:
        self.open.close()


def file_digest(path: str | Path, length: int = 12) -> str:
    """First hex digits of a file's sha256."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()[:length]
