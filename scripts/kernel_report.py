"""Compile every Triton kernel for Hopper (sm_90a), without a GPU, and report registers, shared memory and spills.

    python scripts/kernel_report.py            print the table
    python scripts/kernel_report.py --check    compare with scripts/kernel_report.json, fail on regressions
    python scripts/kernel_report.py --write    rewrite scripts/kernel_report.json

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TABLE = Path(__file__).with_suffix(".json")
SHARED_LIMIT = 227 * 1024
REGISTER_FILE = 65536


@dataclass
class Variant:
    """One kernel at one configuration. `types` gives pointer types, absent arguments are `const`, the rest int32."""

    name: str
    kernel: Any
    types: dict[str, str]
    const: dict[str, Any]
    warps: int
    stages: int = 3
    exact: bool = True  # a decision kernel: neither fused multiply-adds nor approximate divisions
    aligned: tuple[str, ...] = field(default=())

    def compile(self) -> Any:
        fn = self.kernel
        sig = {a: "constexpr" if a in self.const else self.types.get(a, "i32") for a in fn.arg_names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, a in enumerate(fn.arg_names)
            if sig[a].startswith("*") or a in self.aligned
        }
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": not self.exact}
        source = ASTSource(fn=fn, signature=sig, constexprs=self.const, attrs=attrs)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


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


def sampling_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import chain, sampling

    P, I, L, B = "*fp32", "*i64", "*i32", "*u8"
    for tile, warps in ((512, 2), (4096, 8)):
        yield Variant(
            f"draw tile {tile}",
            sampling.draw_kernel,
            {"w_ptr": P, "fallback_ptr": P, "U_ptr": I, "out_ptr": I},
            {"HAS_FALLBACK": True, "BLOCK": tile},
            warps,
            aligned=("V", "w_stride", "fallback_stride"),
        )
        yield Variant(
            f"race tile {tile}",
            sampling.race_kernel,
            {"p_ptr": P, "e_ptr": P, "out_ptr": I},
            {"BLOCK": tile},
            warps,
            aligned=("V", "p_stride", "e_stride"),
        )
    pointers = {
        "p_ptr": P, "q_ptr": P, "draft_ptr": I, "onehot_ptr": B, "n_draft_ptr": I, "u_ptr": P, "U_ptr": I,
        "fresh_ptr": I, "n_ptr": I, "accepted_ptr": B, "tokens_ptr": I,
    }  # fmt: skip
    absent = {"numerator_ptr": None, "denominator_ptr": None, "HAS_NUMERATOR": False, "HAS_DENOMINATOR": False}
    flags = {"HAS_Q": True, "HAS_ONEHOT": True, "HAS_COUNT": True, "HAS_FRESH": True}
    for drafts, tile, warps in ((32, 512, 2), (32, 4096, 8), (128, 4096, 8)):
        for unbroken in (False, True):
            yield Variant(
                f"chain {drafts} drafts tile {tile}{' unbroken' if unbroken else ''}",
                chain.chain_kernel,
                pointers,
                {**absent, **flags, "UNBROKEN": unbroken, "BLOCK_D": drafts, "BLOCK": tile},
                warps,
                aligned=("V", "p_batch", "p_row", "q_batch", "q_row"),
            )


def logits_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import logits

    for dtype in ("bf16", "fp32"):
        pointers = {
            "c_ptr": f"*{dtype}", "u_ptr": f"*{dtype}", "scale_ptr": "*fp32", "temperature_ptr": "*fp32",
            "k_ptr": "*i32", "top_p_ptr": "*fp32", "out_ptr": "*fp32",
        }  # fmt: skip
        flags = {"HAS_UNCOND": True, "HAS_ALLOWED": False, "HAS_TEMPERATURE": True, "HAS_K": True, "HAS_P": True}
        const = {"allowed_ptr": None, "allowed_stride": 0, **flags}
        aligned = ("V", "c_stride", "u_stride")
        for block in (512, 4096, 16384):
            if dtype == "fp32" and block != 16384:
                continue
            yield Variant(
                f"logits row {block} {dtype}",
                logits.row_kernel,
                pointers,
                {**const, "BLOCK": block},
                logits.row_warps(block),
                exact=False,
                aligned=aligned,
            )
        yield Variant(
            f"logits stream {dtype}",
            logits.stream_kernel,
            pointers,
            {**const, "BLOCK": logits.STREAM_TILE, "SEARCH": logits.SEARCH_TILE},
            16,
            exact=False,
            aligned=aligned,
        )


def relaxed_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import relaxed

    for block in (16, 1024):
        yield Variant(
            f"neighbour mass of {block}",
            relaxed.neighbour_mass_kernel,
            {"p_ptr": "*fp32", "ids_ptr": "*i32", "bound_ptr": "*fp32", "out_ptr": "*fp32"},
            {"BLOCK_K": block},
            max(1, block // 256),
        )
    yield Variant(
        "group sums tile 4096",
        relaxed.group_kernel,
        {
            "p_ptr": "*fp32", "q_ptr": "*fp32", "x_ptr": "*i64", "onehot_ptr": "*u8", "e_ptr": "*fp32",
            "num_ptr": "*fp32", "den_ptr": "*fp32", "prob_threshold": "fp32", "distance_threshold": "fp32",
        },
        {"HAS_Q": True, "HAS_ONEHOT": True, "BLOCK_E": 16, "BLOCK": 4096},
        8,
        aligned=("V", "p_stride", "q_stride"),
    )  # fmt: skip


FAMILIES = {"sampling": sampling_variants, "logits": logits_variants, "relaxed": relaxed_variants}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table in the repository")
    parser.add_argument("--write", action="store_true", help="rewrite the table")
    parser.add_argument("--only", choices=sorted(FAMILIES), help="one family of kernels")
    args = parser.parse_args()
    print(f"triton {triton.__version__}, target sm_90a")
    table = report(args.only)
    if args.write:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")
    bad = [f"{name}: {p}" for name, row in table.items() for p in row["problems"]]
    if args.check:
        kept = json.loads(TABLE.read_text())
        for name, row in table.items():
            if name not in kept["kernels"]:
                bad.append(f"{name}: not in {TABLE.name}; run with --write")
            elif kept["triton"] == triton.__version__ and row["registers"] > kept["kernels"][name]["registers"]:
                bad.append(f"{name}: {row['registers']} registers, {kept['kernels'][name]['registers']} recorded")
    for line in bad:
        print("FAILED", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
