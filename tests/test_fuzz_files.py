"""Damaged pictures, clips, arrays, statistics and transformers folders: refused in one line, in bounds."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import Canary, as_bytes, bent, damaged, memory_bound, noise, outcome, sings, survive
from llamagen_tiny import make_text
from PIL import Image

from visacc.eval.reference import is_statistics, open_images
from visacc.metrics.images import ImageFolder, file_sizes, load_image
from visacc.metrics.npz import NpzImages, load_stats, save_stats
from visacc.metrics.stats import FeatureStats
from visacc.models.hf.loading import load_hf
from visacc.models.llamagen import TextConditioner
from visacc.reading import read_array, read_arrays
from visacc.report.pictures import load as report_picture
from visacc.speculate.pipeline import _read, load_vlm
from visacc.train.parallel import read_codes
from visacc.video_io import read_clip

CASES = 120
FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "webp": "WEBP",
    "bmp": "BMP",
    "tif": "TIFF",
    "ppm": "PPM",
    "gif": "GIF",
}


def encoded(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    sink = io.BytesIO()
    (image or Image.fromarray(noise())).save(sink, kind, **options)
    return sink.getvalue()


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, pixels: bytes = b"") -> bytes:
    """A PNG by hand, with whatever header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


# ---- pictures ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_pictures(tmp_path: Path, suffix: str) -> None:
    """All loaders agree: a damaged picture is refused by name, or read."""
    path = tmp_path / f"picture.{suffix}"
    path.write_bytes(encoded(FORMATS[suffix]))

    def read() -> None:
        list(file_sizes([path]))  # leaves unreadable files out
        caption = _read(path, "what is it?", 0).caption
        assert caption.error is None or path.name in caption.error
        failed = []
        for reader in (load_image, report_picture, lambda p: ImageFolder([p]).read(p)):
            try:
                reader(path)
            except ValueError as error:
                failed.append(error)
        assert (caption.error is not None) == bool(failed)
        if failed:
            raise failed[0]

    with memory_bound(128):
        survive(read, path, damaged(path.read_bytes(), CASES, seed=5), least=CASES // 5)


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    """Grey, palette, transparent, CMYK and 16-bit pictures; of 16 bits the upper eight count, nothing is clipped."""
    base = Image.fromarray(noise())
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I;16"):
        path = tmp_path / f"{mode.replace(';', '')}.{'jpg' if mode in ('CMYK', 'YCbCr') else 'tif'}"
        if mode == "I;16":
            Image.fromarray(np.arange(144, dtype=np.uint16).reshape(12, 12) * 455).save(path)
        else:
            try:
                base.convert("RGBA" if mode == "RGBA" else mode).save(path)
            except (OSError, ValueError):  # Pillow does not write, or not make, this mode
                continue
        image = load_image(path)
        assert (image.mode, image.size) == ("RGB", (12, 12))
        assert report_picture(path).tobytes() == image.tobytes()
    path = tmp_path / "deep.png"
    values = np.linspace(0, 65535, 144).astype(np.uint16).reshape(12, 12)
    Image.fromarray(values).save(path)
    grey = np.asarray(load_image(path))
    assert (grey[..., 0] == values.astype(np.int64) * 255 // 65535).all()
    assert (grey == grey[..., :1]).all()


def test_numbers_that_are_no_colours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "numbers.tif"
    for values in (
        np.zeros((4, 4), np.float32),
        np.full((4, 4), -1, np.int32),
        np.full((4, 4), 70_000, np.int32),
    ):
        Image.fromarray(values).save(path)
        with pytest.raises(ValueError, match=r"numbers\.tif: its pixels are .* save it with 8 or 16 bits"):
            load_image(path)


def test_decompression_bombs_are_refused_by_their_header(tmp_path: Path) -> None:
    """Ten gigapixels in a few bytes, or really compressed zeros: nothing is decoded."""
    path = tmp_path / "bomb.png"
    contents = [
        png(100_000, 100_000),
        png(2**31 - 1, 1),
        png(1, 2**31 - 1),
        png(65_500, 65_500, depth=16, colour=6),
    ]
    contents.append(png(20_000, 20_000, colour=0, pixels=bytes(20_001 * 20_000)))
    for content in contents:
        path.write_bytes(content)
        with memory_bound(64):
            for read in (load_image, report_picture):
                with pytest.raises(ValueError, match=r"bomb\.png"):
                    read(path)
            assert "bomb.png" in str(_read(path, "what?", 0).caption.error)


def test_pictures_without_pixels(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    for content in (b"", png(0, 0), png(0, 5), png(5, 0), png(5, 5), b"\x89PNG\r\n\x1a\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"none\.png"):
            load_image(path)
    path = tmp_path / "none.ppm"
    path.write_bytes(b"P6 0 0 255\n")
    with pytest.raises(ValueError, match=r"none\.ppm"):
        load_image(path)


def test_of_an_animation_the_first_frame_counts(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "lime", "blue")]
    for suffix in ("gif", "webp", "png"):
        path = tmp_path / f"moving.{suffix}"
        options = {"lossless": True} if suffix == "webp" else {}
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, **options)
        assert load_image(path).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_damaged_clips(tmp_path: Path, suffix: str) -> None:
    from visacc.video_io import write_clip

    if suffix == "mp4":
        pytest.importorskip("av")
    path = tmp_path / f"clip.{suffix}"
    write_clip(np.stack([noise(16)] * 3 + [255 - noise(16)]), path, side=0)
    assert read_clip(path).shape[0] == 4
    with memory_bound(256):
        survive(
            lambda: read_clip(path), path, damaged(path.read_bytes(), CASES // 2, seed=6), least=CASES // 12
        )


def test_clips_that_would_fill_the_memory(tmp_path: Path) -> None:
    """Two frames, one of them shown for a minute and a half: equal frames are repeated, within bounds."""
    path = tmp_path / "long.gif"
    frames = [Image.fromarray(noise(400)), Image.fromarray(255 - noise(400))]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[10, 90_000])
    with memory_bound(64), pytest.raises(ValueError, match=r"long\.gif holds a clip of more than 2 GB"):
        read_clip(path)


# ---- arrays and statistics --------------------------------------------------------------------------------
def test_damaged_statistics(tmp_path: Path) -> None:
    path = tmp_path / "stats.npz"
    save_stats(path, FeatureStats.of(np.random.default_rng(0).normal(size=(20, 4)), "net"))
    assert load_stats(path).dim == 4

    def read() -> None:
        if is_statistics(path):
            load_stats(path)

    with memory_bound(64):
        survive(read, path, damaged(path.read_bytes(), 3 * CASES, seed=7), least=CASES)


def test_damaged_sample_arrays(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez_compressed(path, arr_0=np.stack([noise(8)] * 5))
    assert len(list(open_images(path).batches(2))) == 3
    with memory_bound(64):
        read = lambda: list(NpzImages(path).batches(2))  # noqa: E731
        survive(read, path, damaged(path.read_bytes(), 2 * CASES, seed=8), least=CASES // 2)


def zeros(path: Path, **arrays: tuple[str, tuple[int, ...]]) -> None:
    """An ``.npz`` whose headers claim shapes; up to 128 MB of zeros stand behind each, compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (dtype, shape) in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_2_0(stream, header)
                for _ in range(min(2, int(np.prod(shape, dtype=object)) >> 20)):
                    stream.write(bytes(1 << 26))


def test_statistics_of_absurd_sizes_are_refused_by_their_header(tmp_path: Path) -> None:
    path, wide = tmp_path / "wide.npz", 200_000
    for mu, sigma in (
        ((wide,), (wide, wide)),
        ((4,), (wide, wide)),
        ((2**60,), (2, 2)),
        ((2, 2**62), (2, 2)),
    ):
        zeros(path, mu=("<f8", mu), sigma=("<f8", sigma))
        with memory_bound(64), pytest.raises(ValueError, match=r"wide\.npz"):
            load_stats(path)
    zeros(path, arr_0=("|u1", (4, 200_000, 200_000, 3)))
    with memory_bound(64), pytest.raises(ValueError, match=r"wide\.npz: no image has 200000 x 200000 pixels"):
        NpzImages(path)


def test_arrays_of_objects_run_nothing(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "canary")
    assert sings(canary)
    path = tmp_path / "objects.npz"
    evil = np.array([canary], dtype=object)
    good = {"mu": np.zeros(1), "sigma": np.zeros((1, 1)), "n": np.int64(3), "extractor": np.array("net")}
    for name in good:
        np.savez(path, **{**good, name: evil}, allow_pickle=True)
        with pytest.raises(ValueError, match=r"objects\.npz"):
            load_stats(path)
    np.savez(path, arr_0=evil, allow_pickle=True)
    for read in (NpzImages, read_arrays):
        with pytest.raises(ValueError, match=r"objects\.npz"):
            read(path)
    path = tmp_path / "codes.npy"
    np.save(path, evil, allow_pickle=True)
    for call in (lambda: read_array(path), lambda: read_codes(tmp_path, 8, 4)):
        with pytest.raises(ValueError, match=r"codes\.npy"):
            call()
    assert not canary.sung


def test_damaged_codes(tmp_path: Path) -> None:
    path = tmp_path / "codes.npy"
    np.save(path, np.random.default_rng(0).integers(0, 8, (5, 4)))
    assert read_codes(tmp_path, 8, 4).shape == (5, 4)
    with memory_bound(64):
        survive(
            lambda: read_codes(tmp_path, 8, 4),
            path,
            damaged(path.read_bytes(), CASES, seed=9),
            least=CASES // 3,
        )


# ---- transformers folders ---------------------------------------------------------------------------------
def test_damaged_text_encoders(tmp_path: Path) -> None:
    """The T5 folder of a LlamaGen model: every file of it in turn."""
    folder = tmp_path / "text"
    make_text(folder)
    read = lambda: TextConditioner.from_pretrained(folder, 8)  # noqa: E731
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        path = folder / name
        survive(read, path, damaged(path.read_bytes(), 12, seed=19), least=0)
        if path.suffix == ".json":
            survive(read, path, as_bytes(bent(json.loads(path.read_text()), 12, seed=20)), least=0)


def test_bent_model_cards(tmp_path: Path) -> None:
    """config.json of folders that claim to be transformers checkpoints, before any weight is read."""
    path = tmp_path / "config.json"
    cards = [
        {"model_type": "chameleon", "vocab_size": 100, "architectures": ["X"], "z_loss_weight": 1.0},
        {"model_type": "Emu3", "vocab_size": 300_000, "hidden_size": 64, "num_attention_heads": 4, "rope_scaling": None},
        {"model_type": "llava", "vision_config": {"hidden_size": 32}, "text_config": {"hidden_size": 32}},
    ]  # fmt: skip

    def read() -> None:
        load_hf(tmp_path)

    for seed, card in enumerate(cards):
        survive(read, path, as_bytes(bent(card, CASES // 3, seed=21 + seed)))
        survive(read, path, damaged(json.dumps(card).encode(), CASES // 4, seed=24))
    settings = tmp_path / "generation_config.json"
    path.write_text(json.dumps(cards[0]))
    survive(read, settings, as_bytes(bent({"visacc": {"family": "anole"}}, CASES // 2, seed=25)))
    for content in (b"", b"{", b"[]", b'{"model_type": "llava"}', b'{"model_type": []}'):
        path.write_bytes(content)
        assert not outcome(lambda: load_vlm(str(tmp_path)), path, f"load_vlm, {content!r}")
