"""`visacc eval`: score folders, or generate and score a grid of decoders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from visacc.cli_options import Device, Quiet, batch_option, out_option, values_option

app = typer.Typer(
    help="Quality and speed of decoders: FID family, GenEval, CLIP score, whole evaluation runs.",
    no_args_is_help=True,
    add_completion=False,
)

Gen = Annotated[Path, typer.Argument(help="Folder of generated images (or an .npz with arr_0).")]
Ref = Annotated[str, typer.Argument(help="Reference: folder, .npz statistics or images, or shapes:COUNT.")]
Work = Annotated[
    Path | None, typer.Option(help="Folder for intermediate results: makes the command resumable.")
]
Out = Annotated[Path | None, out_option("Also write the scores to this JSON file.")]
Weights = Annotated[Path | None, typer.Option(help="Weights file of the network; default: download.")]
Batch = Annotated[int, batch_option("Images per forward pass.")]
Options = Annotated[list[str] | None, values_option("Option of the network, name=value.")]


def _parse(options: list[str] | None) -> dict[str, Any]:
    import yaml

    parsed = {}
    for text in options or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"options are given as name=value, got {text!r}")
        try:
            parsed[name] = yaml.safe_load(value)
        except Exception as error:  # values that only look like dates or numbers raise anything
            raise ValueError(f"option {name}: {value!r} is no YAML value ({error})") from error
    return parsed


@contextmanager
def _work(folder: Path | None, world: Any) -> Iterator[Path]:
    """The given work folder, locked; or one that vanishes, for a single process."""
    from visacc.eval.lock import claim

    if folder is None:
        if world.size > 1:
            raise ValueError("several processes need a common --work folder")
        with tempfile.TemporaryDirectory(prefix="visacc-eval-") as temporary:
            yield Path(temporary)
    else:
        with claim(folder, world):
            yield folder


def _show(world: Any, scores: list[Any], out: Path | None) -> None:
    if not world.main:
        return
    for score in scores:
        print(score)
        for warning in score.warnings:
            typer.secho(f"  warning: {warning}", err=True)
    if out is not None:
        from visacc.eval.files import write_json

        write_json(out, [s.to_json() for s in scores])


def _features(
    names: list[str],
    gen: Path,
    reference: str | None,
    spec: dict[str, Any],
    work: Path | None,
    out: Path | None,
    device: str | None,
    quiet: bool,
) -> None:
    from visacc.eval.run import folder_task
    from visacc.eval.score import score
    from visacc.eval.spec import check_spec
    from visacc.eval.world import join

    spec = {"metric": names, **({"reference": reference} if reference else {}), **spec}
    check_spec(spec)
    world = join(device)
    with _work(work, world) as folder:
        task = folder_task(gen, folder, quiet=quiet)
        if world.main:
            _guard_set(folder, task.files, gen)
        world.barrier()
        _show(world, score(world, task, spec), out)


def _guard_set(folder: Path, files: Any, gen: Path, wanted: Any = None) -> None:
    """A work folder belongs to one image set and to what it should show (texts or clauses), if that matters."""
    from visacc.eval.files import read_json, write_json
    from visacc.eval.inputs import stamps
    from visacc.metrics.protocol import digest

    entry = {"images": str(gen.resolve()), "files": digest(stamps(files)), "wanted": digest(wanted)}
    path = folder / "set.json"
    if path.exists() and read_json(path) != entry:
        raise ValueError(
            f"{folder} holds results of another image set, or the images changed, or their prompts did; use another --work"
        )
    write_json(path, entry)


@app.command()
def fid(
    gen: Gen,
    reference: Ref,
    metric: Annotated[
        list[str] | None, typer.Option(help="fid, sfid, kid, is, prdc, cmmd, mind; repeatable.")
    ] = None,
    extractor: Annotated[
        str, typer.Option(help="inception, dinov2, clip, clip-cmmd, vgg16, efflite0, timm.")
    ] = ("inception"),
    flavour: Annotated[
        str | None,
        typer.Option(help="Inception preprocessing: torch-fidelity, pytorch-fid, clean-fid, torchmetrics."),
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="A paper's protocol by name; see docs/metrics.md.")
    ] = None,
    prepare: Annotated[str, typer.Option(help="What is done to generated images first.")] = "as-is",
    skip_unreadable: Annotated[
        bool, typer.Option(help="Leave unreadable images out and count them.")
    ] = False,
    mixed_sizes: Annotated[bool, typer.Option(help="Allow generated images of different sizes.")] = False,
    kid_subset: Annotated[int, typer.Option(help="Images per KID subset.")] = 1000,
    weights: Weights = None,
    option: Options = None,
    work: Work = None,
    out: Out = None,
    device: Device = None,
    batch: Batch = 32,
    quiet: Quiet = False,
) -> None:
    """Fréchet family of a folder against a reference, each number with its protocol."""
    names = metric or ["fid"]
    options = _parse(option)
    if flavour is not None:
        options["flavour"] = flavour
    spec: dict[str, Any] = {"batch": batch, "extractor_options": options}
    if protocol is not None:
        spec["protocol"] = protocol
    else:
        spec |= {"extractor": extractor, "prepare": prepare}
    if weights is not None:
        spec["weights"] = str(weights)
    if skip_unreadable:
        spec["on_error"] = "skip"
    if mixed_sizes:
        spec["mixed_sizes"] = True
    if "kid" in names:
        spec["kid"] = {"subset_size": kid_subset}
    _features(names, gen, reference, spec, work, out, device, quiet)


@app.command()
def kid(
    gen: Gen,
    reference: Ref,
    extractor: Annotated[str, typer.Option(help="Feature extractor, as for fid.")] = "inception",
    subset: Annotated[int, typer.Option(help="Images per subset.")] = 1000,
    subsets: Annotated[int, typer.Option(help="Number of subsets.")] = 100,
    weights: Weights = None,
    option: Options = None,
    work: Work = None,
    out: Out = None,
    device: Device = None,
    batch: Batch = 32,
    quiet: Quiet = False,
) -> None:
    """Kernel Inception Distance."""
    spec: dict[str, Any] = {
        "extractor": extractor,
        "extractor_options": _parse(option),
        "batch": batch,
        "kid": {"subset_size": subset, "subsets": subsets},
    }
    if weights is not None:
        spec["weights"] = str(weights)
    _features(["kid"], gen, reference, spec, work, out, device, quiet)


@app.command()
def clip(
    gen: Gen,
    prompts: Annotated[
        Path, typer.Argument(help="Text file: one prompt per image, in natural order of the names.")
    ],
    model: Annotated[str | None, typer.Option(help="open_clip architecture (ViT-B-16).")] = None,
    pretrained: Annotated[str | None, typer.Option(help="open_clip tag (openai).")] = None,
    scale: Annotated[str | None, typer.Option(help="cosine, 100cos, gigagan, clipscore (100cos).")] = None,
    hps: Annotated[str | None, typer.Option(help="Score HPS v2.0 or v2.1 instead.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="A paper's: sjd-clip, gigagan-clip, lantern-hps.")
    ] = None,
    weights: Weights = None,
    work: Work = None,
    out: Out = None,
    device: Device = None,
    batch: Batch = 32,
    quiet: Quiet = False,
) -> None:
    """CLIP score (or HPS) of images with their prompts."""
    from visacc.eval.prompts import load_prompts
    from visacc.eval.run import folder_task
    from visacc.eval.score import score
    from visacc.eval.spec import check_spec
    from visacc.eval.world import join
    from visacc.metrics.recipes import text_recipe

    spec: dict[str, Any] = {"metric": "clip", "batch": batch}
    if protocol is not None:
        given = {"--model": model, "--pretrained": pretrained, "--scale": scale, "--hps": hps}
        spoken = [name for name, value in given.items() if value is not None]
        if spoken:
            raise ValueError(f"--protocol fixes the model and the scale; leave {', '.join(spoken)} out")
        spec |= {"metric": text_recipe(protocol).metric, "protocol": protocol}
    elif hps is not None:
        spec |= {"metric": "hps", "version": hps}
    else:
        spec |= {
            "model": model or "ViT-B-16",
            "pretrained": pretrained or "openai",
            "scale": scale or "100cos",
        }
    if weights is not None:
        spec["weights"] = str(weights)
    check_spec(spec)
    texts = [str(t) for t in load_prompts(str(prompts)).texts]
    world = join(device)
    with _work(work, world) as folder:
        task = folder_task(gen, folder, texts=texts, quiet=quiet)
        if world.main:
            _guard_set(folder, task.files, gen, texts)
        world.barrier()
        _show(world, score(world, task, spec), out)


@app.command()
def fvd(
    gen: Annotated[Path, typer.Argument(help="Folder of generated clips, or of sub-folders of frames.")],
    reference: Annotated[Path, typer.Argument(help="Folder of reference clips.")],
    weights: Annotated[str, typer.Option(help="I3D file, or hub:owner/name/file.")],
    protocol: Annotated[str, typer.Option(help="ucf101, k600 or tokenizer; see docs/metrics.md.")] = "ucf101",
    variant: Annotated[
        str | None, typer.Option(help="Port of I3D: styleganv or videogpt; that of the protocol by default.")
    ] = None,
    out: Out = None,
    device: Device = None,
    batch: Annotated[int, batch_option("Clips per forward pass.")] = 8,
    quiet: Quiet = False,
) -> None:
    """Fréchet video distance of two folders of clips, with its protocol."""
    from visacc.eval.fvd import fvd_score
    from visacc.eval.world import World, refuse_several
    from visacc.metrics.extractors.base import pick_device

    refuse_several("visacc eval fvd")
    score = fvd_score(
        gen,
        reference,
        protocol,
        weights,
        variant=variant,
        device=pick_device(device),
        batch=batch,
        quiet=quiet,
    )
    _show(World(), [score], out)


@app.command()
def geneval(
    images: Annotated[Path, typer.Argument(help="Folder in GenEval's layout.")],
    detector: Annotated[
        str, typer.Option(help="mask2former, fb-mask2former, shapes, yolov3-tiny.")
    ] = "mask2former",
    prompts: Annotated[
        str | None, typer.Option(help="What must be there: geneval, shapes, or a .jsonl file.")
    ] = None,
    partial: Annotated[bool, typer.Option(help="Score an incomplete folder.")] = False,
    weights: Weights = None,
    colour_model: Annotated[
        str, typer.Option(help="open_clip architecture of the colour step.")
    ] = "ViT-L-14",
    colour_weights: Annotated[Path | None, typer.Option(help="Its weights file; default: download.")] = None,
    option: Options = None,
    work: Work = None,
    results: Annotated[
        Path | None, typer.Option(help="Write result lines in the official format here.")
    ] = None,
    out: Out = None,
    device: Device = None,
    batch: Batch = 8,
    quiet: Quiet = False,
) -> None:
    """GenEval: six tasks and the overall score, with the original's result file and summary."""
    from visacc.eval.files import write_text
    from visacc.eval.prompts import load_prompts
    from visacc.eval.score import Task, geneval_results, score
    from visacc.eval.spec import check_spec
    from visacc.eval.world import join
    from visacc.metrics.geneval import pairs, read_results, scan, summarise

    spec: dict[str, Any] = {"metric": "geneval", "detector": detector, "batch": batch}
    if option:
        spec["detector_options"] = _parse(option)
    if weights is not None:
        spec["weights"] = str(weights)
    if detector != "shapes":
        spec["colour_model"] = colour_model
        if colour_weights is not None:
            spec["colour_weights"] = str(colour_weights)
    check_spec(spec)
    wanted = load_prompts(prompts) if prompts is not None else None
    if wanted is not None and wanted.metadata is None:
        raise ValueError(f"{prompts} has no GenEval clauses")
    found = pairs(scan(images, prompts=wanted.metadata if wanted else None, partial=partial))
    world = join(device)
    with _work(work, world) as folder:
        files = [f for f, _ in found]
        if world.main:
            _guard_set(folder, files, images, [m for _, m in found])
        world.barrier()
        task = Task(files, images, folder, wanted, metadata=[m for _, m in found], quiet=quiet)
        scores = score(world, task, spec)
        if world.main:
            path = geneval_results(folder, spec)
            print(summarise(read_results(path)).text())
            print()
            if results is not None:
                write_text(results, path.read_text(encoding="utf-8"))
        _show(world, scores, out)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file, see docs/metrics.md.")],
    output: Annotated[Path | None, out_option("Folder, instead of the one in the file.", "--output")] = None,
    quiet: Quiet = False,
) -> None:
    """Generate and score a grid of decoders. Run the same command again after an interruption.

    Several processes: accelerate launch --num_processes 4 -m visacc eval run config.yaml
    """
    from visacc.eval.config import load_config
    from visacc.eval.run import run as run_all
    from visacc.eval.table import markdown

    settings = load_config(config, output)
    from visacc.eval.world import join

    device = settings.model_options.get("device")
    world = join(str(device) if device else None)
    rows = run_all(settings, world=world, quiet=quiet)
    if world.main:
        print(markdown(rows, settings.baseline), end="")


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(help="GenEval result file.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same prompts and seeds.")],
) -> None:
    """Paired difference of two GenEval result files with a 95 % interval."""
    from visacc.metrics.geneval import compare, read_results

    result = compare(read_results(first), read_results(second))
    print(json.dumps({"difference": result.difference, "ci": result.ci, "tasks": result.tasks}, indent=1))
