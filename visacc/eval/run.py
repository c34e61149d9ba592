"""`visacc eval run`: generate and score every cell of a configuration, then tabulate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from visacc.eval.config import Cell, Config
from visacc.eval.files import write_json, write_text
from visacc.eval.generate import Builder, Images, Pipeline, generate_cell
from visacc.eval.grids import write_grids
from visacc.eval.lock import claim
from visacc.eval.prompts import PromptSet, load_prompts
from visacc.eval.score import Task, geneval_results, score
from visacc.eval.spec import check_spec, metric_names
from visacc.eval.table import Row, Speed, markdown
from visacc.eval.world import World, join
from visacc.metrics.protocol import Score


def run(
    config: Config,
    *,
    world: World | None = None,
    quiet: bool = False,
    build: Callable[[Cell], Pipeline] | None = None,
) -> list[Row]:
    """The whole run. Call it again after any interruption: finished work is kept, changed settings are
    refused.

    Writes <output>/<cell>/... (images, chunks, scores), summary.json and summary.md; every process returns
    the rows.
    """
    world = world or join(str(config.model_options["device"]) if "device" in config.model_options else None)
    prompts = load_prompts(config.prompts, config.limit)
    _check(config, prompts)
    with claim(config.output, world):
        return _run(world, config, prompts, quiet, build)


def _check(config: Config, prompts: PromptSet) -> None:
    """Refuse what cannot work before hours are spent on it."""
    total = len(prompts) * config.samples_per_prompt
    if config.pipeline is None:
        from visacc.registry import make_decoder

        for cell in config.decoders:  # unknown names and options
            make_decoder(
                cell.decoder, **{k: v for k, v in cell.options.items() if (k, v) != ("window", "auto")}
            )
    for spec in config.metrics:
        check_spec(spec)
        names = metric_names(spec)
        if "geneval" in names and prompts.metadata is None:
            raise ValueError(f"geneval needs prompts with clauses; {prompts.name} has none")
        if names[0] in ("clip", "hps") and not all(isinstance(t, str) for t in prompts.texts):
            raise ValueError(f"{names[0]} needs text prompts; {prompts.name} holds class labels")
        if total < 2 and any(n not in ("geneval", "clip", "hps") for n in names):
            raise ValueError(f"{', '.join(names)} needs at least 2 images, this run makes {total}")
        size = spec.get("kid", {}).get("subset_size", 1000) if "kid" in names else 1
        if type(size) is not int or size < 1:
            raise ValueError(f"the subset_size of kid must be a positive integer, got {size!r}")
        if size > total:
            raise ValueError(
                f"kid draws subsets of {size} images, this run makes {total}: set kid: {{subset_size: ...}}"
            )


def _run(
    world: World,
    config: Config,
    prompts: PromptSet,
    quiet: bool,
    build: Callable[[Cell], Pipeline] | None,
) -> list[Row]:
    make = build or Builder(config, world.device)
    for cell in config.decoders:
        generate_cell(
            world,
            config,
            cell,
            prompts,
            config.output / cell.name,
            partial(make, cell),
            quiet=quiet,
        )
        images = Images(config.output / cell.name / "images", prompts, config.samples_per_prompt)
        write_grids(world, images, prompts, config.output / cell.name / "dpg")
    rows = []
    for cell in config.decoders:
        scores = score_cell(world, config, cell, prompts, quiet=quiet)
        rows.append(Row(cell.name, cell.decoder, cell.options, Speed.read(config.output / cell.name), scores))
    for row in rows:
        row.paired = _paired(config, row.name)
    if world.main:
        summary = {"baseline": config.baseline, "prompts": prompts.name, "rows": [r.to_json() for r in rows]}
        write_json(config.output / "summary.json", summary)
        write_text(config.output / "summary.md", markdown(rows, config.baseline))
    world.barrier()
    return rows


def score_cell(
    world: World, config: Config, cell: Cell, prompts: PromptSet, *, quiet: bool = False
) -> list[Score]:
    """Every metric entry on one finished cell."""
    folder = config.output / cell.name
    images = Images(folder / "images", prompts, config.samples_per_prompt)
    index = range(len(images))
    task = Task(
        files=[images.path(i) for i in index],
        root=images.root,
        work=folder,
        prompts=prompts,
        texts=[images.text(i) for i in index],
        metadata=[images.metadata(i) for i in index] if prompts.metadata is not None else None,
        shared=config.output,
        quiet=quiet,
        bootstrap=config.bootstrap,
    )
    return [s for spec in config.metrics for s in score(world, task, spec)]


def _paired(config: Config, name: str) -> Mapping[str, Any]:
    """GenEval difference from the baseline on the same prompts and seeds."""
    from visacc.metrics.geneval import compare, read_results

    specs = [s for s in config.metrics if metric_names(s) == ["geneval"]]
    if name == config.baseline or not specs:
        return {}
    out = {}
    for spec in specs:
        mine = read_results(geneval_results(config.output / name, spec))
        base = read_results(geneval_results(config.output / config.baseline, spec))
        result = compare(mine, base)
        label = "geneval" if len(specs) == 1 else f"geneval ({spec.get('detector', 'mask2former')})"
        out[label] = {"difference": result.difference, "ci": list(result.ci), "tasks": result.tasks}
    return out


def folder_task(images: Path, work: Path, *, texts: list[str] | None = None, quiet: bool = False) -> Task:
    """A plain folder of images, or the arr_0 array of an .npz file, as a scoring task."""
    from visacc.metrics.images import list_images
    from visacc.metrics.npz import NpzImages

    if images.suffix == ".npz":
        if texts is not None:
            raise ValueError(f"prompts need a folder of images in natural order, not {images}")
        return Task([images], images, work, quiet=quiet, source=NpzImages(images))
    files = list_images(images)
    if texts is not None and len(texts) != len(files):
        raise ValueError(f"{images} holds {len(files)} images but {len(texts)} prompts were given")
    return Task(files, images, work, texts=texts, quiet=quiet)
