"""One resumable training loop for the embedded models: Muon and AdamW, bfloat16 autocast, averaged weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visacc.models.shapes.train_util import Average, JsonLog, load_checkpoint, save_atomic, schedule


@dataclass
class Fit:
    """Settings of one run.

    Attributes:
        muon_lr: rate of the matrices that Muon trains; 0 trains everything with AdamW.
        adam_lr: rate of all other tensors.
        ema: decay of the averaged weights, which are what is returned.
    """

    steps: int = 2000
    batch: int = 32
    muon_lr: float = 0.01
    adam_lr: float = 1.5e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    ema: float = 0.997
    save_every: int = 100
    log_every: int = 20
    seed: int = 0


def fit(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    count: int,
    folder: Path,
    name: str,
    settings: Fit,
    *,
    matrices: nn.Module | None = None,
    decays: Callable[[str, Tensor], bool] | None = None,
    factor: Callable[[int], float] | None = None,
) -> nn.Module:
    """Train, or resume, in ``folder``; returns the model with averaged weights in evaluation mode.

    Every step is seeded by its number, so an interrupted run ends with the weights of an uninterrupted one.

    Args:
        loss: mean loss of the samples with the given indices int64 [batch]; may draw from torch's global generator.
        count: number of samples.
        name: of the checkpoint ``name.pt`` and the log ``name.jsonl``.
        matrices: sub-module whose 2-D parameters Muon trains.
        decays: which parameters (name, tensor) get weight decay; all by default.
        factor: step -> factor of all rates; warm-up and cosine to 2 % by default.
    """
    torch.manual_seed(settings.seed)
    optimizers = _optimizers(model, matrices, settings, decays)
    device = next(model.parameters()).device.type
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    average, start = Average(model, settings.ema), 0
    checkpoint = load_checkpoint(folder / f"{name}.pt")
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        average.state, start = checkpoint["average"], checkpoint["step"]
    log, losses, began = JsonLog(folder / f"{name}.jsonl"), [], time.time()
    model.train()
    for step in range(start, settings.steps):
        scale = factor(step) if factor is not None else schedule(step, settings.steps, settings.warmup)
        for optimizer, base in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * scale
            optimizer.zero_grad(set_to_none=True)
        pick = _pick(step, count, settings)
        torch.manual_seed((settings.seed + 1) * 1_000_003 + step)
        with torch.autocast(device, dtype=torch.bfloat16):
            value = loss(pick)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        average.update(model, step)
        losses.append(value.detach())
        if (step + 1) % settings.log_every == 0:
            seconds = (time.time() - began) / len(losses)
            mean = float(torch.stack(losses).mean())
            log.write(stage=name, step=step + 1, loss=mean, grad=float(norm), seconds_per_step=seconds)
            began, losses = time.time(), []
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            saved: dict[str, Any] = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "average": average.state,
                "step": step + 1,
                "settings": asdict(settings),
            }
            save_atomic(saved, folder / f"{name}.pt")
    model.load_state_dict(average.state)
    return model.eval()


def _optimizers(
    model: nn.Module,
    matrices: nn.Module | None,
    settings: Fit,
    decays: Callable[[str, Tensor], bool] | None,
) -> list[torch.optim.Optimizer]:
    chosen: list[nn.Parameter] = []
    if matrices is not None and settings.muon_lr > 0:
        chosen = [p for p in matrices.parameters() if p.ndim == 2]
    taken = {id(p) for p in chosen}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in taken]
    decay, lr = settings.weight_decay, settings.adam_lr
    groups: list[dict[str, Any]] = [{"params": [p for n, p in rest if decays is None or decays(n, p)]}]
    if decays is not None:
        groups.append({"params": [p for n, p in rest if not decays(n, p)], "weight_decay": 0.0})
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=lr, betas=settings.betas, weight_decay=decay)
    ]
    if chosen:
        muon = torch.optim.Muon(chosen, lr=settings.muon_lr, weight_decay=decay, adjust_lr_fn="original")
        optimizers.append(muon)
    return optimizers


def _pick(step: int, count: int, settings: Fit) -> Tensor:
    """Indices of a step: consecutive parts of one shuffle per epoch."""
    size = min(settings.batch, count)
    per_epoch = count // size
    epoch, part = divmod(step, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed * 1000 + epoch))
    return order[part * size : (part + 1) * size]
