"""``visacc calibrate``: fit a model's neighbour tables for decoder ``nc-sjd``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from visacc.cli_options import (
    Device,
    Dtype,
    Guidance,
    ImageSize,
    PromptsFile,
    Quiet,
    Temperature,
    TopK,
    TopP,
    batch_option,
    images_option,
    out_option,
    progress_bar,
    read_prompts,
    sampling_of,
)
from visacc.models.base import ImageModel


def calibrate(
    model: Annotated[str, typer.Argument(help="Model name, folder, file or hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts (or labels) to sample from.")] = None,
    prompts_file: PromptsFile = None,
    decoder: Annotated[str, typer.Option(help="Decoder to calibrate for; only nc-sjd needs it.")] = "nc-sjd",
    images: Annotated[
        int,
        images_option("Images to decode; a sixth or so is held out.", "--images"),
    ] = 96,
    rank: Annotated[int, typer.Option(help="Rank of the tables.")] = 32,
    out: Annotated[Path | None, out_option("File to write; default: beside the model's weights.")] = None,
    window: Annotated[int, typer.Option(help="Window of the decodes.")] = 64,
    batch_size: Annotated[int, batch_option("Images decoded together.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the first image.")] = 0,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    image_size: ImageSize = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Fit tables of how a model's laws shift with their neighbours, for decoder nc-sjd, to its own decodes."""
    from visacc import calibrate as measuring
    from visacc.cli import console
    from visacc.decoders.neighbour_tables import TABLE_FILE
    from visacc.loading import load_model
    from visacc.models.nbp.embedded import NAMES as VIDEO_NAMES
    from visacc.sampling import SamplingParams

    if decoder != "nc-sjd":
        raise ValueError(f"decoder {decoder!r} needs no calibration; only nc-sjd does")
    texts = read_prompts(prompts, prompts_file)
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
    chosen = sampling_of(guidance_scale, temperature, top_k, top_p)
    sampling = SamplingParams.merge(target.defaults, chosen)
    with progress_bar("images", hidden=quiet) as report:
        tables, staleness = measuring.calibrate(
            target,
            texts,
            sampling,
            images=images,
            rank=rank,
            window=window,
            batch=batch_size,
            seed=seed,
            progress=report,
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
    from visacc.loading import as_device, as_dtype
    from visacc.video_models import load_video_model

    if image_size is not None:
        raise ValueError(f"{name} has one size and takes no image_size")
    where = as_device(device)
    return load_video_model(name, device=where, dtype=as_dtype(dtype, where))
