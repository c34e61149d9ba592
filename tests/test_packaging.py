"""The package list is written by hand (sub-packages lie beside visacc/), so it is checked against the folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")


def test_every_folder_with_code_is_packaged():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for top in ("visacc", "models", "kernels", "metrics"):
        for file in (ROOT / top).rglob("*.py"):
            parts = file.parent.relative_to(ROOT).parts
            found.add(".".join(parts if top == "visacc" else ("visacc", *parts)))
    assert set(config["packages"]) == found
    assert set(config["package-dir"]) == found
    for package, folder in config["package-dir"].items():
        assert (ROOT / folder).is_dir(), package


def test_code_files_outside_tests_stay_small():
    """Modules are meant to be read whole: a guard, with some slack over the aim of 400 lines."""
    long = {}
    for top in ("visacc", "models", "kernels", "metrics", "scripts"):
        for file in (ROOT / top).rglob("*.py"):
            count = len(file.read_text().splitlines())
            if count > 480:
                long[str(file.relative_to(ROOT))] = count
    assert not long
