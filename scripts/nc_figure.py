"""Steps against window for the lossless Jacobi decoders with confidence intervals: the figure of docs/decoders/nc-sjd.md.

Every image is decoded by all rows with the same prompt and seed before the next one begins, so ratios are paired and a
noisy machine disturbs all rows alike. Results go to a JSON file after every batch; run again to go on, or with more images.

    python scripts/nc_figure.py --out nc.json --images 64 --ranks 1 2 4 8 16 32 --online
    python scripts/nc_figure.py --out nc.json --figure docs/decoders/nc-sjd.png --images 0
    python scripts/nc_figure.py --out ntp.json --model moving-ntp --images 32

Tables: those of --tables, else those beside the model, else fitted here (`visacc calibrate` does the same) and kept beside
--out; tables of other ranks are always fitted here. Staleness is measured on --staleness images with seeds of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from visacc.calibrate import calibrate, measure
from visacc.decoders.nc_online import forget
from visacc.decoders.neighbour_tables import TABLE_FILE, NeighbourTables
from visacc.engine import decode
from visacc.eval.prompts import load_prompts
from visacc.loading import load_model
from visacc.models.base import ImageModel
from visacc.models.nbp import embedded, moving
from visacc.pictures import save_json
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams

CURVES = ("sjd", "mc-sjd", "sjd-pac", "nc-sjd")
COLOURS = {"sjd": "#9aa0a6", "mc-sjd": "#1a73e8", "sjd-pac": "#e8710a", "nc-sjd": "#188038"}
CALIBRATION_SEED, STALENESS_SEED = 1_000_000, 2_000_000
Row = tuple[str, str, dict[str, Any]]


class Setting:
    """The model, its prompts in a fixed random order, and its tables by rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.images = args.out, args.calibrate
        if args.model in embedded.NAMES:
            self.model: ImageModel = embedded.load(args.model)
            texts: list[Any] = [moving.sample(10_000_000 + i).text for i in range(1000)]
        else:
            self.model = load_model(args.model, device="cpu")
            texts = list(load_prompts(args.prompts).texts)
        self.sampling = SamplingParams.merge(self.model.defaults, {})
        # prompts come in blocks of one kind each
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        self.prompts = [texts[i] for i in order]
        beside = None if self.model.folder is None else self.model.folder / TABLE_FILE
        if args.tables:
            self.tables = NeighbourTables.load(args.tables)
        elif beside is not None and beside.is_file():
            self.tables = NeighbourTables.load(beside)
        else:
            self.tables = self.fitted(32)
        self.tables.check(self.model)

    def fitted(self, rank: int) -> NeighbourTables:
        """Tables of a rank: fitted once, then read from a file beside the record."""
        file = self.out.with_suffix(f".rank{rank}.safetensors")
        if not file.is_file():
            with Progress(transient=True) as bar:
                task = bar.add_task(f"fitting tables of rank {rank}", total=self.images)
                tables, _ = calibrate(
                    self.model,
                    self.prompts,
                    self.sampling,
                    images=self.images,
                    rank=rank,
                    seed=CALIBRATION_SEED,
                    progress=lambda done, _: bar.update(task, completed=done),
                )
            tables.save(file)
        tables = NeighbourTables.load(file)
        tables.check(self.model)
        return tables


def configurations(args: argparse.Namespace, setting: Setting) -> list[Row]:
    """(key, decoder, options) of every row that can be decoded image by image."""
    rows: list[Row] = []
    tables = setting.tables
    for window in args.windows:
        for name in args.decoders:
            options: dict[str, Any] = {"window": window}
            if name == "nc-sjd":
                options["tables"] = tables
            if name == "mc-sjd":
                options["coupling"] = args.coupling
            if name != "sjd-pac" or window >= 16:  # the smallest tree with a chain of use
                rows.append((f"{name}/{window}", name, options))
    for rank in args.ranks:
        rows.append((f"rank {rank}/{args.at}", "nc-sjd", {"window": args.at, "tables": setting.fitted(rank)}))
    for extra in args.extra:
        found = {
            "left only": {"tables": only(tables, {(0, 0, -1)})},
            "gumbel-exact": {"tables": tables, "coupling": "gumbel-exact"},
            "copy left": {"tables": tables, "fresh": "repeat_left"},
            "without gates": {"tables": replace(tables, probe=None, mixer=None, fresh_gate=None)},
        }[extra]
        rows.append((f"{extra}/{args.at}", "nc-sjd", {"window": args.at, **found}))
    return rows


