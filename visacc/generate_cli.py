"""``visacc generate``: prompts in, PNG files, a contact sheet and statistics out."""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
    image_size: Annotated[int | None, typer.Option(help="Pixels, for models of several sizes.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU when there is one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also draw which step committed each token.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Generate images."""
    texts = _read_prompts(prompts or [], prompts_file)
    options = _options(option or [], window)
    _check_writable(out)

    from visacc.loading import load

    pipe = load(model, decoder=decoder, device=device, dtype=dtype, image_size=image_size, **options)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=quiet, transient=True) as bar:
        task = bar.add_task(f"{decoder}", total=1.0)
        result = pipe(
            texts,
            num_images_per_prompt=count,
            seed=seed,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            batch_size=batch_size,
            progress=lambda done, total: bar.update(task, completed=done / total),
        )
    _write(result, [t for t in texts for _ in range(count)], out, trace, pipe.model)
    stats = result.stats
    images = len(result.images)
    where = f"{images} image{'s' * (images > 1)} in {out}"
    print(
        f"{where}: {result.settings['decoder']}, {stats.nfe:.1f} steps for {stats.tokens} tokens"
        f" (step compression {stats.step_compression:.2f}x), {stats.seconds:.2f} s"
    )


def _read_prompts(prompts: list[str], file: Path | None) -> list[str | int]:
    lines = list(prompts)
    if file is not None:
        if not file.is_file():
            raise ValueError(f"prompts file {file} does not exist")
        lines += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
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
        except (ValueError, SyntaxError):
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


def _write(result: Any, prompts: list[str | int], out: Path, trace: bool, model: Any) -> None:
    from visacc.pictures import commit_map, contact_sheet, save_image, save_json
    from visacc.traces import TRACED, encode_grid, environment

    digits = max(3, len(str(len(result.images))))
    names = [f"{i:0{digits}d}.png" for i in range(len(result.images))]
    for name, image in zip(names, result.images, strict=True):
        save_image(image, out / name)
    save_image(contact_sheet(result.images), out / "contact_sheet.png")
    grids = model.layout.to_grid(result.stats.step_of)
    if trace:
        for name, image, grid in zip(names, result.images, grids, strict=True):
            save_image(commit_map(image, grid[0].numpy()), out / f"trace_{name}")
    images: list[dict[str, Any]] = [
        {"file": name, "prompt": prompt, "seed": seed, "steps": steps}
        for name, prompt, seed, steps in zip(
            names, prompts, result.seeds, result.stats.steps.tolist(), strict=True
        )
    ]
    for entry, grid in zip(images if trace else images[:TRACED], grids, strict=False):
        entry["commit_steps"] = encode_grid(grid)
    record = {
        "command": sys.argv[1:],
        **result.settings,
        "environment": environment(model.device),
        "stats": result.stats.summary(),
        "images": images,
    }
    save_json(record, out / "stats.json")
