"""Names of decoders and models: the built-in ones and those that other packages add through entry points.

Entry-point groups: ``visacc.decoders`` (a :class:`visacc.decoders.Decoder` subclass) and ``visacc.models`` (a callable
``load(name_or_path, *, device, dtype, image_size) -> ImageModel``; the entry point's name is the model's name). A built-in
name wins over a plug-in of the same name; such a decoder is addressed as ``package:name``, such a model needs another name.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from visacc.decoders.base import Decoder

_DECODERS = {
    "ar": "visacc.decoders.ar:AR",
    "sjd": "visacc.decoders.jacobi:SJD",
    "mc-sjd": "visacc.decoders.jacobi:MCSJD",
    "nc-sjd": "visacc.decoders.nc_sjd:NCSJD",
    "sjd-pac": "visacc.decoders.sjd_pac:SJDPAC",
    "gsd": "visacc.decoders.gsd:GSD",
    "zipar": "visacc.decoders.zipar:ZipAR",
    "pjd": "visacc.decoders.pjd:PJD",
    "eagle": "visacc.decoders.eagle:Eagle",
    "lantern": "visacc.decoders.eagle_relaxed:LanternDecoder",
    "lantern++": "visacc.decoders.eagle_relaxed:LanternPPDecoder",
    "lpd": "visacc.decoders.lpd:LPD",
    "nbp": "visacc.decoders.nbp:NBP",
}


@dataclass(frozen=True)
class DecoderEntry:
    """A registered decoder: its name, class and the package it comes from."""

    name: str
    cls: type[Decoder]
    package: str

    @property
    def options(self) -> dict[str, Any]:
        """Option names and defaults, as the class's constructor has them."""
        found = inspect.signature(self.cls.__init__).parameters.values()
        return {p.name: p.default for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD}


@lru_cache(maxsize=8)
def _plugins(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown package"


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not registered: the known ones and the closest."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")


def _builtin(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _load_plugin(entry: EntryPoint) -> Any | None:
    try:
        return entry.load()
    except Exception as error:  # a broken plug-in must never break the library
        warnings.warn(f"plug-in {entry.name!r} of {_package(entry)} cannot be loaded: {error}")
        return None


def decoder_entries() -> list[DecoderEntry]:
    """All decoders, built-in ones first. A broken plug-in is reported by a warning and left out."""
    entries = [DecoderEntry(name, _builtin(target), "visacc") for name, target in _DECODERS.items()]
    for plugin in _plugins("visacc.decoders"):
        cls = _load_plugin(plugin)
        if cls is None:
            continue
        if not (isinstance(cls, type) and issubclass(cls, Decoder)) or cls.api_version != Decoder.api_version:
            warnings.warn(
                f"plug-in decoder {plugin.name!r} of {_package(plugin)} is not a visacc Decoder of API version"
                f" {Decoder.api_version}"
            )
            continue
        name = f"{_package(plugin)}:{plugin.name}" if plugin.name in _DECODERS else plugin.name
        entries.append(DecoderEntry(name, cls, _package(plugin)))
    return entries


def decoder_entry(name: str) -> DecoderEntry:
    """The entry called ``name``. Raises ``ValueError`` listing the known names and the closest one."""
    if isinstance(name, str) and name in _DECODERS:
        return DecoderEntry(name, _builtin(_DECODERS[name]), "visacc")
    entries = {e.name: e for e in decoder_entries()}
    for entry in list(entries.values()):
        entries.setdefault(f"{entry.package}:{entry.name}", entry)
    if name not in entries:
        raise unknown("decoder", name, (e.name for e in decoder_entries()))
    return entries[name]


def make_decoder(decoder: str | Decoder, **options: Any) -> Decoder:
    """A decoder from its name and options (or the object itself).

    Raises:
        ValueError: unknown name, an option the decoder does not have, or a value it refuses.
    """
    if isinstance(decoder, Decoder):
        if options:
            raise ValueError(
                f"options {sorted(options)} cannot be given together with a decoder object; set them on it"
            )
        return decoder
    entry = decoder_entry(decoder)
    wrong = sorted(set(options) - set(entry.options))
    if wrong:
        known = ", ".join(f"{k}={v!r}" for k, v in entry.options.items()) or "none"
        close = difflib.get_close_matches(wrong[0], [*entry.options, *_CALL], n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"decoder {entry.name!r} has no option {', '.join(map(repr, wrong))}{hint} (its options: {known})"
        )
    options = {name: v.item() if isinstance(v, np.generic) else v for name, v in options.items()}
    _check_kinds(entry, options)
    try:
        return entry.cls(**options)
    except TypeError as error:  # values of a kind that the decoder did not expect
        given = ", ".join(f"{name}={value!r:.60}" for name, value in options.items())
        raise ValueError(f"decoder {entry.name!r} refuses its options ({given}): {error}") from error


_CALL = (
    "guidance_scale",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "batch_size",
    "negative_prompt",
    "output_type",
)
"""Arguments of a pipeline's call that are misspelt more often than options of a decoder."""
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "an integer"),
    "float": ((int, float), "a finite number"),
    "str": ((str,), "a text"),
}


def _check_kinds(entry: DecoderEntry, options: dict[str, Any]) -> None:
    """Options whose constructor declares a plain type must have it: "false" is no boolean."""
    parameters = inspect.signature(entry.cls.__init__).parameters
    for name, value in options.items():
        declared = str(getattr(parameters[name].annotation, "__name__", parameters[name].annotation))
        kind, _, rest = declared.partition(" | ")
        if kind not in _KINDS or rest not in ("", "None") or (rest and value is None):
            continue
        types, words = _KINDS[kind]
        fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
        if not fits or (kind == "float" and not math.isfinite(value)):
            raise ValueError(f"{name} of decoder {entry.name!r} must be {words}, got {value!r}")


def model_plugins() -> dict[str, Callable[..., Any]]:
    """Models that other packages register, by name."""
    found = {}
    for plugin in _plugins("visacc.models"):
        loader = _load_plugin(plugin)
        if loader is not None:
            found[plugin.name] = loader
    return found
