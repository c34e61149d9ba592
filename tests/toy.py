"""A tiny target model whose law is a table: every context has its own random logits. For exactness tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visacc.cache import addresses, allocate
from visacc.models.base import Conditioning, DecodeState, ImageModel, Layout, ModelOutput, Proposal


class TableModel(ImageModel):
    """Slot t has logits ``table[t][index of the t earlier codes]``; slots never written count as code V.

    ``uncond`` gives the unconditional branch its own tables. Every cache address remembers the token and the position
    written there, so chains, trees and sets all see exactly what their mask shows.
    """

    name = "table"
    provides = frozenset({"grid", "tree_mask"})

    def __init__(
        self,
        vocab: int = 4,
        total: int = 6,
        *,
        width: int | None = None,
        seed: int = 0,
        std: float = 1.0,
        forced: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        slots = total if forced is None else len(forced)
        images = total if forced is None else sum(f < 0 for f in forced)
        width = width or images
        self.layout = Layout((1, images // width, width), vocab, forced)
        g = torch.Generator().manual_seed(seed)
        base = vocab + 1
        self.base = base
        self.tables = [
            [
                (torch.randn(base**t, vocab, generator=g, dtype=torch.float64) * std).to(dtype)
                for t in range(slots)
            ]
            for _ in range(2)
        ]
        self._module = torch.nn.Linear(1, 1)

    @property
    def module(self) -> torch.nn.Module:
        return self._module

    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        return Conditioning(len(prompts), {})

    def prefill(self, cond: Conditioning, *, guidance: bool, window: int) -> tuple[DecodeState, ModelOutput]:
        batch, branches = cond.batch, 1 + guidance
        capacity = self.layout.total + window + 1
        kv = allocate(1, branches * batch, 1, capacity, 2, dtype=torch.float64, device="cpu")
        kv.fill_(-1)
        state = DecodeState(
            batch,
            branches,
            kv,
            torch.zeros(batch, dtype=torch.int64),
            0,
            torch.ones(branches * batch, 0, dtype=torch.bool),
            kv.shape[4],
        )
        rows = [self.tables[b][0].expand(batch, 1, -1) for b in range(branches)]
        return state, ModelOutput(rows[0].clone(), rows[1].clone() if guidance else None)

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        from visacc.cache import window_mask

        state.limit = state.kv.shape[4]
        batch, total = state.batch, self.layout.total
        address = addresses(state, proposal)
        rows = torch.arange(batch)[:, None]
        where = address.clamp(max=state.kv.shape[4] - 1)
        for branch in range(state.branches):
            for i, value in enumerate((proposal.tokens, proposal.positions)):
                state.kv[0, 0, branch * batch + rows, 0, where, i] = value.double()
        seen = window_mask(state, proposal)[:batch]  # [B, N, S]
        token, position = state.kv[0, 0, :batch, 0, :, 0].long(), state.kv[0, 0, :batch, 0, :, 1].long()
        context = torch.full((batch, proposal.size, total + 1), self.base - 1)
        slot = torch.where(seen & (position >= 0)[:, None], position[:, None], total)
        context.scatter_(2, slot, token[:, None].expand_as(slot))
        outputs = [proposal.take(self.logits(b, context, proposal.positions)) for b in range(state.branches)]
        return ModelOutput(outputs[0], outputs[1] if state.branches > 1 else None)

    def logits(self, branch: int, context: Tensor, positions: Tensor) -> Tensor:
        """[B, N, V] after nodes at ``positions`` [B, N] that see ``context`` [B, N, total + 1]: codes by slot, V unseen."""
        logits = self.tables[branch][0].new_zeros(*positions.shape, self.layout.vocab)
        for t in range(1, self.layout.total):
            power = self.base ** torch.arange(t - 1, -1, -1)
            index = (context[..., :t] * power).sum(-1)
            logits = torch.where((positions == t - 1)[..., None], self.tables[branch][t][index], logits)
        return logits

    def decode(self, codes: Tensor) -> Tensor:
        return (codes.float() / self.layout.vocab).movedim(1, 1).expand(-1, 3, -1, -1)

    def law(self, processed: Any) -> dict[tuple[int, ...], float]:
        """Chain-rule law of the whole sequence; ``processed(logits [1, V], uncond, slot) -> probabilities``."""
        result = {(): 1.0}
        for t in range(self.layout.total):
            longer = {}
            for prefix, mass in result.items():
                index = 0
                for token in prefix:
                    index = index * self.base + token
                p = processed(self.tables[0][t][index][None], self.tables[1][t][index][None], t)[0]
                for token, value in enumerate(p.tolist()):
                    if value > 0:
                        longer[(*prefix, token)] = mass * value
            result = longer
        return result


class NeighbourModel(TableModel):
    """Logits are a base plus one table row per visible neighbour (left, above): additive, as neighbour tables assume."""

    name = "neighbours"

    def __init__(self, vocab: int, height: int, width: int, *, seed: int = 0, std: float = 1.0) -> None:
        super().__init__(vocab, 1)
        self.layout = Layout((1, height, width), vocab)
        g = torch.Generator().manual_seed(seed)
        self.tables = [[torch.randn(1, vocab, generator=g)] for _ in range(2)]
        self.effects = torch.randn(2, vocab, vocab, generator=g) * std

    def logits(self, branch: int, context: Tensor, positions: Tensor) -> Tensor:
        slot = positions + 1
        total = self.tables[branch][0].expand(*positions.shape, -1).clone()
        for effect, offset in zip(self.effects, ((0, 0, -1), (0, -1, 0)), strict=True):
            cell = self.layout.neighbour(*offset)[slot.clamp(max=self.layout.total - 1)]
            code = context.gather(2, cell.clamp(min=0)[..., None])[..., 0]
            seen = (cell >= 0) & (code < self.layout.vocab)
            total += effect[code.clamp(max=self.layout.vocab - 1)] * seen[..., None]
        return total


def recorded(model: ImageModel) -> list[Tensor]:
    """The logits of all forwards that the model runs from here on, the prompt's first."""
    found: list[Tensor] = []
    for name in ("prefill", "open", "forward"):
        call = getattr(model, name)

        def wrapped(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            output = result[1] if isinstance(result, tuple) else result
            found.append(output.logits)
            return result

        setattr(model, name, wrapped)
    return found
