"""The comparison as JSON, Markdown and a trade-off plot."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visacc import __version__
from visacc.bench.run import Bench, Row, spread, time_ratio
from visacc.pictures import save_image
from visacc.traces import encode_grid, environment
from visacc.writing import write_atomic


def to_dict(bench: Bench) -> dict[str, Any]:
    """Plain numbers of everything that was measured."""
    plain = bench.row("ar")
    return {
        "visacc": __version__,
        "torch": torch.__version__,
        "device": _device(),
        "model": bench.model,
        "sampling": bench.sampling,
        "images": bench.images,
        "batch": bench.batch,
        "environment": environment(bench.device),
        "decoders": [_row(row, plain) | _traces(bench, row) for row in bench.rows],
        "skipped": bench.skipped,
    }


def _device() -> str:
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )


def _row(row: Row, plain: Row) -> dict[str, Any]:
    low, high = spread(row.ratio)
    found: dict[str, Any] = {
        "label": row.entry.label,
        "decoder": row.entry.decoder,
        "options": {
            k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in row.entry.options.items()
        },
        "knob": row.entry.knob,
        "lossless": row.lossless,
        "steps": row.stats.nfe,
        "step_compression": row.stats.step_compression,
        "tau": row.stats.tau,
        "seconds": row.seconds,
        "seconds_ratio": time_ratio(row),
        "seconds_ratio_range": [low, high],
        "same_codes_as_ar": float((row.codes == plain.codes).float().mean()),
        "note": row.note,
    }
    if row.distance is not None:
        found["frechet"] = dict(row.distance.__dict__)
    if row.scores is not None:
        found["tasks"] = row.scores.tasks()
        found["overall"] = row.scores.overall
        found["overall_interval"] = list(row.scores.interval())
        if plain.scores is not None:
            found["difference_to_ar"] = list(row.scores.difference(plain.scores))
    return found


def _traces(bench: Bench, row: Row) -> dict[str, Any]:
    """How steps and tokens were distributed, and what is known of the kept pictures."""
    steps = row.stats.steps.double()
    half = 1.96 * float(steps.std()) / math.sqrt(len(steps)) if len(steps) > 1 else None
    found: dict[str, Any] = {
        "steps_interval": None if half is None else [row.stats.nfe - half, row.stats.nfe + half],
        "committed_histogram": row.stats.histogram(),
    }
    if row.grids is None:
        return found
    found["commit_mean"] = encode_grid(row.grids.double().mean(0))
    found["pictures"] = [_picture(bench, row, row.grids[i], i) for i in bench.kept]
    return found


def _picture(bench: Bench, row: Row, grid: Tensor, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "file": picture_file(row, index),
        "prompt": bench.prompts[index],
        "seed": bench.seeds[index],
        "steps": int(row.stats.steps[index]),
        "commit_steps": encode_grid(grid),
    }
    if row.scores is not None:
        found |= {"task": row.scores.tags[index], "right": bool(row.scores.right[index])}
    return found


def picture_file(row: Row, index: int) -> str:
    """Where a kept picture lies below the folder of the comparison."""
    name = re.sub(r"[^A-Za-z0-9.+=-]+", "-", row.entry.label).strip("-")
    return f"pictures/{name}/{index:05d}.png"


def to_markdown(bench: Bench) -> str:
    """One table: faster by how much, lossy by how much."""
    data = to_dict(bench)
    judged = any("overall" in d for d in data["decoders"])
    head = ["decoder", "output", "steps", "compression", "tau", "seconds vs ar"]
    head += ["overall score", "difference to ar", *_tasks(data)] if judged else []
    head += ["Fréchet to ar", "p"]
    lines = [
        f"# Decoders on {data['model']}",
        "",
        f"{data['images']} images, batch {data['batch']}, {data['device']}, sampling {_settings(data['sampling'])}.",
        "Seconds are relative to plain decoding of the same batches in the same run (range over batches). Scores and"
        " differences carry 95 % intervals; those of differences are paired, picture by picture of the same prompt and"
        " seed. The Fréchet distance (fixed 64-d features) is to plain decoding with other"
        " seeds; p: how often two equally distributed sets of this size are as far apart.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for d in data["decoders"]:
        low, high = d["seconds_ratio_range"]
        cells = [
            f"`{d['label']}`",
            "exact" if d["lossless"] else "lossy",
            f"{d['steps']:.1f}",
            f"{d['step_compression']:.2f}x",
            f"{d['tau']:.2f}",
            f"{d['seconds_ratio']:.2f} ({low:.2f} to {high:.2f})",
        ]
        if judged:
            cells += _score_cells(d)
        frechet = d.get("frechet")
        cells += [f"{frechet['distance']:.4g}", f"{frechet['p_value']:.3f}"] if frechet else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [""] + [f"- `{d['label']}`: {d['note']}." for d in data["decoders"] if d["note"]]
    lines += [f"- `{label}` did not run: {reason}" for label, reason in data["skipped"].items()]
    return "\n".join(lines).rstrip() + "\n"


def _tasks(data: dict[str, Any]) -> list[str]:
    return list(next(d["tasks"] for d in data["decoders"] if "tasks" in d))


def _score_cells(d: dict[str, Any]) -> list[str]:
    low, high = d["overall_interval"]
    mean, below, above = d["difference_to_ar"]
    tasks = [
        f"{t['score']:.2f} ({t['interval'][0]:.2f} to {t['interval'][1]:.2f})" for t in d["tasks"].values()
    ]
    return [
        f"{d['overall']:.3f} ({low:.3f} to {high:.3f})",
        f"{mean:+.3f} ({below:+.3f} to {above:+.3f})",
        *tasks,
    ]


def _settings(sampling: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def can_plot() -> bool:
    """Whether matplotlib, which the plot needs, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(bench: Bench, path: Path) -> None:
    """Step compression against quality, one line per knob, plain decoding's interval as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    judged = bench.rows[0].scores is not None
    figure, axes = plt.subplots(1, 2 if judged else 1, figsize=(11 if judged else 6, 4.4), squeeze=False)
    if judged:
        _panel(axes[0][0], bench, lambda row: row.scores.overall if row.scores else 0.0, "overall task score")
        plain = bench.row("ar").scores
        assert plain is not None
        axes[0][0].axhspan(*plain.interval(), color="0.9", zorder=0, label="ar, 95 %")
    last = axes[0][-1]
    _panel(last, bench, lambda row: row.distance.distance if row.distance else 0.0, "Fréchet distance to ar")
    last.set_yscale("log")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{bench.model}: faster by how much, lossy by how much")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(ax: Any, bench: Bench, value: Any, title: str) -> None:
    groups: dict[str, list[Row]] = {}
    for row in bench.rows:
        groups.setdefault(row.entry.decoder if row.entry.knob else row.entry.label, []).append(row)
    for name, rows in groups.items():
        x = [row.stats.step_compression for row in rows]
        y = [value(row) for row in rows]
        style = "o-" if len(rows) > 1 else "s" if rows[0].lossless else "^"
        ax.plot(x, y, style, label=name, markersize=5, linewidth=1)
        knob = rows[0].entry.knob
        if knob and len(rows) > 1:
            for row, px, py in zip(rows, x, y, strict=True):
                ax.annotate(
                    f"{row.entry.options[knob]:g}",
                    (px, py),
                    fontsize=6,
                    xytext=(3, 3),
                    textcoords="offset points",
                )
    ax.set_xlabel("step compression (tokens per step)")
    ax.set_ylabel(title)


def write(bench: Bench, folder: str | Path, *, with_plot: bool = True) -> dict[str, Path]:
    """Write ``decoders.json``, ``decoders.md``, ``decoders.png`` and the kept pictures into ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"json": folder / "decoders.json", "markdown": folder / "decoders.md"}
    for row in bench.rows:
        for index, picture in zip(bench.kept, row.pictures if row.pictures is not None else (), strict=False):
            path = folder / picture_file(row, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_image(Image.fromarray(picture), path)
    text, table = json.dumps(to_dict(bench), indent=1) + "\n", to_markdown(bench)
    write_atomic(paths["json"], lambda p: p.write_text(text, encoding="utf-8"))
    write_atomic(paths["markdown"], lambda p: p.write_text(table, encoding="utf-8"))
    if with_plot:
        paths["plot"] = folder / "decoders.png"
        plot(bench, paths["plot"])
    return paths
