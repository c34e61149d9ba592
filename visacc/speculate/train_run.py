"""Training a drafter from a JSONL file of pictures and prompts: what ``visacc train`` runs for VLM
targets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from visacc.eval.world import several
from visacc.models.vlm.target import VLMTarget
from visacc.pictures import read_image
from visacc.reading import read_objects
from visacc.speculate.drafter import Drafter
from visacc.speculate.harvest import Answered, OfflineStore, OnlineHarvester
from visacc.speculate.losses import PRESETS, DraftBatch, candidate_layers
from visacc.speculate.params import eos_ids
from visacc.speculate.pipeline import CaptionPipeline
from visacc.speculate.train import DrafterTraining, default_config, mixed, train_drafter
from visacc.train.processes import own_device

Features = Callable[[Sequence[int]], DraftBatch]
METHODS = ("eagle", "msd", "dream", "flash", "vispec")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, images relative to it.

    Raises:
        ValueError: a line that is not an object with a prompt, or a picture that does not exist.
    """
    rows = []
    for number, row in read_objects(path):
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f'{path}, line {number}: expected an object with "prompt" (a text) and "image"')
        if row.get("image"):
            if not isinstance(row["image"], str) or "\0" in row["image"]:
                raise ValueError(f'{path}, line {number}: "image" must be a file name, got {row["image"]!r}')
            picture = row["image"] = path.parent / row["image"]
            if not picture.exists():
                raise ValueError(f"{path}, line {number}: no picture {picture}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def train_from_files(
    method: str,
    target: str,
    data: Path,
    out: Path,
    *,
    answers: str,
    steps: int,
    batch_size: int,
    lr: float,
    max_new_tokens: int,
    held_out: int,
    check_every: int,
    store: Path | None = None,
    shard: bool = False,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
) -> Drafter:
    """Load, harvest online, train.

    Args:
        store: folder for features; they are written there once and read back from then on (offline).
        shard: see :class:`DrafterTraining`.
        config: overrides fields of the drafter's configuration.
    """
    if method not in METHODS:
        raise ValueError(f"training is available for {', '.join(METHODS)}, not for {method!r}")
    rows = read_rows(data)
    if len(rows) - held_out < batch_size:
        raise ValueError(
            f"{data} has {len(rows)} rows: too few for held_out={held_out} and batch_size={batch_size}"
        )
    if answers == "dataset" and any("answer" not in row for row in rows):
        raise ValueError('answers="dataset" needs an "answer" in every row')
    pipeline = CaptionPipeline(target, speculator=None, device=own_device(device), dtype=dtype)
    adapter = VLMTarget(pipeline.model, score=(config or {}).get("prune", 1) < 1)
    generation = pipeline.model.generation_config
    pad = eos_ids(generation.pad_token_id) or eos_ids(generation.eos_token_id)
    if method == "dream" and len(candidate_layers(len(adapter.layers))) > 1:
        pipeline.model.set_attn_implementation("eager")  # the layer is chosen by its attention maps
    harvester = OnlineHarvester(
        adapter,
        answers=answers,
        max_new_tokens=max_new_tokens,
        eos=eos_ids(generation.eos_token_id),
        pad=pad[0] if pad else 0,
        mid=method == "dream",
    )
    train_rows = rows[: len(rows) - held_out]
    features = _harvested(pipeline, harvester, train_rows, answers)
    if store is not None:
        features = _stored(store, features, harvester, len(train_rows), batch_size)
    batches = _batches(features, train_rows, batch_size, method, steps)
    test = rows[len(rows) - held_out :]

    def measure(drafter: Drafter) -> dict[str, Any]:
        from visacc.speculate.api import Speculator

        tester = CaptionPipeline(pipeline.model, pipeline.processor, speculator=None)
        tester.speculator = Speculator(pipeline.model, drafter)
        done = tester(
            [r.get("image") for r in test], [r["prompt"] for r in test], max_new_tokens=max_new_tokens
        )
        count, spent = sum(max(c.tokens - 1, 0) for c in done), sum(c.steps for c in done)
        return {"tau": count / max(spent, 1)}

    return train_drafter(
        adapter,
        default_config(method, adapter, **(config or {})),
        batches,
        out,
        DrafterTraining(steps=steps, lr=lr, check_every=check_every, shard=shard),
        spec=PRESETS[method],
        evaluate=measure if test else None,
    )


def _harvested(
    pipeline: CaptionPipeline, harvester: OnlineHarvester, rows: list[dict[str, Any]], answers: str
) -> Features:
    """Row numbers -> features, made on the spot."""

    def features(numbers: Sequence[int]) -> DraftBatch:
        return harvester(_prompts(pipeline, harvester, [rows[i] for i in numbers], answers))

    return features


def _prompts(
    pipeline: CaptionPipeline, harvester: OnlineHarvester, rows: list[dict[str, Any]], answers: str
) -> Any:
    pictures: list[list[Image.Image]] = []
    for row in rows:
        if row.get("image"):
            pictures.append([read_image(row["image"])])
        else:
            pictures.append([])
    inputs = pipeline.inputs([row["prompt"] for row in rows], pictures)
    if answers == "generated":
        return inputs
    tokenizer = pipeline.tokenizer
    ends = list(harvester.params.eos[:1])
    texts = [tokenizer(row["answer"], add_special_tokens=False)["input_ids"] + ends for row in rows]
    return Answered(inputs, texts)


def _stored(folder: Path, features: Features, harvester: OnlineHarvester, count: int, size: int) -> Features:
    """Row numbers -> features read from ``folder``, which is filled first if it is new."""
    if not (folder / "header.json").exists():
        if several():
            raise ValueError(
                f"{folder} holds no features yet: let one process write them (the same command with --steps 0,"
                " without the launcher)"
            )
        parts = (list(range(first, min(first + size, count))) for first in range(0, count, size))
        harvester.write(map(features, parts), folder)
    store = OfflineStore(folder, harvester.target)
    if len(store) != count:
        raise ValueError(f"{folder} holds features of {len(store)} rows, {count} are to be trained on")
    if harvester.layers and not store.header.get("mid_layers"):
        raise ValueError(f"{folder} lacks the intermediate states that dream is trained on")
    if harvester.target.score and store.batch([0]).view.visual_score is None:
        raise ValueError(f"{folder} lacks the attention that picture tokens receive, which pruning needs")
    return store.batch


def _batches(
    features: Features, rows: list[dict[str, Any]], size: int, method: str, steps: int
) -> Callable[[int], DraftBatch]:
    """Batch number -> features; MSD reads texts first and pictures later, where there are enough of both."""
    text = [i for i, row in enumerate(rows) if not row.get("image")]
    visual = [i for i, row in enumerate(rows) if row.get("image")]
    if method == "msd" and min(len(text), len(visual)) >= size:
        total = steps * int(os.environ.get("WORLD_SIZE", "1"))
        return mixed(_shuffled(features, text, size), _shuffled(features, visual, size), total)
    return _shuffled(features, list(range(len(rows))), size)


def _shuffled(features: Features, rows: list[int], size: int) -> Callable[[int], DraftBatch]:
    """Every round over the rows is shuffled anew, the same way on every machine."""

    def batch(number: int) -> DraftBatch:
        turn, place = divmod(number, len(rows) // size)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(turn))
        return features([rows[int(i)] for i in order[place * size : (place + 1) * size]])

    return batch
