"""Configuration of an evaluation run: one YAML file, checked as a whole before anything is computed."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from visacc.eval.prompts import PromptSet
from visacc.metrics.protocol import digest
from visacc.reading import read_text
from visacc.sampling import SamplingParams

_KEYS = {
    "output": "folder of the run",
    "model": "name, folder, file or hub id (visacc list models)",
    "model_options": "options of visacc.load: dtype, image_size, ...",
    "pipeline": "package.module:function returning a pipeline, instead of model",
    "prompts": "geneval, shapes, shapes-heldout, labels:1000x50, FILE.txt, FILE.jsonl or FOLDER of .txt files",
    "limit": "only the first prompts",
    "samples_per_prompt": "images per prompt (1)",
    "seed": "base seed (0)",
    "batch_size": "images decoded together (8)",
    "sampling": "guidance_scale, temperature, top_k, top_p, guidance_interval",
    "decoders": "name -> {decoder: ..., options}, or a list; list-valued options span a grid",
    "metrics": "list of {metric: ..., options}",
    "baseline": "name of the decoder others are compared with (the first)",
    "bootstrap": "confidence intervals of distances where they are cheap (true)",
}


@dataclass(frozen=True)
class Cell:
    """One decoder with one setting."""

    name: str
    decoder: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    output: Path
    prompts: str
    decoders: tuple[Cell, ...]
    metrics: tuple[Mapping[str, Any], ...]
    model: str = "shapes-t2i"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    pipeline: str | None = None
    limit: int | None = None
    samples_per_prompt: int = 1
    seed: int = 0
    batch_size: int = 8
    sampling: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = ""
    bootstrap: bool = True

    def generation(self, cell: Cell, prompts: PromptSet, device: str) -> dict[str, Any]:
        """Everything the images of a cell depend on; its digest guards the folder."""
        from visacc import __version__

        return {
            "model": self.pipeline or self.model,
            "model_options": {k: v for k, v in self.model_options.items() if k not in _PLACE},
            "device": device,
            "decoder": cell.decoder,
            "decoder_options": dict(cell.options),
            "prompts": prompts.name,
            "prompts_digest": prompts.digest,
            "samples_per_prompt": self.samples_per_prompt,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "sampling": dict(self.sampling),
            "visacc": __version__,
        }


_PLACE = ("device", "device_map", "shard")
"""Model options that say where the model lies, not which pictures it draws."""
MOST_CELLS = 1000
"""Settings of one decoder entry beyond which its lists are taken for a mistake."""
MOST_VALUES = 100_000
"""Values of a whole file, repeated ones counted each time."""


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", text).strip("-") or "cell"


def expand(decoders: Any) -> tuple[Cell, ...]:
    """Cells of the `decoders` entry. List values of options span a grid: window: [8, 16] gives two cells."""
    if isinstance(decoders, str):
        decoders = [decoders]
    if isinstance(decoders, Mapping):
        entries = [(name, {"decoder": name} if spec is None else spec) for name, spec in decoders.items()]
    elif isinstance(decoders, list):
        entries = [("", {"decoder": e} if isinstance(e, str) else e) for e in decoders]
    else:
        raise ValueError(f"decoders must be a name, a list or a mapping, got {decoders!r}")
    cells: list[Cell] = []
    for name, spec in entries:
        if not isinstance(spec, Mapping) or not isinstance(spec.get("decoder", name or None), str):
            raise ValueError(
                f"decoder entry {name or spec!r} needs `decoder: NAME` and options, got {spec!r}"
            )
        if not all(isinstance(k, str) for k in (name, *spec)):
            raise ValueError(f"names and options of decoders are texts, got {name!r}: {spec!r}")
        decoder = str(spec.get("decoder", name))
        options = {k: v for k, v in spec.items() if k != "decoder"}
        swept = [k for k, v in options.items() if isinstance(v, list)]
        if math.prod(len(options[k]) for k in swept) > MOST_CELLS:
            raise ValueError(f"the lists of decoder {name or decoder} span more than {MOST_CELLS} settings")
        for values in itertools.product(*(options[k] for k in swept)):
            chosen = {**options, **dict(zip(swept, values, strict=True))}
            tail = [
                f"{k}={v}" for k, v in (chosen if not name else dict(zip(swept, values, strict=True))).items()
            ]
            cells.append(Cell(_slug("-".join([name or decoder, *tail])), decoder, chosen))
    names = [c.name for c in cells]
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        raise ValueError(f"two decoder entries are called {doubled[0]!r}; give them different names")
    if not cells:
        raise ValueError("no decoders to evaluate")
    return tuple(cells)


def parse(data: Any, *, output: str | Path | None = None, base: Path = Path()) -> Config:
    """Checked configuration. Relative file paths in it are relative to `base` (the folder of the file)."""
    if not isinstance(data, Mapping):
        raise ValueError("the configuration must be a mapping of keys")
    unknown = [k for k in data if k not in _KEYS]
    if unknown:
        known = "\n".join(f"  {k}: {v}" for k, v in _KEYS.items())
        raise ValueError(f"unknown key {unknown[0]!r} in the configuration; known keys:\n{known}")
    for key in ("prompts", "decoders"):
        if key not in data:
            raise ValueError(f"the configuration needs {key!r}: {_KEYS[key]}")
    if output is None and "output" not in data:
        raise ValueError("the configuration needs 'output' (or give --output)")
    for key in ("samples_per_prompt", "batch_size"):
        value = data.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} must be a positive integer, got {value!r}")
    _check_kinds(data)
    if "pipeline" not in data:  # another library's pipeline has names of its own
        allowed = [f.name for f in fields(SamplingParams)]
        foreign = [k for k in data.get("sampling", {}) if k not in allowed]
        if foreign:
            raise ValueError(f"unknown sampling option {foreign[0]!r}; known: {', '.join(allowed)}")
        SamplingParams(**data.get("sampling", {}))
    if "pipeline" in data and "model" in data:
        raise ValueError("give either `model` or `pipeline`, not both")
    metrics = [{"metric": m} if isinstance(m, str) else m for m in data.get("metrics", [])]
    for m in metrics:
        names = m.get("metric") if isinstance(m, Mapping) else None
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise ValueError(f"a metric entry needs `metric: NAME` and options, got {m!r}")
    cells = expand(data["decoders"])
    baseline = data.get("baseline", cells[0].name)
    if baseline not in [c.name for c in cells]:
        raise ValueError(f"baseline {baseline!r} is none of the cells {', '.join(c.name for c in cells)}")
    prompts = str(data["prompts"])
    if (base / prompts).exists():
        prompts = str(base / prompts)
    simple = {
        k: data[k]
        for k in ("model", "model_options", "pipeline", "limit", "samples_per_prompt", "seed", "batch_size", "sampling",
                  "bootstrap")
        if k in data
    }  # fmt: skip
    return Config(
        Path(output) if output is not None else base / data["output"],
        prompts,
        cells,
        tuple(_resolve(m, base) for m in metrics),
        baseline=baseline,
        **simple,
    )


_KINDS: dict[str, tuple[Any, str]] = {
    "output": (str | os.PathLike, "a folder"),
    "model": (str, "a name, a folder or a file"),
    "model_options": (Mapping, "a mapping of names to values"),
    "pipeline": (str, "package.module:function"),
    "prompts": (str | os.PathLike, "the name of a prompt set or a file"),
    "limit": (int | None, "a number"),
    "seed": (int, "an integer"),
    "sampling": (Mapping, "a mapping of names to values"),
    "metrics": (list | tuple, "a list"),
    "baseline": (str, "the name of a decoder"),
    "bootstrap": (bool, "true or false"),
}


def _check_kinds(data: Mapping[str, Any]) -> None:
    for key, (kind, words) in _KINDS.items():
        value = data.get(key)
        if key in data and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ValueError(f"{key} must be {words}, got {value!r}")
        if isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
            raise ValueError(f"{key} must be {words}, got {value!r}")


def _resolve(spec: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Paths of a metric entry made absolute where such a file exists beside the configuration."""
    return {
        k: str((base / v).resolve()) if isinstance(v, str) and k in _PATH_KEYS and (base / v).exists() else v
        for k, v in spec.items()
    }


_PATH_KEYS = ("reference", "weights", "colour_weights")


def load_config(path: str | Path, output: str | Path | None = None) -> Config:
    """Read a YAML (or JSON) file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no configuration file {path}")
    try:
        import yaml
    except ImportError as error:
        raise ImportError("reading configurations needs PyYAML: pip install 'visacc[eval]'") from error
    text = read_text(path)
    try:
        data = yaml.safe_load(text)  # safe: tags that would build Python objects are errors
    except Exception as error:  # values that only look like dates or numbers raise anything
        raise ValueError(f"{path} is not valid YAML: {error or type(error).__name__}") from error
    _check_amount(path, data)
    try:
        return parse(data, output=output, base=path.parent)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_amount(path: Path, data: Any) -> None:
    """Aliases let a short file stand for billions of values, or for itself."""
    todo, count = [data], 0
    while todo:
        count += 1
        value = todo.pop()
        if isinstance(value, Mapping):
            todo += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            todo += value
        if count + len(todo) > MOST_VALUES:
            raise ValueError(f"{path} stands for more than {MOST_VALUES:,} values; does it repeat itself?")


def settings_digest(settings: Mapping[str, Any]) -> str:
    return digest(settings, 16)
