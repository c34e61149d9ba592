"""Steps against window for the lossless Jacobi decoders with confidence intervals: the figure of docs/decoders/nc-sjd.md.

Every image is decoded by all rows with the same prompt and seed before the next one begins, so ratios are paired and a
noisy machine disturbs all rows alike. Results go to a JSON file after every batch; run again to go on, or with more images.

    python scripts/nc_figure.py --out nc.json --images 64
    python scripts/nc_figure.py --out nc.json --figure docs/decoders/nc-sjd.png --images 0
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from visacc.decoders.nc_sjd import NCSJD
from visacc.decoders.neighbour_tables import NeighbourTables
from visacc.engine import decode
from visacc.eval.prompts import load_prompts
from visacc.loading import load_model
from visacc.models.base import ImageModel
from visacc.pictures import save_json
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams

CURVES = ("sjd", "mc-sjd", "sjd-pac", "nc-sjd")
COLOURS = {"sjd": "#9aa0a6", "mc-sjd": "#1a73e8", "sjd-pac": "#e8710a", "nc-sjd": "#188038"}


def truncated(tables: NeighbourTables, rank: int) -> NeighbourTables:
    """The same tables with fewer directions (the factors are ordered by importance)."""
    left, right = tables.left[..., :rank].contiguous(), tables.right[:, :rank].contiguous()
    return NeighbourTables(
        tables.offsets, left, right, tables.base, tables.fingerprint, tables.guidance_scale
    )


def configurations(
    args: argparse.Namespace, tables: NeighbourTables
) -> list[tuple[str, str, dict[str, Any]]]:
    """(key, decoder, options) of every row."""
    rows = []
    for window in args.windows:
        for name in args.decoders:
            options: dict[str, Any] = {"window": window}
            if name == "nc-sjd":
                options["tables"] = tables
            if name != "sjd-pac" or window >= 16:  # the smallest tree with a chain of use
                rows.append((f"{name}/{window}", name, options))
    for rank in args.ranks:
        rows.append(
            (f"rank {rank}/{args.at}", "nc-sjd", {"window": args.at, "tables": truncated(tables, rank)})
        )
    for extra in args.extra:
        found = {
            "left only": {"tables": only(tables, {(0, 0, -1)})},
            "gumbel-exact": {"tables": tables, "coupling": "gumbel-exact"},
            "copy left": {"tables": tables, "fresh": "repeat_left"},
            "2 passes": {"tables": tables, "passes": 2},
            "8 passes": {"tables": tables, "passes": 8},
        }[extra]
        rows.append((f"{extra}/{args.at}", "nc-sjd", {"window": args.at, **found}))
    return rows


def only(tables: NeighbourTables, offsets: set[tuple[int, int, int]]) -> NeighbourTables:
    """The tables with every other offset switched off."""
    keep = torch.tensor([o in offsets for o in tables.offsets])
    left = tables.left * keep[:, None, None]
    return NeighbourTables(
        tables.offsets, left, tables.right, tables.base, tables.fingerprint, tables.guidance_scale
    )


def measure(
    model: ImageModel,
    rows: list[tuple[str, str, dict[str, Any]]],
    sampling: SamplingParams,
    images: int,
    batch: int,
    record: dict[str, Any],
    out: Path,
    prompts: list[Any],
) -> None:
    """Decode what is missing of the first ``images`` images in every row."""
    for start in range(0, images, batch):
        ids = list(range(start, min(start + batch, images)))
        cond = model.encode([prompts[i % len(prompts)] for i in ids])
        for key, name, options in rows:
            row = record["rows"].setdefault(
                key, {"steps": {}, "cpu_seconds": 0.0, "judge": 0.0, "forward": 0.0, "passes": 0}
            )
            if all(str(i) in row["steps"] for i in ids):
                continue
            began = time.process_time()
            result = decode(model, make_decoder(name, **options), cond, sampling, ids)
            row["cpu_seconds"] += time.process_time() - began
            for phase in ("judge", "forward"):
                row[phase] += result.stats.phases[phase]
            row["passes"] += result.stats.forwards
            row["steps"].update({str(i): s for i, s in zip(ids, result.stats.steps.tolist(), strict=True)})
            save_json(record, out)


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


def show(record: dict[str, Any]) -> None:
    table = Table(
        "row",
        "images",
        "steps",
        "to mc-sjd",
        "CPU s/image",
        "judge ms/pass",
        "forward ms/pass",
        title=record["model"],
    )
    for key, row in record["rows"].items():
        steps = row["steps"]
        if not steps:
            continue
        mean, error = mean_and_error([float(s) for s in steps.values()])
        base = record["rows"].get(f"mc-sjd/{key.rpartition('/')[2]}")
        text = ""
        if base and base["steps"]:
            value, width = ratio(steps, base["steps"])
            text = f"{value:.3f} ± {width:.3f}"
        table.add_row(
            key,
            str(len(steps)),
            f"{mean:.1f} ± {error:.1f}",
            text,
            f"{row['cpu_seconds'] / len(steps):.2f}",
            f"{1000 * row['judge'] / row['passes']:.1f}",
            f"{1000 * row['forward'] / row['passes']:.1f}",
        )
    Console(width=140).print(table)


def draw_figure(record: dict[str, Any], path: Path) -> None:
    """Left: what happens in a window. Right: steps against window."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyArrowPatch, Rectangle

    figure, (sketch, curves) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=(1, 1.25))
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
    ticks = sorted({int(k.rpartition("/")[2]) for k in record["rows"]})
    curves.set_xticks(ticks, [str(t) for t in ticks])
    curves.set(
        xlabel="window (tokens read per pass)",
        ylabel=f"steps per image of {record['tokens']} tokens",
        ylim=(0, None),
    )
    curves.grid(alpha=0.3)
    curves.legend(frameon=False)
    curves.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes-t2i")
    parser.add_argument("--tables", help="file of neighbour tables; default: the one beside the model")
    parser.add_argument("--prompts", default="shapes")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--windows", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--decoders", nargs="*", default=list(CURVES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--extra", nargs="*", default=[])
    parser.add_argument("--at", type=int, default=64, help="window of --ranks and --extra")
    parser.add_argument("--out", type=Path, default=Path("nc.json"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(args.model, device="cpu")
    sampling = SamplingParams.merge(model.defaults, {})
    if args.tables:
        tables = NeighbourTables.load(args.tables)
    else:
        decoder = NCSJD(online=False)
        decoder.check(model)
        if decoder._tables is None:
            raise SystemExit(
                f"no tables beside {args.model}; measure them with 'visacc calibrate {args.model}'"
            )
        tables = decoder._tables
    tables.check(model)
    record: dict[str, Any] = {"model": model.name, "fingerprint": model.fingerprint(), "rows": {}}
    if args.out.is_file():
        record = json.loads(args.out.read_text())
        if record["fingerprint"] != model.fingerprint():
            raise SystemExit(f"{args.out} holds figures of another model; choose another --out")
    record["tokens"], record["sampling"] = model.layout.total, vars(sampling)
    texts = load_prompts(args.prompts).texts
    # prompts come in blocks of one kind each
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    rows = configurations(args, tables)
    measure(model, rows, sampling, args.images, args.batch, record, args.out, [texts[i] for i in order])
    show(record)
    if args.figure:
        draw_figure(record, args.figure)


if __name__ == "__main__":
    main()
