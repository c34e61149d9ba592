"""Kernel configurations that scripts/kernel_report.py compiles for sm_90a."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


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


def sweep_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import sweep

    P, I, B = "*fp32", "*i64", "*u8"
    pointers = {
        "law_ptr": P, "draft_ptr": I, "now_ptr": I, "seen_ptr": I, "first_ptr": I, "near_ptr": I, "left_ptr": P,
        "right_ptr": P, "fresh_ptr": B, "given_ptr": B, "gate_ptr": P, "q_ptr": P, "onehot_ptr": B, "drafted_ptr": B,
        "u_ptr": P, "U_ptr": I, "E_ptr": P, "tokens_ptr": I,
    }  # fmt: skip
    flags = {"HAS_GIVEN": True, "HAS_GATE": True, "HAS_Q": True, "HAS_ONEHOT": True, "HAS_DRAFTED": True}
    race = {**dict.fromkeys(flags, False), "HAS_GIVEN": True, "HAS_GATE": True}
    gone = ("q_ptr", "onehot_ptr", "drafted_ptr", "u_ptr", "U_ptr")
    for tile in (512, 4096):
        for name, const in (
            ("coupled", {**flags, "RACE": False, "E_ptr": None}),
            ("race", {**race, "RACE": True, **dict.fromkeys(gone)}),
        ):
            yield Variant(
                f"sweep {name} tile {tile}",
                sweep.sweep_kernel,
                {a: t for a, t in pointers.items() if a not in const},
                {**const, "BLOCK": tile},
                sweep.sweep_warps(tile),
                exact=False,
                aligned=("V", "q_batch", "q_row", "e_batch", "e_row"),
            )


def tree_variants() -> Iterator[Variant]:
    from visacc.kernels.triton import tree, tree_ratio

    pointers = {
        "parent_ptr": "*i64", "live_ptr": "*u8", "ancestors_ptr": "*u8", "depth_ptr": "*i64", "words_ptr": "*i32",
        "flags_ptr": "*u8", "path_ptr": "*i32", "n_ptr": "*i64", "tokens_ptr": "*i64", "u_ptr": "*fp32",
        "U_ptr": "*i64", "p_ptr": "*fp32", "q_ptr": "*fp32", "scratch_ptr": "*fp32", "next_ptr": "*i64",
        "row_of_ptr": "*i64", "near_ptr": "*i32", "kind_ptr": "*i8", "left_ptr": "*fp32", "delta": "fp32", "growth": "fp32",
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
    cases += [(100, "bf16", 64, True)]
    cases += [(96, "bf16", rows, window) for rows in (64, 128) for window in (False, True)]
    cases += [(dim, "fp16", rows, False) for dim in (64, 100, 128) for rows in (16, 64, 128)]
    cases += [(dim, "fp32", rows, False) for dim in (64, 100, 128) for rows in (16, 32)]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for dim, name, rows, window in cases:
        dtype = types[name]
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
    "sweep": sweep_variants,
    "tree": tree_variants,
}


SWITCHED = {
    "HAS_Q": ("q_ptr", "row_of_ptr"),
    "HAS_ONEHOT": ("onehot_ptr",),
    "HAS_COUNT": ("n_draft_ptr",),
    "HAS_FRESH": ("fresh_ptr",),
    "HAS_NUMERATOR": ("numerator_ptr",),
    "HAS_DENOMINATOR": ("denominator_ptr",),
    "HAS_UNCOND": ("u_ptr", "scale_ptr"),
    "HAS_ALLOWED": ("allowed_ptr",),
    "HAS_TEMPERATURE": ("temperature_ptr",),
    "HAS_K": ("k_ptr",),
    "HAS_P": ("top_p_ptr",),
    "HAS_START": ("start_ptr",),
    "HAS_WORDS": ("words_ptr",),
    "HAS_DEPTH": ("depth_ptr",),
    "HAS_KINDS": ("kind_ptr",),
    "HAS_NEAR": ("near_ptr",),
    "HAS_GIVEN": ("given_ptr",),
    "HAS_GATE": ("gate_ptr",),
    "HAS_DRAFTED": ("drafted_ptr",),
    "RACE": ("E_ptr",),
}
"""Pointers that come and go with an option; the types of those that a variant leaves out."""

ABSENT_TYPES = {
    "numerator_ptr": "*fp32", "denominator_ptr": "*fp32", "allowed_ptr": "*u8", "allowed_stride": "i32",
    "kind_ptr": "*i8", "depth_ptr": "*i32", "near_ptr": "*i32", "E_ptr": "*fp32",
}  # fmt: skip


def option_variants() -> Iterator[Variant]:
    """Each kernel once with every size 1 (Triton then passes Python integers), and with each option flipped."""
    done = set()
    for v in (v for variants in FAMILIES.values() for v in variants()):
        if v.kernel in done:
            continue
        done.add(v.kernel)
        sizes = [a for a in v.kernel.arg_names if a not in v.const and a not in v.types]
        yield replace(v, name=f"{v.name}, sizes 1", const={**v.const, **dict.fromkeys(sizes, 1)}, aligned=())
        for flag, value in v.const.items():
            if isinstance(value, bool):
                const, types = {**v.const, flag: not value}, dict(v.types)
                for pointer in SWITCHED.get(flag, ()):
                    if pointer not in v.kernel.arg_names:
                        continue
                    if value:
                        const[pointer] = None
                    else:
                        const.pop(pointer, None)
                        types[pointer] = ABSENT_TYPES[pointer]
                yield replace(v, name=f"{v.name}, {flag} {not value}", const=const, types=types)
        if "GROUP" in v.const:
            const = {**v.const, "SPLITS": 1, "lse_ptr": None}
            yield replace(v, name=f"{v.name}, one slice", const=const, types={**v.types, "out_ptr": "*bf16"})
