"""``visacc generate``: prompts in, PNG files, a contact sheet and statistics out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from visacc.cli_options import (
    DecoderOptions,
    Device,
    DrawnSeed,
    Dtype,
    Guidance,
    ImageSize,
    Model,
    NumImages,
    OutFolder,
    PromptsFile,
    Quiet,
    Temperature,
    TopK,
    TopP,
    batch_option,
    check_writable,
    decoder_arguments,
    decoder_option,
    named_values,
    progress_bar,
    read_prompts,
    sampling_of,
    shard_option,
)


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, or class labels for class models.")
    ] = None,
    model: Model = "shapes-t2i",
    decoder: Annotated[str, decoder_option("Decoder name, see 'visacc list'.")] = "ar",
    count: NumImages = 1,
    out: OutFolder = Path("out"),
    prompts_file: PromptsFile = None,
    window: Annotated[
        str | None, typer.Option(help="Window of Jacobi decoders: a number, or 'auto'.")
    ] = None,
    option: DecoderOptions = None,
    seed: DrawnSeed = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    batch_size: Annotated[int | None, batch_option("Images decoded together (8).")] = None,
    image_size: ImageSize = None,
    device: Device = None,
    dtype: Dtype = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option("--model-option", help="Option of the model's loader, name=value."),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(help="auto: spread a transformers model over the GPUs of one process (accelerate)."),
    ] = None,
    shard: Annotated[bool, shard_option("the model's layers")] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile the model's forward (ar and window decoders).")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also draw which step committed each token.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Generate images.

    Several processes share the images: accelerate launch --num_processes 4 -m visacc generate ..., or torchrun. They
    need a common output folder; the pictures are those of one process. The share is dealt out in batches of
    --batch-size images.
    """
    if quiet:
        _silence()
    texts = read_prompts(prompts, prompts_file)
    check_writable(out)

    from visacc.generate_files import Job, run_share
    from visacc.loading import load
    from visacc.pipeline import positive

    pairs = [*(option or []), *([f"window={window}"] if window is not None else [])]
    options = decoder_arguments(pairs, load)
    world = _world(device, options)

    repeat = positive("num_images_per_prompt", count)
    where = world.device if world.size > 1 else device
    pipe = load(
        model,
        decoder=decoder,
        device=where,
        dtype=dtype,
        image_size=image_size,
        model_options=named_values(model_option, "model options"),
        compile=compile,
        device_map=device_map,
        shard=shard,
        **options,
    )
    job = Job([t for t in texts for _ in range(repeat)], seed, batch_size)
    with progress_bar(decoder, hidden=quiet or not world.main) as report:
        call = {**sampling_of(guidance_scale, temperature, top_k, top_p), "progress": report}
        record = run_share(pipe, job, world, out, trace, call)
    if record is None:
        return
    stats, images = record["stats"], len(record["images"])
    where = f"{images} image{'s' * (images > 1)} in {out}"
    print(
        f"{where}: {record['decoder']}, {stats['mean_steps']:.1f} steps for {stats['tokens_per_image']} tokens"
        f" (step compression {stats['step_compression']:.2f}x), {stats['seconds']:.2f} s,"
        f" seed {record['images'][0]['seed']}"
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
