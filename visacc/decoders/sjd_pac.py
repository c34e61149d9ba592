"""SJD-PAC: a coupled Jacobi window whose head is a small token tree (arXiv 2603.18599), repaired to be lossless.

*Adaptive continuation* is the maximal coupling of MC-SJD. *Proactive drafting* hedges the place where a step is likely
to end: the first ``depth - 1`` positions of the window carry ``branching`` candidates each, the same ones below every
parent, and the rest of the window is a chain below the first leaf.

The released program fails a chi-square test; what was repaired (numbers of our reference notes on the method):

1. candidates 2..K of a level are drawn without replacement from the recorded law of candidate 1, which is what the test
   assumes (the release draws them from a residual, where they may repeat candidate 1);
2. the tree is walked level by level and the first accepted sibling is taken (the release takes the longest accepted
   path, although the laws of later siblings presuppose that the earlier ones failed);
3. when every node of a path stands, the next token is drawn from the law behind it (the release draws it from the
   padding's uniform law);
4. this holds in the first step too, whose candidates are distinct uniform draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visacc.decoders.base import Verdict
from visacc.decoders.jacobi import Jacobi
from visacc.decoders.window_init import Fresh
from visacc.kernels import draw, race_topk, rng, window_resample
from visacc.models.base import Layout, ModelOutput, Proposal
from visacc.verify import DraftTree, TreeShape, verify

if TYPE_CHECKING:
    from visacc.engine import Run


def pac_shape(window: int, branching: int, depth: int) -> tuple[TreeShape, tuple[int, ...], tuple[int, ...]]:
    """The tree of ``window`` nodes: its shape, the candidate number of every node (0 on the chain), and the nodes of the
    first-child path from the root to the end of the chain."""
    parent, rank, level = [-1], [0], [0]
    path = [0]
    for _ in range(depth - 1):
        following = []
        for up in level:
            for k in range(branching):
                following.append(len(parent))
                parent.append(up)
                rank.append(k)
        level = following
        path.append(level[0])
    while len(parent) < window:
        parent.append(path[-1])
        path.append(len(parent) - 1)
        rank.append(0)
    return TreeShape(tuple(parent)), tuple(rank), tuple(path)


WIDEST = 1 << 14
"""Window beyond which its masks, quadratic in it, are taken for a mistake."""


def tree_nodes(branching: int, depth: int) -> int:
    """Nodes of the tree before the chain, the root included."""
    return sum(branching**d for d in range(depth))


class SJDPAC(Jacobi):
    """Coupled Jacobi decoding with a tree of candidates at the head of the window.

    Args:
        window: nodes per pass, the last committed token included.
        branching: candidates per level; ``None`` takes the published 4 where the tree fills at most half of the window,
            else 3 or 2.
        depth: levels of the tree, the root included (the published 3).

    Raises:
        ValueError: a tree that does not fit into the window, fewer than two candidates or levels.
    """

    name = "sjd-pac"
    summary = "coupled Jacobi window with a token tree at its head"
    requires = frozenset({"tree_mask"})

    def __init__(self, window: int = 64, branching: int | None = None, depth: int = 3) -> None:
        super().__init__(window, "maximal", "random")
        for label, value in (("branching", branching), ("depth", depth)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
                raise ValueError(f"{label} must be an integer of at least 2, got {value!r}")
        if window > WIDEST:
            raise ValueError(f"window must be at most {WIDEST}, got {window}")
        if depth > window.bit_length():  # even a tree of branching 2 has more nodes than the window, by far
            raise ValueError(
                f"a tree of depth {depth} does not fit into a window of {window}; lower the depth"
            )
        if branching is None:
            fitting = [k for k in (4, 3, 2) if 2 * tree_nodes(k, depth) <= window]
            branching = fitting[0] if fitting else 2
        if tree_nodes(branching, depth) > window:
            raise ValueError(
                f"a tree of branching {branching} and depth {depth} has {tree_nodes(branching, depth)} nodes, more than"
                f" the window of {window}; enlarge the window or lower one of them"
            )
        self.branching, self.depth = branching, depth
        self.shape, self._rank, self._path = pac_shape(window, branching, depth)

    def options(self) -> dict[str, Any]:
        return {"window": self.window, "branching": self.branching, "depth": self.depth}

    def max_nodes(self, layout: Layout) -> int:
        return self.window

    def begin(self, run: Run, law: Tensor) -> Tensor:
        device = run.device
        self._tree = self.shape.tensors(device)
        self._level = self._tree.index.depth[0]
        self._ranks = torch.tensor(self._rank, device=device)
        self._first = torch.tensor(self._path, device=device)
        first = super().begin(run, law)
        q, onehot = self.state.pop("q"), self.state.pop("onehot")
        assert q is not None and onehot is not None
        length = len(self._path) - 1
        drafts = self.state["drafts"]
        assert drafts is not None
        slots = torch.ones_like(run.count)[:, None] + torch.arange(length, device=device)
        self._keep(run, slots, drafts[:, :length], _point_where(onehot[:, :length], q[:, :length]))
        return first

    def _keep(self, run: Run, slots: Tensor, drafts: Tensor, q: Tensor) -> None:
        """Store the drafts of the first-child path [B, L] with their laws [B, L, V], and draw their siblings."""
        heads = self.depth - 1
        ids = torch.arange(run.layout.vocab, device=run.device)
        place = slots[:, :heads].clamp(max=run.total - 1)
        noise = rng.exponential(run.noise.seeds[:, None, None], ids, place[..., None], run.step, rng.DRAFT)
        others = q[:, :heads].scatter(2, drafts[:, :heads, None], 0.0)
        count = min(self.branching - 1, run.layout.vocab - 1)
        siblings, live = race_topk(others, noise, count)
        missing = self.branching - 1 - count
        self.state["drafts"], self.state["q"] = drafts, q
        self.state["siblings"] = torch.nn.functional.pad(siblings, (0, missing))
        self.state["sibling_live"] = torch.nn.functional.pad(live, (0, missing))

    def _nodes(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and liveness of all nodes: [B, T] each."""
        drafts, siblings, live = (self.state[k] for k in ("drafts", "siblings", "sibling_live"))
        assert drafts is not None and siblings is not None and live is not None
        at = (self._level - 1).clamp(min=0)
        head, other = at.clamp(max=self.depth - 2), (self._ranks - 1).clamp(min=0)
        first = self._ranks == 0
        tokens = torch.where(first, drafts[:, at], siblings[:, head, other])
        tokens = torch.where(self._level == 0, run.last_tokens()[:, None], tokens)
        slots = (run.count - 1)[:, None] + self._level
        # what hangs below a sibling without mass is dead as well
        alive = torch.where(first, True, live[:, head, other]) & (slots < run.total)
        dead_above = (self._tree.index.ancestors[0] & ~alive[:, None]).any(2)
        return tokens, slots, ~dead_above

    def propose(self, run: Run) -> Proposal:
        tokens, slots, live = self._nodes(run)
        visible = self._tree.index.ancestors.expand(run.batch, -1, -1)
        return Proposal(tokens, slots.clamp(max=run.total - 1), live, visible=visible)

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        return run.count[:, None] + self._level

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        q, drafts = self.state["q"], self.state["drafts"]
        assert q is not None and drafts is not None
        batch, length = drafts.shape
        slots = self.predicted_slots(run, proposal)
        inside = slots.clamp(max=run.total - 1)
        node = rng.NODE_STRIDE * torch.arange(proposal.size, device=run.device)
        parents = torch.where(self._tree.row_of >= 0, self._level, -1)
        tree = DraftTree(
            proposal.tokens,
            self._tree.parent.expand(batch, -1),
            proposal.live,
            "without_replacement",
            q,
            parents.expand(batch, -1),
            self.shape,
        )
        seeds = run.noise.seeds[:, None]
        step = verify(
            tree,
            law,
            u=rng.uniform(seeds, 0, inside, run.step, rng.ACCEPT + node),
            U=rng.integer(seeds, 0, inside, run.step, rng.RESIDUAL + node),
        )
        order = torch.arange(length + 1, device=run.device)
        count = (step.n - 1)[:, None]
        following = torch.cat([step.tokens[:, 1:], step.tokens[:, :1]], dim=1)
        tokens = torch.where(order < count, following, step.next_root[:, None])
        where = run.count[:, None] + order
        keep = (order <= count) & (where < run.total)
        self._continue(run, law[:, self._first], where, keep.sum(1))
        accepted = torch.minimum(step.n - 1, keep.sum(1))
        return Verdict(tokens, where, keep, accepted=accepted, path=step.path.long())

    def _continue(self, run: Run, law: Tensor, slots: Tensor, gained: Tensor) -> None:
        """Couple the first-child path to its new laws [B, L + 1, V] and shift it by what was committed."""
        q, drafts = self.state["q"], self.state["drafts"]
        assert q is not None and drafts is not None
        batch, length = drafts.shape
        vocab = law.shape[2]
        inside = slots.clamp(max=run.total - 1)
        _, coupled = window_resample(
            law[:, :length].flatten(0, 1),
            q.flatten(0, 1),
            drafts.flatten(),
            run.noise.uniform(rng.ACCEPT, inside[:, :length], run.step).flatten(),
            run.noise.integer(rng.RESIDUAL, inside[:, :length], run.step).flatten(),
        )
        last = draw(law[:, length], run.noise.integer(rng.DRAW, inside[:, length:], run.step)[:, 0])
        coupled = torch.cat([coupled.view(batch, length), last[:, None]], dim=1)
        source, carried, place = self._shift(run, gained, length, length + 1)
        source = source.clamp(max=length)
        fresh = self._fresh(run, place)
        assert fresh.q is not None
        rows = torch.arange(batch, device=run.device)[:, None]
        padding = _point_where(fresh.onehot, fresh.q.expand(batch, length, vocab))
        self._keep(
            run,
            place,
            torch.where(carried, coupled.gather(1, source), fresh.tokens),
            torch.where(carried[..., None], law[rows, source], padding),
        )

    def _fresh(self, run: Run, slots: Tensor) -> Fresh:
        inside = slots.clamp(max=run.total - 1)
        return self._fill(run, inside, inside[:, 0], run.sequence, None, want_q=True)


def _point_where(onehot: Tensor, q: Tensor) -> Tensor:
    """Laws [B, L, V] with a point mass on code 0 where ``onehot`` [B, L] says so (slots that the grammar forces)."""
    point = torch.zeros(q.shape[2], dtype=q.dtype, device=q.device)
    point[0] = 1
    return torch.where(onehot[..., None], point, q)
