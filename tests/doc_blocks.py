"""Reading the documentation as a test does: fenced blocks with their marks, and the shell commands in them.

A mark is an HTML comment on the line before a Python block:

- ``<!-- not run: reason -->``: the block needs a download, a GPU or files of the reader's. It must compile, and every
  name it takes from visacc must exist.
- ``<!-- runs with: path -->``: the block needs trained weights that may not be in this checkout; it runs where the
  file exists and is treated as the one above where it does not.
- ``<!-- stand-ins: reason -->``: the block names released checkpoints; it runs on those that tests/doc_runs.py puts in
  their places.
- ``<!-- processes: 2 -->``: the block is a program of its own, which as many processes run.

Everything else runs, block after block in one namespace per page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import visacc
from visacc.bench.run import parse_entry
from visacc.cli import app
from visacc.loading import known_models
from visacc.registry import decoder_entry

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLUGINS = ("replay",)
"""Decoders that examples/ brings; tests/test_examples.py installs and runs them."""
SHELLS = ("", "bash", "sh", "shell", "console")
_MARK = re.compile(r"<!--\s*(not run|runs with|stand-ins|processes):\s*(.+?)\s*-->")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, its text, and the mark before it (kind, argument)."""

    page: Path
    line: int
    language: str
    text: str
    mark: tuple[str, str] | None = None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        if self.mark is None:
            return True
        kind, argument = self.mark
        return kind == "stand-ins" or (kind == "runs with" and (ROOT / argument).exists())


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises ``ValueError`` for a fence that is never closed or a mark without a block."""
    found: list[Block] = []
    mark: tuple[str, str] | None = None
    opened: tuple[int, str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"(\s*)```(.*)$", line)
        if opened is not None:
            start, language, indent = opened
            if fence and not fence[2].strip():
                found.append(Block(page, start, language, "\n".join(body) + "\n", mark))
                opened, body, mark = None, [], None
            else:
                body.append(line[indent:] if not line[:indent].strip() else line)
        elif fence:
            opened = (number + 1, fence[2].strip().split(" ")[0], len(fence[1]))
        elif match := _MARK.search(line):
            mark = (match[1], match[2])
        elif line.strip() and mark is not None:
            raise ValueError(f"{page}:{number}: a mark must stand on the line before its block")
    if opened is not None:
        raise ValueError(f"{page}: the block at line {opened[0]} is never closed")
    return found


def processes(block: Block) -> int:
    """How many processes run the block as a program; 0 for a block that is none."""
    return int(block.mark[1]) if block.mark is not None and block.mark[0] == "processes" else 0


def python_blocks(page: Path) -> list[Block]:
    return [b for b in blocks(page) if b.language == "python"]


def check_names(block: Block) -> None:
    """Compile a block, import what it takes from visacc, look up every ``visacc.name`` and check the calls of loaders."""
    tree = ast.parse(block.text, block.where)
    compile(tree, block.where, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            check_call(node, block.where)
        if isinstance(node, ast.Import):
            for name in (a.name for a in node.names if a.name.split(".")[0] == "visacc"):
                importlib.import_module(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "visacc":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert alias.name != "*", f"{block.where}: name what is imported from {node.module}"
                assert has(module, alias.name), f"{block.where}: {node.module} has no {alias.name}"
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "visacc"
        ):
            module = importlib.import_module("visacc")
            assert has(module, node.attr), f"{block.where}: visacc has no {node.attr}"


def check_call(call: ast.Call, where: str) -> None:
    """A call of a loader with a decoder's name: the decoder and its options exist, and so does a model's plain name."""
    loaders: dict[str, Any] = {
        "visacc.load": visacc.load,
        "visacc.attach": visacc.attach,
        "visacc.ARImagePipeline.from_pretrained": None,  # of diffusers; takes what its base class takes
    }
    name = ast.unparse(call.func)
    if name not in loaders:
        return
    words = [a.value for a in call.args if isinstance(a, ast.Constant)]
    given = {k.arg: k.value for k in call.keywords if k.arg}
    if name == "visacc.load" and words and re.fullmatch(r"[\w-]+", str(words[0])):
        own = str(words[0]).startswith("my-")  # a reader's own
        assert own or words[0] in known_models(), f"{where}: no model is called {words[0]!r}"
    decoder = given.get("decoder", call.args[1] if len(call.args) > 1 else None)
    if isinstance(decoder, ast.Constant) and loaders[name] is not None:
        known = {*decoder_entry(decoder.value).options, *inspect.signature(loaders[name]).parameters}
        wrong = given.keys() - known
        assert not wrong, f"{where}: {name} with decoder {decoder.value} takes no {', '.join(sorted(wrong))}"


def has(module: Any, name: str) -> bool:
    """Whether a module has a name, without importing what it would import lazily for it."""
    if name in getattr(module, "__all__", ()) or hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Command:
    """One command line of a page: its words, and whether the page leaves something out (``...``)."""

    where: str
    words: tuple[str, ...]
    partial: bool


def commands(page: Path) -> list[Command]:
    """The command lines of a page: those of its shell blocks and the code spans that begin with ``visacc``."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language in SHELLS:
            found += shell_commands(block.text, block.where)
    prose = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", page.read_text(encoding="utf-8"))
    for span in _SPAN.findall(prose):
        if span.startswith("visacc "):
            found += shell_commands(span + " ...", str(page.relative_to(ROOT)))
    return found


