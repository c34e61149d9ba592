"""Choosing the window from what a forward costs here: ``window="auto"``."""

from __future__ import annotations

import time

import torch

from visacc.decoders.base import Decoder
from visacc.decoders.jacobi import Jacobi
from visacc.models.base import ImageModel, Proposal
from visacc.stats import DecodeStats

CANDIDATES = (4, 8, 16, 24, 32, 48, 64, 96, 128)


def forward_costs(
    model: ImageModel, windows: tuple[int, ...], batch: int, guided: bool, repeats: int = 5
) -> dict[int, float]:
    """Median seconds of one target forward of ``window`` tokens per row, half of the sequence being cached.

    Uses made-up tokens and leaves nothing behind; repeats are interleaved over the windows so that a noisy machine
    disturbs all of them alike.
    """
    layout = model.layout
    windows = tuple(w for w in windows if w <= layout.total)
    cond = model.dummy_conditioning(batch)
    seconds: dict[int, list[float]] = {w: [] for w in windows}
    with torch.no_grad():
        state, _ = model.prefill(cond, guidance=guided, window=max(windows))
        start = layout.total // 2
        state.lengths = torch.full_like(state.lengths, start)
        for turn in range(repeats + 1):
            for window in windows:
                position = (start + torch.arange(window, device=state.device)).clamp(max=layout.total - 1)
                position = position.expand(batch, -1)
                state.limit = min(state.prefix + start + window, state.kv.shape[4])
                proposal = Proposal(
                    torch.zeros_like(position), position, torch.ones_like(position, dtype=torch.bool)
                )
                _synchronise(state.device)
                begin = time.perf_counter()
                model.forward(state, proposal)
                _synchronise(state.device)
                if turn:
                    seconds[window].append(time.perf_counter() - begin)
    return {w: sorted(s)[len(s) // 2] for w, s in seconds.items()}


def expected_compression(window: int) -> float:
    """Tokens per step of coupled Jacobi decoding, the prior until this model has been seen at work.

    A power law through the simulated 3.2, 4.5 and 6.0 at windows 16, 32 and 64 for a flat next-token law.
    """
    return max(1.0, 0.95 * window**0.44)


class AutoWindow:
    """Chooses the window with the best expected compression per second for one model, and learns from each run."""

    def __init__(self, model: ImageModel) -> None:
        self.model = model
        self._costs: dict[tuple[int, bool], dict[int, float]] = {}
        self._seen: dict[tuple[str, int], float] = {}

    def choose(self, decoder: Decoder, guided: bool, batch: int) -> int:
        """Window for this decoder on this machine. Raises ``ValueError`` for decoders without a window."""
        if not isinstance(decoder, Jacobi):
            raise ValueError(f"window='auto' is for Jacobi decoders, not for {decoder.name!r}")
        key = (batch, guided)
        if key not in self._costs:
            self._costs[key] = forward_costs(self.model, CANDIDATES, batch, guided)
        costs = self._costs[key]
        return max(costs, key=lambda w: self._compression(decoder, w) / costs[w])

    def _compression(self, decoder: Jacobi, window: int) -> float:
        """Observed compression, or the prior scaled by how the nearest observed window compares with it."""
        seen = {w: c for (name, w), c in self._seen.items() if name == decoder.coupling}
        if not seen:
            return expected_compression(window)
        nearest = min(seen, key=lambda w: abs(w - window))
        return seen[nearest] * expected_compression(window) / expected_compression(nearest)

    def observe(self, decoder: Decoder, stats: DecodeStats) -> None:
        if isinstance(decoder, Jacobi) and not stats.unfinished:
            self._seen[decoder.coupling, decoder.window] = stats.step_compression


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
