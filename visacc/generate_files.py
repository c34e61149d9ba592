"""What ``visacc generate`` writes, by one process or by several that share the images.

The unit of sharing is a batch: batch b holds images ``b * size .. (b + 1) * size`` whatever the number of processes, and
process r of n decodes batches r, r + n, ... So no picture changes with the number of processes, not even by rounding.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from visacc.eval.world import refuse_memory
from visacc.pictures import commit_map, contact_sheet, save_image, save_json
from visacc.pipeline import BATCH, image_seeds, positive
from visacc.stats import DecodeStats
from visacc.traces import TRACED, encode_grid, environment
from visacc.writing import sweep

STATS = "stats.json"
"""Written last: a folder that holds it is whole."""


@dataclass(frozen=True)
class Job:
    """Images to make: the prompt of each, the call's seed, images per batch (``None``: 8)."""

    prompts: list[Any]
    seed: int | None = None
    batch_size: int | None = None

    @property
    def names(self) -> list[str]:
        digits = max(3, len(str(len(self.prompts))))
        return [f"{i:0{digits}d}.png" for i in range(len(self.prompts))]


def share(images: int, batch: int, rank: int, size: int) -> list[int]:
    """Numbers of the images that process ``rank`` of ``size`` decodes."""
    batches = range(rank, -(-images // batch), size)
    return [i for b in batches for i in range(b * batch, min((b + 1) * batch, images))]


def run_share(
    pipe: Any, job: Job, world: Any, out: Path, trace: bool, options: dict[str, Any]
) -> dict[str, Any] | None:
    """Decode this process's images and write them; the main process adds contact sheet and ``stats.json``.

    Args:
        world: a :class:`visacc.eval.world.World`.
        options: of the pipeline's call.

    Returns:
        what ``stats.json`` holds, ``None`` on the other processes.

    Raises:
        ValueError: a decoder whose images depend on what its process decoded before, with several processes.
    """
    batch = positive("batch_size", BATCH if job.batch_size is None else job.batch_size)
    if world.size > 1:
        refuse_memory(pipe.current_decoder())
    count = len(job.prompts)
    if world.main:
        # statistics of an earlier run must not stand beside pictures of one that is killed before it writes its own
        (out / STATS).unlink(missing_ok=True)
        sweep(out, deep=False, spare_running=True)
    seeds = image_seeds(world.broadcast(image_seeds(job.seed, None, 1)[0]), None, count)
    mine = share(count, batch, world.rank, world.size)
    part: tuple[list[int], DecodeStats, dict[str, Any]] | None = None
    if mine:
        result = pipe(
            [job.prompts[i] for i in mine], seed=[seeds[i] for i in mine], batch_size=batch, **options
        )
        grids = pipe.model.layout.to_grid(result.stats.step_of)
        for i, image, grid in zip(mine, result.images, grids, strict=True):
            save_image(image, out / job.names[i])
            if trace:
                save_image(commit_map(image, grid[0].numpy()), out / f"trace_{job.names[i]}")
        part = (mine, result.stats, result.settings)
    pipe.finish()
    parts = [p for p in world.gather(part) if p is not None]
    if not world.main:
        return None
    order = [i for numbers, _, _ in parts for i in numbers]
    stats = DecodeStats.merge([s for _, s, _ in parts]).select(sorted(range(count), key=order.__getitem__))
    save_image(contact_sheet([_reopened(out / name) for name in job.names]), out / "contact_sheet.png")
    images: list[dict[str, Any]] = [
        {"file": name, "prompt": prompt, "seed": seed, "steps": steps}
        for name, prompt, seed, steps in zip(job.names, job.prompts, seeds, stats.steps.tolist(), strict=True)
    ]
    grids = pipe.model.layout.to_grid(stats.step_of)
    for entry, grid in zip(images if trace else images[:TRACED], grids, strict=False):
        entry["commit_steps"] = encode_grid(grid)
    settings = parts[0][2]
    settings["total_seconds"] = max(s["total_seconds"] for _, _, s in parts)
    record = {
        "command": sys.argv[1:],
        **settings,
        "environment": environment(pipe.model.device),
        "processes": world.size,
        "stats": stats.summary(),
        "images": images,
    }
    save_json(record, out / STATS)
    if len(parts) < world.size:
        print(
            f"{world.size - len(parts)} of {world.size} processes had nothing to do: {count} images make {len(parts)}"
            f" batches of {batch}; lower --batch-size"
        )
    return record


def _reopened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
