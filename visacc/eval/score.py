"""The scoring stage: one metric entry on one set of images, sharded and resumable like the generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from visacc.eval.chunks import Chunks, run_chunks
from visacc.eval.features import BATCH, extract
from visacc.eval.files import read_json, write_json, write_text
from visacc.eval.prompts import PromptSet
from visacc.eval.reference import reference_features
from visacc.eval.world import World
from visacc.metrics.extractors.base import Extractor
from visacc.metrics.images import ImageFolder, load_image, pil_to_tensor
from visacc.metrics.protocol import Recipe, Score, digest, recipe
from visacc.metrics.scores import NEEDS, compute, heads_for

TEXT_METRICS = ("clip", "hps")
FEATURE_KEYS = {"metric", "extractor", "extractor_options", "weights", "reference", "reference_prepare", "prepare",
                "protocol", "batch", "on_error", "mixed_sizes", *NEEDS}  # fmt: skip
GENEVAL_KEYS = {"metric", "detector", "detector_options", "weights", "colour_model", "colour_pretrained",
                "colour_weights", "thresholds", "batch"}  # fmt: skip
TEXT_KEYS = {"metric", "model", "pretrained", "weights", "scale", "version", "batch"}


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


def spec_key(spec: Mapping[str, Any]) -> str:
    return f"{'+'.join(metric_names(spec))}-{digest(dict(spec), 8)}"


def score(world: World, task: Task, spec: Mapping[str, Any]) -> list[Score]:
    """All scores of one metric entry; read back if they were computed before."""
    check_spec(spec)
    done = task.work / "scores" / f"{spec_key(spec)}.json"
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


def _apply_recipe(spec: Mapping[str, Any]) -> tuple[dict[str, Any], Recipe | None]:
    """A paper's protocol by name fills in extractor, its options and the image preparation."""
    if "protocol" not in spec:
        return dict(spec), None
    chosen = recipe(str(spec["protocol"]))
    fixed = {
        "extractor": chosen.extractor,
        "extractor_options": {**dict(chosen.options), **spec.get("extractor_options", {})},
        "prepare": chosen.images,
        "reference_prepare": chosen.reference_images,
    }
    for key, value in fixed.items():
        if key in spec and key != "extractor_options" and spec[key] != value:
            raise ValueError(
                f"protocol {chosen.name!r} fixes {key} to {value!r}, the entry says {spec[key]!r}"
            )
    return {**spec, **fixed}, chosen


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
    spec, chosen = _apply_recipe(spec)
    names = metric_names(spec)
    heads, batch = heads_for(names), int(spec.get("batch", BATCH))
    build = _builder(spec, heads, world)
    images = ImageFolder(
        task.files,
        prepare=spec.get("prepare", "as-is"),
        mixed_sizes=bool(spec.get("mixed_sizes", False)),
        on_error=spec.get("on_error", "raise"),
    )
    key = digest(
        [spec.get(k) for k in ("extractor", "extractor_options", "weights", "prepare")] + [list(heads)]
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
    return [_named(s, chosen) for s in scores]


def _named(score: Score, chosen: Recipe | None) -> Score:
    """Put a paper's protocol name on a score only if its counts are met; else say why not."""
    if chosen is None:
        return score
    wrong = chosen.check_counts(score.protocol.n_gen or 0, score.protocol.n_ref)
    if score.name not in chosen.metrics:
        wrong = wrong or f"{chosen.name!r} does not define {score.name!r}"
    if wrong:
        return replace(score, warnings=(*score.warnings, wrong))
    return replace(score, protocol=replace(score.protocol, name=chosen.name))


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
    key = digest({k: v for k, v in spec.items() if k != "batch"})
    folder = task.work / f"geneval-{key}"
    results, batch = folder / "results.jsonl", int(spec.get("batch", 8))
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
    return to_scores(read_results(results), read_json(folder / "judge.json")["id"], name)


def geneval_results(work: Path, spec: Mapping[str, Any]) -> Path:
    """The result file of a scored GenEval entry, in the official format."""
    key = digest({k: v for k, v in spec.items() if k != "batch"})
    return work / f"geneval-{key}" / "results.jsonl"


def build_text_model(spec: Mapping[str, Any], world: World, prompts: str) -> Any:
    from visacc.metrics.clip_score import HPS, ClipScore, hps_model
    from visacc.metrics.extractors.clip_models import ClipModel

    if spec["metric"] == "hps":
        if "version" not in spec:
            raise ValueError("hps needs `version: v2.0` or `version: v2.1`; both are in print and differ")
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
    folder = task.work / f"{spec['metric']}-{digest(dict(spec))}"
    chunks = Chunks(folder / "chunks", len(task.files), int(spec.get("batch", BATCH)))
    prompts = task.prompts.name if task.prompts else ""
    model = build_text_model(spec, world, prompts) if chunks.pending() else None
    if model is not None and world.main:
        write_json(folder / "model.json", {"name": model.model.name, "weights": model.model.weights})

    def work(chunk: int, start: int, stop: int) -> None:
        assert model is not None and task.texts is not None
        images = [pil_to_tensor(load_image(f)) for f in task.files[start:stop]]
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
    return [mean_score(scale_cosines(cosines, scale), str(spec["metric"]), _Named(**info), settings)]


@dataclass
class _Named:
    name: str
    weights: str
