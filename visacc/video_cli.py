"""``visacc video``: generate and continue clips; MP4, GIF and a frame sheet come out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

app = typer.Typer(help="Generate video, or continue it.", no_args_is_help=True, add_completion=False)

_Model = Annotated[
    str, typer.Option("--model", "-m", help="Embedded name, checkpoint file, or released name.")
]
_Decoder = Annotated[
    str | None, typer.Option("--decoder", "-d", help="Decoder; the model's usual one by default.")
]
_Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
_Format = Annotated[str, typer.Option("--format", "-f", help="mp4, gif, or both.")]
_Seed = Annotated[int | None, typer.Option(help="Seed; without one a random seed is drawn and recorded.")]
_Option = Annotated[list[str] | None, typer.Option("--option", "-O", help="Decoder option, name=value.")]
_Number = Annotated[float | None, typer.Option()]
_Whole = Annotated[int | None, typer.Option()]
_File = Annotated[Path | None, typer.Option(help="Checkpoint of a released model given by name.")]
_Tok = Annotated[Path | None, typer.Option(help="Video tokenizer, file or folder.")]
_TextTok = Annotated[Path | None, typer.Option(help="LLaMA tokenizer (UCF models) folder.")]
_TextEnc = Annotated[Path | None, typer.Option(help="T5-11B folder (Video2World).")]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU when there is one.")]
_Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="Texts, e.g. 'red circle moves left'.")],
    model: _Model = "moving-nbp",
    decoder: _Decoder = None,
    count: Annotated[int, typer.Option("--num-videos", "-n", help="Clips per prompt.")] = 1,
    out: _Out = Path("out"),
    format: _Format = "mp4",
    fps: Annotated[float, typer.Option(help="Frames per second.")] = 8,
    seed: _Seed = None,
    option: _Option = None,
    guidance_scale: _Number = None,
    temperature: _Number = None,
    top_k: _Whole = None,
    top_p: _Number = None,
    batch_size: Annotated[int, typer.Option(help="Clips decoded together.")] = 4,
    device: _Device = None,
    dtype: _Dtype = None,
    file: _File = None,
    tokenizer: _Tok = None,
    text_tokenizer: _TextTok = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Generate clips from texts."""
    from visacc.video import TextToVideoPipeline

    _prepare(out, format, count)
    pipe = TextToVideoPipeline(
        *_load(
            model, decoder, device, dtype, 0, file=file, tokenizer=tokenizer, text_tokenizer=text_tokenizer
        ),
        fps=fps,
        **_options(option),
    )
    call = _call(seed, guidance_scale, temperature, top_k, top_p, batch_size)
    with _bar(quiet) as report:
        result = pipe(prompts, num_videos_per_prompt=count, progress=report, **call)
    _write(result, [p for p in prompts for _ in range(count)], out, format)


