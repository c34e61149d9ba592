"""Reports of ``visacc bench vlm``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visacc.report.model import Column, Method, Number, Point, Report, Table, comparison

TAU = Column("accepted length", ".2f", note="committed tokens per target step, the prompt's step left out")
RATE = Column("tokens/s", ".3g", note="of the whole call; median and range over passes")
RATIO = Column("speed-up", ".2f", "x", "tokens/s divided by that of plain decoding (none), same prompts")
DECODE = Column("speed-up, decoding", ".2f", "x", "the same without the prompt's forward")
STOCK = Column("against generate", ".2f", "x", "tokens/s divided by that of model.generate")
STOCK_DECODE = Column("against generate, decoding", ".2f", "x", "the same without the prompt")
ASSISTED = Column("against assisted generation", ".2f", "x", "tokens/s divided by that of transformers' own")
SHARE = Column("drafting", ".0%", note="share of the time spent in the drafter")
_SETTINGS = ("model", "pictures", "batch_size", "max_new_tokens")


def read(data: Mapping[str, Any], _folder: Path) -> Report:
    rows = data["rows"]
    ran = [row for row in rows if "failed" not in row]
    several = len({row["temperature"] for row in rows}) > 1
    labels = [_label(row, several) for row in ran]
    cells = []
    for row in ran:
        low, high = row.get("tokens_per_second_range", (None, None))
        numbers = [
            row.get("tau"),
            row.get("tokens_per_second_ratio_to_none"),
            row.get("decode_tokens_per_second_ratio_to_none"),
            row.get("tokens_per_second_ratio_to_generate"),
            row.get("decode_tokens_per_second_ratio_to_generate"),
            row.get("tokens_per_second_ratio_to_assisted"),
            row.get("draft_share"),
        ]
        values: list[Number | str | None] = [None if n is None else Number(n) for n in numbers]
        cells.append([values[0], Number(row["tokens_per_second"], low, high), *values[1:]])
    points = [
        Point(
            label,
            row["method"],
            Number(row.get("tau")),
            Number(row.get("decode_tokens_per_second_ratio_to_none")),
            None,
            f"T={row['temperature']:g}" if several else "",
        )
        for label, row in zip(labels, ran, strict=True)
    ]
    methods = [
        Method(label, row["method"], None, list(row.get("committed_histogram", [])), row.get("tau"))
        for label, row in zip(labels, ran, strict=True)
    ]
    return Report(
        f"Speculators on {data['model']}",
        f"{data['pictures']} pictures, {data['batch_size']} at a time, up to {data['max_new_tokens']} tokens each",
        str(data["model"]),
        methods,
        [Table("Speed", [TAU, RATE, RATIO, DECODE, STOCK, STOCK_DECODE, ASSISTED, SHARE], cells)],
        comparison("Speed-up of decoding against accepted length", TAU, DECODE, points),
        settings={key: data[key] for key in _SETTINGS},
        environment=dict(data.get("environment", {})) or {k: data[k] for k in ("device", "threads")},
        notes=[
            f"{_label(row, several)} does not run with this model: {row['failed']}"
            for row in rows
            if "failed" in row
        ],
    )


def _label(row: Mapping[str, Any], several: bool) -> str:
    return f"{row['method']}, T={row['temperature']:g}" if several else str(row["method"])
