"""Running a page of the documentation as its reader would, with smaller numbers, in a folder of the test's.

Pages are read from top to bottom: Python blocks share a namespace, and the shell blocks of :data:`SHELL_PAGES` run between
them, so that a block may use what a command wrote. What is changed of a command stands in the tables below and nowhere else.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import hf_tiny
import pytest
from doc_blocks import ROOT, SHELLS, Block, Command, blocks, check_names, shell_commands, visacc_arguments
from PIL import Image
from tiny import save_tiny

from visacc.cli import main
from visacc.models.shapes import ASSETS
from visacc.models.vlm.captioner import ASSETS as CAPTIONER

SHELL_PAGES = (
    "README.md",
    "docs/index.md",
    "docs/report.md",
    "docs/extending/decoder.md",
    "docs/speculators/overview.md",
    "docs/speculators/serving.md",
)
"""Pages whose commands need nothing but what ships with the package."""

SMALLER = {
    "-n": "1",
    "--num-images": "1",
    "--methods": "ngram,msd",
    "--temperatures": "0",
}
"""Option of a command -> the value it runs with."""

ADDED = {
    "bench decoders": ("--prompts-file", "prompt.txt"),  # else 48 prompts of six tasks
    "bench vlm": ("--max-new-tokens", "8", "--repeats", "1"),
    "caption": ("--max-new-tokens", "8"),
}
"""Command -> options that make it shorter."""

NAMES: dict[str, Callable[[Path], object]] = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": lambda folder: "shapes-captioner",
    "llava-hf/llava-1.5-7b-hf": lambda folder: "shapes-captioner",
    "runs/msd/drafter": lambda folder: CAPTIONER / "drafters" / "msd",
    "deepseek-community/Janus-Pro-1B": lambda folder: hf_tiny.janus(folder / "janus"),
    "BAAI/Emu3-Gen-hf": lambda folder: hf_tiny.emu3(folder / "emu3"),
    "BAAI/Emu3.5-Image": lambda folder: hf_tiny.emu35(folder / "emu35"),
    "/path/to/Emu3.5-VisionTokenizer": lambda folder: hf_tiny.emu35(folder / "emu35") / "vision_tokenizer",
    "llamagen-c2i-l-384": lambda folder: save_tiny(folder / "c2i", classes=1000),
    "llamagen-t2i-xl-512": lambda folder: ASSETS / "t2i",
    "t2i_XL_stage2_512.pt": lambda folder: ASSETS / "t2i" / "gpt.safetensors",
    "vq_ds16_t2i.pt": lambda folder: ASSETS / "t2i" / "vq.safetensors",
    "flan-t5-xl": lambda folder: ASSETS / "t2i" / "text",
}
"""Released weights (and a run of the reader's) -> what stands in for them."""

LEFT_OUT = (
    ("pip install -e", "installs what is being tested"),
    ("pip install 'visacc", "the same"),
    ("pytest", "is what runs this"),
    ("OMP_NUM_THREADS=1 visacc bench decoders", "ten decoders; docs/index.md runs the command with three"),
)
"""Beginnings of commands that are only checked, and why."""


def prepare(folder: Path) -> None:
    """What the pages take for granted: a checkout's examples, a folder of photos; and the one prompt of :data:`ADDED`."""
    (folder / "prompt.txt").write_text("a red circle left of a blue square\n")
    (folder / "photos").mkdir()
    for i in range(2):
        Image.new("RGB", (80, 60), (200, 60 * i, 40)).save(folder / "photos" / f"{i}.jpg")
    shutil.copytree(ROOT / "examples", folder / "examples")
    config = folder / "examples" / "eval_shapes.yaml"
    text = config.read_text()
    for old, new in (
        ("samples_per_prompt: 2", "samples_per_prompt: 2\nlimit: 1"),
        ("window: [16, 32]", "window: 32"),
        ("shapes:1000", "shapes:4"),
        ("subset_size: 100, subsets: 50", "subset_size: 2, subsets: 2"),
    ):
        assert old in text, f"examples/eval_shapes.yaml no longer has {old!r}"
        text = text.replace(old, new)
    config.write_text(text)


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[str]]:
    """Run a page in ``folder``; returns the namespace of its Python blocks and the commands that ran."""
    monkeypatch.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "__doc__"}
    ran: list[str] = []
    with_shell = page.relative_to(ROOT).as_posix() in SHELL_PAGES
    if with_shell:
        prepare(folder)
    for block in blocks(page):
        if block.language == "python":
            check_names(block)
            if block.runs:
                run_block(block, namespace, folder)
        elif with_shell and block.language in SHELLS:
            ran += [
                run_command(c, folder, monkeypatch)
                for c in shell_commands(block.text, block.where)
                if not any(shlex.join(c.words).startswith(start) for start, _ in LEFT_OUT)
            ]
    return namespace, ran


def run_block(block: Block, namespace: dict[str, Any], folder: Path) -> None:
    text = block.text
    if block.mark is not None and block.mark[0] == "stand-ins":
        for name, make in NAMES.items():
            if f'"{name}"' in text:
                text = text.replace(f'"{name}"', repr(str(make(folder))))
    # padded, so that a traceback names the line of the page
    exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), namespace)


def smaller(arguments: list[str], folder: Path) -> list[str]:
    """A command's arguments with the values of the tables, and its patterns of file names filled in as a shell does."""
    found: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before in SMALLER:
            found.append(SMALLER[before])
        elif word in NAMES:
            found.append(str(NAMES[word](folder)))
        else:
            found += sorted(glob(word)) if "*" in word else [word]
    for command, options in ADDED.items():
        if found[: len(command.split())] == command.split():
            found += options
    return found


def run_command(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one command line: visacc's in this process, pip's into a folder that this process then imports from."""
    arguments = visacc_arguments(command.words)
    line = shlex.join(command.words)
    if command.words[:2] == ("pip", "install"):
        pip = [
            sys.executable,
            "-m",
            *command.words,
            "--quiet",
            "--no-index",
            "--target",
            str(folder / "site"),
        ]
        done = subprocess.run(pip, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command.where}: {line}: {done.stderr[-2000:]}"
        monkeypatch.syspath_prepend(folder / "site")
        importlib.invalidate_caches()
        return line
    assert arguments is not None, f"{command.where}: {line}: say in LEFT_OUT why it is not run"
    code: object = 0
    try:
        main(smaller(arguments, folder))
    except SystemExit as stop:
        code = stop.code or 0
    assert code == 0, f"{command.where}: {line}: exit code {code}"
    return line
