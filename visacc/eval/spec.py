"""Metric entries of a configuration: their keys, the protocols of papers by name, what is refused at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visacc.eval.inputs import inputs_of
from visacc.metrics.images import PREPARE
from visacc.metrics.protocol import Score, digest
from visacc.metrics.recipes import Recipe, recipe, text_recipe
from visacc.metrics.scores import NEEDS

TEXT_METRICS = ("clip", "hps")
FEATURE_KEYS = {"metric", "extractor", "extractor_options", "weights", "reference", "reference_prepare", "prepare",
                "protocol", "batch", "on_error", "mixed_sizes", *NEEDS}  # fmt: skip
GENEVAL_KEYS = {"metric", "detector", "detector_options", "weights", "colour_model", "colour_pretrained",
                "colour_weights", "thresholds", "batch"}  # fmt: skip
TEXT_KEYS = {"metric", "model", "pretrained", "weights", "scale", "version", "prepare", "protocol", "batch"}


def metric_names(spec: Mapping[str, Any]) -> list[str]:
    names = spec["metric"]
    return [names] if isinstance(names, str) else list(names)


def check_spec(spec: Mapping[str, Any]) -> None:
    """Refuse a metric entry that cannot work, before anything is generated."""
    names = metric_names(spec)
    if names == ["geneval"]:
        allowed = GENEVAL_KEYS
    elif len(names) == 1 and names[0] in TEXT_METRICS:
        allowed = TEXT_KEYS
    else:
        known = [*NEEDS, "geneval", *TEXT_METRICS]
        odd = [n for n in names if n not in NEEDS]
        if odd:
            raise ValueError(
                f"unknown metric {odd[0]!r}; known: {', '.join(known)} (geneval, clip and hps stand alone)"
            )
        allowed = FEATURE_KEYS
        if any(NEEDS[n][1] for n in names) and "reference" not in spec:
            raise ValueError(
                f"metric {', '.join(names)} needs `reference`: a folder, an .npz file or shapes:COUNT"
            )
    unknown = [k for k in spec if k not in allowed]
    if unknown:
        raise ValueError(
            f"metric entry {names}: unknown key {unknown[0]!r}; known: {', '.join(sorted(allowed))}"
        )
    _check_kinds(names, spec)
    _check_values(names, spec)


_KINDS: dict[str, tuple[Any, str]] = {
    "extractor_options": (Mapping, "a mapping of names to values"),
    "detector_options": (Mapping, "a mapping of names to values"),
    "thresholds": (Mapping, "a mapping of names to values"),
    "weights": (str | os.PathLike, "a file"),
    "colour_weights": (str | os.PathLike, "a file"),
    "reference": (str | os.PathLike, "a folder, an .npz file or shapes:COUNT"),
    "mixed_sizes": (bool, "true or false"),
    "model": (str, "a name"),
    "colour_model": (str, "a name"),
    "batch": (int, "a positive integer"),
    **dict.fromkeys(NEEDS, (Mapping, "a mapping of names to values")),
}


def _check_kinds(names: Sequence[str], spec: Mapping[str, Any]) -> None:
    for key, (kind, words) in _KINDS.items():
        value = spec.get(key)
        wrong = not isinstance(value, kind)
        if kind is int and isinstance(value, int):
            wrong = isinstance(value, bool) or value < 1
        if isinstance(value, Mapping):
            wrong = wrong or not all(isinstance(name, str) for name in value)
        if key in spec and wrong:
            raise ValueError(f"metric entry {names}: {key} must be {words}, got {value!r}")


def _check_values(names: Sequence[str], spec: Mapping[str, Any]) -> None:
    """Names that only the scoring stage uses, so that a typing error does not cost the generation."""
    from visacc.metrics import extractors
    from visacc.metrics.clip_score import HPS_FILES, SCALES
    from visacc.metrics.geneval import detectors

    choices: dict[str, Sequence[str]] = {}
    if names[0] == "geneval":
        choices = {"detector": detectors.names()}
    elif names[0] in TEXT_METRICS:
        spec = apply_text_recipe(spec)
        choices = {"scale": list(SCALES), "prepare": list(PREPARE), "version": list(HPS_FILES)}
        if names[0] == "hps" and "version" not in spec:
            raise ValueError("hps needs `version: v2.0` or `version: v2.1`; both are in print and differ")
    else:
        spec, _ = apply_recipe(spec)
        choices = {
            "extractor": extractors.names(),
            "prepare": list(PREPARE),
            "reference_prepare": list(PREPARE),
            "on_error": ("raise", "skip"),
        }
    for key, known in choices.items():
        if key in spec and spec[key] not in known:
            raise ValueError(f"metric entry {names}: unknown {key} {spec[key]!r}; known: {', '.join(known)}")
    for key in ("weights", "colour_weights"):
        if key in spec and not Path(spec[key]).exists():
            raise ValueError(f"metric entry {names}: {key} {spec[key]} does not exist")
    reference = str(spec.get("reference", "shapes:"))
    if not reference.startswith("shapes:") and not Path(reference).exists():
        raise ValueError(f"metric entry {names}: reference {reference} does not exist")


def spec_key(spec: Mapping[str, Any]) -> str:
    """Name of an entry's results: another one when the entry changes, or a file that it names."""
    return f"{'+'.join(metric_names(spec))}-{digest([dict(spec), inputs_of(spec)], 8)}"


