"""Many images through the public pipeline, with an eye on memory: does anything pile up?

A LlamaGen with random weights, small enough for ten thousand images in a few minutes on one core; batches go through the
decoders in turn, to pixels. Resident memory, Python objects and live tensors are written down after every twentieth of the
images. Exits with 1 if they grow after the first tenth by more than the bounds.

    python scripts/soak.py                       # 10,000 images
    python scripts/soak.py --images 400 --grid 4 --rss-bound 16
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from visacc.models.llamagen import GPT, GPTConfig, LlamaGen, VQConfig, VQModel
from visacc.pipeline import TextToImagePipeline
from visacc.registry import make_decoder

DECODERS = ("ar", "sjd", "mc-sjd", "sjd-pac", "gsd", "zipar", "pjd", "nc-sjd")
ROWS = 20
"""Times at which the counts are taken."""


@dataclass(frozen=True)
class Row:
    """Counts after so many images: resident memory in MB, Python objects that the collector knows, live tensors."""

    images: int
    seconds: float
    rss: float
    objects: int
    tensors: int


def small_model(grid: int, vocab: int = 64, classes: int = 10) -> LlamaGen:
    """Class-conditional, two layers of width 32, random weights large enough for lively laws."""
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layer": 2, "n_head": 2, "multiple_of": 32, "vocab_size": vocab}
    gpt = GPT(GPTConfig(**sizes, block_size=grid**2, num_classes=classes)).eval()
    for weights in gpt.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.2)
    vq = VQModel(VQConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=vocab)).eval()
    return LlamaGen(gpt, vq, name="soak")


def resident() -> float:
    """Resident memory of this process in MB."""
    status = Path("/proc/self/status")
    if not status.is_file():
        raise RuntimeError("resident memory is read from /proc, which this system does not have")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def count(images: int, started: float) -> Row:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)  # isinstance would run code of theirs
    return Row(images, time.perf_counter() - started, resident(), len(objects), tensors)


def soak(images: int, *, batch: int = 25, grid: int = 4, decoders: tuple[str, ...] = DECODERS) -> list[Row]:
    """Decode ``images`` images, ``batch`` at a time, the decoders in turn; counts along the way.

    Every decoder has a batch of its own first, so that what it imports and caches on first use is there.

    Raises:
        RuntimeError: a decoder left an image unfinished, or gave another number of images.
    """
    pipe = TextToImagePipeline(small_model(grid))
    started, rows, done = time.perf_counter(), [], 0
    every = max(batch, images // ROWS)
    engines = [make_decoder(name) for name in decoders]
    for engine in engines:
        pipe(list(range(10)), decoder=engine, seed=0, guidance_scale=2.0, output_type="np")
    turns = itertools.cycle(engines)
    while done < images:
        size = min(batch, images - done)
        out = pipe(
            [(done + i) % 10 for i in range(size)],
            decoder=next(turns),
            seed=done,
            guidance_scale=2.0,
            batch_size=size,
            output_type="np",
        )
        if len(out.images) != size or out.stats.unfinished:
            raise RuntimeError(f"{out.stats.decoder} did not finish its images after {done} images")
        if done // every != (done + size) // every or done + size == images:
            del out
            rows.append(count(done + size, started))
        done += size
    return rows


def growth(rows: list[Row]) -> tuple[float, int, int]:
    """How far memory (MB), objects and tensors ever rise above what they were after the first tenth of the images."""
    start = next(i for i, row in enumerate(rows) if row.images >= rows[-1].images / 10)
    first, rest = rows[start], rows[start + 1 :]
    if not rest:
        raise ValueError("too few images: there must be counts after the first tenth")
    return (
        max(row.rss for row in rest) - first.rss,
        max(row.objects for row in rest) - first.objects,
        max(row.tensors for row in rest) - first.tensors,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=25, help="images decoded together")
    parser.add_argument("--grid", type=int, default=4, help="codes along a side")
    parser.add_argument("--decoders", nargs="+", default=list(DECODERS))
    parser.add_argument("--rss-bound", type=float, default=16.0, help="MB that memory may rise by")
    parser.add_argument("--object-bound", type=int, default=2000, help="Python objects that may be added")
    args = parser.parse_args()
    rows = soak(args.images, batch=args.batch, grid=args.grid, decoders=tuple(args.decoders))
    print(f"{'images':>8} {'seconds':>9} {'RSS, MB':>9} {'objects':>9} {'tensors':>8}")
    for row in rows:
        print(f"{row.images:8d} {row.seconds:9.1f} {row.rss:9.1f} {row.objects:9d} {row.tensors:8d}")
    rss, objects, tensors = growth(rows)
    print(f"after the first tenth: {rss:+.1f} MB, {objects:+d} objects, {tensors:+d} tensors")
    if rss > args.rss_bound or objects > args.object_bound or tensors > args.object_bound // 10:
        sys.exit(f"memory grows: more than {args.rss_bound:g} MB or {args.object_bound} objects")


if __name__ == "__main__":
    main()
