"""From logits to the one distribution per slot that every decoder samples, drafts and verifies with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visacc.kernels import process_logits
from visacc.models.base import Layout, ModelOutput

LARGEST_SCALE = 1e6
"""Larger scales push float32 logits out of range."""
_COLDEST, _HOTTEST = 1e-6, 1e6


def check_temperature(value: float) -> None:
    """``ValueError`` unless a temperature is 0 (greedy) or one that float32 logits can be divided by."""
    if not (value == 0 or _COLDEST <= value <= _HOTTEST):
        raise ValueError(
            f"temperature must be 0 (greedy) or lie between {_COLDEST:g} and {_HOTTEST:g}, got {value}"
        )


@dataclass(frozen=True)
class SamplingParams:
    """How logits become probabilities: guidance -> structure -> temperature -> top-k -> top-p -> softmax (float32).

    Attributes:
        guidance_scale: classifier-free guidance ``u + s (c - u)``; 1 switches the unconditional branch off.
        temperature: 0 is greedy.
        top_k: keep logits not below the k-th largest (ties kept); 0 keeps all.
        top_p: nucleus mass in (0, 1]; 1 keeps all.
        guidance_interval: guide only slots ``0..guidance_interval + 1`` (LlamaGen's ``cfg_interval``); -1 guides all.
    """

    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance_interval: int = -1

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, f.name, value := value.item())
            integral = f.name in ("top_k", "guidance_interval")
            if isinstance(value, bool) or not isinstance(value, int if integral else (int, float)):
                kind = "an integer" if integral else "a number"
                raise ValueError(f"{f.name} must be {kind}, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{f.name} must be finite, got {value!r}")
        if self.guidance_scale < 1:
            raise ValueError(
                f"guidance_scale must be 1 (off) or larger, got {self.guidance_scale}: scales below 1 are not defined"
                " for these models (the original programs ignore them silently)"
            )
        if self.guidance_scale > LARGEST_SCALE:
            raise ValueError(
                f"guidance_scale must be at most {LARGEST_SCALE:g}, got {self.guidance_scale}: float32 logits overflow"
            )
        check_temperature(self.temperature)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.guidance_interval < -1:
            raise ValueError(
                f"guidance_interval must be -1 (always) or a slot number, got {self.guidance_interval}"
            )

    @property
    def guided(self) -> bool:
        return self.guidance_scale != 1

    @classmethod
    def merge(cls, defaults: dict[str, Any], overrides: dict[str, Any]) -> SamplingParams:
        """Family defaults with the caller's values on top; ``None`` means "not given"."""
        return cls(**{**defaults, **{k: v for k, v in overrides.items() if v is not None}})


def probs(
    output: ModelOutput,
    slots: Tensor,
    layout: Layout,
    sampling: SamplingParams,
    guidance: Tensor | None = None,
) -> Tensor:
    """The law of every predicted slot after all processing.

    Args:
        output: logits [B, N, V] (and the unconditional ones when guided).
        slots: int64 [B, N] the slot that each output predicts (may lie beyond the layout for padding nodes).
        layout: its forced slots get all mass on code 0.
        sampling: see :class:`SamplingParams`.
        guidance: float [B, N] scale of each slot in place of ``sampling``'s scale and interval.

    Returns:
        float32 [B, N, V], each row summing to 1.
    """
    batch, size, vocab = output.logits.shape
    scale: float | Tensor | None = None
    if output.uncond is not None:
        scale = sampling.guidance_scale if guidance is None else guidance.flatten()
        if guidance is None and sampling.guidance_interval >= 0:
            guided = slots <= sampling.guidance_interval + 1
            scale = torch.where(guided.flatten(), sampling.guidance_scale, 1.0)
    greedy = sampling.temperature == 0
    law = process_logits(
        output.logits.reshape(-1, vocab),
        None if output.uncond is None else output.uncond.reshape(-1, vocab),
        scale=scale,
        temperature=None if greedy or sampling.temperature == 1 else sampling.temperature,
        top_k=None if greedy or not 0 < sampling.top_k < vocab else sampling.top_k,
        top_p=None if greedy or sampling.top_p == 1 else sampling.top_p,
    ).view(batch, size, vocab)
    if greedy:
        broken = law[..., :1].isnan()
        law = torch.zeros_like(law).scatter_(2, law.argmax(dim=2, keepdim=True), 1.0)
        law = torch.where(broken, torch.nan, law)
    if layout.forced_ids is not None:
        forced = layout.forced_ids.to(slots.device)[slots.clamp(max=layout.total - 1)] >= 0
        single = torch.zeros(vocab, device=law.device)
        single[0] = 1
        law = torch.where(forced[..., None], single, law)
    return law
