"""Statistics and image files of other programs.

pytorch-fid, clean-fid custom statistics and LPD: keys mu, sigma. ADM reference: mu, sigma (pool), mu_s,
sigma_s (spatial), arr_0 (10 000 uint8 images). ADM samples: arr_0 [n, h, w, 3], optionally arr_1 labels.
Ours: mu, sigma, n, extractor. Images are streamed out of the archive, never loaded whole.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from visacc.metrics.stats import FeatureStats, Gaussian


def save_stats(path: str | Path, stats: FeatureStats | Gaussian) -> None:
    """Write mu, sigma, n, extractor; readable by pytorch-fid, clean-fid and LPD's torch-fidelity fork."""
    g = stats.gaussian() if isinstance(stats, FeatureStats) else stats
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp.npz")
    np.savez(
        temporary,
        mu=g.mean.cpu().numpy(),
        sigma=g.cov.cpu().numpy(),
        n=np.int64(-1 if g.n is None else g.n),
        extractor=np.array(g.extractor or ""),
    )
    os.replace(temporary, target)


def load_stats(path: str | Path, *, spatial: bool = False, extractor: str | None = None) -> Gaussian:
    """Statistics of any of the layouts above; spatial: the sFID pair of an ADM file.

    extractor: what a file without a record of its own is taken to hold. A recorded one that differs is
    refused.
    """
    keys = ("mu_s", "sigma_s") if spatial else ("mu", "sigma")
    try:
        with np.load(path, allow_pickle=False) as data:
            missing = [k for k in keys if k not in data.files]
            if missing:
                raise ValueError(
                    f"{path} is no statistics file: it holds {data.files}, needed {list(keys)}"
                    + (
                        " (sample images: give them as images, not as statistics)"
                        if "arr_0" in data.files
                        else ""
                    )
                )
            mean, cov = data[keys[0]], data[keys[1]]
            n = int(data["n"]) if "n" in data.files else -1
            recorded = str(data["extractor"]) if "extractor" in data.files else ""
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"cannot read statistics {path}: {error}") from error
    if recorded and extractor and recorded != extractor:
        raise ValueError(f"{path} was made with {recorded!r}, not with {extractor!r}")
    return Gaussian(
        torch.from_numpy(np.asarray(mean)),
        torch.from_numpy(np.asarray(cov)),
        n if n > 0 else None,
        recorded or extractor,
        Path(path).name,
    )


class NpzImages:
    """The arr_0 array [n, h, w, 3] uint8 of an ADM file, read row block by row block."""

    def __init__(self, path: str | Path, key: str = "arr_0"):
        self.path, self.key = Path(path), key
        with self._open() as (_, shape):
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
        with self._open() as (stream, _):
            _skip(stream, start * row)
            for i in range(start, stop, size):
                b = min(size, stop - i)
                data = stream.read(b * row)
                if len(data) != b * row:
                    raise ValueError(f"{self.path}: {self.key} is truncated after {i} images of {n}")
                block = np.frombuffer(data, np.uint8).reshape(b, h, w, c)
                yield torch.from_numpy(block.copy()).permute(0, 3, 1, 2).contiguous()


def _skip(stream, nbytes: int) -> None:  # type: ignore[no-untyped-def]
    while nbytes > 0:
        got = len(stream.read(min(nbytes, 1 << 24)))
        if got == 0:
            raise ValueError("file ends before the first requested image")
        nbytes -= got


class _Member:
    """Context manager: (stream after the .npy header, shape)."""

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key

    def __enter__(self):  # type: ignore[no-untyped-def]
        try:
            self.archive = zipfile.ZipFile(self.path)
            self.stream = self.archive.open(f"{self.key}.npy")
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(f"cannot read images {self.path}: {error}") from error
        except KeyError as error:
            raise ValueError(
                f"{self.path} has no array {self.key!r}: it holds {self.archive.namelist()}"
            ) from error
        version = np.lib.format.read_magic(self.stream)
        reader = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = reader(self.stream)
        if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] != 3:
            raise ValueError(
                f"{self.path}: {self.key} must be uint8 [n, h, w, 3] in C order, got {dtype} {shape}"
            )
        return self.stream, shape

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.archive.close()


def file_digest(path: str | Path, length: int = 12) -> str:
    """First hex digits of a file's sha256."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()[:length]
