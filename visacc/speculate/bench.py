"""``visacc bench vlm``: tokens per step and speed of drafters, against four yardsticks on the same prompts.

tau is committed tokens per target step, the bonus token included, the prompt's own token not counted. Speeds are tokens per
second of the whole call (with the prompt) and of decoding alone. The yardsticks are the same loop without a drafter,
``model.generate``, and transformers' prompt lookup and assisted generation where they run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from visacc.pictures import read_image
from visacc.speculate.api import Speculator
from visacc.speculate.contract import forget
from visacc.speculate.params import TextParams, eos_ids
from visacc.speculate.pipeline import EMBEDDED, CaptionPipeline
from visacc.speculate.yardsticks import Measured, assistants, stock
from visacc.traces import environment

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SPEEDS = ("tokens_per_second", "decode_tokens_per_second")
YARDSTICKS = {
    "none": "none",
    "model.generate": "generate",
    "model.generate + prompt lookup": "lookup",
    "model.generate + assistant": "assisted",
}
"""Rows that others are divided by, and how the keys of the quotients end."""


@dataclass
class _Runner:
    """One row of the report: what to time, and what it gave in every pass."""

    name: str
    run: Callable[[int, dict[str, Any]], Measured]
    reset: Callable[[], None] = lambda: None
    failed: str | None = None
    passes: list[Measured] = field(default_factory=list)


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
    assistant: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Measure ``methods`` (drafter folders, embedded methods, "ngram", names of plug-ins) at each temperature.

    Every figure is the median of ``repeats`` passes over distinct pictures, after a warm-up of every row on the first batch.
    The rows take turns, batch by batch, so that whatever else the machine does meets all of them. What drafters
    remember of earlier outputs is dropped before each pass. At temperature 0 all rows write the same tokens; above it the
    rows of this package share their random numbers and text, transformers draws its own.

    Args:
        assistant: name or folder of the model that drafts in assisted generation; by default the first half of the
            target's own layers.

    Raises:
        ValueError: no pictures, or a drafter that does not fit.
    """
    plain = CaptionPipeline(model, speculator=None, device=device)
    batches = _inputs(plain, model, images, prompt, count, batch_size)
    eos = eos_ids(plain.model.generation_config.eos_token_id)
    speculators = {name: Speculator(plain.model, name) for name in methods}
    extra = assistants(plain.model, assistant)
    report: dict[str, Any] = {
        "model": model if isinstance(model, str) else type(model).__name__,
        "pictures": sum(len(b["input_ids"]) for b in batches),
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "device": str(plain.model.device),
        "threads": torch.get_num_threads(),
        "environment": environment(plain.model.device),
        "tau": "committed tokens per target step, bonus token included, prompt step not counted",
        "assistant": extra.name,
        "rows": [],
    }
    for temperature in temperatures:
        params = TextParams(max_new_tokens=max_new_tokens, temperature=temperature, eos=eos)
        runners = [_Runner("none", _ours(plain.speculator, params))]
        for name, options in (
            ("model.generate", {}),
            ("model.generate + prompt lookup", {"prompt_lookup_num_tokens": 5}),
            ("model.generate + assistant", extra.options),
        ):
            runners.append(_Runner(name, stock(plain.model, temperature, max_new_tokens, options)))
        for name, speculator in speculators.items():
            runners.append(_Runner(name, _ours(speculator, params), _forget(speculator)))
        _take_turns(runners, batches, repeats)
        report["rows"] += _rows(runners, temperature)
    return report


