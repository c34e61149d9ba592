"""The scoring stage: one metric entry on one set of images, sharded and resumable like the generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visacc.eval.chunks import Chunks, run_chunks
from visacc.eval.features import BATCH, Source, extract
from visacc.eval.files import read_json, write_json, write_text
from visacc.eval.inputs import inputs_of
from visacc.eval.prompts import PromptSet
from visacc.eval.reference import reference_features
from visacc.eval.spec import (
    TEXT_METRICS,
    apply_recipe,
    apply_text_recipe,
    check_spec,
    metric_names,
    named,
    spec_key,
)
from visacc.eval.world import World
from visacc.metrics.extractors.base import Extractor
from visacc.metrics.images import ImageFolder, file_sizes, prepared, resolution_name
from visacc.metrics.npz import NpzImages
from visacc.metrics.protocol import Score, digest
from visacc.metrics.scores import NEEDS, compute, heads_for


@dataclass
class Task:
    """Images to score: files in order, their texts or clauses, where intermediate results go."""

    files: Sequence[Path]
    root: Path
    work: Path
    prompts: PromptSet | None = None  # as given to the reference "shapes:N"
    texts: Sequence[str | int] | None = None  # one per file
    metadata: Sequence[Mapping[str, Any]] | None = None  # one per file
    shared: Path | None = None  # where the reference's features lie
    quiet: bool = False
    bootstrap: bool = True
    source: Source | None = None  # where images come from if not one file each

    def resolution(self) -> str:
        """Of the images, as protocols state it."""
        if isinstance(self.source, NpzImages):
            _, height, width, _ = self.source.shape
            return resolution_name([(width, height)])
        return resolution_name(file_sizes(self.files))


def score(world: World, task: Task, spec: Mapping[str, Any]) -> list[Score]:
    """All scores of one metric entry; read back if they were computed before."""
    check_spec(spec)
    kind = "" if task.bootstrap else "-plain"
    done = task.work / "scores" / f"{spec_key(spec)}{kind}.json"
    if not done.exists():
        names = metric_names(spec)
        if names == ["geneval"]:
            scores = _geneval(world, task, spec)
        elif names[0] in TEXT_METRICS:
            scores = _text(world, task, spec)
        else:
            scores = _features(world, task, spec)
        if world.main:
            write_json(done, {"spec": dict(spec), "scores": [s.to_json() for s in scores]})
    world.barrier()
    return [Score.from_json(s) for s in read_json(done)["scores"]]


def _builder(spec: Mapping[str, Any], heads: Sequence[str], world: World) -> Callable[[], Extractor]:
    built: list[Extractor] = []

    def build() -> Extractor:
        if not built:
            from visacc.metrics.extractors import create

            name = str(spec.get("extractor", "inception"))
            options = dict(spec.get("extractor_options", {}))
            if "weights" in spec:
                options["weights"] = spec["weights"]
            if name == "inception":
                options["heads"] = tuple(heads)
            built.append(create(name, device=world.device, **options))
            missing = [h for h in heads if h not in built[0].heads]
            if missing:
                raise ValueError(
                    f"{built[0].id} has no {missing[0]!r} output; it gives {sorted(built[0].heads)}"
                )
        return built[0]

    return build


def _features(world: World, task: Task, spec: Mapping[str, Any]) -> list[Score]:
    spec, chosen = apply_recipe(spec)
    names = metric_names(spec)
    heads, batch = heads_for(names), int(spec.get("batch", BATCH))
    build = _builder(spec, heads, world)
    if task.source is not None and spec.get("prepare", "as-is") != "as-is":
        raise ValueError(f"images of {task.root} are taken as they are; prepare must be 'as-is'")
    images = task.source or ImageFolder(
        task.files,
        prepare=spec.get("prepare", "as-is"),
        mixed_sizes=bool(spec.get("mixed_sizes", False)),
        on_error=spec.get("on_error", "raise"),
    )
    key = digest(
        [spec.get(k) for k in ("extractor", "extractor_options", "weights", "prepare")]
        + [list(heads), {k: v for k, v in inputs_of(spec).items() if k != "reference"}]
    )
    gen, extractor = extract(
        world, images, task.work / f"features-{key}", build, "features", name="generated", batch=batch,
        quiet=task.quiet,
    )  # fmt: skip
    ref = None
    if any(NEEDS[n][1] for n in names):
        folder = (task.shared or task.work) / "reference"
        ref = reference_features(
            world,
            dict(spec),
            heads,
            folder,
            extractor,
            build,
            task.prompts,
            batch=batch,
            quiet=task.quiet,
        )
    if not world.main:
        return []
    gen.resolution = task.resolution()
    options = {n: spec[n] for n in names if n in spec}
    scores = compute(
        names,
        extractor,
        gen,
        ref,
        images=spec.get("prepare", "as-is"),
        options=options,
        bootstrap=task.bootstrap,
    )
    return [named(s, chosen) for s in scores]


def build_judge(spec: Mapping[str, Any], world: World) -> Any:
    """Detector and colour step of a GenEval entry."""
    from visacc.metrics.geneval import ColourClassifier, Judge, OpenClipEncoder, Options, create_detector

    name = str(spec.get("detector", "mask2former"))
    options = dict(spec.get("detector_options", {}))
    if "weights" in spec:
        options["weights"] = spec["weights"]
    if name != "shapes":
        options.setdefault("device", world.device)
    detector = create_detector(name, **options)
    colours = None
    if not detector.knows_colours and spec.get("colour_model", "ViT-L-14") is not None:
        encoder = OpenClipEncoder(
            spec.get("colour_model", "ViT-L-14"),
            spec.get("colour_pretrained", "openai"),
            spec.get("colour_weights"),
            str(world.device),
        )
        colours = ColourClassifier(encoder)
    thresholds = {**vars(detector.options), **spec.get("thresholds", {})}
    return Judge(detector, colours, Options(**thresholds))


def _geneval(world: World, task: Task, spec: Mapping[str, Any]) -> list[Score]:
    from visacc.metrics.geneval import read_results, score_files, to_line, to_scores

    if task.metadata is None:
        raise ValueError("geneval needs prompts with clauses (prompts: geneval, shapes, or a metadata file)")
    results, batch = geneval_results(task.work, spec), int(spec.get("batch", 8))
    folder = results.parent
    if not results.exists():
        chunks = Chunks(folder / "chunks", len(task.files), batch, ".jsonl")
        judge = build_judge(spec, world) if chunks.pending() else None
        if judge is not None:
            for metadata in task.metadata:
                judge.check(metadata)
            if world.main:
                write_json(folder / "judge.json", {"id": judge.id})

        def work(chunk: int, start: int, stop: int) -> None:
            assert judge is not None and task.metadata is not None
            items = list(zip(task.files[start:stop], task.metadata[start:stop], strict=True))
            lines = [to_line(r) for r in score_files(judge, items, root=task.root, batch=batch)]
            write_text(chunks.path(chunk), "".join(line + "\n" for line in lines))

        run_chunks(world, chunks, work, "geneval", quiet=task.quiet)
        if world.main:
            write_text(results, "".join(p.read_text(encoding="utf-8") for p in chunks.paths()))
    world.barrier()
    if not world.main:
        return []
    name = task.prompts.name if task.prompts else "folder"
    judge_id = read_json(folder / "judge.json")["id"]
    return to_scores(read_results(results), judge_id, name, task.resolution())


def geneval_results(work: Path, spec: Mapping[str, Any]) -> Path:
    """The result file of a scored GenEval entry, in the official format."""
    key = digest([{k: v for k, v in spec.items() if k != "batch"}, inputs_of(spec)])
    return work / f"geneval-{key}" / "results.jsonl"


def build_text_model(spec: Mapping[str, Any], world: World, prompts: str) -> Any:
    from visacc.metrics.clip_score import HPS, ClipScore, hps_model
    from visacc.metrics.extractors.clip_models import ClipModel

    if spec["metric"] == "hps":
        return HPS(hps_model(spec["version"], spec.get("weights"), world.device), prompts=prompts)
    model = ClipModel(
        spec.get("model", "ViT-B-16"), spec.get("pretrained", "openai"), spec.get("weights"), world.device
    )
    return ClipScore(model, spec.get("scale", "100cos"), prompts)


def _text(world: World, task: Task, spec: Mapping[str, Any]) -> list[Score]:
    if task.texts is None:
        raise ValueError(f"{spec['metric']} compares images with their prompts, and none were given")
    if len(task.texts) != len(task.files):
        raise ValueError(
            f"{len(task.files)} images but {len(task.texts)} prompts: one prompt per image is needed"
        )
    if any(not isinstance(t, str) for t in task.texts):
        raise ValueError(f"{spec['metric']} needs text prompts; these are class labels")
    spec = apply_text_recipe(spec)
    prepare = str(spec.get("prepare", "as-is"))
    folder = task.work / f"{spec['metric']}-{digest([dict(spec), inputs_of(spec)])}"
    chunks = Chunks(folder / "chunks", len(task.files), int(spec.get("batch", BATCH)))
    prompts = task.prompts.name if task.prompts else ""
    model = build_text_model(spec, world, prompts) if chunks.pending() else None
    if model is not None and world.main:
        write_json(folder / "model.json", {"name": model.model.name, "weights": model.model.weights})

    def work(chunk: int, start: int, stop: int) -> None:
        assert model is not None and task.texts is not None
        images = [prepared(f, prepare) for f in task.files[start:stop]]
        cosines = model.similarity(images, [str(t) for t in task.texts[start:stop]]).tolist()
        write_json(chunks.path(chunk), {"cosines": cosines})

    run_chunks(world, chunks, work, str(spec["metric"]), quiet=task.quiet)
    if not world.main:
        return []
    from visacc.metrics.clip_score import mean_score, scale_cosines

    cosines = np.array([c for p in chunks.paths() for c in read_json(p)["cosines"]])
    info = read_json(folder / "model.json")
    scale = "cosine" if spec["metric"] == "hps" else spec.get("scale", "100cos")
    settings = {"prompts": prompts} | ({} if spec["metric"] == "hps" else {"scale": scale})
    return [
        mean_score(
            scale_cosines(cosines, scale),
            str(spec["metric"]),
            _Named(**info),
            settings,
            images=prepare,
            resolution=task.resolution(),
            name=str(spec.get("protocol", "custom")),
        )
    ]


@dataclass
class _Named:
    name: str
    weights: str
