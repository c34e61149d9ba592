"""Reference sets: a folder of photos, an ADM image file, a statistics file, or scenes of the shapes world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visacc.eval.chunks import Chunks, run_chunks
from visacc.eval.features import Source, extract
from visacc.eval.files import write_json, write_png
from visacc.eval.inputs import inputs_of
from visacc.eval.prompts import PromptSet
from visacc.eval.world import World
from visacc.metrics.extractors.base import Extractor
from visacc.metrics.images import ImageFolder
from visacc.metrics.npz import NpzImages, file_digest, load_stats, members
from visacc.metrics.protocol import digest
from visacc.metrics.scores import FeatureSet


def open_images(
    path: str | Path, *, prepare: str = "as-is", mixed_sizes: bool = False, on_error: str = "raise"
) -> Source:
    """A folder of images, or the arr_0 array of an .npz file."""
    path = Path(path)
    if path.suffix == ".npz":
        if prepare != "as-is":
            raise ValueError("images of an .npz file are taken as they are; prepare must be 'as-is'")
        return NpzImages(path)
    return ImageFolder.of(path, prepare=prepare, mixed_sizes=mixed_sizes, on_error=on_error)


def is_statistics(path: str | Path) -> bool:
    """Whether a .npz file holds mu and sigma."""
    if Path(path).suffix != ".npz":
        return False
    return "mu" in members(path)


def statistics_set(path: str | Path, extractor: Extractor, heads: Sequence[str]) -> FeatureSet:
    """Reference known by its statistics only; dimensions are checked against the extractor."""
    given = {}
    for head in heads:
        if head not in ("features", "spatial"):
            continue
        g = load_stats(path, spatial=head == "spatial")
        if g.dim != extractor.heads[head]:
            raise ValueError(
                f"{path} holds {g.dim}-d statistics, {extractor.id} gives {extractor.heads[head]}-d {head}: "
                "they were made with another extractor"
            )
        if g.extractor and g.extractor != extractor.id:
            raise ValueError(f"{path} was made with {g.extractor}, not with {extractor.id}")
        given[head] = g
    n = next((g.n for g in given.values()), None)
    return FeatureSet(n, None, f"{Path(path).name}@{file_digest(path, 8)}", given=given)


def render_shapes(
    world: World, count: int, prompts: PromptSet | None, folder: Path, *, quiet: bool = False
) -> Path:
    """`count` true scenes of the shapes world: of the prompts in turn where they carry clauses, else of
    its captions.
    """
    from visacc.models.shapes.captions import sample, scene_for
    from visacc.models.shapes.world import render

    metadata = prompts.metadata if prompts is not None else None
    name = f"shapes-{count}" + (f"-{prompts.digest}" if metadata and prompts else "")
    images, chunks = folder / name / "images", Chunks(folder / name / "chunks", count, 100)

    def work(chunk: int, start: int, stop: int) -> None:
        images.mkdir(parents=True, exist_ok=True)
        for i in range(start, stop):
            scene = (
                scene_for(metadata[i % len(metadata)], 10_000_000 + i)
                if metadata
                else sample(20_000_000 + i).scene
            )
            picture = Image.fromarray(np.round(render(scene) * 255).astype(np.uint8))
            write_png(images / f"{i:06d}.png", picture)
        write_json(chunks.path(chunk), {"images": stop - start})

    run_chunks(world, chunks, work, f"render {count} reference scenes", quiet=quiet)
    return images


def reference_features(
    world: World,
    spec: dict[str, Any],
    heads: Sequence[str],
    folder: Path,
    info: Extractor,
    build: Callable[[], Extractor],
    prompts: PromptSet | None,
    *,
    batch: int,
    quiet: bool = False,
) -> FeatureSet:
    """Features (or statistics) of the reference a metric entry names; shared by all cells of a run."""
    source = str(spec["reference"])
    if is_statistics(source):
        return statistics_set(source, info, heads)
    name = source
    if source.startswith("shapes:"):
        if not source.removeprefix("shapes:").isdigit():
            raise ValueError(f"true scenes are asked for as shapes:COUNT, got {source!r}")
        count = int(source.removeprefix("shapes:"))
        path = render_shapes(world, count, prompts, folder, quiet=quiet)
    else:
        path = Path(source)
        name = path.name
    images = open_images(
        path,
        prepare=spec.get("reference_prepare", "as-is"),
        mixed_sizes=True,
        on_error=spec.get("on_error", "raise"),
    )
    settings = [spec.get(k) for k in ("reference_prepare", "extractor", "extractor_options", "weights")]
    wanted = prompts.digest if source.startswith("shapes:") and prompts else None
    key = digest([source, *settings, inputs_of(spec), list(heads), wanted])
    found, _ = extract(
        world,
        images,
        folder / f"features-{key}",
        build,
        f"features of {name}",
        name=name,
        batch=batch,
        quiet=quiet,
    )
    return found
