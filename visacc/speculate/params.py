"""How text is chosen: the options of ``model.generate`` that speculative decoding reproduces exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visacc.kernels import process_logits
from visacc.sampling import check_temperature


@dataclass(frozen=True)
class TextParams:
    """Order as in transformers: repetition penalty, minimum length, temperature, top-k, top-p, softmax
    (float32).

    Attributes:
        max_new_tokens: limit on generated tokens (the end token counts).
        temperature: 0 is greedy.
        top_k: 0 keeps all. top_p: 1 keeps all.
        repetition_penalty: tokens of the prompt and of the text so far are made less likely; 1 is off.
        min_new_tokens: the end tokens are impossible before.
        eos: ids that end a text. pad: id written behind the end.
        stop_strings: text that ends a generation once it has been produced (needs a tokenizer).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    pad: int = 0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        check_temperature(self.temperature)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must lie in 0..max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether logits go into the arg-max untouched."""
        return self.greedy and self.repetition_penalty == 1 and self.min_new_tokens == 0

    def filter(self, logits: Tensor) -> Tensor:
        """Temperature, top-k, top-p, softmax: logits [R, V] -> law float32 [R, V]."""
        vocab = logits.shape[1]
        return process_logits(
            logits,
            temperature=None if self.greedy or self.temperature == 1 else self.temperature,
            top_k=self.top_k if 0 < self.top_k < vocab else None,
            top_p=self.top_p if self.top_p < 1 else None,
        )


def eos_ids(value: Any) -> tuple[int, ...]:
    """End tokens from what configurations hold: nothing, one id or several."""
    if value is None:
        return ()
    if isinstance(value, Tensor):
        return tuple(int(v) for v in value.flatten().tolist())
    return tuple(value) if isinstance(value, Sequence) else (int(value),)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1, 1.0),
    "min_p": (None,),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


def from_generation_config(config: Any, prompt_length: int, **overrides: Any) -> TextParams:
    """The parameters a transformers ``GenerationConfig`` asks for.

    Raises:
        ValueError: it asks for something speculative decoding does not reproduce.
    """
    odd = [
        f"{name}={getattr(config, name)!r}"
        for name, neutral in _NEUTRAL.items()
        if getattr(config, name, None) not in neutral
    ]
    if odd:
        raise ValueError(f"not supported with speculative decoding: {', '.join(odd)}")
    values: dict[str, Any] = {}
    if getattr(config, "max_new_tokens", None) is not None:
        values["max_new_tokens"] = config.max_new_tokens
    elif getattr(config, "max_length", None):
        values["max_new_tokens"] = config.max_length - prompt_length
        if values["max_new_tokens"] < 1:
            raise ValueError(
                f"max_length={config.max_length} leaves no room behind a prompt of {prompt_length} tokens;"
                " pass max_new_tokens"
            )
    if getattr(config, "min_new_tokens", None):
        values["min_new_tokens"] = config.min_new_tokens
    elif getattr(config, "min_length", None):
        values["min_new_tokens"] = max(config.min_length - prompt_length, 0)
    if getattr(config, "repetition_penalty", None):
        values["repetition_penalty"] = config.repetition_penalty
    if getattr(config, "do_sample", False):
        values["temperature"] = 1.0 if config.temperature is None else config.temperature
        values["top_k"] = config.top_k or 0
        values["top_p"] = 1.0 if config.top_p is None else config.top_p
        if values["temperature"] == 0:
            raise ValueError("do_sample=True needs a temperature above 0")
    values["eos"] = eos_ids(config.eos_token_id)
    pad = eos_ids(config.pad_token_id)
    values["pad"] = pad[0] if pad else (values["eos"][0] if values["eos"] else 0)
    if getattr(config, "stop_strings", None):
        stops = config.stop_strings
        values["stop_strings"] = (stops,) if isinstance(stops, str) else tuple(stops)
    values.update({k: v for k, v in overrides.items() if v is not None})
    return TextParams(**values)


class Laws:
    """Target logits of tree nodes -> what the verifier compares: laws, or scores whose arg-max is taken.

    Keeps, per row, which tokens prompt and text already hold (only with a repetition penalty). ``prompt``
    int64 [B, N] has ``vocab`` at padding, which is not penalised.
    """

    def __init__(self, params: TextParams, prompt: Tensor, vocab: int) -> None:
        self.params, self.vocab = params, vocab
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(prompt.shape[0], vocab + 1, dtype=torch.bool, device=prompt.device)
            self.seen.scatter_(1, prompt.clamp(max=vocab), True)

    def select(self, rows: Tensor) -> None:
        if self.seen is not None:
            self.seen = self.seen[rows]

    def add(self, tokens: Tensor, keep: Tensor) -> None:
        """Note tokens int64 [B, K] of which ``keep`` bool [B, K] joined the text."""
        if self.seen is not None:
            self.seen.scatter_(1, torch.where(keep, tokens, self.vocab), True)

    def __call__(self, logits: Tensor, tokens: Tensor, ancestors: Tensor, index: Tensor) -> Tensor:
        """float32 [B, T, V].

        Args:
            logits: float32 [B, T, V] behind each node.
            tokens: int64 [B, T]; ancestors: bool [B, T, T] which nodes lie on a node's path, itself included.
            index: int64 [B, T] number of the generated token that each node's law is for.
        """
        p = self.params
        if p.plain:
            return logits
        if self.seen is not None:
            path = torch.where(ancestors, tokens[:, None], self.vocab)
            seen = self.seen[:, None].expand(-1, tokens.shape[1], -1).clone().scatter_(2, path, True)
            seen = seen[..., : self.vocab]
            penal = torch.where(logits < 0, logits * p.repetition_penalty, logits / p.repetition_penalty)
            logits = torch.where(seen, penal, logits)
        if p.min_new_tokens and p.eos:
            early = index < p.min_new_tokens
            ends = torch.tensor(p.eos, device=logits.device)
            barred = torch.zeros(self.vocab, dtype=torch.bool, device=logits.device).index_fill_(
                0, ends, True
            )
            logits = logits.masked_fill(early[..., None] & barred, -torch.inf)
        if p.greedy:
            return logits
        return p.filter(logits.flatten(0, 1)).view(logits.shape)
