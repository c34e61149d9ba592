"""Random arguments for every command: an exit code of 0, 1 or 2, one clear line, never a traceback, nothing half-written."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from fuzzing import in_time, memory_bound, tally
from PIL import Image
from tiny import save_tiny

from visacc.cli import app, main
from visacc.models.shapes.captions import all_prompts

CASES = 40
"""Command lines of every command."""
NUMBERS = ("0", "1", "-1", "3", "2.5", "nan", "inf", "-inf", "1e400", "9" * 30, "0x10", "", " ", "١")
TEXTS = (
    "",
    " ",
    "x",
    "-",
    "--",
    "☃",
    "\ud800",
    "a\nb",
    "../..",
    "/",
    "%s{}",
    "=",
    "a=b",
    "window=3",
    "a=[",
    "x" * 3000,
    "\0",
)
DECODERS = (
    "ar",
    "mc-sjd",
    "sjd",
    "gsd",
    "zipar",
    "pjd",
    "nc-sjd",
    "sjd-pac",
    "eagle",
    "lpd",
    "mcsjd",
    "other:ar",
    "",
)
SLOW = {
    "--steps",
    "--epochs",
    "--num-images",
    "-n",
    "--num-videos",
    "--count",
    "--per-task",
    "--images",
    "--limit",
}
"""Options of which large values are legitimate and would run for hours."""


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def command_of(path: tuple[str, ...]) -> Any:
    found: Any = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Names of things to point at: the tiny model, files and folders of every sort, and things that are not there."""
    root = tmp_path_factory.mktemp("world")
    model = save_tiny(root / "model", grid=2)
    (root / "empty").mkdir()
    (root / "pictures").mkdir()
    for i in range(3):
        Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(root / "pictures" / f"{i}.png")
    (root / "broken.png").write_bytes((root / "pictures" / "0.png").read_bytes()[:40])
    (root / "prompts.txt").write_text("1\n2\n3\n")
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in all_prompts(1)))
    (root / "noise.bin").write_bytes(np.random.default_rng(0).bytes(400))
    (root / "list.json").write_text("[1, 2]")
    (root / "object.json").write_text('{"a": 1}')
    (root / "run.yaml").write_text(
        f"output: {root / 'run'}\nprompts: shapes-heldout\ndecoders: [ar, {{decoder: x}}]\n"
    )
    np.savez(root / "stats.npz", mu=np.zeros(3), sigma=np.eye(3))
    np.save(root / "codes.npy", np.zeros((3, 4), np.int64))
    places = [str(p) for p in sorted(root.iterdir()) if p.name != "model"]
    missing = [str(root / "nothing"), str(root / "prompts.txt" / "below"), "", "\0", "x" * 300]
    nowhere = [str(root / "empty"), str(root / "prompts.txt" / "below"), "\0", "x" * 300, ""]
    return {"model": [str(model)] * 6, "place": places + missing, "nowhere": nowhere, "root": [str(root)]}


def kind_of(parameter: Any) -> str:
    """number, path or text; typer has kept this in different places."""
    said = repr(getattr(parameter, "type_descriptor", None) or getattr(parameter, "type", None)).lower()
    return (
        "path"
        if "path" in said
        else "number"
        if "int" in said.split("parameter_info")[0] or "float" in said
        else "text"
    )


def value(rng: random.Random, option: str, kind: str, world: dict[str, list[str]], out: Path) -> str:
    """A value for a parameter: of its kind more often than not."""
    if option in ("--model", "-m", "model", "--target", "-t"):
        # the embedded models are real ones: only refused names, never minutes of decoding
        return rng.choice(world["model"] * 3 + world["place"] + ["shapes-t2x", "llamagen-vq-16-t2i", ""])
    if option in ("--out", "-o", "--output", "--work"):
        # files that exist may be replaced, as was asked for, so none of the world's is named here
        return str(out / rng.choice(("a", "b/c"))) if rng.random() < 0.8 else rng.choice(world["nowhere"])
    if option in ("--decoder", "-d"):
        return rng.choice(DECODERS) + rng.choice(("", "", ":window=2", ":window=0", ":x=1", ":", ":window"))
    if option in ("--device",):
        return rng.choice(("cpu", "cpu", "cuda", "cuda:99", "abacus", ""))
    if option in ("--dtype",):
        return rng.choice(("float32", "float32", "bfloat16", "int8", ""))
    if option in SLOW:
        return rng.choice(("1", "2", "0", "-1", "2.5", "x", ""))
    if kind == "number" and rng.random() < 0.85:
        return rng.choice(NUMBERS)
    if kind == "path" and rng.random() < 0.85:
        return rng.choice(world["place"])
    pool = rng.choice((NUMBERS, TEXTS, world["place"]))
    return rng.choice(pool)


