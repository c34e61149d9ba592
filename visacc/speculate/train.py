"""Training drafters: one loop for every method, resumable, with the accepted length on held-out prompts as
its meter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visacc.eval.world import several
from visacc.models.shapes.train_util import Average, JsonLog, load_checkpoint, save_atomic, schedule
from visacc.models.vlm.target import VLMTarget
from visacc.speculate.api import bind
from visacc.speculate.checkpoints import save_drafter
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.speculate.losses import PRESETS, DraftBatch, DraftLoss, LossSpec
from visacc.train.processes import make_accelerator, shards
from visacc.train.shards import like, load_optimizer, optimizer_state, shard, whole_state

Batches = Callable[[int], DraftBatch]
"""Number of a batch -> the batch; the same number always gives the same batch, so that runs can be
resumed.
"""


@dataclass(frozen=True)
class DrafterTraining:
    """Options of a run.

    Attributes:
        lr: the papers use 5e-5 (MSD, DREAM) and 3e-5 (FLASH) with 68 k samples for 20 to 40 epochs.
        autocast: compute in bfloat16.
        average: decay of the averaged weights that are saved; 0 saves the weights themselves.
        shard: spread parameters, gradients and optimiser states over the processes (FSDP2); also on where accelerate is
            configured for FSDP.
    """

    steps: int = 2000
    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup: int = 100
    seed: int = 0
    check_every: int = 500
    log_every: int = 50
    autocast: bool = True
    average: float = 0.0
    shard: bool = False


def default_config(method: str, target: VLMTarget, **overrides: Any) -> DrafterConfig:
    """A drafter of the papers' shape for a target: its width, one decoder layer (DREAM: three blocks)."""
    text = target.text_config
    heads = int(text.num_attention_heads)
    values: dict[str, Any] = {
        "method": method,
        "hidden_size": target.hidden_size,
        "intermediate_size": int(text.intermediate_size),
        "num_heads": heads,
        "kv_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or target.hidden_size // heads),
        "vocab_size": target.vocab_size,
        "eps": float(getattr(text, "rms_norm_eps", 1e-6)),
        "target": target.describe(),
    }
    if method == "flash":
        values.update(
            heads_ahead=5, latents=64, kv_heads=min(4, heads), intermediate_size=4 * target.hidden_size
        )
    if method == "eagle3":
        n = len(target.layers)
        if n < 7:
            raise ValueError(
                f"eagle3 reads layers 2, n//2 and n-3, which needs at least 7 layers; the target has {n}"
            )
        values.update(taps=(2, n // 2, n - 3))
    values.update(overrides)
    return DrafterConfig(**values)


def visual_share(epoch: int, epochs: int) -> float:
    """MSD's curriculum: probability that a sample of the (1-based) epoch comes from the visual set."""
    half = epochs / 2
    if epoch <= half:
        return 0.0
    return 1.0 if epoch >= epochs else (epoch - half) / half


def mixed(text: Batches, visual: Batches, steps: int, epochs: int = 40, seed: int = 0) -> Batches:
    """Two sources by MSD's curriculum: text only at first, then more and more pictures."""

    def batch(number: int) -> DraftBatch:
        epoch = min(number * epochs // max(steps, 1) + 1, epochs)
        g = torch.Generator().manual_seed(seed * 1_000_003 + number)
        chosen = visual if float(torch.rand((), generator=g)) < visual_share(epoch, epochs) else text
        return chosen(number)

    return batch


def train_drafter(
    target: VLMTarget,
    config: DrafterConfig,
    batches: Batches,
    folder: str | Path,
    options: DrafterTraining,
    *,
    spec: LossSpec | None = None,
    evaluate: Callable[[Drafter], dict[str, Any]] | None = None,
) -> Drafter:
    """Train, or resume in ``folder``; the drafter is saved there as ``drafter/`` at every check.

    Under a launcher (``accelerate launch``, ``torchrun``) process r of n takes batches r, r + n, ... and the gradients are
    averaged; the main process saves, logs and measures.

    Args:
        evaluate: called at every check with the drafter, e.g. to measure the accepted length on held-out
            prompts.

    Raises:
        ValueError: the drafter does not fit the target.
        RuntimeError: several processes without accelerate, or one that is to be sharded.
    """
    folder = Path(folder)
    torch.manual_seed(options.seed)
    drafter = Drafter(config)
    bind(drafter, target)
    drafter.train().float()
    for p in target.model.parameters():
        p.requires_grad_(False)
    terms_of = DraftLoss(drafter, spec or PRESETS[config.method], target.logits)
    module: nn.Module = terms_of
    world, rank, backward, accelerator, sharded = 1, 0, torch.Tensor.backward, None, False
    if several() or options.shard:
        # batches without pictures leave what reads pictures unused
        accelerator = make_accelerator(target.device, unused=config.method in ("vispec", "flash"))
        world, rank, backward = accelerator.num_processes, accelerator.process_index, accelerator.backward
        sharded = shards(accelerator, options.shard)
    saved = load_checkpoint(folder / "state.pt")
    if saved is not None:
        drafter.load_state_dict(saved["drafter"])
    if sharded:
        terms_of.touch_all = True
        shard(module, target.device)
    optimizer: Any = torch.optim.AdamW(
        drafter.parameters(), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    average = Average(drafter, options.average) if options.average else None
    start = 0 if saved is None else _resume(saved, drafter, optimizer, average)
    if accelerator is not None and not sharded:
        module, optimizer = accelerator.prepare(module, optimizer)
    log = JsonLog(folder / "train.jsonl") if rank == 0 else None
    begun = time.time()
    for step in range(start, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(step, options.steps, warmup=options.warmup)
        torch.manual_seed(options.seed * 1_000_003 + step * world + rank)  # noise of its own, resumed or not
        batch = batches(step * world + rank).to(target.device, torch.float32)
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=options.autocast):
            terms = module(batch)
        optimizer.zero_grad(set_to_none=True)
        backward(terms["loss"])
        nn.utils.clip_grad_norm_(drafter.parameters(), options.clip)
        optimizer.step()
        if average is not None:
            average.update(drafter, step)
        if log is not None and (step + 1) % options.log_every == 0:
            rate = (step + 1 - start) / (time.time() - begun)
            log.write(
                step=step + 1, **{k: float(v.detach()) for k, v in terms.items()}, steps_per_second=rate
            )
        if (step + 1) % options.check_every == 0 or step + 1 == options.steps:
            # every process helps to put shards together
            state = _state(drafter, optimizer, average, step + 1)
            if rank == 0:
                finished = _frozen(drafter, state)
                save_atomic(state, folder / "state.pt")
                save_drafter(finished, folder / "drafter", dtype=torch.float16)
                if evaluate is not None and log is not None:
                    log.write(step=step + 1, **evaluate(finished))
    if accelerator is not None:
        accelerator.wait_for_everyone()  # the drafter is there when any process goes on
    return _frozen(drafter, _state(drafter, optimizer, average, options.steps))


def _resume(saved: dict[str, Any], drafter: Drafter, optimizer: Any, average: Average | None) -> int:
    load_optimizer(optimizer, saved["optimizer"])
    if average is not None:
        now = drafter.state_dict()
        average.state = {name: like(value, now[name]) for name, value in saved["average"].items()}
    return int(saved["step"])


def _state(drafter: Drafter, optimizer: Any, average: Average | None, step: int) -> dict[str, Any]:
    """What a run is resumed from; all processes of a sharded run must ask together."""
    state: dict[str, Any] = {
        "drafter": whole_state(drafter.state_dict()),
        "optimizer": optimizer_state(optimizer),
        "step": step,
    }
    if average is not None:
        state["average"] = whole_state(average.state)
    return state


def _frozen(drafter: Drafter, state: dict[str, Any]) -> Drafter:
    """A copy for evaluation with the (averaged) weights of a state."""
    copy = Drafter(replace(drafter.config))
    copy.load_state_dict(state.get("average", state["drafter"]))
    copy._embed, copy._target_head = drafter._embed, drafter._target_head
    return copy.eval()


def resampled(stored: list[DraftBatch]) -> Batches:
    """Batches kept in memory, in a new order every round."""

    def batch(number: int) -> DraftBatch:
        turn, place = divmod(number, len(stored))
        g = torch.Generator().manual_seed(turn)
        return stored[int(torch.randperm(len(stored), generator=g)[place])]

    return batch
