"""transformers itself as a yardstick: ``generate`` alone, with prompt lookup, with an assistant model."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch

from visacc.speculate.params import eos_ids


@dataclass
class Measured:
    """What one or several timed calls did.

    Attributes:
        rows: prompts; tokens: generated, end tokens included. seconds: of the calls; prefill_seconds: of them, up to and
            including the first token.
        steps, accepted, draft_seconds, committed: of speculative loops; 0 or empty for others.
    """

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    committed: Counter[int] = field(default_factory=Counter)

    def add(self, other: Measured) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def figures(self) -> dict[str, float]:
        """Tokens per second, with and without the prompt; where there are steps, what they committed."""
        found = {
            "tokens_per_second": self.tokens / self.seconds,
            "decode_tokens_per_second": (self.tokens - self.rows)
            / max(self.seconds - self.prefill_seconds, 1e-9),
        }
        if self.steps:
            found |= {
                "tau": (self.tokens - self.rows) / self.steps,
                "accepted_per_step": self.accepted / self.steps,
                "draft_share": self.draft_seconds / self.seconds,
            }
        return found


def stock(
    model: Any, temperature: float, max_new_tokens: int, extra: dict[str, Any]
) -> Callable[[int, dict[str, Any]], Measured]:
    """A timer of ``model.generate`` with the options ``extra``; the prompt's share is that of a one-token call."""
    options: dict[str, Any] = {"do_sample": temperature > 0, **extra}
    if temperature > 0:
        options.update(temperature=temperature, top_k=0, top_p=1.0)
    eos = eos_ids(model.generation_config.eos_token_id)

    def timed(inputs: dict[str, Any], length: int, more: dict[str, Any]) -> tuple[float, torch.Tensor]:
        begun = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=length, **more)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        return time.perf_counter() - begun, out

    def run(number: int, inputs: dict[str, Any]) -> Measured:
        torch.manual_seed(number)
        seconds, out = timed(inputs, max_new_tokens, options)
        prefill, _ = timed(inputs, 1, {"do_sample": False})
        tokens = written(out[:, inputs["input_ids"].shape[1] :], eos)
        return Measured(len(out), tokens, seconds, prefill)

    return run


def written(out: torch.Tensor, eos: tuple[int, ...]) -> int:
    """Generated tokens up to and including each row's end token."""
    if not eos:
        return out.numel()
    ends = torch.isin(out, torch.tensor(eos, device=out.device)).long()
    return int((ends.cumsum(1) - ends == 0).sum())


@dataclass
class Assistant:
    """What drafts in transformers' assisted generation, in words and as an option of ``generate``."""

    name: str
    options: dict[str, Any]


def assistants(model: Any, name: str | None) -> Assistant:
    """The model called ``name``, or a copy of ``model`` with the first half of its layers (weights are shared)."""
    if name is not None:
        from visacc.speculate.pipeline import load_vlm

        return Assistant(
            name, {"assistant_model": load_vlm(name, device=str(model.device), dtype=model.dtype)[0]}
        )
    shared = {id(x): x for x in chain(model.parameters(), model.buffers())}
    half = copy.deepcopy(model, shared)
    decoder = half.get_decoder()
    kept = max(len(decoder.layers) // 2, 1)
    total, decoder.layers = len(decoder.layers), decoder.layers[:kept]
    text = half.config.get_text_config()
    text.num_hidden_layers = kept
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:kept]
    return Assistant(f"the first {kept} of the target's {total} layers", {"assistant_model": half})
