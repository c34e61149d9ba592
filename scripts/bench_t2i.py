"""Speed of the text-to-image decoders on this machine: steps, seconds, and what the engine itself costs.

One run measures everything, interleaved (every repetition goes through all rows before the next begins), so that a noisy
machine disturbs all rows alike. Two models: the embedded one (real acceptance) and a random-weight LlamaGen of about 100 M
parameters (cost only: its acceptance says nothing).

    python scripts/bench_t2i.py --out bench.json
    python scripts/bench_t2i.py --models shapes-t2i --prompts 32 --windows 8 16 32 64 128 --batches 1
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from visacc import __version__
from visacc.loading import load_model
from visacc.models.base import ImageModel
from visacc.pictures import save_json
from visacc.pipeline import TextToImagePipeline
from visacc.window import forward_costs

PROMPTS = [
    "a red circle left of a blue square",
    "three green triangles",
    "a yellow star",
    "a purple circle and an orange square",
    "two blue stars",
    "a photo of a square",
    "a green circle above a red triangle",
    "a blue triangle",
]


@dataclass
class Row:
    """One line of the table."""

    model: str
    decoder: str
    options: dict[str, Any]
    batch: int
    guidance: float
    images: int
    steps: float
    step_compression: float
    committed_per_step: float
    fed_per_step: float
    seconds_per_image: float
    ratio_to_ar: float
    step_ms: float
    forward_ms: float

    @property
    def overhead(self) -> float:
        """Part of a step that is not the model's forward."""
        return 1 - self.forward_ms / self.step_ms


def random_100m() -> ImageModel:
    """LlamaGen GPT-B (110 M parameters, 256 tokens, 16 384 codes) with random weights."""
    from visacc.models.llamagen import GPT, GPTConfig, LlamaGen, VQConfig, VQModel

    torch.manual_seed(0)
    gpt = GPT(GPTConfig(n_layer=12, n_head=12, dim=768, num_classes=1000)).eval()
    torch.nn.init.normal_(gpt.output.weight, std=0.02)
    return LlamaGen(gpt, VQModel(VQConfig(ch=32, ch_mult=(1, 1, 1, 1, 1))).eval(), name="random-110M")


def configurations(windows: list[int], auto: bool) -> list[tuple[str, dict[str, Any]]]:
    rows: list[tuple[str, dict[str, Any]]] = [("ar", {}), ("sjd", {"window": 16})]
    rows += [("mc-sjd", {"window": w}) for w in windows]
    rows += [("mc-sjd", {"window": 32, "coupling": c}) for c in ("maximal", "gumbel")]
    if auto:
        rows.append(("mc-sjd", {"window": "auto"}))
    seen: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        if row not in seen:
            seen.append(row)
    return seen


def measure(
    model: ImageModel,
    rows: list[tuple[str, dict[str, Any]]],
    batch: int,
    images: int,
    repeats: int,
    guidance: float | None,
) -> list[Row]:
    """All rows of one model and batch size, interleaved."""
    pipe = TextToImagePipeline(model)
    text = model.name != "random-110M"
    prompts: list[Any] = [PROMPTS[i % len(PROMPTS)] if text else i % 1000 for i in range(images)]
    # the seconds of every row's groups, each group of `batch` images
    seconds: list[list[float]] = [[] for _ in rows]
    stats: list[list[Any]] = [[] for _ in rows]
    windows: list[list[int]] = [[] for _ in rows]  # window=auto may choose anew for each group
    guidance_used = 1.0
    for start in track(range(0, images * repeats, batch), description=f"{model.name}, batch {batch}"):
        group = [prompts[i % images] for i in range(start, start + batch)]
        for i, (decoder, options) in enumerate(rows):
            result = pipe(
                group,
                decoder=decoder,
                seed=list(range(start, start + batch)),
                output_type="codes",
                batch_size=batch,
                guidance_scale=guidance,
                **options,
            )
            stats[i].append(result.stats)
            seconds[i].append(result.stats.seconds / batch)
            windows[i].append(result.settings["decoder_options"].get("window", 1))
            guidance_used = result.settings["sampling"]["guidance_scale"]
    guided = guidance_used != 1
    sizes = tuple({1, *(w for used in windows for w in used)})
    forward = forward_costs(model, sizes, batch, guided, repeats=15)
    found = []
    for (decoder, options), parts, times, used in zip(rows, stats, seconds, windows, strict=True):
        forwards = sum(p.forwards for p in parts)
        fed = sum(p.fed for p in parts) / max(1, forwards - len(parts))
        nfe = statistics.mean(p.nfe for p in parts)
        found.append(
            Row(
                model=model.name,
                decoder=decoder,
                options=options | ({"chosen": sorted(set(used))} if options.get("window") == "auto" else {}),
                batch=batch,
                guidance=guidance_used,
                images=len(times) * batch,
                steps=nfe,
                step_compression=parts[0].tokens / nfe,
                committed_per_step=statistics.mean(p.tau for p in parts),
                fed_per_step=fed,
                seconds_per_image=statistics.median(times),
                # ratios of neighbours in time, so that slow phases of the machine cancel
                ratio_to_ar=statistics.median(a / b for a, b in zip(seconds[0], times, strict=True)),
                step_ms=1e3 * statistics.median(p.seconds / p.forwards for p in parts),
                forward_ms=1e3 * statistics.mean(forward[w] for w in used),
            )
        )
    return found