def shell_commands(text: str, where: str) -> list[Command]:
    """Split shell text into commands; comments, continuations, ``&&``, ``;`` and pipes are understood."""
    found: list[Command] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        try:
            tokens = list(lexer)
        except ValueError:  # not shell: a listing, a drawing, a quoted text
            continue
        for token in [*tokens, ";"]:
            if token and set(token) <= set("&|;"):
                kept = [w for w in words if w not in ("...", "…")]
                if kept:
                    found.append(Command(where, tuple(kept), len(kept) < len(words)))
                words = []
            else:
                words.append(token)
    return found


def visacc_arguments(words: tuple[str, ...]) -> list[str] | None:
    """What follows ``visacc`` in a command line (also ``python -m visacc``, ``accelerate launch -m visacc``)."""
    rest = list(words)
    while rest and re.match(r"[A-Z_]+=", rest[0]):
        rest.pop(0)
    if rest[:1] == ["visacc"]:
        return rest[1:]
    for i, pair in enumerate(pairwise(rest)):
        if pair == ("-m", "visacc"):
            return rest[i + 2 :]
    return None


def check_command(command: Command) -> None:
    """Raise ``AssertionError`` if a command line of the documentation cannot work as written."""
    words = command.words
    arguments = visacc_arguments(words)
    if arguments is not None:
        check_visacc(command, arguments)
    if words[:2] == ("accelerate", "launch"):
        check_accelerate(command)
    if words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        script = ROOT / words[1]
        assert script.is_file(), f"{command.where}: no {words[1]}"
        text = script.read_text(encoding="utf-8")
        for option in (w.split("=")[0] for w in words[2:] if w.startswith("--")):
            known = option in text or option[2:].replace("-", "_") in text
            assert known, f"{command.where}: {words[1]} has no option {option}"
    if words[0] == "pip":
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        for word in words:
            named = re.fullmatch(r"(?:\.|visacc)\[([\w,]+)\]", word)
            for extra in named[1].split(",") if named else ():
                assert extra in extras, f"{command.where}: no extra {extra!r}"
    if "pytest" in words[:2]:
        for word in (w for w in words if w.startswith("tests")):
            assert list(ROOT.glob(word)), f"{command.where}: no {word}"


def check_visacc(command: Command, arguments: list[str]) -> None:
    """Parse the arguments with the command line's own parser, without running anything."""
    current, name, rest = typer.main.get_command(app), "visacc", list(arguments)
    while hasattr(current, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in current.commands, f"{command.where}: visacc has no command {rest[0]!r}"
        name, current, rest = current.resolve_command(click.Context(current), rest)
    if hasattr(current, "commands") and not rest:
        return
    if rest and rest[0] in ("--help", "--version"):
        return
    try:
        given = current.make_context(name, list(rest)).params
    except Exception as error:
        # "`visacc caption --speculator`" names an option without a value
        unfinished = type(error).__name__ in ("MissingParameter", "BadOptionUsage")
        if not (unfinished and command.partial):
            message = getattr(error, "message", error)
            raise AssertionError(f"{command.where}: {' '.join(command.words)}: {message}") from error
        return
    for decoder, options in named_decoders(given):
        if decoder not in PLUGINS:
            wrong = set(options) - set(decoder_entry(decoder).options)
            assert not wrong, f"{command.where}: decoder {decoder} has no option {', '.join(wrong)}"


def named_decoders(given: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Decoders in parsed arguments with their options' names: ``-d NAME -O option=value``, ``-d NAME:option=value``."""
    chosen = given.get("decoder")
    if isinstance(chosen, list):
        parsed = [parse_entry(text) for text in chosen]
        return [(entry.decoder, list(entry.options)) for entry in parsed]
    if not isinstance(chosen, str):
        return []
    options = [text.partition("=")[0].replace("-", "_") for text in given.get("option") or []]
    return [(chosen, options + ["window"] * (given.get("window") is not None))]


def check_accelerate(command: Command) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    known = launch.launch_command_parser()._option_string_actions
    for word in command.words[2:]:
        if word == "-m":
            return
        if word.startswith("--"):
            option = word.split("=")[0]
            assert option in known, f"{command.where}: accelerate launch has no option {option}"
