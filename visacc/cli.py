"""The command line: ``visacc generate``, ``visacc list`` and the sub-commands of the other parts."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from visacc import __version__

app = typer.Typer(
    name="visacc",
    help="Fast, exact decoding for visual autoregressive models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


def _version(value: bool) -> None:
    if value:
        print(f"visacc {__version__}")
        raise typer.Exit


_UsageFault: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Wrong options and arguments. Newer versions of typer bring click's classes along, older ones take them from click."""
_SHARED = ("generate", "eval", "train")
"""Commands that several processes share; the others must run alone."""


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1" and context.invoked_subcommand not in (*_SHARED, None):
        from visacc.eval.world import refuse_several

        refuse_several(f"visacc {context.invoked_subcommand}")


@app.command("list")
def list_command(
    what: str = typer.Argument("all", help="all, decoders or models."),
    matrix: bool = typer.Option(False, "--matrix", help="Which decoder runs on which kind of model."),
) -> None:
    """Show the registered decoders (lossless or lossy) and models."""
    if matrix:
        _print_matrix()
        return
    from visacc.loading import known_models, other_models
    from visacc.registry import decoder_entries

    if what not in ("all", "decoders", "models"):
        raise ValueError(f"'visacc list' takes all, decoders or models, not {what!r}")
    if what != "models":
        table = Table(
            "decoder", "output", "options", "what it does", "from", title="Decoders", title_justify="left"
        )
        for entry in decoder_entries():
            options = ", ".join(f"{k}={v}" for k, v in entry.options.items())
            exact = "lossless" if entry.cls.lossless else "lossy"
            table.add_row(entry.name, exact, options, entry.cls.summary, entry.package)
        console.print(table)
    if what != "decoders":
        known = {
            "Models of visacc generate and visacc.load": known_models(),
            "Models of other commands": other_models(),
        }
        for title, models in known.items():
            table = Table("model", "what it is", title=title, title_justify="left")
            for name, text in models.items():
                table.add_row(name, text)
            console.print(table)


def _print_matrix() -> None:
    from visacc.integrations.matrix import matrix

    marks = matrix()
    families = list(marks)
    table = Table("decoder", *families, title="Decoders on models", title_justify="left")
    for decoder in marks[families[0]]:
        table.add_row(decoder, *(marks[family][decoder] for family in families))
    console.print(table)
    print("exact and lossy: runs; drafter: runs with a drafter trained for the model")


def _mount() -> None:
    """Attach the sub-commands. They import their heavy parts when they run, not here."""
    from visacc.calibrate_cli import calibrate
    from visacc.generate_cli import generate
    from visacc.report_cli import report
    from visacc.speculate import cli as speculate

    app.command("generate")(generate)
    app.command("calibrate")(calibrate)
    app.command("report")(report)
    parts = {name: importlib.import_module(module) for name, module in _SUB_APPS.items()}
    parts["bench"].app.command("vlm")(speculate.bench_command)
    parts["train"].app.command("vlm-drafter")(speculate.train_drafter_command)
    app.command("caption")(speculate.caption)
    app.command("export-drafter")(speculate.export_drafter_command)
    for name, part in parts.items():
        app.add_typer(part.app, name=name)


_SUB_APPS: dict[str, str] = {
    "bench": "visacc.bench.cli",
    "eval": "visacc.eval.cli",
    "train": "visacc.train.cli",
    "video": "visacc.video_cli",
}

_mount()


def main(args: list[str] | None = None) -> None:
    """Console entry point. Bad input ends in one clear line and exit code 2."""
    command: Any = typer.main.get_command(app)
    before = _on_termination()
    try:
        code = command(args, prog_name="visacc", standalone_mode=False)
        if code == 130:  # what newer versions of typer make of Ctrl-C
            _fail("interrupted", 130)
        _leave(code)
    except typer.Exit as stop:
        code = stop.exit_code
    except typer.Abort:
        _fail("interrupted", 130)
    except _UsageFault as error:
        place = getattr(getattr(error, "ctx", None), "command_path", "")
        hint = f"; see '{place} --help'" if place else ""
        _fail(" ".join(error.format_message().split()).rstrip(".") + hint, 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Terminated:
        _fail("terminated", 128 + signal.SIGTERM)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("VISACC_DEBUG"):
            raise
        _fail(" ".join(str(error).split()) or type(error).__name__, 2)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    sys.exit(code if isinstance(code, int) else 0)


class Terminated(BaseException):
    """SIGTERM has come: unwind, so that half-written files are removed."""


def _on_termination() -> Any:
    """Make SIGTERM an exception; returns the earlier handler, ``None`` where it stays in place."""
    if os.environ.get("WORLD_SIZE", "1") != "1" or threading.current_thread() is not threading.main_thread():
        return None  # of several processes none may outlive the others, waiting for them

    def stop(_number: int, _frame: Any) -> None:
        raise Terminated

    return signal.signal(signal.SIGTERM, stop)


def _leave(code: Any) -> None:
    """End one of several processes that worked together."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "torch" not in sys.modules:
        return
    from visacc.eval.world import leave

    if leave(together=True):
        # gloo's threads may still hold Python objects, and one that drops them while the interpreter is being torn
        # down aborts the process (pytorch/pytorch pull request 179291), so the interpreter is not torn down
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"visacc: error: {message}", file=sys.stderr)
    sys.exit(code)