def _take_turns(runners: list[_Runner], batches: list[dict[str, Any]], repeats: int) -> None:
    """Warm everything up, then let all rows run on a batch before the next batch starts."""
    for runner in runners:
        try:
            runner.run(0, batches[0])
        except (
            ValueError,
            RuntimeError,
            TypeError,
            AttributeError,
            NotImplementedError,
            IndexError,
        ) as error:
            if not runner.name.startswith("model.generate"):
                raise
            runner.failed = f"{type(error).__name__}: {error}"[:200]
    able = [runner for runner in runners if runner.failed is None]
    for turn in range(repeats):
        for runner in able:
            runner.reset()
            runner.passes.append(Measured())
        for number, inputs in enumerate(batches):
            first = (turn + number) % len(able)  # nobody is always the first after the others
            for runner in able[first:] + able[:first]:
                runner.passes[-1].add(runner.run(number, inputs))


def _ours(speculator: Speculator, params: TextParams) -> Callable[[int, dict[str, Any]], Measured]:
    def run(number: int, inputs: dict[str, Any]) -> Measured:
        rows = len(inputs["input_ids"])
        stats = speculator.run(inputs, params, [1000 * number + i for i in range(rows)]).stats
        return Measured(
            rows,
            int(stats.tokens.sum()),
            stats.seconds,
            stats.prefill_seconds,
            steps=int(stats.steps.sum()),
            accepted=int(stats.accepted.sum()),
            draft_seconds=stats.draft_seconds,
            committed=Counter(dict(enumerate(stats.committed.tolist())))
            if stats.committed is not None
            else Counter(),
        )

    return run


def _forget(speculator: Speculator) -> Callable[[], None]:
    return lambda: forget(speculator.drafter)


def _rows(runners: list[_Runner], temperature: float) -> list[dict[str, Any]]:
    rows = []
    for runner in runners:
        row: dict[str, Any] = {"method": runner.name, "temperature": temperature}
        rows.append(row)
        if runner.failed is not None:
            row["failed"] = runner.failed
            continue
        figures = [p.figures() for p in runner.passes]
        row |= {key: statistics.median(f[key] for f in figures) for key in figures[0]}
        for key in SPEEDS:
            row[f"{key}_range"] = [min(f[key] for f in figures), max(f[key] for f in figures)]
        row["tokens"] = runner.passes[0].tokens
        if runner.passes[0].steps:
            counts = runner.passes[0].committed  # every pass commits alike, one is enough
            row["committed_histogram"] = [counts[n] for n in range(max(+counts, default=0) + 1)]
    for yardstick in [row for row in rows if row["method"] in YARDSTICKS and "failed" not in row]:
        for row in rows:
            for key in SPEEDS:
                if row.get(key) and yardstick.get(key):
                    row[f"{key}_ratio_to_{YARDSTICKS[yardstick['method']]}"] = row[key] / yardstick[key]
    return rows


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


def print_table(report: dict[str, Any]) -> None:
    """The report as a table on the terminal; quotients of whole calls and, behind the stroke, of decoding alone."""
    ran = {row["method"] for row in report["rows"] if "failed" not in row}
    against = {key: f"vs {key}" for name, key in YARDSTICKS.items() if name in ran}
    table = Table("T", "method", "tau", "tokens", "tokens/s", *against.values(), title=report["model"])

    def number(row: dict[str, Any], key: str, unit: str = "") -> str:
        return f"{row[key]:.2f}{unit}" if row.get(key) is not None else "-"

    for row in report["rows"]:
        label = (f"{row['temperature']:g}", row["method"])
        if "failed" in row:
            table.add_row(*label, "-", "-", f"does not run: {row['failed'][:60]}")
            continue
        quotients = [
            " / ".join(number(row, f"{speed}_ratio_to_{key}", "x") for speed in SPEEDS) for key in against
        ]
        table.add_row(
            *label, number(row, "tau"), str(row["tokens"]), number(row, "tokens_per_second"), *quotients
        )
    Console().print(table)
    Console().print(f"tau: {report['tau']}")
    Console().print("quotients: whole calls / decoding alone, without the prompt")
    if any(row["method"] == "model.generate + assistant" for row in report["rows"]):
        Console().print(f"assistant: {report['assistant']}")
