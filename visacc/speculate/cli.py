"""``visacc caption``, and the vision-language parts of ``visacc train`` and ``visacc bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from visacc.cli_options import (
    Device,
    Dtype,
    Quiet,
    RunSeed,
    Shard,
    batch_option,
    images_option,
    model_option,
    out_option,
    prompt_option,
)
from visacc.speculate.answers import answered, opened, same_settings
from visacc.writing import write_json

app = typer.Typer(help="Vision-language models.", no_args_is_help=True, add_completion=False)
_DTYPES = ("float32", "float16", "bfloat16")
_Model = Annotated[str, model_option("Hub id, folder, or shapes-captioner (embedded).")]
_Prompt = Annotated[str, prompt_option("Question for every picture.")]
_Method = Annotated[str | None, typer.Option(help="Method of an official EAGLE, MSD or FLASH folder.")]


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return getattr(torch, name)


@app.command("caption")
def caption(
    images: Annotated[list[Path], typer.Argument(help="Pictures.")],
    model: _Model = "shapes-captioner",
    speculator: Annotated[
        str, typer.Option("--speculator", "-s", help="Drafter folder, embedded method, ngram, or none.")
    ] = "ngram",
    method: _Method = None,
    prompt: _Prompt = "",
    out: Annotated[Path | None, out_option("JSONL file; resumes if it exists.")] = None,
    batch_size: Annotated[int, batch_option("Pictures per batch.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")] = None,
    seed: RunSeed = 0,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Caption pictures with speculative decoding; one JSON object per line."""
    from rich.console import Console
    from rich.progress import Progress

    from visacc.speculate.params import TextParams
    from visacc.speculate.pipeline import EMBEDDED, CaptionPipeline

    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "stop_strings": tuple(stop or ()),
    }
    TextParams(**options)  # bad ones are refused before a model is loaded
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not prompt:
        prompt = "describe the image ." if model == EMBEDDED else "Describe the image."
    known = answered(out) if out is not None else set()
    if out is not None:
        settings = {
            "model": model,
            "speculator": speculator,
            "method": method,
            "seed": seed,
            "dtype": dtype,
            **options,
            "stop_strings": list(options["stop_strings"]),
        }
        same_settings(out, settings, resumes=bool(known))
    left = [(str(image), seed + i) for i, image in enumerate(images) if (str(image), prompt) not in known]
    console = Console(stderr=True)
    if known:
        console.print(f"{len(images) - len(left)} of {len(images)} pictures are answered in {out} already")
    pipeline = CaptionPipeline(
        model,
        speculator=None if speculator == "none" else speculator,
        method=method,
        device=device,
        dtype=_dtype(dtype),
    )
    failed = tokens = steps = 0
    sink = opened(out) if out is not None else None
    try:
        with Progress(console=console, disable=quiet) as bar:
            task = bar.add_task("captions", total=len(left))
            files, seeds = [name for name, _ in left], [number for _, number in left]
            for row in pipeline.iterate(files, prompt, batch_size=batch_size, seed=seeds, **options):
                line = json.dumps(row.to_dict(), ensure_ascii=False)
                if sink is not None:
                    sink.write(line + "\n")
                    sink.flush()
                else:
                    print(line, flush=True)
                failed += row.error is not None
                tokens, steps = tokens + max(row.tokens - 1, 0), steps + row.steps
                bar.advance(task)
    finally:
        if sink is not None:
            sink.close()
    if steps:
        console.print(f"{tokens / steps:.2f} tokens per target step")
    if failed:
        console.print(f"{failed} of {len(left)} pictures failed")
        raise typer.Exit(1)


