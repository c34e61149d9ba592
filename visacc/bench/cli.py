"""``visacc bench decoders``: speed and quality of several decoders in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from visacc.cli_options import (
    Device,
    Dtype,
    Guidance,
    Model,
    NumImages,
    PromptsFile,
    Quiet,
    RunSeed,
    Temperature,
    TopK,
    TopP,
    batch_option,
    decoder_option,
    out_option,
    prompt_lines,
    sampling_of,
)

app = typer.Typer(help="Compare decoders.", no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    pass


@app.command("decoders")
def decoders(
    model: Model = "shapes-t2i",
    decoder: Annotated[
        list[str] | None,
        decoder_option("Decoder, with options: 'gsd:group_size=50'. Repeatable."),
    ] = None,
    prompts_file: PromptsFile = None,
    per_task: Annotated[int, typer.Option(help="Prompts per task of the shapes world.")] = 8,
    num_images: NumImages = 1,
    batch_size: Annotated[int, batch_option("Images decoded together.")] = 8,
    out: Annotated[Path, out_option("Folder for JSON, Markdown and plot.")] = Path("bench"),
    seed: RunSeed = 0,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    device: Device = None,
    dtype: Dtype = None,
    pictures: Annotated[int, typer.Option(help="Pictures to keep of each decoder.")] = 16,
    plot: Annotated[bool, typer.Option(help="Draw the trade-off plot (needs matplotlib).")] = True,
    quiet: Quiet = False,
) -> None:
    """Run decoders side by side and write a table of speed next to quality.

    Without --prompts-file shapes-t2i is judged on its own task prompts, and a class model draws its classes.
    """
    from visacc.bench.report import can_plot, to_markdown, write
    from visacc.bench.run import bench_decoders, default_entries, parse_entry
    from visacc.loading import load_model
    from visacc.sampling import SamplingParams

    drawn = plot and can_plot()
    entries = [parse_entry(text) for text in decoder or []]
    target = load_model(model, device=device, dtype=dtype)
    chosen = sampling_of(guidance_scale, temperature, top_k, top_p)
    bench = bench_decoders(
        target,
        bench_prompts(target, prompts_file, per_task),
        entries or default_entries(target.layout.grid[2]),
        sampling=SamplingParams.merge(target.defaults, chosen),
        seed=seed,
        batch=batch_size,
        per_prompt=num_images,
        pictures=pictures,
        say=(lambda text: None) if quiet else print,
    )
    paths = write(bench, out, with_plot=drawn)
    print(to_markdown(bench))
    print("written: " + ", ".join(str(path) for path in paths.values()))
    if plot and not drawn:
        print("no trade-off plot: it needs matplotlib (pip install 'visacc[report]')")


def bench_prompts(model: Any, path: Path | None, per_task: int) -> list[Any]:
    """Prompts of a file, task prompts of the shapes world, or class labels."""
    if path is not None:
        lines = prompt_lines(path)
        if not lines:
            raise ValueError(f"{path} holds no prompts")
        return lines
    if per_task < 1:
        raise ValueError(f"per_task must be at least 1, got {per_task}")
    if model.name == "shapes-t2i":
        from visacc.models.shapes.captions import all_prompts

        return list(all_prompts(per_task))
    gpt = getattr(model, "gpt", None)
    if gpt is not None and gpt.config.model_type == "c2i":
        classes = gpt.config.num_classes
        return [round(i * (classes - 1) / max(per_task - 1, 1)) for i in range(min(per_task, classes))]
    raise ValueError(f"{model.name} needs prompts: pass --prompts-file FILE")
