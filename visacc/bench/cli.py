"""``visacc bench decoders``: speed and quality of several decoders in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from visacc.reading import read_lines

app = typer.Typer(help="Compare decoders.", no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    pass


@app.command("decoders")
def decoders(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model name, folder, file or hub id.")
    ] = "shapes-t2i",
    decoder: Annotated[
        list[str] | None,
        typer.Option("--decoder", "-d", help="Decoder, with options: 'gsd:group_size=50'. Repeatable."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, one prompt a line; shapes-t2i has its own task prompts.")
    ] = None,
    per_task: Annotated[int, typer.Option(help="Prompts per task of the shapes world.")] = 8,
    num_images: Annotated[int, typer.Option("--num-images", "-n", help="Images per prompt.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Images decoded together.")] = 8,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for JSON, Markdown and plot.")] = Path(
        "bench"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    guidance_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable codes.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU when there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    pictures: Annotated[int, typer.Option(help="Pictures to keep of each decoder.")] = 16,
    plot: Annotated[bool, typer.Option(help="Draw the trade-off plot.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress lines.")] = False,
) -> None:
    """Run decoders side by side and write a table of speed next to quality."""
    from visacc.bench.report import require_plotting, to_markdown, write
    from visacc.bench.run import bench_decoders, default_entries, parse_entry
    from visacc.loading import load_model
    from visacc.sampling import SamplingParams

    if plot:
        require_plotting()
    entries = [parse_entry(text) for text in decoder or []]
    target = load_model(model, device=device, dtype=dtype)
    chosen = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    bench = bench_decoders(
        target,
        bench_prompts(target, prompts, per_task),
        entries or default_entries(target.layout.grid[2]),
        sampling=SamplingParams.merge(target.defaults, chosen),
        seed=seed,
        batch=batch_size,
        per_prompt=num_images,
        pictures=pictures,
        say=(lambda text: None) if quiet else print,
    )
    paths = write(bench, out, with_plot=plot)
    print(to_markdown(bench))
    print("written: " + ", ".join(str(path) for path in paths.values()))


def bench_prompts(model: Any, path: Path | None, per_task: int) -> list[Any]:
    """Prompts of a file, task prompts of the shapes world, or class labels."""
    if path is not None:
        if not path.is_file():
            raise ValueError(f"prompts file {path} does not exist")
        lines = read_lines(path)
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
    raise ValueError(f"{model.name} needs prompts: pass --prompts FILE")