def line(rng: random.Random, path: tuple[str, ...], world: dict[str, list[str]], out: Path) -> list[str]:
    """A command line: some of the options with values, arguments, sometimes an option that does not exist."""
    words = [*path]
    command = command_of(path)
    given = set()
    for parameter in command.params:
        name = parameter.opts[0]
        if parameter.param_type_name == "argument":
            count = rng.choice((1, 1, 1, 2, 0)) if parameter.nargs == -1 else 1
            words += [value(rng, parameter.name or "", kind_of(parameter), world, out) for _ in range(count)]
        elif name in ("--model", "-m", "--out", "-o", "--output", "--target") or rng.random() < 3 / len(
            command.params
        ):
            given.add(name)
            if getattr(parameter, "is_flag", False):
                words.append(rng.choice([*parameter.opts, *parameter.secondary_opts]))
            elif name != "--compile":
                words += [rng.choice(parameter.opts), value(rng, name, kind_of(parameter), world, out)]
    if rng.random() < 0.05:
        words.append(rng.choice(("--nothing", "-Z", "--model", "--seed")))
    return words


def verdict(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Exit code of a command line; fails on anything but a clean end."""
    shown = " ".join(w if len(w) < 80 else w[:77] + "..." for w in words)
    try:
        with in_time(shown):
            main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException as error:
        pytest.fail(f"visacc {shown!r}: {type(error).__name__}: {str(error)[:300]}")
    out, err = capsys.readouterr()
    if code not in (0, 1, 2):
        pytest.fail(f"visacc {shown!r} ends with code {code}")
    if "Traceback" in out + err:
        pytest.fail(f"visacc {shown!r} prints a traceback")
    if code == 2:
        ours = [row for row in err.splitlines() if row.startswith("visacc: error: ")]
        if not (len(ours) == 1 and len(ours[0]) > 25):
            pytest.fail(f"visacc {shown!r} says nothing clear: {err[:300]!r}")
    tally(refused=code == 2)
    return code


ALL = sorted(commands())


def test_the_commands_are_known() -> None:
    assert ("generate",) in ALL
    assert len(ALL) >= 15


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_random_arguments(
    path: tuple[str, ...],
    world: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for library in ("open_clip", "timm"):  # they build networks of gigabytes before they look for weights
        monkeypatch.setattr(pytest.importorskip(library), "create_model", refuse)
    monkeypatch.setenv("VISACC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng = random.Random(" ".join(path))
    before = {p: p.read_bytes() for p in Path(world["root"][0]).rglob("*") if p.is_file()}
    codes: dict[int, int] = {}
    with memory_bound(700):
        for number in range(CASES):
            code = verdict(line(rng, path, world, tmp_path / f"out{number}"), capsys)
            codes[code] = codes.get(code, 0) + 1
    assert codes.get(2, 0) > 0, codes
    leftovers = [p for p in tmp_path.rglob("*") if ".part" in p.name or p.suffix == ".tmp"]
    assert not leftovers
    kept = {p: p.read_bytes() for p in before}
    assert kept == before, "a command changed files that it was only to read"


def test_every_option_alone_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ALL:
        for parameter in command_of(path).params:
            if parameter.param_type_name != "argument" and not getattr(parameter, "is_flag", False):
                assert verdict([*path, parameter.opts[0]], capsys) == 2


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ALL:
        with pytest.raises(SystemExit) as stop:
            main([*path, "--help"])
        assert stop.value.code == 0
        assert "Usage:" in capsys.readouterr().out
