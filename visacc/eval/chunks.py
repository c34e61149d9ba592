"""Work in fixed chunks: the unit of sharding, of resuming and of batching.

Chunk c is items [c * size, (c+1) * size) whatever the number of processes, and it is computed as one batch.
Because its composition never changes, neither does a single bit of its result: one process, eight processes
or five kills give the same files. A chunk is done when its marker file exists, which is written last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from visacc.eval.progress import progress
from visacc.eval.world import World


@dataclass(frozen=True)
class Chunks:
    """total items in chunks of `size`; markers lie in `folder` with the given suffix."""

    folder: Path
    total: int
    size: int
    suffix: str = ".json"

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def bounds(self, chunk: int) -> tuple[int, int]:
        return chunk * self.size, min((chunk + 1) * self.size, self.total)

    def path(self, chunk: int) -> Path:
        return self.folder / f"{chunk:06d}{self.suffix}"

    def paths(self) -> list[Path]:
        return [self.path(c) for c in range(len(self))]

    def pending(self) -> list[int]:
        names = {f.name for f in self.folder.iterdir()} if self.folder.is_dir() else set()
        return [c for c in range(len(self)) if self.path(c).name not in names]

    def done_items(self, pending: Sequence[int] | None = None) -> int:
        missing = self.pending() if pending is None else pending
        return self.total - sum(b - a for a, b in map(self.bounds, missing))


def run_chunks(
    world: World,
    chunks: Chunks,
    work: Callable[[int, int, int], None],
    label: str,
    *,
    quiet: bool = False,
    through: Callable[[], object] | None = None,
) -> None:
    """Do every pending chunk: `work(chunk, start, stop)` must end by writing the chunk's marker.

    Pending chunks are dealt out in turn, so after a resume the rest is again shared evenly. Returns when all
    processes are through; `through` is called when this one is.
    """
    pending = chunks.pending()
    # everybody must have looked before anybody finishes a chunk, or the shares would overlap
    world.barrier()
    mine = pending[world.rank :: world.size]
    start = chunks.done_items(pending)
    with progress(label, chunks.total, start, quiet=quiet or not world.main) as report:
        for n, chunk in enumerate(mine):
            work(chunk, *chunks.bounds(chunk))
            others = world.size > 1 and (n % 8 == 7 or n == len(mine) - 1)
            if world.size == 1:
                start += chunks.bounds(chunk)[1] - chunks.bounds(chunk)[0]
                report(start)
            elif world.main and others:
                report(chunks.done_items())
    if through is not None:
        through()
    world.barrier()
    left = chunks.pending()
    if left:
        raise RuntimeError(
            f"{label}: {len(left)} of {len(chunks)} chunks are not done; run again to finish them"
        )
