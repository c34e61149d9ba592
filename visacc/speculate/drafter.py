"""A drafter: row builder x backbone x head, with its caches. Trees are grown by a policy (``trees.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from visacc.speculate.backbones import make_backbone
from visacc.speculate.blocks import Attend, RMSNorm
from visacc.speculate.config import DrafterConfig
from visacc.speculate.kv import RowCache
from visacc.speculate.rows import ROWS, PrefillRows
from visacc.speculate.trees import TreePolicy, make_policy
from visacc.speculate.views import AcceptedStep, PromptView, TargetFeatures

Embed = Callable[[Tensor], Tensor]


@dataclass
class DraftState:
    """A batch's drafter state between rounds.

    Attributes:
        kv, cross_kv: committed rows of the self- and cross-attention.
        next_pos: int64 [B] drafter position of the root's children.
        root: int64 [B].
        feature: [B, D] (or [B, K, D]) predicted feature of the root, i.e. the drafter's last committed
            output.
        logits: float32 [B, V] (or [B, K, V]) draft logits behind the root.
        extra: per-request tensors of the row builder.
    """

    kv: RowCache
    cross_kv: RowCache | None
    next_pos: Tensor
    root: Tensor
    feature: Tensor
    logits: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows of the batch."""
        self.kv.select(rows)
        if self.cross_kv is not None:
            self.cross_kv.select(rows)
        for name in ("next_pos", "root", "feature", "logits"):
            setattr(self, name, getattr(self, name)[rows])
        self.extra = {k: v[rows] for k, v in self.extra.items()}

    def tighten(self) -> None:
        """Lower the host's bounds to the true lengths (looks at the device)."""
        self.kv.bound = int(self.kv.length.max())
        if self.cross_kv is not None:
            self.cross_kv.bound = int(self.cross_kv.length.max())


class TargetHead(nn.Module):
    """Draft logits by the target's own head."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c

    def forward(self, features: Tensor, head: Embed) -> Tensor:
        return head(features).float()


class OwnHead(nn.Module):
    """EAGLE-3: norm and head of the drafter over its own, usually smaller, vocabulary."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        size = c.draft_vocab_size or c.vocab_size
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.lm_head = nn.Linear(c.hidden_size, size, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))

    def forward(self, features: Tensor, head: Embed) -> Tensor:
        logits = self.lm_head(self.norm(features)).float()
        if logits.shape[-1] == self.c.vocab_size:
            return logits
        ids = torch.arange(logits.shape[-1], device=logits.device) + self.d2t
        full = logits.new_full((*logits.shape[:-1], self.c.vocab_size), -torch.inf)
        return full.index_copy_(-1, ids, logits)


