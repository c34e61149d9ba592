"""Where methods, models and metrics are published: arXiv ids by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

DECODERS: dict[str, tuple[str, ...]] = {
    "sjd": ("2410.01699",),
    "mc-sjd": ("2510.24211",),
    "sjd-pac": ("2603.18599",),
    "gsd": ("2508.07747",),
    "zipar": ("2412.04062",),
    "pjd": ("2606.05703",),
    "eagle": ("2401.15077", "2406.16858"),
    "lantern": ("2410.03355",),
    "lantern++": ("2502.06352",),
    "lpd": ("2507.01957",),
    "nbp": ("2502.07737",),
}
SPECULATORS: dict[str, tuple[str, ...]] = {
    "eagle": ("2401.15077", "2406.16858"),
    "eagle3": ("2503.01840",),
    "msd": ("2505.14260",),
    "flash": ("2505.12728",),
    "dream": ("2505.19201",),
    "vispec": ("2509.15235",),
}
MODELS: dict[str, tuple[str, ...]] = {  # by what the name contains
    "llamagen": ("2406.06525",),
    "shapes-t2i": ("2406.06525",),
    "janus": ("2410.13848", "2501.17811"),
    "emu3": ("2409.18869",),
    "chameleon": ("2405.09818",),
    "anole": ("2407.06135",),
    "lumina": ("2408.02657",),
    "lpd": ("2507.01957",),
    "nbp": ("2502.07737",),
    "cosmos": ("2501.03575",),
}
METRICS: dict[str, tuple[str, ...]] = {
    "geneval": ("2310.11513",),
    "fid": ("1706.08500",),
    "fd": ("1706.08500",),
    "kid": ("1801.01401",),
    "is": ("1606.03498",),
    "precision": ("1904.06991",),
    "recall": ("1904.06991",),
    "density": ("2002.09797",),
    "coverage": ("2002.09797",),
    "cmmd": ("2401.09603",),
    "mind": ("2605.06797",),
    "clip": ("2104.08718",),
    "hps": ("2306.09341",),
}


def plugin_sources(decoder: str) -> tuple[str, ...]:
    """``Decoder.sources`` of a decoder that another package registers; none if it is not installed here."""
    from visacc.registry import decoder_entry

    try:
        return tuple(map(str, decoder_entry(decoder).cls.sources))
    except ValueError:
        return ()


def address(source: str) -> str:
    """Web address of an arXiv id or of an address itself; empty for anything else."""
    if re.fullmatch(r"\d{4}\.\d{4,5}(v\d+)?", source):
        return f"https://arxiv.org/abs/{source}"
    return source if source.startswith(("https://", "http://")) else ""


def sources(methods: Iterable[str], model: str, metrics: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(name, arXiv ids) of everything on a page that is published, each name once."""
    found: dict[str, tuple[str, ...]] = {}
    for name in methods:
        known = DECODERS.get(name) or SPECULATORS.get(name.replace("\\", "/").rsplit("/", 1)[-1])
        ids = (
            known
            if known is not None
            else ()
            if name in ("", "ar", "nc-sjd", "none")
            else plugin_sources(name)
        )
        if ids:
            found.setdefault(name, ids)
    lower = model.lower()
    ids = next((ids for part, ids in MODELS.items() if part in lower), ())
    if ids:
        found.setdefault(model, ids)
    for name in metrics:
        ids = METRICS.get(name.split(" ")[0].split("-")[0], ())
        if ids:
            found.setdefault(name, ids)
    return list(found.items())
