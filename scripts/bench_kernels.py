"""Benchmark every kernel: against its torch reference, torch.compile or FlexAttention, and the byte floor.

    python scripts/bench_kernels.py                    everything that this machine can run
    python scripts/bench_kernels.py --only attention   one family
    python scripts/bench_kernels.py --json out.json    raw figures

On a GPU: CUDA-event medians over CUDA-graph replays with the L2 cache flushed in between, GB/s achieved, and
its share of the measured copy bandwidth. On a CPU only the references run (medians of processor time); the
interpreter is never timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from visacc.kernels import (
    WITHOUT_REPLACEMENT,
    chain_verify,
    commit_kv,
    draw,
    group_sums,
    neighbour_mass,
    neighbour_sweep,
    process_logits,
    race,
    rng,
    tree_attention,
    tree_index,
    tree_verify,
)
from visacc.kernels.dispatch import interpreting
from visacc.verify.policies import static_tree


@dataclass
class Case:
    """One op at one shape. `run(backend=...)` calls it; `moved` is the least number of bytes it must move."""

    family: str
    name: str
    run: Callable[..., Any]
    moved: float
    opponents: dict[str, Callable[[], Any]]


@dataclass
class Row:
    family: str
    name: str
    backend: str
    microseconds: float
    gigabytes_per_second: float
    percent_of_copy: float | None


def laws(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).mul_(2).softmax(-1)


def stock_processors(cond: Any, uncond: Any, k: int) -> Any:
    """Guidance, temperature, top-k and top-p as transformers' processors do them, full sort included."""
    z = (uncond.float() + 3.0 * (cond.float() - uncond.float())) / 0.9
    z = z.masked_fill(z < z.topk(k).values[:, -1:], -torch.inf)
    ordered, ids = z.sort(descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 0.05
    return z.masked_fill(torch.empty_like(drop).scatter_(1, ids, drop), -torch.inf).softmax(-1)


def logits_cases(device: str) -> Iterator[Case]:
    for name, nodes, vocab in (
        ("shapes window 32", 32, 512),
        ("LlamaGen window 32", 32, 16384),
        ("Lumina window 32", 32, 65536),
        ("Lumina window 96", 96, 65536),
    ):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        packed = (3 * torch.randn(2 * nodes, vocab, device=device)).to(dtype)
        cond, uncond = packed.chunk(2)
        k = min(1000, vocab // 4)
        run = partial(process_logits, cond, uncond, 3.0, None, 0.9, k, 0.95)
        opponents: dict[str, Callable[[], Any]] = {
            "stock processors": partial(stock_processors, cond, uncond, k)
        }
        if device == "cuda":
            compiled = torch.compile(stock_processors, dynamic=False)
            opponents["torch.compile"] = partial(compiled, cond, uncond, k)
        moved = 2 * nodes * vocab * packed.element_size() + 4 * nodes * vocab
        yield Case("logits", name, run, moved, opponents)


def verify_cases(device: str) -> Iterator[Case]:
    for name, batch, nodes, vocab in (
        ("shapes window 32", 1, 32, 512),
        ("shapes window 32, batch 8", 8, 32, 512),
        ("LlamaGen window 32", 1, 32, 16384),
        ("Lumina window 96", 1, 96, 65536),
    ):
        p, q = laws(batch, nodes, vocab, device=device), laws(batch, nodes - 1, vocab, device=device)
        flat = p.view(-1, vocab)
        x = torch.multinomial(q.view(-1, vocab), 1).view(batch, nodes - 1)
        u = torch.rand(batch, nodes - 1, device=device)
        U = torch.randint(0, 2**32, (batch, nodes), device=device)
        E = torch.rand(batch, nodes, vocab, device=device) + 1e-3
        for unbroken in (False, True):
            run = partial(chain_verify, p, x, q, u=u, U=U, unbroken=unbroken)
            moved = 8 * vocab * batch * (nodes if unbroken else 1)
            yield Case("chain", f"{name}{', unbroken' if unbroken else ''}", run, moved, {})
        opponents = {"torch.multinomial": partial(torch.multinomial, flat, 1)}
        yield Case("draw", name, partial(draw, flat, U.flatten()), 4 * p.numel(), opponents)
        yield Case("race", name, partial(race, p, E), 8 * p.numel(), {})
        near = torch.randint(0, vocab, (batch * nodes, min(1000, vocab)), device=device, dtype=torch.int32)
        bound = torch.full((batch * nodes,), 0.1, device=device)
        run = partial(neighbour_mass, flat, near, bound)
        yield Case("neighbours", f"{name}, {near.shape[1]}", run, 36 * near.numel(), {})
        if vocab <= 16384:
            rows, codes = p[:, :-1].flatten(0, 1), torch.randn(vocab, 8, device=device)
            run = partial(group_sums, rows, q.flatten(0, 1), x.flatten(), None, codes, 14, 0.15, 0.5)
            yield Case("groups", name, run, 4 * p.numel(), {})


def sweep_cases(device: str) -> Iterator[Case]:
    """The window behind a rejection: one token in front of it has moved, most drafts stand."""
    for name, batch, window, vocab, side in (
        ("shapes window 16, batch 16", 16, 15, 512, 16),
        ("shapes window 64, batch 16", 16, 63, 512, 16),
        ("LlamaGen window 32", 1, 31, 16384, 24),
        ("Lumina window 64", 1, 63, 65536, 48),
    ):
        slots, rank, first = side * side, 32, 5 * side
        cells = torch.arange(slots, device=device)
        neighbour = torch.stack([cells - back for back in (1, 2, side - 1, side, side + 1)]).clamp(min=-1)
        p = laws(batch, window, vocab, device=device)
        q = (p + 0.1 * laws(batch, window, vocab, device=device)) / 1.1
        seen = torch.randint(0, vocab, (batch, slots), device=device)
        known = seen.clone()
        known[:, first - 1] = (known[:, first - 1] + 1) % vocab
        draft = torch.multinomial(q.view(-1, vocab), 1).view(batch, window)
        seen[:, first : first + window] = draft
        run = partial(
            neighbour_sweep,
            p,
            draft,
            known,
            seen,
            torch.full((batch,), first, device=device),
            neighbour,
            torch.randn(5, vocab, rank, device=device) / rank**0.5,
            torch.randn(5, rank, vocab, device=device),
            (torch.arange(window, device=device) >= window - 3).expand(batch, -1).contiguous(),
            q=q,
            u=torch.rand(batch, window, device=device),
            U=torch.randint(0, 2**32, (batch, window), device=device),
        )
        yield Case("sweep", name, run, 8 * p.numel(), {})


def tree_cases(device: str) -> Iterator[Case]:
    for name, tree, vocab in (
        ("25 drafts, V 512", "mc_sim_7b_63", 512),
        ("57 drafts, V 16384", "naive_extend_57", 16384),
        ("57 drafts, V 65536", "naive_extend_57", 65536),
    ):
        shape = static_tree(tree)
        known, T = shape.tensors(device), shape.slots
        p, q = laws(1, T, vocab, device=device), laws(1, len(shape.internal), vocab, device=device)
        tokens = torch.randperm(vocab, device=device)[:T][None]
        parent, live = known.parent[None], torch.ones(1, T, dtype=torch.bool, device=device)
        run = partial(
            tree_verify,
            p,
            tokens,
            parent,
            live,
            known.index,
            u=torch.rand(1, T, device=device),
            U=torch.randint(0, 2**32, (1, T), device=device),
            nodes=known.internal,
            max_children=shape.max_children,
            width=shape.max_depth + 1,
        )
        sampled = partial(run, q_rows=q, q_row_of=known.row_of[None], kind=WITHOUT_REPLACEMENT)
        yield Case("tree", f"{name}, point", run, 4 * vocab, {})
        yield Case("tree", f"{name}, sampled", sampled, 12 * vocab, {})
        yield Case("tree index", f"{T} slots", partial(tree_index, parent, live), T * T, {})


def attention_cases(device: str) -> Iterator[Case]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models = [
        ("LlamaGen-XL", 2, 20, 20, 64, 1024),
        ("LlamaGen-3B", 2, 32, 32, 100, 1024),
        ("Janus-Pro-7B", 2, 32, 32, 128, 600),
        ("Emu3", 2, 32, 8, 128, 8200),
        ("Lumina-mGPT", 2, 32, 32, 128, 2400),
        ("LLaVA-1.5", 1, 32, 32, 128, 1500),
    ]
    shape = static_tree("naive_extend_57")
    for name, batch, heads, kv_heads, dim, context in models if device == "cuda" else models[:1]:
        for nodes in (1, 32, shape.slots):
            capacity = -(-(context + 64) // 64) * 64
            q = torch.randn(batch, nodes, heads, dim, device=device, dtype=dtype)
            k, v = (torch.randn(batch, kv_heads, capacity, dim, device=device, dtype=dtype) for _ in range(2))
            lengths = torch.full((batch,), context, device=device)
            words = None
            if nodes == shape.slots:
                words = shape.tensors(device).index.words.expand(batch, -1, -1).contiguous()
            opponents: dict[str, Callable[[], Any]] = {}
            if device == "cuda":
                opponents["FlexAttention"] = flex(q, k, v, lengths, words)
            moved = 2 * batch * kv_heads * (context + nodes) * dim * q.element_size()
            run = partial(tree_attention, q, k, v, lengths, words=words)
            yield Case("attention", f"{name}, {nodes} nodes", run, moved, opponents)


def flex(q: Any, k: Any, v: Any, lengths: Any, words: Any) -> Callable[[], Any]:
    """FlexAttention with the length captured as a tensor and the tree as a captured boolean table."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from visacc.kernels.reference.attention import unpack_bits

    B, N, H, _ = q.shape
    S = k.shape[2]
    order = torch.arange(N, device=q.device)
    seen = (order <= order[:, None]).expand(B, N, N) if words is None else unpack_bits(words, N)
    seen = seen.contiguous()

    def visible(b: Any, h: Any, i: Any, s: Any) -> Any:
        j = (s - lengths[b]).clamp(0, N - 1)
        return (s < lengths[b]) | ((s < lengths[b] + N) & seen[b, i, j])

    mask = create_block_mask(visible, B, None, N, S, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    heads_first = q.transpose(1, 2)
    return lambda: compiled(heads_first, k, v, block_mask=mask, enable_gqa=k.shape[1] != H)


def other_cases(device: str) -> Iterator[Case]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = 32 if device == "cuda" else 8
    kv = torch.zeros(2 * layers, 1, 32, 512, 128, device=device, dtype=dtype)
    path = torch.tensor([[0, 1, 6, 22, 50]], device=device)
    n, start = torch.tensor([5], device=device), torch.tensor([300], device=device)
    run = partial(commit_kv, kv, path, n, start)
    moved = 2 * kv[:, :, :, :5].numel() * kv.element_size()
    yield Case(
        "commit",
        f"5 slots, {layers} layers",
        run,
        moved,
        {"layer by layer": partial(per_layer_commit, kv, path[0])},
    )
    seeds, slots = torch.arange(8, device=device)[:, None], torch.arange(32, device=device)
    ids = torch.arange(512, device=device)
    noise = partial(rng.exponential, seeds[..., None], ids, slots[:, None], 0, rng.GUMBEL)
    yield Case("rng", "noise 8 x 32 x 512", lambda backend: noise(), 4 * 8 * 32 * 512, {})
    few = partial(rng.uniform, seeds, 0, slots, 1, rng.ACCEPT)
    yield Case("rng", "uniforms 8 x 32", lambda backend: few(), 4 * 8 * 32, {})


def per_layer_commit(kv: Any, path: Any) -> None:
    for layer in kv:
        layer[:, :, 300 : 300 + len(path)] = layer.index_select(2, 300 + path)


FAMILIES: dict[str, Callable[[str], Iterator[Case]]] = {
    "logits": logits_cases,
    "verify": verify_cases,
    "sweep": sweep_cases,
    "tree": tree_cases,
    "attention": attention_cases,
    "other": other_cases,
}


def time_cpu(fn: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of processor time, which other processes on the machine do not inflate."""
    for _ in range(3):
        fn()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        fn()
        times.append(time.process_time() - begin)
    return statistics.median(times) * 1e6


def time_cuda(fn: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of CUDA-graph replays, the L2 cache flushed before each; eager if not
    capturable."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()
    replay: Callable[[], Any] = fn
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            fn()
        replay = graph.replay
    except RuntimeError as error:
        print(f"  not capturable ({str(error).splitlines()[0]}), timed eagerly", file=sys.stderr)
    flush = torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Measured device copy bandwidth in GB/s (read + write)."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / time_cuda(lambda: b.copy_(a), 20) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(FAMILIES), help="one family of ops")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs per case")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if interpreting():
        print("unset TRITON_INTERPRET: the interpreter is for tests and must not be timed", file=sys.stderr)
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    bandwidth = copy_bandwidth() if device == "cuda" else None
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{where}, torch {torch.__version__}" + (f", copy {bandwidth:.0f} GB/s" if bandwidth else ""))
    rows: list[Row] = []
    with torch.inference_mode():
        for family, cases in FAMILIES.items():
            if args.only and family != args.only:
                continue
            for case in cases(device):
                runs: dict[str, Callable[[], Any]] = {"reference": lambda c=case: c.run(backend="reference")}
                if device == "cuda":
                    runs = {"triton": lambda c=case: c.run(backend="triton"), **runs}
                for backend, fn in {**runs, **case.opponents}.items():
                    spent = (time_cuda if device == "cuda" else time_cpu)(fn, args.repeats)
                    speed = case.moved / spent / 1e3
                    share = None if bandwidth is None else 100 * speed / bandwidth
                    rows.append(Row(case.family, case.name, backend, spent, speed, share))
                    tail = "" if share is None else f" {share:6.1f} % of copy"
                    print(
                        f"{case.family:10s} {case.name:42s} {backend:34s} {spent:10.1f} us {speed:9.2f} GB/s{tail}",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(
            json.dumps(
                {"device": where, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}, indent=1
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