def transformers_loop(model: ImageModel, repeats: int) -> dict[str, float]:
    """Seconds per image of ``ar`` without guidance, and of ``generate`` on a Llama of the same size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = model.gpt.config  # type: ignore[attr-defined]
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.dim,
            intermediate_size=cfg.ffn_dim,
            num_hidden_layers=cfg.n_layer,
            num_attention_heads=cfg.n_head,
            num_key_value_heads=cfg.kv_heads,
            max_position_embeddings=1024,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    pipe = TextToImagePipeline(model)
    prompt: Any = PROMPTS[0] if model.layout.vocab < 16384 else 1
    ids = torch.ones(1, cfg.prefix_len, dtype=torch.long)
    times: dict[str, list[float]] = {"ar": [], "generate": []}
    for turn in range(repeats + 1):
        start = time.perf_counter()
        pipe(prompt, output_type="codes", guidance_scale=1.0, temperature=1.0, top_k=0, top_p=1.0, seed=turn)
        middle = time.perf_counter()
        llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=cfg.block_size,
            do_sample=True,
            top_k=0,
            use_cache=True,
        )
        if turn:
            times["ar"].append(middle - start)
            times["generate"].append(time.perf_counter() - middle)
    return {name: statistics.median(t) for name, t in times.items()}


def show(rows: list[Row], loops: dict[str, dict[str, float]]) -> None:
    console = Console(width=150)
    table = Table(
        "model",
        "decoder",
        "options",
        "batch",
        "steps",
        "tokens/step",
        "fed/step",
        "s/image",
        "x AR",
        "step ms",
        "overhead",
    )
    for r in rows:
        options = " ".join(f"{k}={v}" for k, v in r.options.items())
        table.add_row(
            r.model,
            r.decoder,
            options,
            str(r.batch),
            f"{r.steps:.1f}",
            f"{r.step_compression:.2f}",
            f"{r.fed_per_step:.1f}",
            f"{r.seconds_per_image:.3f}",
            f"{r.ratio_to_ar:.2f}",
            f"{r.step_ms:.2f}",
            f"{100 * r.overhead:.0f} %",
        )
    console.print(table)
    for name, loop in loops.items():
        console.print(
            f"{name} without guidance: ar {loop['ar']:.3f} s/image, transformers generate with a Llama of the same size"
            f" {loop['generate']:.3f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["shapes-t2i", "random-110M"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--windows", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, default=32, help="images per row of the embedded model")
    parser.add_argument(
        "--cost-prompts", type=int, default=8, help="images per row of the random-weight model"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--guidance-scale", type=float, default=None, help="default: the model's own (random-110M: 2)"
    )
    parser.add_argument("--no-auto", action="store_true", help="leave the row of window=auto out")
    parser.add_argument("--out", default=None, help="JSON file")
    args = parser.parse_args()
    rows: list[Row] = []
    loops = {}
    for name in args.models:
        model = random_100m() if name == "random-110M" else load_model(name)
        images = args.cost_prompts if name == "random-110M" else args.prompts
        guidance = args.guidance_scale or (2.0 if name == "random-110M" else None)
        for batch in args.batches:
            rows += measure(
                model,
                configurations(args.windows, not args.no_auto),
                batch,
                max(images, batch),
                args.repeats,
                guidance,
            )
        loops[model.name] = transformers_loop(model, 3)
    show(rows, loops)
    if args.out:
        from pathlib import Path

        record = {
            "visacc": __version__,
            "torch": torch.__version__,
            "machine": {
                "processor": platform.processor(),
                "threads": torch.get_num_threads(),
                "device": "cpu",
            },
            "rows": [asdict(r) | {"overhead": r.overhead} for r in rows],
            "plain_loops_seconds_per_image": loops,
        }
        save_json(json.loads(json.dumps(record)), Path(args.out))


if __name__ == "__main__":
    main()
