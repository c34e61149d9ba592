"""``visacc video``: generate and continue clips; MP4, GIF and a frame sheet come out."""

from __future__ import annotations

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
    NumVideos,
    OutFolder,
    Quiet,
    Temperature,
    TopK,
    TopP,
    batch_option,
    check_writable,
    decoder_arguments,
    decoder_option,
    model_option,
    progress_bar,
    prompt_option,
    sampling_of,
)

app = typer.Typer(help="Generate video, or continue it.", no_args_is_help=True, add_completion=False)

_Model = Annotated[str, model_option("Embedded name, checkpoint file, or released name.")]
_Decoder = Annotated[str | None, decoder_option("Decoder; the model's usual one by default.")]
_Format = Annotated[str, typer.Option("--format", "-f", help="mp4, gif, or both.")]
_Frames = Annotated[float, typer.Option(help="Frames per second.")]
_Batch = Annotated[int, batch_option("Clips decoded together.")]
_File = Annotated[Path | None, typer.Option(help="Checkpoint of a released model given by name.")]
_Tok = Annotated[Path | None, typer.Option(help="Video tokenizer, file or folder.")]
_TextTok = Annotated[Path | None, typer.Option(help="LLaMA tokenizer (UCF models) folder.")]
_TextEnc = Annotated[Path | None, typer.Option(help="T5-11B folder (Video2World).")]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="Texts, e.g. 'red circle moves left'.")],
    model: _Model = "moving-nbp",
    decoder: _Decoder = None,
    count: NumVideos = 1,
    out: OutFolder = Path("out"),
    format: _Format = "mp4",
    fps: _Frames = 8,
    seed: DrawnSeed = None,
    option: DecoderOptions = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    batch_size: _Batch = 4,
    device: Device = None,
    dtype: Dtype = None,
    file: _File = None,
    tokenizer: _Tok = None,
    text_tokenizer: _TextTok = None,
    quiet: Quiet = False,
) -> None:
    """Generate clips from texts."""
    from visacc.video import TextToVideoPipeline

    _prepare(out, format, count)
    pipe = TextToVideoPipeline(
        *_load(
            model, decoder, device, dtype, 0, file=file, tokenizer=tokenizer, text_tokenizer=text_tokenizer
        ),
        fps=fps,
        **decoder_arguments(option, TextToVideoPipeline),
    )
    sampling = sampling_of(guidance_scale, temperature, top_k, top_p)
    with progress_bar("video", hidden=quiet) as report:
        result = pipe(
            prompts,
            num_videos_per_prompt=count,
            seed=seed,
            batch_size=batch_size,
            progress=report,
            **sampling,
        )
    _write(result, [p for p in prompts for _ in range(count)], out, format)


@app.command("continue")
def continue_(
    clip: Annotated[Path, typer.Argument(help="MP4, GIF, picture, or folder of pictures.")],
    prompt: Annotated[str | None, prompt_option("Text, for models that take one.")] = None,
    model: _Model = "moving-nbp",
    decoder: _Decoder = None,
    given_frames: Annotated[int, typer.Option(help="Latent frames taken from the clip.")] = 2,
    last: Annotated[
        bool, typer.Option("--last", help="Take the last frames of the clip, not the first.")
    ] = False,
    count: NumVideos = 1,
    out: OutFolder = Path("out"),
    format: _Format = "mp4",
    fps: _Frames = 8,
    seed: DrawnSeed = None,
    option: DecoderOptions = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    batch_size: _Batch = 4,
    device: Device = None,
    dtype: Dtype = None,
    file: _File = None,
    tokenizer: _Tok = None,
    text_encoder: _TextEnc = None,
    quiet: Quiet = False,
) -> None:
    """Continue a clip."""
    from visacc.models.cosmos import CosmosModel, fit_frames
    from visacc.video import VideoContinuationPipeline
    from visacc.video_io import read_clip, reduce, to_frames

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
        **decoder_arguments(option, VideoContinuationPipeline),
    )
    frames, need = read_clip(clip), pipe.frames_needed
    if len(frames) < need:
        raise ValueError(
            f"{clip} has {len(frames)} frames, {pipe.model.name} continues {need}: truncated video?"
        )
    picture = to_frames(reduce(frames[-need:] if last else frames[:need], pipe.frame_size))
    if isinstance(pipe.model, CosmosModel):
        picture = fit_frames(picture)
    sampling = sampling_of(guidance_scale, temperature, top_k, top_p)
    with progress_bar("video", hidden=quiet) as report:
        result = pipe(
            [picture] * count, prompt, seed=seed, batch_size=batch_size, progress=report, **sampling
        )
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
    from visacc.loading import as_device, as_dtype
    from visacc.video_models import default_decoder, load_video_model

    where = as_device(device)
    loaded = load_video_model(
        model, given_frames=given_frames, device=where, dtype=as_dtype(dtype, where), **files
    )
    return loaded, decoder or default_decoder(loaded)


def _prepare(out: Path, format: str, count: int) -> None:
    from visacc.writing import sweep

    if format not in ("mp4", "gif", "both"):
        raise ValueError(f"--format must be mp4, gif or both, got {format!r}")
    if count < 1:
        raise ValueError(f"--num-videos must be at least 1, got {count}")
    if format != "gif":
        from visacc.video_io import _av

        _av()
    check_writable(out)
    (out / "stats.json").unlink(missing_ok=True)  # those of an earlier run must not stand beside new clips
    sweep(out, deep=False, spare_running=True)


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