def only(tables: NeighbourTables, offsets: set[tuple[int, int, int]]) -> NeighbourTables:
    """The tables with every other offset switched off."""
    keep = torch.tensor([o in offsets for o in tables.offsets])
    return replace(tables, left=tables.left * keep[:, None, None])


def decode_batch(
    setting: Setting, row: dict[str, Any], name: str, options: dict[str, Any], ids: list[int]
) -> None:
    """Decode some images and add what it took to the row."""
    cond = setting.model.encode([setting.prompts[i % len(setting.prompts)] for i in ids])
    began = time.process_time()
    result = decode(setting.model, make_decoder(name, **options), cond, setting.sampling, ids)
    row["cpu_seconds"] += time.process_time() - began
    for phase in ("judge", "forward"):
        row[phase] += result.stats.phases[phase]
    row["passes"] += result.stats.forwards
    row["steps"].update({str(i): s for i, s in zip(ids, result.stats.steps.tolist(), strict=True)})


def empty_row() -> dict[str, Any]:
    return {"steps": {}, "cpu_seconds": 0.0, "judge": 0.0, "forward": 0.0, "passes": 0}


def measure_rows(setting: Setting, rows: list[Row], images: int, batch: int, record: dict[str, Any]) -> None:
    """Decode what is missing of the first ``images`` images in every row."""
    for start in range(0, images, batch):
        ids = list(range(start, min(start + batch, images)))
        for key, name, options in rows:
            row = record["rows"].setdefault(key, empty_row())
            if any(str(i) not in row["steps"] for i in ids):
                decode_batch(setting, row, name, options, ids)
                save_json(record, setting.out)


def measure_online(setting: Setting, window: int, images: int, batch: int, record: dict[str, Any]) -> None:
    """All images by a decoder that starts without tables and learns from batch to batch; anew if it was interrupted."""
    key = f"online/{window}"
    if len(record["rows"].get(key, empty_row())["steps"]) >= images:
        return
    forget(setting.model)
    row = empty_row()
    for start in range(0, images, batch):
        ids = list(range(start, min(start + batch, images)))
        decode_batch(setting, row, "nc-sjd", {"window": window, "tables": "online"}, ids)
    record["rows"][key] = row
    save_json(record, setting.out)


