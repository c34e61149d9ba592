"""``visacc bench vlm``: tokens per step and speed of drafters, against three yardsticks on the same prompts.

tau is committed tokens per target step, the bonus token included, the prompt's own token not counted. Speeds
are tokens per second of the whole call (with the prompt) and of decoding alone.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from visacc.pictures import read_image
from visacc.speculate.api import Speculator
from visacc.speculate.params import TextParams, eos_ids
from visacc.speculate.pipeline import EMBEDDED, CaptionPipeline
from visacc.traces import environment

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def bench(
    model: Any,
    methods: list[str],
    temperatures: list[float],
    *,
    images: Path | None = None,
    prompt: str = "",
    count: int = 32,
    batch_size: int = 1,
    max_new_tokens: int = 64,
    repeats: int = 3,
    device: str | None = None,
) -> dict[str, Any]:
    """Measure ``methods`` (drafter folders, embedded methods, "ngram") at each temperature.

    Every figure is the median of ``repeats`` passes over distinct pictures, after one warm-up pass over the
    first batch. The n-gram memory is emptied before each pass.

    Raises:
        ValueError: no pictures, or a drafter that does not fit.
    """
    plain = CaptionPipeline(model, speculator=None, device=device)
    batches = _inputs(plain, model, images, prompt, count, batch_size)
    eos = eos_ids(plain.model.generation_config.eos_token_id)
    speculators = {name: Speculator(plain.model, name) for name in methods}
    report: dict[str, Any] = {
        "model": model if isinstance(model, str) else type(model).__name__,
        "pictures": sum(len(b["input_ids"]) for b in batches),
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "device": str(plain.model.device),
        "threads": torch.get_num_threads(),
        "environment": environment(plain.model.device),
        "tau": "committed tokens per target step, bonus token included, prompt step not counted",
        "rows": [],
    }
    for temperature in temperatures:
        params = TextParams(max_new_tokens=max_new_tokens, temperature=temperature, eos=eos)
        base = _loop(plain.speculator, batches, params, repeats)
        rows = [{"method": "none", **base}]
        reference = _generate(plain.model, batches, temperature, max_new_tokens, repeats)
        rows.append({"method": "model.generate", **reference})
        lookup = _generate(
            plain.model, batches, temperature, max_new_tokens, repeats, prompt_lookup_num_tokens=5
        )
        rows.append({"method": "model.generate + prompt lookup", **lookup})
        for name, speculator in speculators.items():
            rows.append({"method": name, **_loop(speculator, batches, params, repeats)})
        for row in rows:
            row["temperature"] = temperature
            for key in ("tokens_per_second", "decode_tokens_per_second"):
                if row.get(key) and base.get(key):
                    row[f"{key}_ratio_to_none"] = row[key] / base[key]
            if row.get("tokens_per_second") and reference.get("tokens_per_second"):
                row["tokens_per_second_ratio_to_generate"] = (
                    row["tokens_per_second"] / reference["tokens_per_second"]
                )
        report["rows"] += rows
    return report


def _inputs(
    pipeline: CaptionPipeline, model: Any, images: Path | None, prompt: str, count: int, size: int
) -> list[dict[str, Any]]:
    from PIL import Image

    if images is not None:
        files = sorted(p for p in images.iterdir() if p.suffix.lower() in PICTURES)[:count]
        if not files:
            raise ValueError(f"{images} holds no pictures ({', '.join(PICTURES)})")
        pictures = [read_image(p) for p in files]
    elif model == EMBEDDED:
        from visacc.models.vlm.scenes import draw_scene, picture

        pictures = [Image.fromarray(picture(draw_scene(20_000 + i, held_out=True))) for i in range(count)]
    else:
        raise ValueError("pass a folder of pictures (images=...); only shapes-captioner draws its own")
    text = prompt or ("describe the image ." if model == EMBEDDED else "Describe the image.")
    groups = [pictures[i : i + size] for i in range(0, len(pictures), size)]
    return [pipeline.inputs([text] * len(g), [[p] for p in g]) for g in groups]


def _loop(
    speculator: Speculator, batches: list[dict[str, Any]], params: TextParams, repeats: int
) -> dict[str, Any]:
    from visacc.speculate.ngram import NgramDrafter

    runs: list[dict[str, float]] = []
    histogram: Counter[int] = Counter()
    speculator.run(batches[0], params, [0] * len(batches[0]["input_ids"]))
    for _ in range(repeats):
        if isinstance(speculator.drafter, NgramDrafter):
            speculator.drafter.past = speculator.drafter.past[:0]
        tokens = steps = accepted = 0
        seconds = prefill = draft = 0.0
        for number, inputs in enumerate(batches):
            seeds = [1000 * number + i for i in range(len(inputs["input_ids"]))]
            stats = speculator.run(inputs, params, seeds).stats
            tokens, steps = tokens + int(stats.tokens.sum()), steps + int(stats.steps.sum())
            accepted += int(stats.accepted.sum())
            seconds, prefill = seconds + stats.seconds, prefill + stats.prefill_seconds
            draft += stats.draft_seconds
            if not runs and stats.committed is not None:  # every pass commits alike, one is enough
                histogram.update(dict(enumerate(stats.committed.tolist())))
        rows = sum(len(b["input_ids"]) for b in batches)
        runs.append(
            {
                "tau": (tokens - rows) / max(steps, 1),
                "accepted_per_step": accepted / max(steps, 1),
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "decode_tokens_per_second": (tokens - rows) / max(seconds - prefill, 1e-9),
                "draft_share": draft / seconds,
            }
        )
    found: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    for key in ("tokens_per_second", "decode_tokens_per_second"):
        found[f"{key}_range"] = [min(run[key] for run in runs), max(run[key] for run in runs)]
    found["committed_histogram"] = [histogram[n] for n in range(max(+histogram, default=0) + 1)]
    return found


def _generate(
    model: Any,
    batches: list[dict[str, Any]],
    temperature: float,
    max_new_tokens: int,
    repeats: int,
    **extra: Any,
) -> dict[str, Any]:
    """The same prompts by transformers itself; a mode that does not run for this model is reported as
    such.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, **extra}
    if temperature > 0:
        options.update(temperature=temperature, top_k=0, top_p=1.0)
    speeds = []
    try:
        model.generate(**batches[0], **options)
        for _ in range(repeats):
            begun, tokens = time.perf_counter(), 0
            for number, inputs in enumerate(batches):
                torch.manual_seed(number)
                out = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
                tokens += _written(out, eos_ids(model.generation_config.eos_token_id))
            speeds.append(tokens / (time.perf_counter() - begun))
    except (ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError, IndexError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_range": [min(speeds), max(speeds)],
    }


