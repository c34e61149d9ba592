"""Measuring the text-to-image model: a plain batched sampler, task scores with intervals, entropy of its law."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visacc.metrics.intervals import wilson
from visacc.models.llamagen.gpt import GPT
from visacc.models.llamagen.vq import VQModel, to_uint8
from visacc.models.shapes.captions import TASKS, Metadata
from visacc.models.shapes.judge import judge

#: Guidance, temperature, top-k (0: off) and top-p (1: off) of a run.
Settings = dict[str, Any]


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities [R, V] after temperature, top-k and top-p."""
    logits = logits / temperature
    if top_k:
        limit = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -math.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True)
        drop = ranked.cumsum(-1) - ranked > top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ranked.masked_fill(drop, 0.0))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


@torch.no_grad()
def sample_codes(
    gpt: GPT, features: Tensor, valid: Tensor, settings: Settings, seed: int
) -> tuple[Tensor, Tensor]:
    """Plain autoregressive sampling, one token per pass, guidance by a second half batch.

    features [B, T, C] and bool valid [B, T] are left-padded captions. Returns codes int64 [B, 256] and the mean
    entropy [B] (nats) of the laws the tokens were drawn from.
    """
    batch, width = valid.shape
    total = gpt.config.block_size
    generator = torch.Generator().manual_seed(seed)
    scale = float(settings["guidance_scale"])
    guided = scale > 1
    conditions = torch.cat([features, gpt.null_condition(batch).to(features.dtype)]) if guided else features
    seen = torch.cat([valid, valid]) if guided else valid
    rows = len(seen)
    cache = gpt.empty_cache(rows, width + total)
    causal = torch.ones(width, width, dtype=torch.bool).tril() & seen[:, None, :]
    mask = torch.zeros(rows, width, width + total, dtype=torch.bool)
    mask[:, :, :width] = causal | torch.eye(width, dtype=torch.bool)
    slots = torch.arange(width).expand(rows, width)
    inputs, codes = gpt.embed_prefix(conditions), []
    entropy = torch.zeros(batch)
    image_mask = torch.cat([seen, torch.zeros(rows, total, dtype=torch.bool)], dim=1)[:, None]
    for t in range(total):
        logits = gpt.forward_window(inputs, slots, slots, mask, cache, width + t, logits="last").logits[:, -1]
        if guided:
            logits = logits[batch:] + (logits[:batch] - logits[batch:]) * scale
        probs = filtered(logits, settings["temperature"], settings["top_k"], settings["top_p"])
        entropy += torch.special.entr(probs).sum(-1) / total
        token = torch.multinomial(probs, 1, generator=generator)
        codes.append(token)
        inputs = torch.cat([token, token]) if guided else token
        image_mask[:, :, width + t] = True
        mask = image_mask
        slots = torch.full((rows, 1), width + t)
    return torch.cat(codes, dim=1), entropy


@torch.no_grad()
def to_pictures(vq: VQModel, codes: Tensor) -> NDArray[np.uint8]:
    """Codes [B, 256] -> bytes [B, H, W, 3]."""
    side = math.isqrt(codes.shape[1])
    return to_uint8(vq.decode_codes(codes, (side, side))).numpy()


@dataclass
class Report:
    """Scores of one run: per task (right, n), the mean over tasks, mean entropy, and the pictures judged."""

    tasks: dict[str, tuple[int, int]]
    entropy: float
    pictures: NDArray[np.uint8]
    verdicts: list[bool]

    @property
    def overall(self) -> float:
        """GenEval's overall score: the mean of the task scores."""
        return float(np.mean([right / n for right, n in self.tasks.values()]))

    def summary(self) -> dict[str, Any]:
        """JSON form: score, n and 95 % interval of every task, overall score, entropy."""
        tasks = {
            tag: {
                "score": round(right / n, 4),
                "n": n,
                "interval": [round(bound, 3) for bound in wilson(right, n)],
            }
            for tag, (right, n) in self.tasks.items()
        }
        return {"overall": round(self.overall, 4), "entropy": round(self.entropy, 3), "tasks": tasks}


def evaluate(
    gpt: GPT,
    vq: VQModel,
    conditioner: Any,
    prompts: Sequence[Metadata],
    settings: Settings,
    *,
    per_task: int = 64,
    seed: int = 0,
    batch: int = 64,
) -> Report:
    """Samples `per_task` pictures of every task, going round its prompts, and judges them.

    conditioner: captions -> (left-padded features [B, T, C], bool mask [B, T]).
    """
    groups = [[prompt for prompt in prompts if prompt["tag"] == tag] for tag in TASKS]
    work = [group[i % len(group)] for group in groups if group for i in range(per_task)]
    counts: dict[str, list[bool]] = defaultdict(list)
    pictures, verdicts, entropies = [], [], []
    for start in range(0, len(work), batch):
        part = work[start : start + batch]
        features, valid = conditioner([prompt["prompt"] for prompt in part])
        codes, entropy = sample_codes(gpt, features, valid, settings, seed + start)
        images = to_pictures(vq, codes)
        pictures.append(images)
        entropies.append(entropy)
        for prompt, image in zip(part, images, strict=True):
            verdicts.append(judge(prompt, image).correct)
            counts[prompt["tag"]].append(verdicts[-1])
    tasks = {tag: (sum(counts[tag]), len(counts[tag])) for tag in TASKS if tag in counts}
    return Report(tasks, float(torch.cat(entropies).mean()), np.concatenate(pictures), verdicts)
