"""``visacc calibrate``: fit a model's neighbour tables for decoder ``nc-sjd``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from visacc.models.base import ImageModel


def calibrate(
    model: Annotated[str, typer.Argument(help="Model name, folder, file or hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts (or labels) to sample from.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="Text file with one prompt a line.")] = None,
    decoder: Annotated[str, typer.Option(help="Decoder to calibrate for; only nc-sjd needs it.")] = "nc-sjd",
    images: Annotated[int, typer.Option(help="Images to decode; a sixth or so is held out.")] = 96,
    rank: Annotated[int, typer.Option(help="Rank of the tables.")] = 32,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default: beside the model's weights.")
    ] = None,
    window: Annotated[int, typer.Option(help="Window of the decodes.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Images decoded together.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the first image.")] = 0,
    guidance_scale: Annotated[float | None, typer.Option(help="Guidance that will be decoded with.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable codes; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")] = None,
    image_size: Annotated[
        str | None,
        typer.Option(help="Pixels, for models of several sizes: 512, or 768x512 (height x width)."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU when there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Fit tables of how a model's laws shift with their neighbours, for decoder nc-sjd, to its own decodes."""
    from visacc import calibrate as measuring
    from visacc.cli import console
    from visacc.decoders.neighbour_tables import TABLE_FILE
    from visacc.generate_cli import _read_prompts
    from visacc.loading import load_model
    from visacc.models.nbp.embedded import NAMES as VIDEO_NAMES
    from visacc.sampling import SamplingParams

    if decoder != "nc-sjd":
        raise ValueError(f"decoder {decoder!r} needs no calibration; only nc-sjd does")
    texts = _read_prompts(prompts or [], prompts_file)
    if model in VIDEO_NAMES:
        target = _video_model(model, device, dtype, image_size)
    else:
        target = load_model(model, device=device, dtype=dtype, image_size=image_size)
    if out is None:
        if target.folder is None:
            raise ValueError(
                f"{target.name} lies in no folder; say where to write the tables with --out FILE"
            )
        out = target.folder / TABLE_FILE
    chosen = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = SamplingParams.merge(target.defaults, chosen)
    with Progress(disable=quiet, transient=True) as bar:
        task = bar.add_task("images", total=images)
        tables, staleness = measuring.calibrate(
            target,
            texts,
            sampling,
            images=images,
            rank=rank,
            window=window,
            batch=batch_size,
            seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    tables.save(out)
    table = Table(
        "neighbour that changed", "stale", "corrected", "ratio", title="Total variation, images held out"
    )
    for what, before, after in staleness.rows():
        table.add_row(what, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}" if before else "-")
    console.print(table)
    print(f"{out}: rank {tables.rank}, guidance {tables.guidance_scale:g}, model {tables.fingerprint}")


def _video_model(name: str, device: str | None, dtype: str | None, image_size: str | None) -> ImageModel:
    """An embedded video model, whose tables also have the frame before."""
    from visacc.loading import _device, _dtype
    from visacc.video_models import load_video_model

    if image_size is not None:
        raise ValueError(f"{name} has one size and takes no image_size")
    where = _device(device)
    return load_video_model(name, device=where, dtype=_dtype(dtype, where))
