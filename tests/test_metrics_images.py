"""What the metrics read: images, folders, statistics files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metric_cases import Patches, pictures
from PIL import Image

import visacc.metrics as vm
from visacc.metrics.images import ImageFolder, list_images, load_image, natural_key, to_uint8
from visacc.metrics.npz import NpzImages, load_stats, save_stats
from visacc.metrics.stats import FeatureStats

# ---------------------------------------------------------------- images and files


def test_natural_order() -> None:
    names = ["10.png", "2.png", "a10b2.png", "a9b11.png", "1.png"]
    assert sorted(names, key=natural_key) == ["1.png", "2.png", "10.png", "a9b11.png", "a10b2.png"]


def test_float_images_are_checked() -> None:
    assert to_uint8(torch.tensor([0.0, 0.5, 1.0]).reshape(1, 3, 1, 1)).flatten().tolist() == [0, 128, 255]
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(to_uint8(x, "round"), to_uint8(x, "trunc"))  # equal off exact ties
    for bad, message in (
        (torch.full((1, 3, 2, 2), 1.2), r"\[1.2, 1.2\]"),
        (torch.full((1, 3, 2, 2), torch.nan), "nan"),
        (torch.full((1, 3, 2, 2), -0.1), r"\[-0.1"),
        (torch.zeros(1, 4, 2, 2), "must be"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.int32), "uint8 or float"),
    ):
        with pytest.raises(ValueError, match=message):
            to_uint8(bad)
    with pytest.raises(ValueError, match="encoding must be"):
        to_uint8(x, "floor")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, image in enumerate(pictures(11, 0)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
    return tmp_path


def test_folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = list_images(folder)
    assert [f.name for f in files] == [f"{i}.png" for i in range(11)]
    assert [len(b) for b in ImageFolder(files).batches(4)] == [4, 4, 3]
    part = list(ImageFolder(files).batches(4, 3, 8))
    assert [len(b) for b in part] == [4, 1]
    assert torch.equal(part[0][0], pictures(11, 0)[3])
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="no images in"):
        list_images(empty)
    with pytest.raises(ValueError, match="is not a folder"):
        list_images(empty / "nowhere")


def test_damaged_images_are_named_or_counted(folder: Path) -> None:
    whole = (folder / "4.png").read_bytes()
    (folder / "4.png").write_bytes(whole[: len(whole) // 2])
    (folder / "7.png").write_text("not an image")
    with pytest.raises(ValueError, match=r"cannot read image .*4\.png"):
        list(ImageFolder.of(folder).batches(4))
    reader = ImageFolder.of(folder, on_error="skip")
    assert sum(len(b) for b in reader.batches(4)) == 9
    assert [Path(s).name for s in reader.skipped] == ["4.png", "7.png"]
    with pytest.raises(ValueError, match="on_error must be"):
        ImageFolder.of(folder, on_error="ignore")


def test_mixed_sizes_are_refused_unless_asked_for(folder: Path) -> None:
    Image.new("RGB", (9, 12)).save(folder / "3.png")
    with pytest.raises(ValueError, match=r"0\.png is \(12, 12\), 3\.png is \(9, 12\)"):
        list(ImageFolder.of(folder).batches(4))
    rows = Patches()([i for b in ImageFolder.of(folder, mixed_sizes=True).batches(11) for i in b])["features"]
    assert rows.shape == (11, 27)
    alone = Patches()(torch.from_numpy(np.zeros((1, 3, 12, 9), np.uint8)))["features"]
    assert torch.equal(rows[3], alone[0])


def test_gigagans_preparation() -> None:
    """Centre square with torchvision's rounding (an odd margin of 3 starts at 2), then Lanczos to 256."""
    from visacc.metrics.images import PREPARE

    rng = np.random.default_rng(0)
    for width, height, left, top in ((7, 4, 2, 0), (5, 4, 0, 0), (4, 11, 0, 4), (6, 6, 0, 0)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        side = min(width, height)
        want = image.crop((left, top, left + side, top + side)).resize((256, 256), Image.Resampling.LANCZOS)
        assert PREPARE["center-crop-lanczos-256"](image).tobytes() == want.tobytes()
    small = PREPARE["bicubic-256"](Image.new("RGB", (384, 384), (10, 200, 30)))
    assert small.size == (256, 256)
    assert small.getpixel((9, 9)) == (10, 200, 30)


def test_transparency_and_rotation(tmp_path: Path) -> None:
    Image.new("RGBA", (3, 2), (10, 20, 30, 0)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").getpixel((0, 0)) == (10, 20, 30)
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (4, 2)).save(tmp_path / "b.jpg", exif=exif)
    assert load_image(tmp_path / "b.jpg").size == (4, 2)
    assert load_image(tmp_path / "b.jpg", exif=True).size == (2, 4)


def test_statistics_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6))
    stats = FeatureStats.of(x, "patches@none/area-3")
    save_stats(tmp_path / "ours.npz", stats)
    back = load_stats(tmp_path / "ours.npz")
    assert (back.n, back.extractor) == (50, "patches@none/area-3")
    assert vm.frechet(back, stats) == pytest.approx(0, abs=1e-12)
    mu, sigma = x.mean(0), np.cov(x.T)
    np.savez(tmp_path / "pytorch-fid.npz", mu=mu, sigma=sigma)
    np.savez_compressed(tmp_path / "clean-fid.npz", mu=mu.astype(np.float32), sigma=sigma)
    np.savez(tmp_path / "adm.npz", mu=mu, sigma=sigma, mu_s=mu[:2], sigma_s=sigma[:2, :2], arr_0=np.zeros((2, 2, 2, 3), np.uint8))  # fmt: skip  # noqa: E501
    for name in ("pytorch-fid", "clean-fid", "adm"):
        got = load_stats(tmp_path / f"{name}.npz")
        assert got.n is None
        assert vm.frechet(got, stats) == pytest.approx(0, abs=1e-10)
    assert load_stats(tmp_path / "adm.npz", spatial=True).dim == 2
    np.savez(tmp_path / "samples.npz", arr_0=np.zeros((2, 2, 2, 3), np.uint8))
    with pytest.raises(ValueError, match="give them as images"):
        load_stats(tmp_path / "samples.npz")
    with pytest.raises(ValueError, match="was made with"):
        load_stats(tmp_path / "ours.npz", extractor="another")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 nothing")
    for reader in (load_stats, NpzImages):
        with pytest.raises(ValueError, match="cannot read"):
            reader(tmp_path / "broken.npz")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_image_files_are_streamed(tmp_path: Path, save: Any) -> None:
    images = np.random.default_rng(0).integers(0, 256, (23, 5, 7, 3), dtype=np.uint8)
    save(tmp_path / "a.npz", arr_0=images, arr_1=np.arange(23))
    source = NpzImages(tmp_path / "a.npz")
    assert len(source) == 23
    got = torch.cat(list(source.batches(4)))
    assert torch.equal(got, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert torch.equal(torch.cat(list(source.batches(4, 9, 20))), got[9:20])
    save(tmp_path / "b.npz", arr_0=images.astype(np.float32))
    with pytest.raises(ValueError, match="must be uint8"):
        NpzImages(tmp_path / "b.npz")
    save(tmp_path / "c.npz", other=images)
    with pytest.raises(ValueError, match="has no array 'arr_0'"):
        NpzImages(tmp_path / "c.npz")
