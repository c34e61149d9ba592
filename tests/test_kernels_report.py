"""Every kernel compiles for Hopper without spills: scripts/kernel_report.py without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "kernel_report.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_kernels_compile_for_sm90_without_spills() -> None:
    """No spills, shared memory and registers within the hardware's limits and no worse than recorded.

    Decision kernels have neither fused multiply-adds nor approximate divisions, aligned rows are read in vectors.
    """
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm_90a" in done.stdout
    table = json.loads(SCRIPT.with_suffix(".json").read_text())["kernels"]
    assert len(table) > 60
    for name in ("bf16", "fp16", "fp32"):  # the head sizes and types that the kernel takes
        assert {f"attention {dim} {name} 16 rows" for dim in (64, 100, 128)} <= set(table)
    assert all(row["stack"] == 0 for row in table.values())
    # wgmma needs 64 rows; that the wide attention tiles use it shows that they are worth their registers
    for dim in (64, 128):
        assert table[f"attention {dim} bf16 64 rows"]["mma"] == "wgmma"
        assert table[f"attention {dim} bf16 16 rows"]["mma"] == "mma.sync"


@pytest.mark.slow
def test_every_option_compiles() -> None:
    """The compiler rejects constructs that the interpreter accepts, so every option is compiled once."""
    done = run("--options")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compiles:") > 40
