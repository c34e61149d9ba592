"""One self-contained HTML page about a run: table, plots, pictures under every decoder, commit order, settings."""

from visacc.report.page import build

__all__ = ["build"]
