"""Drafting without a trained network: an n-gram model over the prompt, the text so far and earlier outputs.

The longest suffix (up to ``order`` tokens) that occurred before votes for what follows; shorter suffixes
vote with less weight. It plugs into the same tree policies as a network: its "feature" of a node is the
node's last tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visacc.speculate.trees import DynamicTree, TreePolicy
from visacc.speculate.views import AcceptedStep, PromptView, TargetFeatures


@dataclass
class NgramState:
    """Text of every row so far, left-padded with -1: int64 [B, L]; votes behind the root [B, V]."""

    text: Tensor
    length: Tensor
    root: Tensor
    feature: Tensor
    logits: Tensor

    def select(self, rows: Tensor) -> None:
        for name in ("text", "length", "root", "feature", "logits"):
            setattr(self, name, getattr(self, name)[rows])

    def tighten(self) -> None:
        """Nothing to do: there is no cache."""


class NgramDrafter:
    """Prompt lookup that also remembers what it wrote for earlier prompts.

    Args:
        vocab_size: the target's.
        order: longest suffix looked up.
        memory: how many tokens of earlier outputs are kept.
    """

    ahead = 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it reads: none."""
        return ()

    def __init__(self, vocab_size: int, order: int = 4, memory: int = 8192) -> None:
        if order < 1 or memory < 0:
            raise ValueError(f"order must be >= 1 and memory >= 0, got {order} and {memory}")
        self.vocab_size, self.order, self.memory = vocab_size, order, memory
        self.past = torch.zeros(0, dtype=torch.int64)

    @staticmethod
    def default_tree() -> TreePolicy:
        return DynamicTree(depth=4, top_k=2, budget=12)

    def remember(self, text: Tensor) -> None:
        """Add a finished output (int64 [n], without padding) to the memory; -1 separates texts."""
        gap = torch.full((1,), -1, dtype=torch.int64, device=text.device)
        self.past = (
            torch.cat([self.past.to(text.device), text, gap])[-self.memory :] if self.memory else self.past
        )

    def forget(self) -> None:
        """Empty the memory."""
        self.past = self.past[:0]

    def prefill(self, view: PromptView, feats: TargetFeatures, root: Tensor, *, room: int) -> NgramState:
        known = view.valid & ~view.visual
        text = torch.where(known, view.input_ids, -1)
        spare = text.new_full((text.shape[0], room), -1)
        state = NgramState(
            torch.cat([text, spare], dim=1),
            torch.full_like(root, text.shape[1]),
            root,
            root[:, None],
            torch.zeros(0, device=root.device),
        )
        self._append(state, root[:, None], torch.ones_like(root))
        self._refresh(state)
        return state

    def observe(self, state: NgramState, step: AcceptedStep) -> None:
        # the root is in the text already: the tokens behind it follow, the new root last
        new = torch.cat([step.tokens[:, 1:], step.next_root[:, None]], dim=1)
        order = torch.arange(new.shape[1], device=new.device)
        new = torch.where(order == (step.n - 1).clamp(min=0)[:, None], step.next_root[:, None], new)
        self._append(state, new, step.n)
        state.root = step.next_root
        self._refresh(state)

    def session(self, state: NgramState) -> NgramSession:
        return NgramSession(self, state)

    @staticmethod
    def _append(state: NgramState, new: Tensor, n: Tensor) -> None:
        order = torch.arange(new.shape[1], device=new.device)
        width = state.text.shape[1]
        at = (state.length[:, None] + order).clamp(max=width - 1)
        old = state.text.gather(1, at)
        state.text = state.text.scatter(1, at, torch.where(order < n[:, None], new, old))
        state.length = (state.length + n).clamp(max=width)

    def _refresh(self, state: NgramState) -> None:
        order = torch.arange(-self.order, 0, device=state.text.device)
        at = (state.length[:, None] + order).clamp(min=0)
        state.feature = state.text.gather(1, at)  # the last tokens, oldest first
        state.logits = self.votes(state, state.feature[:, None])[:, 0]

    def votes(self, state: NgramState, suffix: Tensor) -> Tensor:
        """Log-votes float32 [B, n, V] for the token behind each suffix int64 [B, n, order]."""
        batch, n, order = suffix.shape
        past = self.past.to(suffix.device).expand(batch, -1)
        corpus = torch.cat([past, torch.full_like(state.text[:, :1], -1), state.text], dim=1)
        score = torch.full((batch, n, self.vocab_size), 1e-6, dtype=torch.float32, device=suffix.device)
        following = corpus[:, 1:]
        match = torch.ones(batch, n, following.shape[1], dtype=torch.bool, device=suffix.device)
        known = (following >= 0)[:, None]
        target = following.clamp(min=0)[:, None].expand(-1, n, -1)
        for back in range(order):
            # position i is compared with the token that stood `back` places before it
            shifted = torch.nn.functional.pad(corpus[:, : corpus.shape[1] - 1 - back], (back, 0), value=-1)
            wanted = suffix[..., order - 1 - back]
            match = match & (shifted[:, None] == wanted[..., None]) & (wanted >= 0)[..., None]
            weight = (match & known).float() * 10.0**back
            score.scatter_add_(2, target, weight)
        return (score / score.sum(2, keepdim=True)).log()


class NgramSession:
    """Growing a tree: a node's feature is its own suffix; ancestors need no rows."""

    def __init__(self, drafter: NgramDrafter, state: NgramState) -> None:
        self.drafter, self.state = drafter, state

    def run(
        self, tokens: Tensor, feature: Tensor, parents: Tensor, depth: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        suffix = torch.cat([feature[..., 1:], tokens[..., None]], dim=-1)
        return suffix, self.drafter.votes(self.state, suffix)
