"""Shared test set-up."""

from __future__ import annotations

import os
import sys

# Triton decides at import whether its kernels are interpreted, so this must precede every import of it.
# On a machine with a GPU run the `gpu` tests with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

from pathlib import Path

import pytest
import torch

torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device (or kernels are being interpreted)."""
    if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and TRITON_INTERPRET=0")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much damage the fuzz tests of this session did, and what became of it."""
    fuzzing = sys.modules.get("fuzzing")
    if fuzzing is not None and sum(fuzzing.TALLY.values()):
        taken, refused = fuzzing.TALLY["taken"], fuzzing.TALLY["refused"]
        terminalreporter.write_line(
            f"fuzz: {taken + refused} damaged inputs, {refused} refused, {taken} harmless"
        )


@pytest.fixture(scope="session")
def golden_root() -> Path:
    """Folder of the recorded outputs of the original programs (environment variable VISACC_GOLDEN)."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "golden"
    return Path(os.environ.get("VISACC_GOLDEN", default))


# ---- runs of every kind, for tests of the report -----------------------------------------------------------
@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from report_runs import bench_run

    return bench_run(tmp_path_factory.mktemp("runs") / "bench")


@pytest.fixture(scope="session")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from report_runs import eval_run

    return eval_run(tmp_path_factory.mktemp("runs") / "eval")


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from report_runs import generate_run

    base = tmp_path_factory.mktemp("runs")
    options = ("-O", "coupling=gumbel-exact", "--window", "6")
    return [
        generate_run(base / "ar", base / "model", "ar"),
        generate_run(base / "mc", base / "model", "mc-sjd", *options),
    ]