def apply_recipe(spec: Mapping[str, Any]) -> tuple[dict[str, Any], Recipe | None]:
    """A paper's protocol by name fills in extractor, its options and the image preparation."""
    if "protocol" not in spec:
        return dict(spec), None
    chosen = recipe(str(spec["protocol"]))
    _check_fixed(chosen.name, dict(chosen.options), spec.get("extractor_options", {}))
    fixed: dict[str, Any] = {
        "extractor": chosen.extractor,
        "extractor_options": {**dict(chosen.options), **spec.get("extractor_options", {})},
        "prepare": chosen.images,
        "reference_prepare": chosen.reference_images,
    }
    for metric in metric_names(spec):
        own, theirs = spec.get(metric, {}), chosen.settings.get(metric, {})
        _check_fixed(chosen.name, theirs, own)
        if theirs:
            fixed[metric] = {**theirs, **own}
    _check_fixed(chosen.name, {k: v for k, v in fixed.items() if k in _FIXED}, spec)
    return {**spec, **fixed}, chosen


_FIXED = ("extractor", "prepare", "reference_prepare")


def _check_fixed(name: str, fixed: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    for key, value in fixed.items():
        if key in spec and spec[key] != value:
            raise ValueError(f"protocol {name!r} fixes {key} to {value!r}, the entry says {spec[key]!r}")


def apply_text_recipe(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A paper's image-text protocol by name fills in model, scale and image preparation."""
    if "protocol" not in spec:
        return dict(spec)
    chosen = text_recipe(str(spec["protocol"]))
    if spec["metric"] != chosen.metric:
        raise ValueError(
            f"protocol {chosen.name!r} is one of {chosen.metric}, the entry says {spec['metric']!r}"
        )
    _check_fixed(chosen.name, chosen.fixed, spec)
    return {**spec, **chosen.fixed}


def named(score: Score, chosen: Recipe | None) -> Score:
    """Put a paper's protocol name on a score only if its counts are met; else say why not."""
    if chosen is None:
        return score
    wrong = chosen.check_counts(score.protocol.n_gen or 0, score.protocol.n_ref)
    if score.name not in chosen.metrics:
        wrong = wrong or f"{chosen.name!r} does not define {score.name!r}"
    if wrong:
        return replace(score, warnings=(*score.warnings, wrong))
    return replace(score, protocol=replace(score.protocol, name=chosen.name))
