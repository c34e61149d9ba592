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
    from visacc.kernels.triton import chain, common, sampling

    P, I, B = "*fp32", "*i64", "*u8"
    for tile in (512, 4096):
        warps = common.warps(tile)
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
    absent = {
        "numerator_ptr": None,
        "denominator_ptr": None,
        "HAS_NUMERATOR": False,
        "HAS_DENOMINATOR": False,
    }
    flags = {"HAS_Q": True, "HAS_ONEHOT": True, "HAS_COUNT": True, "HAS_FRESH": True}
    for drafts, tile in ((32, 512), (32, 4096), (128, 4096)):
        warps = common.warps(tile)
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
        flags = {
            "HAS_UNCOND": True,
            "HAS_ALLOWED": False,
            "HAS_TEMPERATURE": True,
            "HAS_K": True,
            "HAS_P": True,
        }
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
    from visacc.kernels.triton import common, relaxed

    for block in (16, 1024):
        yield Variant(
            f"neighbour mass of {block}",
            relaxed.neighbour_mass_kernel,
            {"p_ptr": "*fp32", "ids_ptr": "*i32", "bound_ptr": "*fp32", "out_ptr": "*fp32"},
            {"BLOCK_K": block},
            common.warps(block),
        )
    yield Variant(
        "group sums tile 4096",
        relaxed.group_kernel,
        {
            "p_ptr": "*fp32", "q_ptr": "*fp32", "x_ptr": "*i64", "onehot_ptr": "*u8", "e_ptr": "*fp32",
            "num_ptr": "*fp32", "den_ptr": "*fp32", "prob_threshold": "fp32", "distance_threshold": "fp32",
        },
        {"HAS_Q": True, "HAS_ONEHOT": True, "BLOCK_E": 16, "BLOCK": common.TILE},
        common.warps(common.TILE),
        aligned=("V", "p_stride", "q_stride"),
    )  # fmt: skip


def tree_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import tree, tree_ratio

    pointers = {
        "parent_ptr": "*i64", "live_ptr": "*u8", "ancestors_ptr": "*u8", "depth_ptr": "*i64", "words_ptr": "*i32",
        "flags_ptr": "*u8", "path_ptr": "*i32", "n_ptr": "*i64", "tokens_ptr": "*i64", "u_ptr": "*fp32",
        "U_ptr": "*i64", "p_ptr": "*fp32", "q_ptr": "*fp32", "scratch_ptr": "*fp32", "next_ptr": "*i64",
        "row_of_ptr": "*i64", "near_ptr": "*i32", "kind_ptr": "*i8", "delta": "fp32", "growth": "fp32",
    }  # fmt: skip
    for slots in (32, 64, 128):
        yield Variant(
            f"tree index {slots}",
            tree.index_kernel,
            pointers,
            {"STEPS": (slots - 1).bit_length(), "BLOCK_T": slots},
            4,
        )
        yield Variant(
            f"tree walk {slots}",
            tree.walk_kernel,
            pointers,
            {"FIRST": True, "BLOCK_T": slots, "BLOCK_A": 16},
            tree.square_warps(slots),
        )
    aligned = ("V", "p_batch", "p_row", "q_batch", "q_row")
    for tile in (512, 2048):
        warps = tree_ratio.walk_warps(tile)
        yield Variant(
            f"tree point tile {tile}",
            tree_ratio.point_kernel,
            pointers,
            {"BLOCK_T": 64, "BLOCK": tile},
            warps,
            aligned=aligned,
        )
        flags = {"HAS_Q": True, "HAS_KINDS": False, "kind_ptr": None, "KIND": 1, "BLOCK": tile}
        yield Variant(
            f"tree ratio tile {tile}",
            tree_ratio.ratio_kernel,
            pointers,
            {**flags, "HAS_NEAR": False, "near_ptr": None, "BLOCK_K": 16},
            warps,
            aligned=aligned,
        )
        yield Variant(
            f"tree ratio tile {tile} lantern 1024",
            tree_ratio.ratio_kernel,
            pointers,
            {**flags, "HAS_NEAR": True, "BLOCK_K": 1024},
            warps,
            aligned=aligned,
        )


def attention_variants() -> Iterator[Variant]:
    import torch

    from visacc.kernels.triton import attention

    cases = [
        (dim, "bf16", rows, window)
        for dim in (64, 100, 128)
        for rows in (16, 32, 64, 128)
        for window in (False, True)
        if not (window and (rows < 64 or dim == 100)) and not (dim == 100 and rows == 128)
    ]
    cases += [(dim, "fp32", rows, False) for dim in (64, 128) for rows in (16, 32)]
    for dim, name, rows, window in cases:
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        c = attention.config(dim, rows, dtype, window)
        if c.block_m != rows and not window:
            continue
        pointers = {
            "q_ptr": f"*{name}", "k_ptr": f"*{name}", "v_ptr": f"*{name}", "length_ptr": "*i32",
            "start_ptr": "*i32", "words_ptr": "*i32", "depth_ptr": "*i32", "out_ptr": "*fp32",
            "lse_ptr": "*fp32", "scale": "fp32",
        }  # fmt: skip
        flags = {
            "GROUP": 4 if rows > 16 else 1, "SPLITS": 8, "HAS_START": True, "HAS_WORDS": True,
            "HAS_WINDOW": window, "HAS_DEPTH": window, "UPCAST": False, "D": dim,
            "ALIGN": 4 if dim == 100 else 8, "PRECISION": attention.precision(dtype),
        }  # fmt: skip
        tiles = {"BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "BLOCK_D": 1 << (dim - 1).bit_length()}
        yield Variant(
            f"attention {dim} {name} {rows} rows{' sliding' if window else ''}",
            attention.split_kernel,
            pointers,
            {**flags, **tiles, **({} if window else {"depth_ptr": None})},
            c.warps,
            c.stages,
            exact=False,
        )
    yield Variant(
        "attention merge 8",
        attention.merge_kernel,
        {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"},
        {"D": 128, "SPLITS": 8, "BLOCK_R": 16, "BLOCK_D": 128},
        4,
        1,
        exact=False,
    )


def other_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import cache, rng

    for dim in (64, 128):
        yield Variant(
            f"commit 16 x {dim} bf16",
            cache.commit_kernel,
            {"kv_ptr": "*bf16", "path_ptr": "*i32", "n_ptr": "*i64", "start_ptr": "*i64"},
            {"BLOCK_P": 16, "BLOCK_D": dim},
            cache.commit_warps(16, dim),
            aligned=("kv_l", "kv_b", "kv_h", "kv_s", "D"),
        )
    yield Variant(
        "philox 512",
        rng.philox_kernel,
        dict.fromkeys(("seed_ptr", "c0_ptr", "c1_ptr", "c2_ptr", "c3_ptr", "out_ptr"), "*i64"),
        {"BLOCK": 512},
        4,
    )


FAMILIES = {
    "attention": attention_variants,
    "other": other_variants,
    "sampling": sampling_variants,
    "logits": logits_variants,
    "relaxed": relaxed_variants,
    "tree": tree_variants,
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
    parser.add_argument("--only", choices=sorted(FAMILIES), help="one family of kernels")
    args = parser.parse_args()
    print(f"triton {triton.__version__}, target sm_90a")
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
