"""Writing files that survive a kill or a full disk: whole or not at all, leftovers swept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_PART = ".part"
_LEFTOVER = re.compile(r"\..+\.(\d+)\.part(\.[^.]+)?", re.DOTALL)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` fills a temporary neighbour, which then replaces ``path``. A kill leaves a hidden ``.part`` file at most.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; the message names ``path``, and an earlier file of
            that name is untouched.
    """
    path = Path(os.path.realpath(path))  # of a link the file it leads to is replaced, not the link
    part = path.with_name(f".{_short(path.stem)}.{os.getpid()}{_PART}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        os.replace(part, path)
    except OSError as error:
        _drop(part)
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        _drop(part)
        raise


def _short(stem: str) -> str:
    """A name that leaves room for what is added to it: file systems take 255 bytes."""
    if len(os.fsencode(stem)) <= 100:
        return stem
    return stem[:20] + hashlib.sha256(stem.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _drop(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:  # its folder is a file, or cannot be written to either
        return


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(
    path: Path, data: Any, *, indent: int = 1, sort_keys: bool = False, ascii_only: bool = False
) -> None:
    """JSON in UTF-8, a line break at its end. ``ascii_only``: other characters as escapes, which can be half a pair."""
    write_text(path, json.dumps(data, indent=indent, sort_keys=sort_keys, ensure_ascii=ascii_only) + "\n")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Tensors of any device, made contiguous."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}

    def write(part: Path) -> None:
        try:
            save_file(state, part, metadata=dict(metadata or {"format": "pt"}))
        except SafetensorError as error:
            raise _as_os_error(error, part) from error

    write_atomic(path, write)


def write_torch(path: Path, state: Any) -> None:
    """``torch.save``, for training states."""
    import torch

    def write(part: Path) -> None:
        try:
            torch.save(state, part)
        except RuntimeError as error:
            raise _as_os_error(error, part) from error

    write_atomic(path, write)


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """For libraries that write many files: yields an empty folder whose files then replace those of ``folder``, each whole.

    Nothing is moved if the block raises; files of ``folder`` with other names stay. A kill leaves a hidden ``.part`` folder
    at most.
    """
    folder = Path(os.path.realpath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=_PART) as temporary:
        yield Path(temporary)
        for part in sorted(p for p in Path(temporary).rglob("*") if p.is_file()):
            place = folder / part.relative_to(temporary)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, place)


def _as_os_error(error: Exception, part: Path) -> OSError:
    """These libraries report a full disk, and every other fault of writing, as errors of their own."""
    said = re.search(r"os error (\d+)", str(error))
    if said:
        code = int(said[1])
    else:
        room = shutil.disk_usage(part.parent).free if part.parent.is_dir() else 0
        code = errno.ENOSPC if room < 1 << 20 else errno.EIO
    return OSError(code, f"{os.strerror(code)} ({' '.join(str(error).split())[:200]})")


def sweep(folder: Path, *, deep: bool = True, spare_running: bool = False) -> int:
    """Remove what killed writers left in a folder (and below); returns how many files.

    spare_running: leave the files of other processes that run on this machine, which may be writing them now.
    """
    found = folder.rglob(f".*{_PART}*") if deep else folder.glob(f".*{_PART}*")
    owners = [(f, _LEFTOVER.fullmatch(f.name)) for f in found]
    leftovers = [
        f for f, owner in owners if owner and f.is_file() and not (spare_running and _runs(int(owner[1])))
    ]
    for f in leftovers:
        f.unlink(missing_ok=True)
    return len(leftovers)


def _runs(process: int) -> bool:
    """Whether another process of that number runs here."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