@app.command("train-drafter")
def train_drafter_command(
    method: Annotated[str, typer.Option(help="eagle, msd, dream, flash or vispec.")],
    target: Annotated[str, model_option("Hub id or folder of the vision-language model.", "--target")],
    data: Annotated[Path, typer.Option(help='JSONL with "image", "prompt" and, if wanted, "answer".')],
    out: Annotated[Path, out_option("Folder of the run; resumes if it exists.")],
    answers: Annotated[str, typer.Option(help="generated (by the target) or dataset.")] = "generated",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 20000,
    batch_size: Annotated[int, batch_option("Samples per step and process.")] = 2,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-5,
    max_new_tokens: Annotated[int, typer.Option(help="Longest generated answer.")] = 256,
    held_out: Annotated[int, typer.Option(help="Last samples, kept for measuring the accepted length.")] = 8,
    eval_every: Annotated[
        int,
        typer.Option("--eval-every", "--check-every", help="Steps between measurements of accepted length."),
    ] = 500,
    store: Annotated[
        Path | None, typer.Option(help="Folder of features, written once, then read in place of the target.")
    ] = None,
    prune: Annotated[
        float | None, typer.Option(help="dream: share of the picture's tokens that the drafter keeps.")
    ] = None,
    shard: Shard = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Train (or resume) a drafter of a vision-language model, on features harvested online by default.

    Several processes: accelerate launch --num_processes 4 -m visacc train vlm-drafter ..., or torchrun. Every process
    harvests its own batches; gradients are averaged.
    """
    from visacc.speculate.train_run import train_from_files

    if prune is not None and method != "dream":
        raise ValueError(f"only dream drafters prune picture tokens, not {method!r}")
    train_from_files(
        method,
        target,
        data,
        out,
        answers=answers,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        max_new_tokens=max_new_tokens,
        held_out=held_out,
        check_every=eval_every,
        store=store,
        shard=shard,
        config=None if prune is None else {"prune": prune},
        device=device,
        dtype=_dtype(dtype),
    )


@app.command("export-drafter")
def export_drafter_command(
    drafter: Annotated[Path, typer.Argument(help="Drafter folder (ours or official).")],
    format: Annotated[
        str,
        typer.Option(
            "--format", "-f", help="speculators (vLLM), eagle3-sglang, or eagle-sglang (EAGLE-1/2 and MSD)."
        ),
    ],
    target: Annotated[
        str, model_option("Folder or hub id of the model it was trained for.", "--target", "-t")
    ],
    out: Annotated[Path, out_option("New folder to write to.")],
    method: _Method = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; as in the drafter's folder by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="speculators: tokens to draft by default.")] = 5,
) -> None:
    """Write a vision-language drafter in the format of an inference server (vLLM, SGLang)."""
    from visacc.speculate.serving import export_drafter

    done = export_drafter(drafter, out, format, target, method=method, dtype=_dtype(dtype), tokens=tokens)
    print(f"wrote {done.folder} ({done.format}); it reads back equal")
    for note in done.notes:
        print(f"note: {note}")


@app.command("bench")
def bench_command(
    model: _Model = "shapes-captioner",
    methods: Annotated[str, typer.Option(help="Comma-separated drafters.")] = "ngram,eagle,msd,dream,flash",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    images: Annotated[Path | None, typer.Option(help="Folder of pictures; not for shapes-captioner.")] = None,
    prompt: _Prompt = "",
    count: Annotated[int, images_option("Pictures.", "--count")] = 32,
    batch_size: Annotated[int, batch_option("Pictures per batch.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Passes; figures are medians.")] = 3,
    assistant: Annotated[
        str | None,
        typer.Option(
            help="Model that drafts in assisted generation; the first half of the target's layers by default."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    out: Annotated[Path | None, out_option("JSON report.")] = None,
    device: Device = None,
) -> None:
    """Tokens per step and speed of drafters against plain decoding, model.generate and assisted
    generation.
    """
    import torch

    from visacc.speculate.bench import bench, print_table

    if threads is not None:
        torch.set_num_threads(threads)
    report = bench(
        model,
        [m for m in methods.split(",") if m],
        [float(t) for t in temperatures.split(",")],
        images=images,
        prompt=prompt,
        count=count,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        assistant=assistant,
        device=device,
    )
    print_table(report)
    if out is not None:
        write_json(out, report)