@app.command("continue")
def continue_(
    clip: Annotated[Path, typer.Argument(help="MP4, GIF, picture, or folder of pictures.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text, for models that take one.")
    ] = None,
    model: _Model = "moving-nbp",
    decoder: _Decoder = None,
    given_frames: Annotated[int, typer.Option(help="Latent frames taken from the clip.")] = 2,
    last: Annotated[
        bool, typer.Option("--last", help="Take the last frames of the clip, not the first.")
    ] = False,
    count: Annotated[int, typer.Option("--num-videos", "-n", help="Continuations.")] = 1,
    out: _Out = Path("out"),
    format: _Format = "mp4",
    fps: Annotated[float, typer.Option(help="Frames per second.")] = 8,
    seed: _Seed = None,
    option: _Option = None,
    guidance_scale: _Number = None,
    temperature: _Number = None,
    top_k: _Whole = None,
    top_p: _Number = None,
    batch_size: Annotated[int, typer.Option(help="Clips decoded together.")] = 4,
    device: _Device = None,
    dtype: _Dtype = None,
    file: _File = None,
    tokenizer: _Tok = None,
    text_encoder: _TextEnc = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Continue a clip."""
    from visacc.models.cosmos import CosmosModel, fit_frames
    from visacc.video import VideoContinuationPipeline
    from visacc.video_io import read_clip, to_frames

    _prepare(out, format, count)
    pipe = VideoContinuationPipeline(
        *_load(
            model,
            decoder,
            device,
            dtype,
            given_frames,
            file=file,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
        ),
        fps=fps,
        **_options(option),
    )
    frames, need = read_clip(clip), pipe.frames_needed
    if len(frames) < need:
        raise ValueError(
            f"{clip} has {len(frames)} frames, {pipe.model.name} continues {need}: truncated video?"
        )
    picture = to_frames(frames[-need:] if last else frames[:need])
    if isinstance(pipe.model, CosmosModel):
        picture = fit_frames(picture)
    call = _call(seed, guidance_scale, temperature, top_k, top_p, batch_size)
    with _bar(quiet) as report:
        result = pipe([picture] * count, prompt, progress=report, **call)
    _write(result, [prompt or str(clip)] * count, out, format)


@app.command("list")
def list_models() -> None:
    """Show the video models."""
    from visacc.video_models import known_video_models

    for name, text in known_video_models().items():
        print(f"{name:32} {text}")


def _load(
    model: str, decoder: str | None, device: str | None, dtype: str | None, given_frames: int, **files: Any
) -> tuple[Any, str]:
    from visacc.loading import _device, _dtype
    from visacc.video_models import default_decoder, load_video_model

    where = _device(device)
    loaded = load_video_model(
        model, given_frames=given_frames, device=where, dtype=_dtype(dtype, where), **files
    )
    return loaded, decoder or default_decoder(loaded)


def _options(pairs: list[str] | None) -> dict[str, Any]:
    from visacc.generate_cli import _options as parse

    return parse(pairs or [], None)


def _call(
    seed: Any, guidance_scale: Any, temperature: Any, top_k: Any, top_p: Any, batch_size: int
) -> dict[str, Any]:
    return {
        "seed": seed,
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "batch_size": batch_size,
    }


class _bar:
    """Progress bar as a context that hands out the report function."""

    def __init__(self, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._bar = Progress(*columns, TimeElapsedColumn(), disable=quiet, transient=True)

    def __enter__(self) -> Any:
        self._bar.__enter__()
        task = self._bar.add_task("video", total=1.0)
        return lambda done, total: self._bar.update(task, completed=done / total)

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)


def _prepare(out: Path, format: str, count: int) -> None:
    from visacc.generate_cli import _check_writable
    from visacc.writing import sweep

    if format not in ("mp4", "gif", "both"):
        raise ValueError(f"--format must be mp4, gif or both, got {format!r}")
    if count < 1:
        raise ValueError(f"--num-videos must be at least 1, got {count}")
    if format != "gif":
        from visacc.video_io import _av

        _av()
    _check_writable(out)
    (out / "stats.json").unlink(missing_ok=True)  # those of an earlier run must not stand beside new clips
    sweep(out, deep=False)


def _write(result: Any, prompts: list[str], out: Path, format: str) -> None:
    from visacc.pictures import save_image, save_json
    from visacc.video_io import frame_sheet

    suffixes = ["mp4", "gif"] if format == "both" else [format]
    videos = []
    for i, (prompt, seed) in enumerate(zip(prompts, result.seeds, strict=True)):
        for suffix in suffixes:
            result.save(out / f"{i:03d}.{suffix}", i)
        steps = int(result.stats.steps[i])
        videos.append({"file": f"{i:03d}.{suffixes[0]}", "prompt": prompt, "seed": seed, "steps": steps})
    save_image(frame_sheet(result.videos), out / "frames.png")
    record = {"command": sys.argv[1:], **result.settings, "stats": result.stats.summary(), "videos": videos}
    save_json(record, out / "stats.json")
    stats, frames = result.stats, sum(len(v) for v in result.videos)
    total = result.settings["total_seconds"]
    print(
        f"{len(videos)} clip{'s' * (len(videos) > 1)} in {out}: {result.settings['decoder']}, {stats.nfe:.1f} steps for"
        f" {stats.tokens} tokens ({stats.step_compression:.2f} tokens a step), {frames / total:.1f} frames/s"
    )