def _written(out: torch.Tensor, eos: tuple[int, ...]) -> int:
    """Generated tokens up to and including each row's end token."""
    ends = (
        torch.isin(out, torch.tensor(eos, device=out.device))
        if eos
        else torch.zeros_like(out, dtype=torch.bool)
    )
    before = ends.long().cumsum(1) - ends.long()
    return int((before == 0).sum())


def print_table(report: dict[str, Any]) -> None:
    """The report as a table on the terminal."""
    table = Table(
        "T", "method", "tau", "tokens/s", "vs none", "vs none, decoding", "vs generate", title=report["model"]
    )

    def number(row: dict[str, Any], key: str, unit: str = "") -> str:
        return f"{row[key]:.2f}{unit}" if row.get(key) is not None else "-"

    for row in report["rows"]:
        if "failed" in row:
            table.add_row(
                f"{row['temperature']:g}", row["method"], "-", f"does not run: {row['failed'][:60]}"
            )
            continue
        table.add_row(
            f"{row['temperature']:g}",
            row["method"],
            number(row, "tau"),
            number(row, "tokens_per_second"),
            number(row, "tokens_per_second_ratio_to_none", "x"),
            number(row, "decode_tokens_per_second_ratio_to_none", "x"),
            number(row, "tokens_per_second_ratio_to_generate", "x"),
        )
    Console().print(table)
    Console().print(f"tau: {report['tau']}")
