"""DPG-Bench's layout: one picture per prompt, named after the prompt's id, that shows its samples in a grid."""

from __future__ import annotations

from pathlib import Path

from visacc.eval.files import write_png
from visacc.eval.generate import Images
from visacc.eval.prompts import PromptSet
from visacc.eval.world import World
from visacc.metrics.dpg import make_grid
from visacc.metrics.images import load_image


def write_grids(world: World, images: Images, prompts: PromptSet, folder: Path) -> None:
    """folder/ID.png of every prompt whose samples are all there; two columns, the samples in order. Existing grids
    stay. Prompts are shared out over the processes.
    """
    if prompts.ids is None:
        return
    for i in range(world.rank, len(prompts), world.size):
        target = folder / f"{prompts.ids[i]}.png"
        if not target.exists():
            first = i * images.samples
            samples = [load_image(images.path(k)) for k in range(first, first + images.samples)]
            write_png(target, make_grid(samples))
    world.barrier()
