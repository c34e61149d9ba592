"""``visacc train drafter``: train a drafter for an image model on the model's own samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from visacc.cli_options import (
    Device,
    Dtype,
    Guidance,
    PromptsFile,
    RunSeed,
    Shard,
    Temperature,
    TopK,
    TopP,
    batch_option,
    model_option,
    out_option,
    prompt_lines,
    sampling_of,
    start_option,
)
from visacc.train import parallel


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """``train drafter --method msd ...`` names a method of vision-language drafters: ``train vlm-drafter``."""
        if args[:1] == ["drafter"] and any(arg.split("=")[0] == "--method" for arg in args):
            args = ["vlm-drafter", *args[1:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(help="Train drafters.", cls=_Commands, no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    pass


@app.command("drafter")
def drafter(
    model: Annotated[str, model_option("Target: name, folder or file.")] = "shapes-t2i",
    prompts_file: PromptsFile = None,
    out: Annotated[Path, out_option("Folder of the run.")] = Path("drafter"),
    held_out: Annotated[
        int, typer.Option(help="Prompts kept for measuring accepted length (the last ones of the file).")
    ] = 8,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 2000,
    batch_size: Annotated[int, batch_option("Samples per process and accumulation round.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Rounds per optimiser step.")] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-4,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    feature_weight: Annotated[float, typer.Option(help="Weight of the feature distance.")] = 1.0,
    law_weight: Annotated[float, typer.Option(help="Weight of the cross entropy.")] = 0.1,
    guided_weight: Annotated[
        float, typer.Option(help="Weight of the cross entropy of the guided law.")
    ] = 0.0,
    unroll: Annotated[int, typer.Option(help="Passes; later ones read the drafter's own features.")] = 1,
    noise: Annotated[float, typer.Option(help="Noise on the input features.")] = 0.2,
    pool: Annotated[int, typer.Option(help="Samples held at a time.")] = 512,
    reuse: Annotated[int, typer.Option(help="Times each sample is trained on before it is replaced.")] = 4,
    train_embedding: Annotated[bool, typer.Option(help="Train the drafter's embedding too.")] = False,
    tree: Annotated[str, typer.Option(help="Tree the drafter is for.")] = "2x5",
    padding: Annotated[str, typer.Option(help="What padded prompt slots see: self, half or float.")] = "self",
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements of accepted length.")] = 250,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    init: Annotated[Path | None, start_option("Drafter folder to start from.")] = None,
    shard: Shard = False,
    seed: RunSeed = 0,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Train (or resume) a drafter of an image model; with --method, of a vision-language model (see vlm-drafter).

    Several processes: accelerate launch --num_processes 4 -m visacc train drafter ..., or torchrun. Every process samples
    and reads --batch-size of its own; gradients are averaged, so the batch of a step is that times the processes times
    --accumulate. The sampling options are those of the samples that the target draws. Class models and shapes-t2i need no
    --prompts-file.
    """
    from visacc.loading import load_model
    from visacc.sampling import SamplingParams
    from visacc.train.drafter import DrafterTraining, train_drafter
    from visacc.train.loss import LossSpec
    from visacc.train.processes import own_device

    settings = DrafterTraining(
        steps=steps,
        batch=batch_size,
        accumulate=accumulate,
        lr=lr,
        loss=LossSpec(feature_weight, law_weight, guided_weight, unroll, noise=noise),
        pool=pool,
        reuse=reuse,
        precision=precision,
        padding=padding,
        train_embedding=train_embedding,
        tree=tree,
        eval_every=eval_every,
        eval_prompts=held_out,
        save_every=save_every,
        seed=seed,
        shard=shard,
    )
    target = load_model(model, device=own_device(device), dtype=dtype)
    texts, kept = training_prompts(target, prompts_file, held_out)
    chosen = sampling_of(guidance_scale, temperature, top_k, top_p)
    sampling = SamplingParams.merge(target.defaults, chosen)
    train_drafter(target, texts, kept, out, settings, sampling, init=init)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"drafter written to {out / 'drafter'}")


def training_prompts(model: Any, path: Path | None, held_out: int) -> tuple[list[Any], list[Any]]:
    """Training and held-out prompts: of a file, all class labels, or the captions of the shapes world."""
    if held_out < 1:
        raise ValueError(f"held_out must be at least 1, got {held_out}")
    if path is not None:
        lines = list(dict.fromkeys(prompt_lines(path)))
        if len(lines) <= held_out:
            raise ValueError(
                f"{path} has {len(lines)} different prompts, {held_out} held out leave none to train on"
            )
        return lines[:-held_out], lines[-held_out:]
    gpt = getattr(model, "gpt", None)
    if gpt is not None and gpt.config.model_type == "c2i":
        classes = list(range(gpt.config.num_classes))
        return classes[:-held_out], classes[-held_out:]
    if model.name == "shapes-t2i":
        from visacc.models.shapes.captions import heldout_prompts, sample

        kept = [entry["prompt"] for entry in heldout_prompts()]
        texts = list(dict.fromkeys(sample(i).caption for i in range(8192)))
        step = max(1, len(kept) // held_out)
        return [text for text in texts if text not in set(kept)], kept[::step][:held_out]
    raise ValueError(f"{model.name} needs prompts to train on: pass --prompts-file FILE")


app.command("lpd")(parallel.lpd)
app.command("nbp")(parallel.nbp)
