"""Damaging files on purpose, the same way every time: bytes, JSON trees, safetensors headers, pickles with code."""

from __future__ import annotations

import json
import pickle
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PATIENCE = 60
"""Seconds after which a single case counts as hanging."""
EXTREMES = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"a": None},
    [0] * 9,
)


# ---- bytes ------------------------------------------------------------------------------------------------
def noise(side: int = 12, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (side, side, channels), np.uint8)


def damaged(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` copies of ``data``, each with some damage: cut, flipped, overwritten, doubled, interleaved."""
    rng = random.Random(seed)
    for number in range(count):
        copy = bytearray(data)
        for _ in range(1 + number % 4):
            _damage(copy, rng)
        yield bytes(copy)


def _damage(data: bytearray, rng: random.Random) -> None:
    size = len(data)
    # headers and directories, at either end, matter more than the numbers in between
    near = rng.choice((64, 512, max(size, 1)))
    at = rng.randrange(min(near, size)) if size else 0
    at = at if rng.random() < 0.7 else max(0, size - 1 - at)
    kind = rng.randrange(7)
    if kind == 0:
        del data[at:]
    elif kind == 1 and size:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))[: size - at]
    elif kind == 3:
        del data[at : at + rng.randrange(1, 64)]
    elif kind == 4:
        data[at:at] = rng.randbytes(rng.randrange(1, 32))
    elif kind == 5:
        data[at : at + 16] = bytes(min(16, size - at))
    else:
        data[at:at] = data[: rng.randrange(1, 256)]


# ---- trees ------------------------------------------------------------------------------------------------
def bent(tree: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """``count`` copies of a JSON tree, each with some values replaced by extreme ones, left out or doubled."""
    rng = random.Random(seed)
    text = json.dumps(tree)
    for number in range(count):
        copy = json.loads(text)
        for _ in range(1 + number % 3):
            copy = _bend(copy, rng)
        yield copy


def _bend(tree: Any, rng: random.Random) -> Any:
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.02:
        return deepcopy(rng.choice(EXTREMES))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = rng.choice(keys)
    action = rng.random()
    if isinstance(tree[key], dict | list) and action < 0.7:
        tree[key] = _bend(tree[key], rng)
    elif action < 0.75:
        tree[key] = deepcopy(rng.choice(EXTREMES))
    elif action < 0.9:
        del tree[key]
    elif isinstance(tree, list):
        tree.append(deepcopy(tree[key]))
    else:
        tree[rng.choice(("foreign", "", "../x"))] = deepcopy(tree[key])
    return tree


# ---- safetensors ------------------------------------------------------------------------------------------
def safetensors_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def wrong_safetensors() -> dict[str, bytes]:
    """Files that break one rule of the format each."""

    def one(**changes: Any) -> dict[str, Any]:
        return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}

    twice = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    return {
        "empty": b"",
        "no header": struct.pack("<Q", 0),
        "header of 2**62 bytes": struct.pack("<Q", 2**62) + b"{}",
        "header of 2**64 - 1 bytes": b"\xff" * 8 + b"{}",
        "header beyond the end": struct.pack("<Q", 100) + b"{}",
        "header is a list": safetensors_file(b"[]"),
        "header is no JSON": safetensors_file(b"{"),
        "header nested 100000 deep": safetensors_file(b"[" * 100_000),
        "names are no UTF-8": safetensors_file(b'{"\xff\xfe":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "the same name twice": safetensors_file(twice, bytes(8)),
        "negative offset": safetensors_file(one(data_offsets=[-4, 0]), bytes(4)),
        "offsets the wrong way round": safetensors_file(one(data_offsets=[4, 0]), bytes(4)),
        "offset beyond the end": safetensors_file(one(shape=[2**40], data_offsets=[0, 2**42]), bytes(4)),
        "overlapping tensors": safetensors_file({**one(), "b": one()["a"]}, bytes(4)),
        "a hole between tensors": safetensors_file(one(data_offsets=[4, 8]), bytes(8)),
        "negative dimension": safetensors_file(one(shape=[-1]), bytes(4)),
        "2**60 elements in 4 bytes": safetensors_file(one(shape=[2**60]), bytes(4)),
        "dimensions that overflow": safetensors_file(one(shape=[2**33, 2**33]), bytes(4)),
        "unknown number format": safetensors_file(one(dtype="F31"), bytes(4)),
        "metadata that is no text": safetensors_file({"__metadata__": {"config": 3}, **one()}, bytes(4)),
        "data is missing": safetensors_file(one()),
        "more data than tensors": safetensors_file(one(), bytes(64)),
    }  # fmt: skip


# ---- code -------------------------------------------------------------------------------------------------
class Canary:
    """Pickles to a call that would write a file. ``sung`` tells whether anything has made it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)

    @property
    def sung(self) -> bool:
        return self.path.exists()


def sings(canary: Canary) -> bool:
    """Whether the canary works at all: a plain unpickler must set it off."""
    pickle.loads(pickle.dumps(canary))
    found = canary.sung
    canary.path.unlink()
    return found


# ---- verdicts ---------------------------------------------------------------------------------------------
@contextmanager
def in_time(what: str) -> Iterator[None]:
    """Fails a case that hangs instead of waiting for it."""

    def late(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"{what} took more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


TALLY = {"taken": 0, "refused": 0}
"""Damaged inputs of this session by what became of them; printed at its end (conftest.py)."""


def tally(refused: bool) -> bool:
    TALLY["refused" if refused else "taken"] += 1
    return not refused


def outcome(read: Callable[[], Any], path: Path, what: str) -> bool:
    """Whether a reader took a damaged file; a refusal must be one ``ValueError`` that names the file or its folder."""
    try:
        with in_time(what):
            read()
    except ValueError as error:
        text = str(error)
        if type(error) is UnicodeDecodeError or not (path.name in text or path.parent.name in text):
            pytest.fail(f"{what}: the message names no file: {text!r}")
        return tally(refused=True)
    except BaseException as error:
        pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    return tally(refused=False)


def survive(
    read: Callable[[], Any], path: Path, contents: Iterator[bytes], *, least: int = 1
) -> tuple[int, int]:
    """Write every content to ``path`` and read it; (cases, refusals). At least ``least`` must be refused."""
    original = path.read_bytes() if path.exists() else None
    cases = refused = 0
    for number, content in enumerate(contents):
        path.write_bytes(content)
        refused += not outcome(read, path, f"{path.name}, case {number}")
        cases += 1
    if original is not None:
        path.write_bytes(original)
    assert refused >= least, f"only {refused} of {cases} damaged files were refused"
    return cases, refused


def as_bytes(trees: Iterator[Any]) -> Iterator[bytes]:
    for tree in trees:
        yield json.dumps(tree).encode()


# ---- memory -----------------------------------------------------------------------------------------------
@contextmanager
def memory_bound(megabytes: int) -> Iterator[None]:
    """Fails if resident memory ever rises by more than this inside."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not sys.platform.startswith("linux"):
        pytest.skip("peak memory is read from /proc")

    def number(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) >> 10

    clear.write_text("5")  # forget earlier peaks
    before = number("VmRSS")
    yield
    risen = number("VmHWM") - before
    assert risen <= megabytes, f"memory rose by {risen} MB, more than {megabytes}"
