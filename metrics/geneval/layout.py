"""The official image layout: <root>/<00000...>/metadata.jsonl, samples/<00000...>.png.

The original evaluator skips missing prompts and samples without a word, which moves the score. Here
incomplete folders are refused unless asked for, and then the coverage is part of the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visacc.metrics.geneval.logic import validate
from visacc.metrics.images import natural_key
from visacc.reading import naming, read_object, read_objects


@dataclass(frozen=True)
class PromptImages:
    index: int
    metadata: Mapping[str, Any]
    files: tuple[Path, ...]


def prompt_folder(root: str | Path, index: int) -> Path:
    return Path(root) / f"{index:05d}"


def sample_path(root: str | Path, index: int, sample: int) -> Path:
    return prompt_folder(root, index) / "samples" / f"{sample:05d}.png"


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Content of a prompt folder's metadata.jsonl."""
    return json.dumps(metadata)


def read_prompts(path: str | Path, classes: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A prompt file in the official format (one JSON object per line), validated."""
    out = []
    for number, item in read_objects(path):
        if "prompt" not in item:
            raise ValueError(f"{path}, line {number}: no `prompt`")
        with naming(f"{path}, line {number}"):
            validate(item, classes)
        out.append(item)
    if not out:
        raise ValueError(f"{path} holds no prompts")
    return out


def scan(
    root: str | Path,
    *,
    prompts: Sequence[Mapping[str, Any]] | None = None,
    samples: int | None = None,
    partial: bool = False,
) -> list[PromptImages]:
    """All prompt folders in numeric order.

    prompts: what must be there (metadata compared); samples: images per prompt, by default what most folders
    have. partial=False refuses gaps in the numbering, missing prompts and short folders, naming the first
    ones.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder in GenEval's layout")
    folders = sorted(
        (f for f in root.iterdir() if f.is_dir() and f.name.isdecimal() and len(f.name) < 12),
        key=lambda f: int(f.name),
    )
    if not folders:
        raise ValueError(f"{root} has no prompt folders (00000, 00001, ...)")
    found = []
    for folder in folders:
        metadata = read_object(folder / "metadata.jsonl")
        directory = folder / "samples"
        files = (
            [f for f in directory.iterdir() if re.fullmatch(r"\d+\.png", f.name)]
            if directory.is_dir()
            else []
        )
        ordered = tuple(sorted(files, key=lambda f: natural_key(f.name)))
        found.append(PromptImages(int(folder.name), metadata, ordered))
    if prompts is not None:
        _check_metadata(found, prompts, root)
    problems = [] if partial else _gaps(found, len(prompts) if prompts is not None else None, samples)
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ValueError(f"{root} is incomplete: {shown}. Generate the rest, or score it as partial")
    if not any(p.files for p in found):
        raise ValueError(f"{root} holds no images")
    return found


def _check_metadata(found: Sequence[PromptImages], prompts: Sequence[Mapping], root: Path) -> None:
    for item in found:
        if item.index >= len(prompts):
            raise ValueError(
                f"{root} has folder {item.index:05d} but the prompt list has {len(prompts)} entries"
            )
        if json.dumps(item.metadata, sort_keys=True) != json.dumps(prompts[item.index], sort_keys=True):
            raise ValueError(
                f"{root}/{item.index:05d} was made for {item.metadata.get('prompt')!r}, the prompt list "
                f"says {prompts[item.index].get('prompt')!r}"
            )


def _gaps(found: Sequence[PromptImages], count: int | None, samples: int | None) -> list[str]:
    have = {p.index for p in found}
    last = (count if count is not None else max(have) + 1) - 1
    problems = [f"no folder {i:05d}" for i in range(last + 1) if i not in have]
    sizes = [len(p.files) for p in found]
    want = samples if samples is not None else max(set(sizes), key=sizes.count)
    problems += [
        f"{p.index:05d} has {len(p.files)} images instead of {want}" for p in found if len(p.files) != want
    ]
    return problems
