"""Reading weight files, whichever program wrote them.

Nothing in a file is executed, nothing larger than the file is allocated, and whatever is wrong with it ends in one
``ValueError`` that names it.
"""

from __future__ import annotations

import threading
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter

from visacc.reading import naming

State = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)


# ---- files ------------------------------------------------------------------------------------------------
def read_weights(
    path: str | Path,
    *,
    safetensors: bool | None = None,
    mapped: bool = False,
    allow_training_state: bool = False,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Top level of a weight file and its metadata (safetensors only).

    Args:
        safetensors: the format; by default files of that suffix are taken for it and all others for ``torch.save``.
        mapped: let the tensors of a zip archive refer to the file instead of copying them; for files of many gigabytes.
        allow_training_state: accept an ``argparse.Namespace`` beside the weights.

    Raises:
        ValueError: no such file, truncated, damaged, compressed, with code in it, or with tensors that claim more elements
            than the file holds.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"checkpoint {path} does not exist" if not path.exists() else f"{path} is not a file"
        )
    if path.suffix == ".safetensors" if safetensors is None else safetensors:
        return _read_safetensors(path)
    content = _read_pickle(path, mapped, allow_training_state)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict")
    _check_tensors(path, content)
    return dict(content), {}


def tensor_names(path: str | Path) -> set[str]:
    """Names in a safetensors file, from its header alone. Raises ``ValueError`` naming the file where it has none."""
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: truncated or not a safetensors file ({error})") from error


def tensors_in(path: str | Path, content: Mapping[Any, Any], keys: Iterable[str] = ()) -> State:
    """The tensors of a file's top level, or of the first of ``keys`` that holds a mapping; other entries are left out.

    Raises:
        ValueError: no tensor there.
    """
    inner = next((content[key] for key in keys if isinstance(content.get(key), Mapping)), content)
    state = {name: v for name, v in inner.items() if isinstance(name, str) and isinstance(v, Tensor)}
    if not state:
        raise ValueError(f"{path} holds no weights; its top level has {some(content) or 'nothing'}")
    return state


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: truncated or not a safetensors file ({error})") from error


def _read_pickle(path: Path, mapped: bool, allow_training_state: bool) -> Any:
    from argparse import Namespace

    zipped = _check_archive(path)
    try:
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals([Namespace] if allow_training_state else []),
        ):
            warnings.simplefilter("ignore")  # torch remarks on the pickle protocol of damaged files
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipped)
    except Exception as error:  # a damaged pickle can raise anything
        if "argparse.Namespace" in str(error):
            raise ValueError(
                f"{path} is a training checkpoint that stores its command line besides the weights; "
                "pass allow_training_state=True if you trust it"
            ) from error
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise ValueError(
                f"{path} contains pickled objects other than weights; it is not loaded"
            ) from error
        raise ValueError(f"{path} cannot be read: truncated or not a checkpoint") from error


def _check_archive(path: Path) -> bool:
    """Whether the file is a zip archive (else it is a plain pickle).

    ``torch.save`` never compresses: members that grow when they are read are none of its own, but a zip bomb.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path} cannot be read: truncated or not a checkpoint") from error
    if any("/code/" in member.filename for member in members):
        raise ValueError(
            f"{path} is a TorchScript archive, which is a program; a file of weights alone is needed"
        )
    size = sum(member.file_size for member in members)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or size > path.stat().st_size:
        raise ValueError(
            f"{path} is a compressed archive (its members claim {size:,} bytes); files of torch.save are not"
            " compressed, so it is not loaded"
        )
    return True


def _check_tensors(path: Path, content: Any) -> None:
    """Plain tensors only, none larger than its storage: an expanded view would be allocated in full when it is copied."""
    todo: list[tuple[Any, Any]] = [("", content)]
    seen: set[int] = set()
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
                raise ValueError(
                    f"{path}: tensor {name} is sparse, quantised or empty of data; plain tensors are needed"
                )
            held, claimed = value.untyped_storage().nbytes(), value.numel() * value.element_size()
            if claimed > held:
                raise ValueError(
                    f"{path}: tensor {name} of shape {tuple(value.shape)} claims {claimed:,} bytes, the file holds {held:,}"
                )
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            todo += value.items() if isinstance(value, Mapping) else enumerate(value)


# ---- models -----------------------------------------------------------------------------------------------
def blank(path: str | Path, make: Callable[[], M], state: Mapping[str, Tensor], what: str) -> M:
    """The module that ``make`` builds, on the meta device, after a check that ``state`` is exactly what it needs.

    The check comes before anything is allocated, and building stops where the module wants more than ``state`` holds: a
    configuration that claims a billion layers costs nothing.

    Raises:
        ValueError: missing, foreign, misshapen or non-numeric tensors, by name.
    """
    with naming(path):
        module = meta_module(make, state)
    check_state(path, module, state, what)
    return module


def meta_module(make: Callable[[], M], state: Mapping[str, Tensor]) -> M:
    """The module that ``make`` builds, on the meta device and with a bound on its size: see :func:`blank`."""
    with torch.device("meta"), _at_most(8 * len(state) + 1024):
        return make()


def load_checked(path: str | Path, make: Callable[[], M], state: Mapping[str, Tensor], what: str) -> M:
    """The module that ``make`` builds, on the default device, filled with ``state``; see :func:`blank`."""
    blank(path, make, state, what)
    module = make()
    module.load_state_dict(dict(state))
    return module


def check_state(
    path: str | Path,
    module: nn.Module,
    state: Mapping[str, Tensor],
    what: str,
    optional: Collection[str] = (),
) -> None:
    """Every tensor of the module and nothing else, in the right shapes and kinds; complains by name."""
    expected = module.state_dict()
    problems = []
    if missing := expected.keys() - state.keys() - set(optional):
        problems.append(f"missing {some(missing)}")
    if foreign := state.keys() - expected.keys():
        problems.append(f"foreign {some(foreign)}")
    common = expected.keys() & state.keys()
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in common
        if state[name].shape != expected[name].shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {some(wrong)}")
    kinds = [
        f"{name} {str(state[name].dtype).removeprefix('torch.')}"
        for name in common
        if not _fits(state[name].dtype, expected[name].dtype)
    ]
    if kinds:
        problems.append(f"wrong number formats: {some(kinds)}")
    if problems:
        raise ValueError(f"{path} does not fit {what}: {'; '.join(problems)}")


_EXOTIC = ("float4", "float8_e8m0")
"""Formats of block-scaled weights: torch cannot convert them without their scales."""


def _fits(found: torch.dtype, wanted: torch.dtype) -> bool:
    if any(word in str(found) for word in _EXOTIC) or found.is_complex != wanted.is_complex:
        return False
    return found.is_floating_point == wanted.is_floating_point


@contextmanager
def _at_most(parts: int) -> Iterator[None]:
    """Modules built inside may register so many parameters and children together."""
    count, thread = 0, threading.get_ident()

    def hook(_module: Any, _name: str, _part: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > parts:
            raise ValueError("its configuration asks for far more layers than it has weights")

    handles = [on_module(hook), on_parameter(hook)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def some(names: Iterable[Any], limit: int = 8) -> str:
    """Names in order, shortened for an error message."""
    names = sorted(str(name)[:120] for name in names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
