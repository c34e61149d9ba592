"""Finding a model's drafter, and making sure that the two belong together."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.drafters.checkpoint import load_drafter
from visacc.drafters.network import EagleNetwork
from visacc.models.base import ImageModel

_PROBES = 16


def find_drafter(drafter: str | Path | EagleNetwork | None, model: ImageModel) -> EagleNetwork:
    """The drafter object, the one in a folder, or the one that lies with the model; on the model's device, in the
    model's precision.

    Raises:
        ValueError: the model has no drafter of its own and none is named.
    """
    weight = next(model.module.parameters())
    if isinstance(drafter, EagleNetwork):
        own = drafter.fc.weight
        if (own.device, own.dtype) == (weight.device, weight.dtype):
            return drafter
        return copy.deepcopy(drafter).to(weight.device, weight.dtype)  # the caller's may be in training
    if drafter is not None:
        return _load(Path(drafter), weight)
    folder = None if model.folder is None else model.folder / "drafter"
    if folder is None or not folder.is_dir():
        raise ValueError(
            f"{model.name} comes without a drafter: name one with drafter=FOLDER, or train one with"
            " 'visacc train drafter'"
        )
    return _load(folder, weight)


def _load(folder: Path, weight: Tensor) -> EagleNetwork:
    files = [f for f in folder.glob("*") if f.is_file()] if folder.is_dir() else []
    stamp = max((f.stat().st_mtime_ns for f in files), default=0)
    return _loaded(str(folder.resolve()), stamp, weight.device, weight.dtype)


@lru_cache(maxsize=4)
def _loaded(folder: str, stamp: int, device: torch.device, dtype: torch.dtype) -> EagleNetwork:
    """Decoders are made anew for every call of a pipeline; their drafter is read once."""
    return load_drafter(folder).to(device, dtype)


@torch.no_grad()
def head_probe(model: ImageModel, size: int) -> list[float]:
    """The target head's answer to a fixed feature at 16 codes: tells targets apart in any precision."""
    feature = torch.sin(torch.arange(1, size + 1, dtype=torch.float32) ** 2)
    weight = next(model.module.parameters())
    logits: Tensor = model.head(feature.to(weight.device, weight.dtype)[None, None])[0, 0]
    ids = torch.linspace(0, len(logits) - 1, _PROBES).round().long().to(logits.device)
    return [round(value, 4) for value in logits[ids].tolist()]


def target_card(model: ImageModel, size: int, **facts: Any) -> dict[str, Any]:
    """What a drafter remembers of the model it was trained for."""
    return {"name": model.name, "head": head_probe(model, size), **facts}


def check_target(network: EagleNetwork, model: ImageModel) -> None:
    """Raise ``ValueError`` unless the drafter's dimensions, vocabulary, grid and target are the model's."""
    c, layout = network.config, model.layout
    own = f"{c.family} drafter"
    if c.family != "llamagen":
        raise ValueError(f"a {own} cannot drive {model.name}: decoding supports drafters of family llamagen")
    problems = []
    if model.feature_size is not None and c.hidden_size != model.feature_size:
        problems.append(f"features of width {c.hidden_size}, the model's have {model.feature_size}")
    if c.vocab_size != layout.vocab:
        problems.append(f"{c.vocab_size} codes, the model has {layout.vocab}")
    if layout.grid != (1, c.grid, c.grid) or layout.forced is not None:
        problems.append(f"a {c.grid} x {c.grid} grid, the model's is {layout.grid}")
    if problems:
        raise ValueError(f"this {own} does not fit {model.name}: it was made for {'; '.join(problems)}")
    known = c.target.get("head")
    if known is not None:
        found = torch.tensor(head_probe(model, c.hidden_size))
        wanted = torch.tensor(known)
        if not torch.allclose(found, wanted, atol=0.05 * float(wanted.abs().max()) + 1e-3):
            name = c.target.get("name", "another model")
            raise ValueError(
                f"this drafter was trained for {name!r}, whose output head differs from {model.name}'s"
            )
