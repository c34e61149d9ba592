"""What is packaged: the list is written by hand (sub-packages lie beside visacc/), so it is checked against the folders, and
wheel and sdist are built and looked into.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
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


def test_code_files_stay_small():
    """Modules are meant to be read whole."""
    long = {}
    for top in ("visacc", "models", "kernels", "metrics", "scripts", "examples", "tests"):
        for file in (ROOT / top).rglob("*.py"):
            count = len(file.read_text().splitlines())
            if count > 400:
                long[str(file.relative_to(ROOT))] = count
    assert not long


# ---- what is built ----------------------------------------------------------------------------------------
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""


def build(kind: str, source: Path, target: Path) -> Path:
    """A wheel or an sdist of a source tree, by the back end itself (no network, no environment of its own)."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist) of a copy of this tree without its history, so that nothing is left in it."""
    pytest.importorskip("setuptools", minversion="77")
    root = tmp_path_factory.mktemp("build")
    source = root / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("visacc", "models", "kernels", "metrics", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    sdist = build("sdist", source, root / "dist")
    return build("wheel", source, root / "dist"), sdist


def wanted() -> set[str]:
    """Every file that an installation needs, by its place in it: code and package data."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for package, folder in config["package-dir"].items():
        place = package.replace(".", "/")
        found |= {f"{place}/{file.name}" for file in (ROOT / folder).glob("*.py")}
        for pattern in config["package-data"].get(package, ()):
            files = [f for f in (ROOT / folder).glob(pattern) if f.is_file()]
            # trained weights may not be in this checkout; everything else must be there
            assert files or pattern == "assets/*", (
                f"nothing matches the package data {pattern!r} of {package}"
            )
            found |= {f"{place}/{f.relative_to(ROOT / folder).as_posix()}" for f in files}
    return found


def test_type_hints_are_exported_with_every_package() -> None:
    """One marker at the top covers the sub-packages, which are all installed below it."""
    assert (ROOT / "visacc" / "py.typed").is_file()
    assert "visacc/py.typed" in wanted()


@pytest.mark.slow
def test_wheel_holds_what_an_installation_needs(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        assert wheel.testzip() is None
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = {
            Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name
        }
    assert names == wanted()
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"} <= set(info)
    assert "Tag: py3-none-any" in info["WHEEL"]
    assert "visacc = visacc.cli:main" in info["entry_points.txt"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    head, _, text = info["METADATA"].partition("\n\n")
    for line in (
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        "License-Expression: Apache-2.0",
    ):
        assert line in head
    for requirement in project["dependencies"]:
        assert f"Requires-Dist: {requirement}" in head
    for extra in project["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in head
    assert text.strip() == (ROOT / "README.md").read_text().strip()


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "PKG-INFO"):
        assert (source / name).is_file(), name
    again = build("wheel", source, tmp_path / "dist")
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        assert sorted(one.namelist()) == sorted(two.namelist())
        for name in one.namelist():
            assert one.read(name) == two.read(name), name


@pytest.mark.slow
def test_the_wheel_alone_is_enough(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Unpacked somewhere else, with the tree nowhere in sight: it imports, lists and generates a picture."""
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import visacc, visacc.cli;"
        " assert visacc.__file__.startswith(sys.path[0]), visacc.__file__; visacc.cli.main(sys.argv[1:])"
    )
    out = tmp_path / "out"
    line = ["generate", "a red circle", "-d", "mc-sjd", "--window", "16", "-q", "-o", str(out)]
    for arguments in (["list"], line):
        command = [sys.executable, "-S", "-c", code, str(tmp_path / "site"), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(site.getsitepackages())}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "000.png").is_file()
