"""``visacc report``: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visacc.cli_options import out_option


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folder or JSON file of 'bench decoders', 'bench vlm', 'eval' or 'generate'; several folders of"
            " 'generate' stand side by side.",
        ),
    ],
    out: Annotated[Path, out_option("HTML file to write.")] = Path("report.html"),
    pictures: Annotated[int, typer.Option(help="Prompts whose pictures are shown.")] = 12,
    side: Annotated[
        int, typer.Option(help="Largest side of a picture, pixels; larger ones are scaled.")
    ] = 384,
    title: Annotated[str | None, typer.Option(help="Headline, instead of the run's own.")] = None,
) -> None:
    """Write one self-contained HTML page about a run: table, plots, pictures, commit order, settings."""
    from visacc.report import build

    path = build(runs, out, pictures=pictures, side=side, title=title)
    print(f"report written to {path} ({path.stat().st_size / 1e6:.1f} MB)")
