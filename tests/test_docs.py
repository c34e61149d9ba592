"""The documentation is true: its Python blocks run, its commands and options exist, its pages are complete."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import (
    PAGES,
    ROOT,
    Block,
    blocks,
    check_command,
    check_names,
    commands,
    processes,
    python_blocks,
    shell_commands,
    visacc_arguments,
)
from doc_runs import LEFT_OUT, SHELL_PAGES, run_page
from launch import torchrun

from visacc import registry
from visacc.registry import decoder_entries

SEVERAL = [b for page in PAGES for b in python_blocks(page) if processes(b)]
MARKED = [b for page in PAGES for b in python_blocks(page) if not b.runs and b not in SEVERAL]
RUNNING = [
    page
    for page in PAGES
    if page.relative_to(ROOT).as_posix() in SHELL_PAGES or any(b.runs for b in python_blocks(page))
]
COMMANDS = [c for page in PAGES for c in commands(page)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def fresh_plugins() -> Iterator[None]:
    """A page may install a package with a decoder; it is gone again afterwards."""
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()
    sys.modules.pop("visacc_replay", None)


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
@pytest.mark.usefixtures("fresh_plugins")
def test_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ran = run_page(page, tmp_path, monkeypatch)
    if name_of(page) in SHELL_PAGES:
        assert any("visacc" in line for line in ran)


@pytest.mark.parametrize("block", SEVERAL, ids=lambda b: b.where)
def test_programs_of_several_processes_run(block: Block, tmp_path: Path) -> None:
    # PyTorch's gloo threads may abort an interpreter that ends while they still run (pytorch/pytorch 179291)
    ending = "\nimport os\nfrom visacc.eval.world import leave\nleave(together=True)\nos._exit(0)\n"
    (tmp_path / "program.py").write_text(block.text + ending)
    done = torchrun("program.py", processes=processes(block), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_left_out_is_still_there() -> None:
    for start, reason in LEFT_OUT:
        assert len(reason) > 3
        assert any(
            shlex.join(c.words).startswith(start) for c in COMMANDS if c.where.split(":")[0] in SHELL_PAGES
        ), start


@pytest.mark.parametrize("block", MARKED, ids=lambda b: b.where)
def test_marked_blocks_compile_and_use_names_that_exist(block: Block) -> None:
    assert block.mark is not None
    assert len(block.mark[1]) > 3, "say why the block is not run"
    check_names(block)


def test_blocks_state_their_language() -> None:
    """A block with an import is Python, and must say so to be run."""
    for page in PAGES:
        for block in blocks(page):
            if block.language != "python":
                assert not re.search(r"(?m)^(import|from) \w", block.text), f"{block.where} looks like Python"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for command in commands(page):
        check_command(command)


def test_there_are_commands_to_check() -> None:
    assert sum(visacc_arguments(c.words) is not None for c in COMMANDS) > 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("visacc genrate x", "genrate"),
        ("visacc generate x --windw 3", "windw"),
        ("visacc generate x -d mc-sdj", "mc-sdj"),
        ("visacc generate x -d zipar -O windw=3", "windw"),
        ("visacc bench decoders -d ar -d zipar:windw=3", "windw"),
        ("accelerate launch --num_procs 2 -m visacc eval run a.yaml", "num_procs"),
        ("python scripts/no_such.py", "no_such"),
        ("python scripts/steps_t2i.py --nothing", "nothing"),
        ("pip install 'visacc[nothing]'", "nothing"),
    ],
)
def test_wrong_commands_are_found(line: str, message: str) -> None:
    (command,) = shell_commands(line, "here")
    with pytest.raises((AssertionError, ValueError), match=message):
        check_command(command)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('visacc.load("llamagen-t2i-xl-521")', "llamagen-t2i-xl-521"),
        ('visacc.load("shapes-t2i", "zipar", windw=3)', "windw"),
        ('visacc.load("a/b", decoder="mc-sdj")', "mc-sdj"),
        ('visacc.attach(model, decoder="sjd", procesor=processor)', "procesor"),
    ],
)
def test_wrong_calls_are_found(text: str, message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        check_names(Block(ROOT / "README.md", 1, "python", text + "\n"))


# ---- completeness -----------------------------------------------------------------------------------------
DECODER_PAGES = {
    "ar": "ar",
    "sjd": "jacobi",
    "mc-sjd": "jacobi",
    "nc-sjd": "nc-sjd",
    "sjd-pac": "sjd-pac",
    "gsd": "gsd",
    "zipar": "zipar",
    "pjd": "pjd",
    "eagle": "lantern",
    "lantern": "lantern",
    "lantern++": "lantern",
    "lpd": "lpd",
    "nbp": "nbp",
}
SECTIONS = ("## Options", "## Exact", "## Source", "## Measured here", "## Published figures")


def builtin() -> list[str]:
    return [entry.name for entry in decoder_entries() if entry.package == "visacc"]


def test_every_decoder_has_a_page() -> None:
    assert sorted(DECODER_PAGES) == sorted(builtin())


@pytest.mark.parametrize("name", sorted(set(DECODER_PAGES.values())))
def test_decoder_pages_are_complete(name: str) -> None:
    text = (ROOT / "docs" / "decoders" / f"{name}.md").read_text(encoding="utf-8")
    for section in SECTIONS:
        assert f"\n{section}" in text, f"{name}.md has no section {section!r}"
    idea = text.split("\n## ")[0]
    assert len([p for p in idea.split("\n\n")[1:] if p[0].isalpha() or p[0] in "`[*"]) >= 2, (
        "idea: two paragraphs"
    )


@pytest.mark.parametrize(
    "entry", [e for e in decoder_entries() if e.package == "visacc"], ids=lambda e: e.name
)
def test_decoder_pages_name_every_option(entry) -> None:
    text = (ROOT / "docs" / "decoders" / f"{DECODER_PAGES[entry.name]}.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    for option in entry.options:
        assert f"`{option}`" in rows, f"the page of {entry.name} does not explain option {option!r}"


def test_speculator_pages_are_complete() -> None:
    from visacc.speculate.config import METHODS

    for method in (*METHODS, "ngram"):
        page = {"eagle3": "eagle"}.get(method, method)
        text = (ROOT / "docs" / "speculators" / f"{page}.md").read_text(encoding="utf-8")
        for section in SECTIONS:
            assert f"\n{section}" in text, f"{page}.md has no section {section!r}"


def test_the_matrix_of_the_guide_is_the_programs() -> None:
    from visacc.integrations.matrix import matrix

    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    rows = [
        [c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    start = next(i for i, row in enumerate(rows) if row[0] == "decoder" and "llamagen" in row)
    families = rows[start][1:]
    shown = {}
    for row in rows[start + 2 :]:
        if len(row) != len(families) + 1:
            break
        shown[row[0].strip("`")] = dict(zip(families, row[1:], strict=True))
    marks = matrix()
    assert families == list(marks)
    assert shown == {d: {f: marks[f][d] for f in families} for d in builtin()}


def test_the_design_names_every_module_and_nothing_else() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:visacc|models|kernels|metrics|tests)/[\w./*]*)`", text)
    assert len(named) > 30
    for path in named:
        assert list(ROOT.glob(path.rstrip("/"))), f"ARCHITECTURE.md: no {path}"
    found = {match.relative_to(ROOT) for path in named for match in ROOT.glob(path.rstrip("/"))}
    code = ROOT / "visacc"
    modules = {p for p in code.glob("*.py") if not p.name.startswith("__")} | {
        p.parent for p in code.glob("*/__init__.py")
    }
    missing = {p.relative_to(ROOT) for p in modules} - found
    assert not missing, f"ARCHITECTURE.md does not name {', '.join(sorted(map(str, missing)))}"


# ---- the site ---------------------------------------------------------------------------------------------
def test_site_builds_strictly_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the documentation's extra is not installed: pip install -e '.[docs]'")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = re.findall(
            r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"(https?:[^\"]+)\"", page.read_text()
        )
        assert not loads, f"{page.name} loads {loads[0]}"
