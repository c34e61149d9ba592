"""Statistics of a decode: steps, committed and accepted tokens, tokens fed, time by phase, commit order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.base import Verdict
from visacc.models.base import Layout


class Clock:
    """Wall time by phase. On a GPU the host is ahead of the device, so only :meth:`total` is exact there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, float] = {}
        self.started = self._now()

    def _now(self) -> float:
        return time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + self._now() - start

    def total(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._now() - self.started


@dataclass
class DecodeStats:
    """What a decode cost. A *step* is one target forward; the prompt's forward is step 1.

    Attributes:
        decoder: registered name.
        tokens: slots per sample.
        steps: int64 [B] target forwards until each sample was finished (its own NFE).
        forwards: target forwards of the batch, i.e. the slowest sample's steps.
        committed: int64 [forwards, B] tokens each step committed (0 once a sample is finished).
        accepted: int64 [forwards, B] committed tokens that were drafts.
        fed: tokens fed per row, summed over the steps after the prompt's.
        step_of: int64 [B, tokens] step that committed each slot (0 = never).
        seconds: wall time of the whole decode, pixels excluded.
        phases: seconds by phase.
        unfinished: stopped early by a callback.
    """

    decoder: str
    tokens: int
    steps: Tensor
    step_of: Tensor
    committed: Tensor
    accepted: Tensor
    forwards: int = 0
    fed: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    unfinished: bool = False
    _log: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list, repr=False)

    @classmethod
    def empty(cls, decoder: str, layout: Layout, batch: int, device: torch.device) -> DecodeStats:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            decoder, layout.total, zeros(batch), zeros(batch, layout.total), zeros(0, batch), zeros(0, batch)
        )

    def log(
        self, samples: Tensor, spare: Tensor, verdict: Verdict, gained: Tensor, step: int, fed: int
    ) -> None:
        """Record one step without synchronising; ``spare`` [B', K] are target slots, ``tokens`` meaning nowhere."""
        self._log.append((samples, gained, verdict.accepted))
        padded = torch.cat([self.step_of, self.step_of[:, :1]], dim=1)
        padded[samples[:, None], spare] = step
        self.step_of = padded[:, :-1]
        self.forwards = step
        if step > 1:
            self.fed += fed

    def finish(self, clock: Clock) -> None:
        self.seconds = clock.total()
        self.phases = dict(clock.phases)
        self.committed = torch.zeros(
            len(self._log), len(self.steps), dtype=torch.int64, device=self.steps.device
        )
        self.accepted = torch.zeros_like(self.committed)
        for i, (samples, gained, accepted) in enumerate(self._log):
            self.committed[i, samples] = gained
            if accepted is not None:
                self.accepted[i, samples] = accepted
        self._log.clear()
        self.steps = self.step_of.amax(1)
        for name in ("steps", "step_of", "committed", "accepted"):
            setattr(self, name, getattr(self, name).cpu())

    @property
    def nfe(self) -> float:
        """Mean target forwards per sample."""
        return float(self.steps.float().mean())

    @property
    def step_compression(self) -> float:
        """Tokens per step: what plain autoregressive decoding needs divided by what was needed."""
        return self.tokens / self.nfe

    @property
    def tau(self) -> float:
        """Committed tokens per step after the first, averaged over live samples (accepted length tau)."""
        later = self.committed[1:]
        live = later > 0
        return float(later.sum() / live.sum().clamp(min=1))

    def histogram(self) -> list[int]:
        """``h[n]``: how many (step, sample) pairs after the first step committed n tokens."""
        later = self.committed[1:].flatten()
        return torch.bincount(later[later > 0]).tolist()

    @staticmethod
    def merge(parts: list[DecodeStats]) -> DecodeStats:
        """Statistics of batches decoded one after the other, as one."""
        if len(parts) == 1:
            return parts[0]
        first, most = parts[0], max(len(p.committed) for p in parts)

        def stacked(name: str) -> Tensor:
            rows = [
                torch.nn.functional.pad(getattr(p, name), (0, 0, 0, most - len(p.committed))) for p in parts
            ]
            return torch.cat(rows, dim=1)

        phases: dict[str, float] = {}
        for part in parts:
            for phase, seconds in part.phases.items():
                phases[phase] = phases.get(phase, 0.0) + seconds
        return DecodeStats(
            first.decoder,
            first.tokens,
            torch.cat([p.steps for p in parts]),
            torch.cat([p.step_of for p in parts]),
            stacked("committed"),
            stacked("accepted"),
            forwards=sum(p.forwards for p in parts),
            fed=sum(p.fed for p in parts),
            seconds=sum(p.seconds for p in parts),
            phases=phases,
            unfinished=any(p.unfinished for p in parts),
        )

    def select(self, samples: list[int]) -> DecodeStats:
        """The same statistics with the samples in another order, or only some of them (times stay those of all)."""
        index = torch.tensor(samples, dtype=torch.int64)
        return replace(
            self,
            steps=self.steps[index],
            step_of=self.step_of[index],
            committed=self.committed[:, index],
            accepted=self.accepted[:, index],
        )

    def summary(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "decoder": self.decoder,
            "images": len(self.steps),
            "tokens_per_image": self.tokens,
            "steps": self.steps.tolist(),
            "mean_steps": self.nfe,
            "step_compression": self.step_compression,
            "mean_committed_per_step": self.tau,
            "target_forwards": self.forwards,
            "tokens_fed_per_step": self.fed / max(self.forwards - 1, 1),
            "seconds": self.seconds,
            "seconds_by_phase": self.phases,
            "committed_histogram": self.histogram(),
            "unfinished": self.unfinished,
        }


def check_interval(given: int | None, device: torch.device, elsewhere: int) -> int:
    """Steps between two looks of the host at the device: ``given``, or 1 on a CPU and ``elsewhere`` on other devices."""
    if given is None:
        return 1 if device.type == "cpu" else elsewhere
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"check_every must be a positive integer, got {given!r}")
    return given
