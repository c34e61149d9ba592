"""Random numbers of a generation: counter-based, one stream per purpose, owned by the sample and not by the batch.

Every number is Philox(key = sample seed; code id or 0, absolute slot, iteration, purpose), see ``kernels.rng``. A sample
therefore draws the same numbers alone, in any batch, on any number of processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels import rng

_TABLE_LIMIT = 1 << 28
_CHUNK = 1 << 14
_DECISIONS = (rng.ACCEPT, rng.RESIDUAL, rng.DRAW)
_MASK = (1 << 64) - 1


def sample_seed(seed: int, index: int = 0) -> int:
    """64-bit Philox key of image ``index`` of a call with the user's ``seed`` (splitmix64 finaliser), as a signed int."""
    z = (seed + 0x9E3779B97F4A7C15 * (index + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


class Noise:
    """The streams of a batch.

    Args:
        seeds: int64 [B] Philox keys.
        vocab: number of codes V.
        total: number of slots, for the table of Gumbel noise.
    """

    def __init__(self, seeds: Tensor, vocab: int, total: int) -> None:
        self.seeds = seeds
        self.vocab = vocab
        self.total = total
        self._table: Tensor | None = None
        self._ready = 0
        self._purposes = torch.tensor(_DECISIONS, device=seeds.device)[:, None, None]

    def select(self, rows: Tensor) -> None:
        self.seeds = self.seeds[rows]
        if self._table is not None:
            self._table = self._table[rows]

    def uniform(self, purpose: int, slots: Tensor, iteration: int) -> Tensor:
        """float32 uniforms in [0, 1) shaped like ``slots`` [B, N]."""
        return rng.uniform(self.seeds[:, None], 0, slots, iteration, purpose)

    def integer(self, purpose: int, slots: Tensor, iteration: int) -> Tensor:
        """32-bit integers in int64 shaped like ``slots`` [B, N], for draws by integer CDF."""
        return rng.integer(self.seeds[:, None], 0, slots, iteration, purpose)

    def decisions(self, slots: Tensor, iteration: int) -> tuple[Tensor, Tensor, Tensor]:
        """What one pass over the slots [B, N] needs: acceptance uniforms, residual integers and draw integers.

        The same numbers as :meth:`uniform` and :meth:`integer` of the three purposes, in one call.
        """
        first, second, _, _ = rng.philox(self.seeds[:, None], 0, slots, iteration, self._purposes)
        return rng.to_uniform(second[0]), first[1], first[2]

    def prepare(self, bound: int) -> None:
        """Have the Gumbel noise of all slots below ``bound`` ready. Each slot's noise is computed once.

        The noise of a slot never changes, so it is kept in a table [B, total, V] while that stays below 1 GiB.
        """
        if len(self.seeds) * self.total * self.vocab > _TABLE_LIMIT:
            return
        if self._table is None:
            self._table = torch.empty(len(self.seeds), self.total, self.vocab, device=self.seeds.device)
        bound = min(bound, self.total)
        if bound > self._ready:
            # small vocabularies: many slots at a time, the calls cost more than the numbers
            bound = min(max(bound, self._ready + _CHUNK // self.vocab), self.total)
            fresh = torch.arange(self._ready, bound, device=self.seeds.device)
            self._table[:, self._ready : bound] = self._exponential(fresh.expand(len(self.seeds), -1))
            self._ready = bound

    def _exponential(self, slots: Tensor) -> Tensor:
        ids = torch.arange(self.vocab, device=slots.device)
        return rng.exponential(self.seeds[:, None, None], ids, slots[..., None], 0, rng.GUMBEL)

    def exponential(self, slots: Tensor) -> Tensor:
        """Exp(1) noise [B, N, V] of the slots [B, N]; ``argmax p / E`` is the Gumbel-max draw from p.

        Depends on the slot only (not on the iteration), so that the draws of successive passes are coupled.
        Raises ``RuntimeError`` when :meth:`prepare` was not called far enough.
        """
        if self._table is None:
            return self._exponential(slots)
        rows = torch.arange(len(self.seeds), device=slots.device)[:, None]
        return self._table[rows, slots.clamp(max=self._ready - 1)]
