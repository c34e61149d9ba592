"""What the commands have in common: their options, spelled and explained once, and what is done with them."""

from __future__ import annotations

import ast
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from visacc.reading import read_lines


# what a command takes differs from one to the next; how the option is called does not
def model_option(help: str, *other: str) -> Any:
    """``--model``, with what the command takes in ``help``, and ``other`` names of the same option."""
    return typer.Option(*other, "--model", "-m", help=help)


def out_option(help: str, *other: str) -> Any:
    """``--out``, with what is written there in ``help``."""
    return typer.Option("--out", "-o", *other, help=help)


def images_option(help: str, *other: str) -> Any:
    """``--num-images``, with what is counted in ``help``."""
    return typer.Option("--num-images", "-n", *other, help=help)


def prompt_option(help: str) -> Any:
    """``--prompt``, of commands whose argument is something else."""
    return typer.Option("--prompt", "-p", help=help)


def decoder_option(help: str) -> Any:
    """``--decoder``, one or several."""
    return typer.Option("--decoder", "-d", help=help)


def values_option(help: str) -> Any:
    """``--option``, for pairs that :func:`named_values` reads."""
    return typer.Option("--option", "-O", help=help)


def start_option(help: str) -> Any:
    """``--init``, of trainings."""
    return typer.Option("--init", "--from", help=help)


def shard_option(what: str) -> Any:
    """``--shard``, with what is spread."""
    return typer.Option("--shard", help=f"Several processes: spread {what} over them (FSDP2).")


def batch_option(help: str) -> Any:
    """``--batch-size``, with the unit in ``help``."""
    return typer.Option("--batch-size", "--batch", help=help)


Model = Annotated[str, model_option("Model name, folder, file or hub id.")]
DecoderOptions = Annotated[list[str] | None, values_option("Decoder option, name=value; repeatable.")]
PromptsFile = Annotated[
    Path | None, typer.Option("--prompts-file", "--prompts", help="Text file with one prompt a line.")
]
OutFolder = Annotated[Path, out_option("Folder to write to.")]
NumImages = Annotated[int, images_option("Images per prompt.")]
NumVideos = Annotated[int, typer.Option("--num-videos", "-n", help="Clips of each prompt or beginning.")]
DrawnSeed = Annotated[int | None, typer.Option(help="Seed; without one a random seed is drawn and recorded.")]
RunSeed = Annotated[int, typer.Option(help="Seed of the run.")]
Guidance = Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 switches it off.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most probable codes; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")]
ImageSize = Annotated[
    str | None, typer.Option(help="Pixels, for models of several sizes: 512, or 768x512 (height x width).")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU when there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", "--no-progress", help="No progress is shown.")]
Shard = Annotated[bool, shard_option("the drafter")]


def sampling_of(
    guidance_scale: float | None, temperature: float | None, top_k: int | None, top_p: float | None
) -> dict[str, Any]:
    """The sampling options as keyword arguments of ``SamplingParams`` and of the pipelines; ``None`` is the model's own."""
    return {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}


_WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Values as YAML files spell them, too."""


def named_values(pairs: list[str] | None, what: str = "decoder options") -> dict[str, Any]:
    """``name=value`` pairs to keyword arguments; values are Python literals where they parse as such, else text."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{what} are written name=value, got {pair!r}")
        word = text.strip().lower()
        try:
            value = _WORDS[word] if word in _WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = text
        key = name.strip().replace("-", "_")
        if key in found:
            raise ValueError(f"{key} is given twice in the {what}: {found[key]!r} and {value!r}")
        found[key] = value
    return found


def decoder_arguments(pairs: list[str] | None, call: Callable[..., Any]) -> dict[str, Any]:
    """:func:`named_values` for ``call(..., **decoder_options)``, without names that mean something else there."""
    options = named_values(pairs)
    parameters = inspect.signature(call).parameters.values()
    own = sorted(options.keys() & {p.name for p in parameters if p.kind is not p.VAR_KEYWORD})
    if own:
        raise ValueError(
            f"{', '.join(own)}: no option of a decoder; --option takes what `visacc list decoders` names, everything else"
            " has an option of its own (--help)"
        )
    return options


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str | int]:
    """Prompts of the command line and of a file; numbers are class labels."""
    lines = list(prompts or [])
    if file is not None:
        lines += prompt_lines(file)
    if not lines:
        raise ValueError(
            'give at least one prompt, e.g. visacc generate "a red circle left of a blue square"'
        )
    return [int(line) if re.fullmatch(r"\d+", line.strip()) else line for line in lines]


def prompt_lines(file: Path) -> list[str]:
    """Lines of a text file that are not empty."""
    if not file.is_file():
        raise ValueError(f"prompts file {file} does not exist")
    return read_lines(file)


def check_writable(folder: Path) -> None:
    """Make the folder. Raises ``ValueError`` where that is impossible, before anything is computed for it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output {folder} is a file; --out takes a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to the output folder {folder}: {error.strerror or error}") from error


@contextmanager
def progress_bar(what: str, *, hidden: bool) -> Iterator[Any]:
    """A bar on the terminal, as a function ``report(done, total)``."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=hidden, transient=True
    ) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done, total: bar.update(task, completed=done / total)
