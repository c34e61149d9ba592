"""The generation stage: images of one cell, chunk by chunk, each image with its own recorded seed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from visacc.eval.chunks import Chunks, run_chunks
from visacc.eval.config import Cell, Config, settings_digest
from visacc.eval.files import file_sha256, read_json, write_json, write_png, write_text
from visacc.eval.prompts import PromptSet
from visacc.eval.world import World, refuse_memory
from visacc.metrics.geneval.layout import metadata_text, prompt_folder, sample_path
from visacc.noise import sample_seed
from visacc.pipeline import TextToImagePipeline
from visacc.reading import naming
from visacc.traces import TRACED, encode_grid, environment

FORMAT = 1
_LOAD = ("device", "dtype", "image_size", "compile", "device_map", "shard")
"""Model options that are arguments of ``visacc.load`` itself."""


class Pipeline(Protocol):
    """What a run needs of a pipeline: diffusers' calling convention, a seed per image, statistics if it
    has any.
    """

    def __call__(self, prompt: list[Any], *, seed: list[int], output_type: str, **options: Any) -> Any: ...


class Images:
    """Where image i of a cell lies: GenEval's layout when prompts carry clauses, else one numbered folder."""

    def __init__(self, root: Path, prompts: PromptSet, samples: int):
        self.root, self.prompts, self.samples = root, prompts, samples

    def __len__(self) -> int:
        return len(self.prompts) * self.samples

    def path(self, i: int) -> Path:
        prompt, sample = divmod(i, self.samples)
        if self.prompts.metadata is not None:
            return sample_path(self.root, prompt, sample)
        return self.root / f"{i:06d}.png"

    def text(self, i: int) -> str | int:
        return self.prompts.texts[i // self.samples]

    def metadata(self, i: int) -> Mapping[str, Any]:
        assert self.prompts.metadata is not None
        return self.prompts.metadata[i // self.samples]

    def prepare(self, i: int) -> None:
        """Folder and metadata file of the image's prompt."""
        if self.prompts.metadata is None:
            self.root.mkdir(parents=True, exist_ok=True)
            return
        folder = prompt_folder(self.root, i // self.samples)
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        target = folder / "metadata.jsonl"
        if not target.exists():
            write_text(target, metadata_text(self.metadata(i)))


def image_seed(base: int, i: int) -> int:
    """Seed of image i: the same for every decoder, so that cells can be compared pair by pair."""
    return sample_seed(base, i)


def guard(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the manifest of a cell, or refuse a folder made with other settings, naming the difference."""
    path = folder / "manifest.json"
    entry = {"format": FORMAT, "settings": dict(settings), "digest": settings_digest(settings)}
    if not path.exists():
        write_json(path, entry)
        return
    old = read_json(path)
    if old.get("digest") == entry["digest"]:
        return
    before, now = old.get("settings", {}), dict(settings)
    changed = [k for k in sorted(set(before) | set(now)) if before.get(k) != now.get(k)]
    shown = "; ".join(f"{k}: {before.get(k)!r} -> {now.get(k)!r}" for k in changed)
    raise ValueError(
        f"{folder} holds images of other settings ({shown}). Mixing them would falsify the result: use another "
        "output folder, or delete this one"
    )


def guard_model(folder: Path, pipe: Any) -> None:
    """Refuse to continue with other weights under the same name, or with bytes made of pixels otherwise."""
    model = getattr(pipe, "model", None)
    fingerprint = getattr(model, "fingerprint", None)
    if not callable(fingerprint):
        return
    path, entry = (
        folder / "model.json",
        {"fingerprint": fingerprint(), "pixel_rule": getattr(model, "pixel_rule", None)},
    )
    if not path.exists():
        write_json(path, entry)
    elif (old := read_json(path)).get("fingerprint") != entry["fingerprint"]:
        raise ValueError(f"{folder} was begun with other weights of this model; use another output folder")
    elif old != entry:
        raise ValueError(
            f"{folder} was begun with pixel rule {old.get('pixel_rule')!r}, this model has {entry['pixel_rule']!r}; "
            "use another output folder"
        )


class Builder:
    """Pipelines of a run's cells; the model is loaded once and given each cell's decoder in turn."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self._pipe: Any = None

    def __call__(self, cell: Cell) -> Pipeline:
        config = self.config
        if config.pipeline is not None:
            module, _, name = config.pipeline.partition(":")
            try:
                factory = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"pipeline {config.pipeline!r} cannot be imported: {error}") from error
            options = {**config.model_options, "device": self.device}
            return factory(decoder=cell.decoder, **options, **cell.options)
        if self._pipe is None:
            from visacc import load

            options = {**config.model_options, "device": self.device}
            known = {k: options.pop(k) for k in _LOAD if k in options}
            self._pipe = load(
                config.model, decoder=cell.decoder, model_options=options or None, **known, **cell.options
            )
        else:
            self._pipe.set_decoder(cell.decoder, **cell.options)
        return self._pipe


def record_steps(stats: Any, index: int) -> int | None:
    """Target forwards of one image, where the pipeline counts them per sample."""
    steps = getattr(stats, "steps", None)
    return int(steps[index]) if isinstance(steps, torch.Tensor | Sequence) else None


def commit_grids(pipe: Any, stats: Any) -> torch.Tensor | None:
    """int64 [B, T, H, W] step that committed each token, where the pipeline is one of this package's."""
    layout = getattr(getattr(pipe, "model", None), "layout", None)
    steps = getattr(stats, "step_of", None)
    return None if layout is None or steps is None else layout.to_grid(steps)


def generate_cell(
    world: World,
    config: Config,
    cell: Cell,
    prompts: PromptSet,
    folder: Path,
    build: Callable[[], Pipeline],
    *,
    quiet: bool = False,
) -> None:
    """Make every image of a cell that is not there yet.

    chunks/NNNNNN.json lists files, hashes, seeds and steps, and how many tokens the steps committed;
    timing/NNNNNN.json what cannot be reproduced.
    """
    images = Images(folder / "images", prompts, config.samples_per_prompt)
    chunks = Chunks(folder / "chunks", len(images), config.batch_size)
    if world.main:
        guard(folder, config.generation(cell, prompts, world.device.type))
        drop_damaged(folder, chunks)
    world.barrier()
    pipe: Pipeline | None = None
    if chunks.pending():
        pipe = build()
        if isinstance(pipe, TextToImagePipeline):
            refuse_memory(pipe.current_decoder())
        if world.main:
            guard_model(folder, pipe)
    world.barrier()
    if pipe is None:
        return

    def work(chunk: int, start: int, stop: int) -> None:
        index = list(range(start, stop))
        seeds = [image_seed(config.seed, i) for i in index]
        begun = time.perf_counter()
        assert pipe is not None
        options = dict(config.sampling)
        if isinstance(pipe, TextToImagePipeline):
            options["batch_size"] = len(index)  # a chunk is decoded as one batch
        result = pipe([images.text(i) for i in index], seed=seeds, output_type="pil", **options)
        seconds = time.perf_counter() - begun
        if len(result.images) != len(index):
            raise RuntimeError(f"the pipeline gave {len(result.images)} images for {len(index)} prompts")
        stats, rows = getattr(result, "stats", None), []
        grids = commit_grids(pipe, stats)
        for k, i in enumerate(index):
            images.prepare(i)
            write_png(images.path(i), result.images[k])
            row: dict[str, Any] = {
                "file": images.path(i).relative_to(folder).as_posix(),
                "prompt": images.text(i),
                "seed": seeds[k],
                "sha256": file_sha256(images.path(i)),
                "bytes": images.path(i).stat().st_size,
            }
            steps = record_steps(stats, k)
            if steps is not None:
                row["steps"] = steps
            if grids is not None and i < TRACED:
                row["commit_steps"] = encode_grid(grids[k])
            rows.append(row)
        timing: dict[str, Any] = {"seconds": seconds, "images": len(index)}
        timing |= {"rank": world.rank, "device": str(world.device)}
        timing["environment"] = environment(world.device)
        decode = getattr(stats, "seconds", None)
        if decode is not None:
            timing["decode_seconds"] = float(decode)
        write_json(folder / "timing" / f"{chunk:06d}.json", timing)
        tokens = getattr(stats, "tokens", None)
        record: dict[str, Any] = {"images": rows, "tokens": None if tokens is None else int(tokens)}
        histogram = getattr(stats, "histogram", None)
        if callable(histogram):
            record["committed_histogram"] = histogram()
        used = getattr(result, "settings", None)
        if isinstance(used, Mapping) and isinstance(used.get("lossless"), bool):
            record["lossless"] = used["lossless"]
        write_json(chunks.path(chunk), record)

    through = pipe.finish if isinstance(pipe, TextToImagePipeline) else None
    run_chunks(world, chunks, work, f"generate {cell.name}", quiet=quiet, through=through)


def drop_damaged(folder: Path, chunks: Chunks) -> int:
    """Chunks whose files are missing or have another size are made again; returns how many."""
    dropped = 0
    for path in chunks.paths():
        if not path.exists():
            continue
        if not _sound(path, folder):
            path.unlink()
            dropped += 1
    return dropped


def _sound(path: Path, folder: Path) -> bool:
    """Whether a chunk's record can be read and its files are those it lists."""
    try:
        with naming(path):
            for row in read_json(path)["images"]:
                file = folder / row["file"]
                if not file.exists() or file.stat().st_size != row["bytes"]:
                    return False
    except ValueError:
        return False
    return True