class Drafter(nn.Module):
    """One drafter network. Bind it to a target before use; it never copies the target's embedding or head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.rows: Any = ROWS[config.method](config)
        self.backbone: Any = make_backbone(config)
        self.head: Any = OwnHead(config) if config.method == "eagle3" else TargetHead(config)
        self._embed: Embed | None = None
        self._target_head: Embed | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def ahead(self) -> int:
        """Tokens predicted by one row (K of FLASH)."""
        return self.config.heads_ahead if self.config.method == "flash" else 1

    def default_tree(self) -> TreePolicy | None:
        """The tree it was made for, if its configuration names one."""
        return make_policy(**self.config.tree) if self.config.tree else None

    def bind(self, embed: Embed, head: Embed, *, hidden_size: int, vocab_size: int) -> None:
        """Use the target's embedding and head.

        Args:
            embed: token ids -> embeddings as they enter the target's first layer (scaling included).
            head: features after the final norm -> logits.

        Raises:
            ValueError: the widths disagree.
        """
        c = self.config
        wanted = c.target_hidden_size or c.hidden_size
        if hidden_size != wanted:
            raise ValueError(
                f"this {c.method} drafter was made for a target of hidden size {wanted}, not {hidden_size}"
            )
        if c.draft_vocab_size and vocab_size != c.vocab_size:
            raise ValueError(f"the drafter maps to {c.vocab_size} tokens, the target has {vocab_size}")
        self._embed, self._target_head = embed, head

    def embed(self, tokens: Tensor) -> Tensor:
        if self._embed is None:
            raise RuntimeError("bind the drafter to a target first (Drafter.bind)")
        return self._embed(tokens)

    def logits(self, features: Tensor) -> Tensor:
        if self._target_head is None:
            raise RuntimeError("bind the drafter to a target first (Drafter.bind)")
        return self.head(features, self._target_head)

    def feed_back(self, features: Tensor) -> Tensor:
        """What the next drafted row takes as the feature of its parent."""
        if isinstance(self.head, OwnHead) and self.config.norm_output:
            return self.head.norm(features)
        return features

    # ------------------------------------------------------------------ rounds

    def prefill(self, view: PromptView, feats: TargetFeatures, root: Tensor, *, room: int) -> DraftState:
        """Read the prompt.

        Args:
            root: int64 [B] first sampled token.
            room: columns to keep free behind the prompt (new tokens plus the largest tree).
        """
        rows = self.rows.prefill(view, feats, self.embed(root))
        c, device = self.config, rows.x.device
        batch, width = rows.valid.shape
        kv = RowCache.empty(
            self.backbone.self_layers, batch, c.kv_heads, c.head_dim, width + room, rows.x.dtype, device
        )
        kv.valid[:, :width] = rows.valid
        cross_kv = None
        if rows.cross is not None:
            keys = rows.cross.shape[1]
            cross_kv = RowCache.empty(1, batch, c.kv_heads, c.head_dim, keys + room, rows.x.dtype, device)
            assert rows.cross_valid is not None
            cross_kv.valid[:, :keys] = rows.cross_valid
        how = prompt_attention(rows, uniform_blind=c.uniform_first_row)
        how.kv, how.limit, how.address = kv, width, kv.addresses(0, width)
        if cross_kv is not None:
            assert rows.cross is not None
            how.cross_kv, how.cross_limit = cross_kv, rows.cross.shape[1]
            how.cross_address = cross_kv.addresses(0, rows.cross.shape[1])
        out, _ = self.backbone(rows.x, how)
        kv.commit(torch.full_like(kv.length, width), width)
        if cross_kv is not None:
            assert rows.cross is not None
            cross_kv.commit(torch.full_like(kv.length, rows.cross.shape[1]), rows.cross.shape[1])
        feature = self.feed_back(out[:, -1])
        return DraftState(kv, cross_kv, rows.next_pos, root, feature, self.logits(out[:, -1]), rows.extra)

    def observe(self, state: DraftState, step: AcceptedStep) -> None:
        """Append the rows of a verified step: features of its kept nodes paired with the tokens that follow
        them.

        Rows at and beyond ``step.n`` are computed too and left in scratch. A row with n = 0 is finished.
        """
        order = torch.arange(step.path.shape[1], device=step.n.device)
        last = (step.n - 1).clamp(min=0)
        following = torch.cat([step.tokens[:, 1:], step.next_root[:, None]], dim=1)
        following = torch.where(order == last[:, None], step.next_root[:, None], following)
        n = following.shape[1]
        seen = (order[:, None] >= order).expand(len(step.n), n, n)
        feature = self.rows.feature(step.feats)
        pos = state.next_pos[:, None] + order
        out = self._run(state, following, feature, pos, seen, first=0)
        at = last[:, None, None].expand(-1, 1, out.shape[2]) if out.ndim == 3 else None
        tip = (
            out.gather(1, at)[:, 0]
            if at is not None
            else out[torch.arange(len(last), device=last.device), last]
        )
        state.kv.commit(step.n, n)
        if state.cross_kv is not None:
            state.cross_kv.commit(step.n, n)
        state.next_pos = state.next_pos + step.n
        state.root = step.next_root
        state.feature, state.logits = self.feed_back(tip), self.logits(tip)

    def _run(
        self,
        state: DraftState,
        tokens: Tensor,
        feature: Tensor,
        pos: Tensor,
        seen: Tensor,
        first: int,
        cross_seen: Tensor | None = None,
    ) -> Tensor:
        """Text rows [B, n] written at uncommitted columns ``first..``; ``seen`` bool [B, n, first + n]."""
        x = self.rows.fuse(self.embed(tokens), feature, state.extra)
        n = tokens.shape[1]
        if self.config.mrope_sections:
            pos = pos.expand(3, *pos.shape)
        limit = state.kv.limit(first + n)
        how = Attend(pos, state.kv.mask(seen, limit), state.kv, state.kv.addresses(first, n), limit)
        if state.cross_kv is not None:
            how.cross_limit = state.cross_kv.limit(first + n)
            how.cross_mask = state.cross_kv.mask(seen if cross_seen is None else cross_seen, how.cross_limit)
            how.cross_kv, how.cross_address = state.cross_kv, state.cross_kv.addresses(first, n)
            how.cross_feats, how.uniform_blind = feature, self.config.uniform_first_row
        out, _ = self.backbone(x, how)
        return out

    def session(self, state: DraftState) -> Session:
        """A scratch pad for growing one tree."""
        return Session(self, state)

    # ------------------------------------------------------------------ teacher forcing

    def teach(self, rows: PrefillRows) -> tuple[Tensor, Tensor | None]:
        """Outputs of all rows in parallel, without a cache (training)."""
        return self.backbone(rows.x, prompt_attention(rows, uniform_blind=self.config.uniform_first_row))


def prompt_attention(rows: PrefillRows, *, uniform_blind: bool) -> Attend:
    """Causal attention over left-padded rows; a padding row sees itself. Cross keys end one before their
    row.
    """
    width = rows.valid.shape[1]
    order = torch.arange(width, device=rows.valid.device)
    mask = (order[:, None] >= order) & rows.valid[:, None]
    how = Attend(rows.pos, mask | torch.eye(width, dtype=torch.bool, device=order.device))
    if rows.cross is not None:
        assert rows.cross_valid is not None
        keys = rows.cross.shape[1]
        # rows and keys are aligned at their ends: the last row (token N) sees all keys h_0 .. h_{N-1}
        key = torch.arange(keys, device=order.device) + (width - 1 - keys)
        how.cross_mask = (key < order[:, None]) & rows.cross_valid[:, None]
        how.cross_feats, how.uniform_blind = rows.cross, uniform_blind
    return how


class Session:
    """Growing one tree: rows run in scratch, each seeing the committed rows, its ancestors and itself."""

    def __init__(self, drafter: Drafter, state: DraftState) -> None:
        self.drafter, self.state = drafter, state
        batch = len(state.root)
        self.seen = torch.zeros(batch, 0, 0, dtype=torch.bool, device=state.root.device)

    @property
    def size(self) -> int:
        return self.seen.shape[1]

    def run(
        self, tokens: Tensor, feature: Tensor, parents: Tensor, depth: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Run nodes.

        Args:
            tokens: int64 [B, n]. feature: [B, n, D] features of their parents.
            parents: int64 [B, n] scratch rows of the parents (numbered in the order they were run, within
                one call only rows before the node), -1 for children of the root.
            depth: tree depth of the nodes, 1 for children of the root; a number or int64 [n].

        Returns:
            features [B, n, D] (or [B, n, K, D]) and logits float32 [B, n, V] (or [B, n, K, V]).
        """
        batch, n = tokens.shape
        first = self.size
        seen = torch.zeros(batch, first + n, first + n, dtype=torch.bool, device=tokens.device)
        seen[:, :first, :first] = self.seen
        rows = torch.arange(batch, device=tokens.device)
        internal = bool(n > 1 and not isinstance(depth, int))
        if internal:
            for i in range(n):
                self._adopt(seen, rows, parents[:, i : i + 1], first + i, 1)
        else:
            self._adopt(seen, rows, parents, first, n)
        self.seen = seen
        cross_seen = None
        if self.drafter.config.official_cross_mask:
            order = torch.arange(first + n, device=tokens.device)
            cross_seen = (order <= order[first:, None]).expand(batch, n, -1)
        pos = (self.state.next_pos[:, None] + depth - 1).expand(batch, n)
        out = self.drafter._run(self.state, tokens, feature, pos, seen[:, first:], first, cross_seen)
        return self.drafter.feed_back(out), self.drafter.logits(out)

    @staticmethod
    def _adopt(seen: Tensor, rows: Tensor, parents: Tensor, first: int, n: int) -> None:
        inherited = seen[rows[:, None], parents.clamp(min=0)] & (parents >= 0)[..., None]
        seen[:, first : first + n] = inherited
        own = torch.arange(first, first + n, device=seen.device)
        seen[:, own, own] = True
