"""``visacc generate``: prompts in, PNG files, a contact sheet and statistics out."""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from visacc.reading import read_lines


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, or class labels for class models.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder, file or hub id.")
    ] = "shapes-t2i",
    decoder: Annotated[str, typer.Option("--decoder", "-d", help="Decoder name, see 'visacc list'.")] = "ar",
    count: Annotated[int, typer.Option("--num-images", "-n", help="Images per prompt.")] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("out"),
    prompts_file: Annotated[Path | None, typer.Option(help="Text file with one prompt a line.")] = None,
    window: Annotated[
        str | None, typer.Option(help="Window of Jacobi decoders: a number, or 'auto'.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-O", help="Decoder option, name=value.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed; without one a random seed is drawn and recorded.")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 switches it off.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable codes; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images decoded together (8).")] = None,
    image_size: Annotated[
        str | None,
        typer.Option(help="Pixels, for models of several sizes: 512, or 768x512 (height x width)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU when there is one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option("--model-option", help="Option of the model's loader, name=value."),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(help="auto: spread a transformers model over the GPUs of one process (accelerate)."),
    ] = None,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Several processes: spread the model's layers over them (FSDP2)."),
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model's forward (ar and window decoders).")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also draw which step committed each token.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Generate images.

    Several processes share the images: accelerate launch --num_processes 4 -m visacc generate ..., or torchrun. They
    need a common output folder; the pictures are those of one process. The share is dealt out in batches of
    --batch-size images.
    """
    if quiet:
        _silence()
    texts = _read_prompts(prompts or [], prompts_file)
    options = _options(option or [], window)
    _check_writable(out)
    world = _world(device, options)

    from visacc.generate_files import Job, run_share
    from visacc.loading import load
    from visacc.pipeline import positive

    repeat = positive("num_images_per_prompt", count)
    where = world.device if world.size > 1 else device
    pipe = load(
        model,
        decoder=decoder,
        device=where,
        dtype=dtype,
        image_size=image_size,
        model_options=_options(model_option or [], None),
        compile=compile,
        device_map=device_map,
        shard=shard,
        **options,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    hidden = quiet or not world.main
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=hidden, transient=True
    ) as bar:
        task = bar.add_task(f"{decoder}", total=1.0)
        job = Job([t for t in texts for _ in range(repeat)], seed, batch_size)
        options = {
            "guidance_scale": guidance_scale,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "progress": lambda done, total: bar.update(task, completed=done / total),
        }
        record = run_share(pipe, job, world, out, trace, options)
    if record is None:
        return
    stats, images = record["stats"], len(record["images"])
    where = f"{images} image{'s' * (images > 1)} in {out}"
    print(
        f"{where}: {record['decoder']}, {stats['mean_steps']:.1f} steps for {stats['tokens_per_image']} tokens"
        f" (step compression {stats['step_compression']:.2f}x), {stats['seconds']:.2f} s"
    )


def _silence() -> None:
    """No progress bars of the libraries that load weights either."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it has read the variable already
        from transformers.utils import logging

        logging.disable_progress_bar()


def _world(device: str | None, options: dict[str, Any]) -> Any:
    """The processes of this run. Refuses what would make the pictures depend on their number."""
    from visacc.eval.world import World, join, several

    if not several():
        return World()
    if options.get("window") == "auto":
        raise ValueError(
            "window='auto' measures the machine it runs on, so processes could choose differently: find the window with one"
            " process (stats.json records it) and pass it as a number"
        )
    return join(device)


def _read_prompts(prompts: list[str], file: Path | None) -> list[str | int]:
    lines = list(prompts)
    if file is not None:
        if not file.is_file():
            raise ValueError(f"prompts file {file} does not exist")
        lines += read_lines(file)
    if not lines:
        raise ValueError(
            'give at least one prompt, e.g. visacc generate "a red circle left of a blue square"'
        )
    return [int(line) if re.fullmatch(r"\d+", line.strip()) else line for line in lines]


def _options(pairs: list[str], window: str | None) -> dict[str, Any]:
    """``name=value`` pairs to keyword arguments; values are Python literals where they parse as such, else text."""
    found: dict[str, Any] = {}
    for pair in pairs + ([f"window={window}"] if window is not None else []):
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"decoder options are written name=value, got {pair!r}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = text
        found[name.strip().replace("-", "_")] = value
    return found


def _check_writable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output {folder} is a file; --out takes a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to the output folder {folder}: {error.strerror or error}") from None