def measure_staleness(setting: Setting, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Total variation by offset before and after the correction, for every set of tables."""
    known = record.setdefault("staleness", {})
    named = {"tables": setting.tables} | {f"rank {r}": setting.fitted(r) for r in args.ranks}
    for name, tables in named.items():
        if args.staleness and known.get(name, {}).get("images") != args.staleness:
            seeds = [STALENESS_SEED + i for i in range(args.staleness)]
            found = measure(setting.model, tables, setting.prompts, setting.sampling, seeds, window=args.at)
            known[name] = {"images": args.staleness, "window": args.at, "rows": found.rows()}
            save_json(record, setting.out)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (normal approximation)."""
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
    return mean, 1.96 * spread / math.sqrt(len(values))


def ratio(a: dict[str, int], b: dict[str, int]) -> tuple[float, float]:
    """Ratio of the mean steps of two rows over their common images, with its 95 % half-width (paired delta method)."""
    common = [i for i in a if i in b]
    x, y = [float(a[i]) for i in common], [float(b[i]) for i in common]
    top, bottom = sum(x) / len(x), sum(y) / len(y)
    rest = [u - top / bottom * v for u, v in zip(x, y, strict=True)]
    return top / bottom, mean_and_error(rest)[1] / bottom


def to_mc_sjd(record: dict[str, Any], key: str) -> tuple[float, float] | None:
    """A row's steps to those of mc-sjd at the same window, and the half-width of the interval."""
    base, row = record["rows"].get(f"mc-sjd/{key.rpartition('/')[2]}"), record["rows"][key]
    if not base or not set(base["steps"]) & set(row["steps"]):
        return None
    return ratio(row["steps"], base["steps"])


def rank_points(record: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(rank, ratio to mc-sjd, half-width) in order."""
    points = []
    for key in record["rows"]:
        if key.startswith("rank ") and (found := to_mc_sjd(record, key)):
            points.append((int(key.split("/")[0].removeprefix("rank ")), *found))
    return sorted(points)


def show(record: dict[str, Any]) -> None:
    titles = ("row", "images", "steps", "to mc-sjd", "CPU s/image", "judge ms/pass", "forward ms/pass")
    table = Table(*titles, title=record["model"])
    for key, row in record["rows"].items():
        steps = row["steps"]
        if not steps:
            continue
        mean, error = mean_and_error([float(s) for s in steps.values()])
        found = to_mc_sjd(record, key)
        table.add_row(
            key,
            str(len(steps)),
            f"{mean:.1f} ± {error:.1f}",
            f"{found[0]:.3f} ± {found[1]:.3f}" if found else "",
            f"{row['cpu_seconds'] / len(steps):.2f}",
            f"{1000 * row['judge'] / row['passes']:.1f}",
            f"{1000 * row['forward'] / row['passes']:.1f}",
        )
    console = Console(width=140)
    console.print(table)
    for name, found in record.get("staleness", {}).items():
        title = f"total variation, {name}, {found['images']} images at window {found['window']}"
        stale = Table("neighbour that changed", "before", "after", "ratio", title=title)
        for what, before, after in found["rows"]:
            stale.add_row(what, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}" if before else "-")
        console.print(stale)


def draw_figure(record: dict[str, Any], path: Path) -> None:
    """What happens in a window, steps against window, and where it was measured rank against gain."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyArrowPatch, Rectangle

    ranks = rank_points(record)
    shape = (1, 1.25, 0.9) if ranks else (1, 1.25)
    figure, axes = plt.subplots(
        1, len(shape), figsize=(10 if len(shape) == 2 else 14, 4.2), width_ratios=shape
    )
    sketch, curves = axes[0], axes[1]
    columns, done, failed = 7, 10, 10
    for cell in range(28):
        y, x = divmod(cell, columns)
        if cell < done:
            colour = "#c8e6c9"
        elif cell == failed:
            colour = "#f28b82"
        elif cell < 25:
            colour = "#d2e3fc"
        else:
            colour = "white"
        if cell in (failed + 1, failed + 2, failed + columns - 1, failed + columns, failed + columns + 1):
            colour = "#fde293"
        sketch.add_patch(Rectangle((x, -y), 0.92, 0.92, facecolor=colour, edgecolor="#5f6368", linewidth=0.8))
    centre = (failed % columns + 0.46, -(failed // columns) + 0.46)
    for cell in (failed + 1, failed + 2, failed + columns - 1, failed + columns, failed + columns + 1):
        target = (cell % columns + 0.46, -(cell // columns) + 0.46)
        bend = 0.45 if cell == failed + 2 else 0.0
        sketch.add_patch(
            FancyArrowPatch(
                centre,
                target,
                arrowstyle="-|>",
                mutation_scale=9,
                shrinkA=3,
                shrinkB=7,
                color="#3c4043",
                connectionstyle=f"arc3,rad=-{bend}",
            )
        )
    sketch.text(*centre, "b", ha="center", va="center", fontsize=11, weight="bold")
    sketch.text(
        0,
        1.55,
        "green: final   red: draft a failed, b drawn\nyellow: laws corrected by $B_o[b]-B_o[a]$ before\n"
        "the redraw   blue: rest of the window",
        fontsize=9,
        va="center",
    )
    sketch.set(xlim=(-0.1, 7.1), ylim=(-3.2, 2.3), aspect="equal")
    sketch.axis("off")
    for name in CURVES:
        points = []
        for key, row in record["rows"].items():
            decoder, _, window = key.partition("/")
            if decoder == name and row["steps"]:
                points.append((int(window), *mean_and_error([float(s) for s in row["steps"].values()])))
        if points:
            windows, means, errors = zip(*sorted(points), strict=True)
            curves.errorbar(windows, means, errors, label=name, color=COLOURS[name], marker="o", capsize=3)
    curves.set_xscale("log", base=2)
    ticks = sorted({int(k.partition("/")[2]) for k in record["rows"] if k.partition("/")[0] in CURVES})
    curves.set_xticks(ticks, [str(t) for t in ticks])
    curves.set(
        xlabel="window (tokens read per pass)",
        ylabel=f"steps per image of {record['tokens']} tokens",
        ylim=(0, None),
    )
    curves.grid(alpha=0.3)
    curves.legend(frameon=False)
    if ranks:
        rank, value, error = zip(*ranks, strict=True)
        axes[2].errorbar(rank, value, error, color=COLOURS["nc-sjd"], marker="o", capsize=3)
        axes[2].set_xscale("log", base=2)
        axes[2].set_xticks(rank, [str(r) for r in rank])
        axes[2].set(xlabel="rank of the tables", ylabel="steps to those of mc-sjd", ylim=(0, 1.05))
        axes[2].axhline(1, color=COLOURS["mc-sjd"], linewidth=1)
        axes[2].grid(alpha=0.3)
    for axis in axes[1:]:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes-t2i", help="an image model, or moving-ntp")
    parser.add_argument("--tables", help="file of neighbour tables; default: the one beside the model")
    parser.add_argument("--prompts", default="shapes", help="prompt set or file; moving-ntp has its own")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--windows", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--decoders", nargs="*", default=list(CURVES))
    parser.add_argument("--coupling", default="maximal", help="of mc-sjd; that of nc-sjd is maximal")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="tables of these ranks, fitted here")
    parser.add_argument("--extra", nargs="*", default=[])
    parser.add_argument("--online", action="store_true", help="a row that learns while decoding")
    parser.add_argument(
        "--at", type=int, default=64, help="window of --ranks, --extra, --online, --staleness"
    )
    parser.add_argument("--calibrate", type=int, default=96, help="images that tables are fitted to")
    parser.add_argument(
        "--staleness", type=int, default=16, help="images that staleness is measured on; 0: none"
    )
    parser.add_argument("--out", type=Path, default=Path("nc.json"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(args)
    print_of, tables_of = setting.model.fingerprint(), digest(setting.tables)
    record: dict[str, Any] = {
        "model": setting.model.name,
        "fingerprint": print_of,
        "tables": tables_of,
        "rows": {},
    }
    if args.out.is_file():
        record = json.loads(args.out.read_text())
        if record["fingerprint"] != print_of or record.get("tables") != tables_of:
            raise SystemExit(
                f"{args.out} holds figures of another model or other tables; choose another --out"
            )
    record["tokens"], record["sampling"] = setting.model.layout.total, vars(setting.sampling)
    if args.images:
        measure_rows(setting, configurations(args, setting), args.images, args.batch, record)
        if args.online:
            measure_online(setting, args.at, args.images, args.batch, record)
        measure_staleness(setting, args, record)
    show(record)
    if args.figure:
        draw_figure(record, args.figure)


def digest(tables: NeighbourTables) -> str:
    """Tells files of tables apart."""
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tables.tensors.values())).hexdigest()[:16]


if __name__ == "__main__":
    main()
