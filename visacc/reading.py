"""Reading text, JSON and arrays that others wrote: what is wrong with a file ends in one ``ValueError`` that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visacc.memory import out_of_memory

if TYPE_CHECKING:
    import numpy as np

_DAMAGE = (
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    ArithmeticError,
    ValueError,
    RuntimeError,
    OSError,
)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """What damaged content causes while it is interpreted becomes one ``ValueError`` that names the file."""
    try:
        yield
    except _DAMAGE as error:
        if out_of_memory(error) or (isinstance(error, ValueError) and str(path) in str(error)):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"{path}: {reason or type(error).__name__}") from error


def read_text(path: str | Path) -> str:
    """A text file in UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error})") from error


def read_lines(path: str | Path) -> list[str]:
    """Lines of a text file in UTF-8, without white space around them; empty ones are left out."""
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


def read_object(path: str | Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    return as_object(read_text(path), str(path))


def read_objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file with one JSON object a line; empty lines are left out."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, as_object(line, f"{path}, line {number}")


def read_json(path: str | Path) -> Any:
    """A JSON file that holds anything."""
    return _parse(read_text(path), str(path))


def as_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object that a text holds; ``where`` names its place in errors."""
    content = _parse(text, where)
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object, not a {type(content).__name__}")
    return content


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ValueError(f"{where} is not valid JSON ({place})") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error})") from error


def check_fields(kind: type, data: Mapping[str, Any], what: str) -> None:
    """Refuse entries that the dataclass ``kind`` does not have; ``what`` names the data in the error."""
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f"unknown fields in {what}: {sorted(unknown)}")


def read_entry(path: str | Path, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """A JSON object kept as text in the metadata of a safetensors file; empty where there is none."""
    return as_object(metadata.get(key, "{}"), f"the {key} in the metadata of {path}")


def read_array(path: str | Path, *, mapped: bool = False) -> np.ndarray:
    """An ``.npy`` file; arrays of objects, which hold code, are refused. ``mapped``: read on demand."""
    import numpy as np

    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # damaged headers raise anything
        raise ValueError(f"{path} cannot be read: truncated or not an .npy array ({error})") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise ValueError(f"{path} is an archive of arrays, a single one (.npy) is needed")
    return found


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an ``.npz`` file of our own making."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except Exception as error:  # zip, zlib and header errors have no common class
        raise ValueError(f"{path} cannot be read: truncated or not an .npz file ({error})") from error
