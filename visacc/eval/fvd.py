"""Fréchet video distance of two folders of clips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from visacc.eval.progress import progress
from visacc.metrics.fvd import FVD, PROTOCOLS
from visacc.metrics.npz import file_digest
from visacc.metrics.protocol import Protocol, Score

CLIPS = (".mp4", ".gif", ".webm", ".avi", ".mov", ".mkv")
VARIANTS = {"ucf101": "styleganv", "k600": "styleganv", "tokenizer": "videogpt"}
"""Which port of I3D the figures of a protocol were made with."""


def clip_files(folder: Path) -> list[Path]:
    """Clips of a folder in name order: video files, or sub-folders of frames.

    Raises:
        ValueError: there are none, or no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of clips")
    found = sorted(p for p in folder.iterdir() if p.is_dir() or p.suffix.lower() in CLIPS)
    if not found:
        raise ValueError(f"{folder} holds no clips ({', '.join(CLIPS)}, or sub-folders of frames)")
    return found


def read_clips(files: list[Path], frames: int, batch: int) -> Iterator[Tensor]:
    """Batches of equal size [B, frames, 3, H, W] in [0, 1], in order."""
    from visacc.video_io import read_clip, to_frames

    held: list[Tensor] = []
    for file in files:
        clip = read_clip(file)
        if len(clip) < frames:
            raise ValueError(
                f"{file} has {len(clip)} frames, the protocol compares {frames}: truncated video?"
            )
        found = to_frames(clip[:frames])
        if held and (held[0].shape != found.shape or len(held) == batch):
            yield torch.stack(held)
            held = []
        held.append(found)
    yield torch.stack(held)


def fvd_score(
    generated: Path,
    reference: Path,
    protocol: str,
    weights: str,
    *,
    variant: str | None = None,
    device: torch.device | str = "cpu",
    batch: int = 8,
    quiet: bool = False,
) -> Score:
    """The distance of two folders under one of :data:`visacc.metrics.fvd.PROTOCOLS`.

    Args:
        weights: I3D file, or ``hub:owner/name/file``. variant: port of I3D, that of the protocol by default.

    Raises:
        ValueError: unknown protocol, missing weights, a folder without clips, a clip that cannot be read or is too short.
    """
    from visacc.metrics.fvd_i3d import I3DFeatures, weight_file

    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown video protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    rules, port = PROTOCOLS[protocol], variant or VARIANTS[protocol]
    sides = [(clip_files(folder), real) for folder, real in ((generated, False), (reference, True))]
    network = I3DFeatures(weights, port, device)
    distance, done = FVD(network, rules), 0
    with progress("clips", sum(len(files) for files, _ in sides), quiet=quiet) as report:
        for files, real in sides:
            for clips in read_clips(files, rules.frames, batch):
                distance.update(clips, real=real)
                done += len(clips)
                report(done)
    assert distance.real is not None
    assert distance.fake is not None
    measured = Protocol(
        "fvd",
        f"i3d-{port}",
        file_digest(weight_file(weights), 12),
        f"{rules.resize}-{rules.size}" + (f" after {rules.reduce}" if rules.reduce else ""),
        reference=reference.name,
        n_ref=distance.real.n,
        n_gen=distance.fake.n,
        name=protocol,
    ).with_settings(frames=rules.frames)
    return Score(distance.compute(), measured)
