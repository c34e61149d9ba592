"""Compile every Triton kernel for Hopper (sm_90a), without a GPU, and report registers, shared memory and spills.

    python scripts/kernel_report.py            print the table
    python scripts/kernel_report.py --check    compare with scripts/kernel_report.json, fail on regressions
    python scripts/kernel_report.py --write    rewrite scripts/kernel_report.json
    python scripts/kernel_report.py --options  compile with every option flipped, and with every size 1

Triton ships ptxas and cuobjdump, so this runs anywhere Triton installs. It must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from kernel_variants import FAMILIES, Variant, option_variants

TABLE = Path(__file__).with_suffix(".json")
SHARED_LIMIT = 227 * 1024
REGISTER_FILE = 65536


def resources(compiled: Any) -> dict[str, int]:
    """Registers per thread and stack bytes (spills) from the cubin, shared memory from the metadata."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        command = [str(tool), "--dump-resource-usage", f.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None
    assert stack is not None
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "shared": int(compiled.metadata.shared),
    }


def report(only: str | None = None) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for name, variants in FAMILIES.items():
        if only and only != name:
            continue
        for v in variants():
            compiled = v.compile()
            ptx = compiled.asm["ptx"]
            table[v.name] = {
                "warps": v.warps,
                "stages": v.stages,
                **resources(compiled),
                "mma": "wgmma" if "wgmma" in ptx else ("mma.sync" if "mma.sync" in ptx else "-"),
                "problems": problems(v, compiled),
            }
            row = table[v.name]
            print(
                f"{v.name:44s} {row['warps']:3d} warps {row['registers']:4d} registers {row['stack']:5d} stack"
                f" {row['shared'] / 1024:7.1f} KB shared  {row['mma']:9s} {'; '.join(row['problems'])}",
                flush=True,
            )
    return table


def problems(v: Variant, compiled: Any) -> list[str]:
    """What a compiled variant must not have."""
    use, ptx = resources(compiled), compiled.asm["ptx"]
    found = []
    if use["stack"]:
        found.append(f"spills {use['stack']} bytes")
    if use["shared"] > SHARED_LIMIT:
        found.append(f"{use['shared']} bytes of shared memory")
    if use["registers"] * 32 * v.warps > REGISTER_FILE:
        found.append(f"{use['registers']} registers x {32 * v.warps} threads exceed the register file")
    if v.exact and "fma.rn.f32" in ptx:
        found.append("fused multiply-add in a decision kernel")
    if v.exact and "div.full" in ptx:
        found.append("approximate division in a decision kernel")
    if "ld.global" in ptx and not re.search(r"ld\.global[.\w:]*\.v[24]\.b32", ptx) and v.aligned:
        found.append("no vector loads although rows are aligned")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the table in the repository")
    parser.add_argument("--write", action="store_true", help="rewrite the table")
    parser.add_argument("--options", action="store_true", help="flip every option instead")
    parser.add_argument("--only", choices=sorted(FAMILIES), help="one family of kernels")
    args = parser.parse_args()
    print(f"triton {triton.__version__}, target sm_90a")
    if args.options:
        for v in option_variants():
            v.compile()
            print(f"compiles: {v.name}", flush=True)
        return 0
    table = report(args.only)
    if args.write:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")
    bad = [f"{name}: {p}" for name, row in table.items() for p in row["problems"]]
    if args.check:
        kept = json.loads(TABLE.read_text())
        if kept["triton"] != triton.__version__:
            print(f"note: recorded with triton {kept['triton']}; register use and spills are not compared")
            bad = [line for line in bad if "spills" not in line]
        for name, row in table.items():
            if name not in kept["kernels"]:
                bad.append(f"{name}: not in {TABLE.name}; run with --write")
            elif (
                kept["triton"] == triton.__version__ and row["registers"] > kept["kernels"][name]["registers"]
            ):
                bad.append(
                    f"{name}: {row['registers']} registers, {kept['kernels'][name]['registers']} recorded"
                )
    for line in bad:
        print("FAILED", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
