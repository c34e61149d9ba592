"""Decoding by a schedule that is known in advance: which tokens each pass feeds and which slots it decides.

Plain raster decoding, ZipAR (arXiv 2412.04062), NAR (arXiv 2503.10696), next-block prediction and
locality-aware parallel decoding differ only in such a schedule: nothing is drafted, nothing is rejected,
every token of a pass is kept. A :class:`PackedPlan` holds the whole schedule as index tensors, so that the
decode loop is gathers and no bookkeeping; :class:`PlanDecoder` runs it. A subclass provides
:meth:`PlanDecoder.plan`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict, gumbel_draw
from visacc.models.base import Layout, ModelOutput, Proposal

if TYPE_CHECKING:
    from visacc.engine import Run

Mask = Literal["filled_causal", "addr_causal", "filled_block"]
QUERY = -1
"""``source`` of a vector that carries no token: source -1 - j feeds the model's special input j."""


@dataclass(frozen=True)
class Feed:
    """One vector fed in a pass.

    Attributes:
        slot: the slot whose position the vector takes.
        source: slot whose token it carries (differs from ``slot`` for a stand-in), or :data:`QUERY` - j for
            the model's special input j (a learned query or mask vector).
        keep: stays valid for later passes. A vector that is not kept is seen only by itself under the causal
            masks, and by its own pass under ``filled_block``.
        address: cache address, ``None`` for ``slot``.
    """

    slot: int
    source: int
    keep: bool = True
    address: int | None = None

    @property
    def at(self) -> int:
        return self.slot if self.address is None else self.address


@dataclass
class Pass:
    """One target forward: vectors fed, and per decided slot the index of the vector that predicts it.

    ``decided[slot] = None`` commits a slot that the model's grammar forces; it needs no prediction.
    """

    feeds: list[Feed] = field(default_factory=list)
    decided: dict[int, int | None] = field(default_factory=dict)

    def forced(self) -> set[int]:
        """Slots whose token the grammar knows: they may be fed in the pass that commits them."""
        return {slot for slot, node in self.decided.items() if node is None}


@dataclass(frozen=True)
class PackedPlan:
    """A schedule as tensors, P passes (pass 0 is the prompt's), padded to S vectors and R decided slots;
    padding is -1.

    Attributes:
        total: number of slots.
        mask: ``filled_causal``: a vector sees the valid addresses up to its own; ``addr_causal``: all
            addresses up to its own, even never written ones (zero keys, official LlamaGen-ZipAR);
            ``filled_block``: all valid addresses and its whole pass.
        n_in, n_out: vectors and decided slots of each pass.
        feed_slot, feed_src, feed_addr: int64 [P, S], see :class:`Feed`.
        keep: bool [P, S].
        take: int64 [P, R] vector that predicts, -1 where the slot is forced.
        out_slot: int64 [P, R].
        valid_from: int64 [L] pass from which on an address may be seen; P where never.
        reach: per pass one more than the largest address used so far.
        has_queries: whether some vector carries a special input instead of a token.
    """

    total: int
    mask: Mask
    n_in: tuple[int, ...]
    n_out: tuple[int, ...]
    feed_slot: Tensor
    feed_src: Tensor
    feed_addr: Tensor
    keep: Tensor
    take: Tensor
    out_slot: Tensor
    valid_from: Tensor
    reach: tuple[int, ...]
    has_queries: bool = False

    @property
    def passes(self) -> int:
        return len(self.n_in)

    @property
    def width(self) -> int:
        """Most vectors fed in one pass."""
        return max(self.n_in)

    def to(self, device: torch.device) -> PackedPlan:
        moved: dict[str, Any] = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def sees(self, step: int, fed: slice) -> Tensor:
        """bool [n, L]: the addresses each vector of pass ``step`` sees, L = the reach of that pass."""
        length = self.reach[step]
        slot = torch.arange(length, device=self.feed_addr.device)
        own = self.feed_addr[step, fed][:, None]
        if self.mask == "addr_causal":
            return slot <= own
        valid = self.valid_from[:length] <= step
        if self.mask == "filled_causal":
            return (valid & (slot < own)) | (slot == own)
        return valid.index_fill(0, self.feed_addr[step, fed], True).expand(own.shape[0], -1)


def pack(total: int, passes: Sequence[Pass], mask: Mask = "filled_causal") -> PackedPlan:
    """Passes, the first being the prompt's (it decides slot 0 and feeds nothing), as one :class:`PackedPlan`.

    Raises:
        ValueError: a slot is decided never or twice, a vector needs a token that is not there yet, two
            vectors of a pass share an address, a kept vector is overwritten by something else than its own
            token.
    """
    _check(total, passes)
    feeds, decided = [p.feeds for p in passes], [p.decided for p in passes]
    n_in, n_out = tuple(map(len, feeds)), tuple(map(len, decided))
    width, outs = max(*n_in, 1), max(n_out)

    def table(rows: Iterable[Sequence[int]], size: int) -> Tensor:
        return torch.tensor([[*row, *[-1] * (size - len(row))] for row in rows], dtype=torch.int64)

    length = 1 + max((f.at for row in feeds for f in row), default=0)
    valid_from = torch.full((length,), len(passes), dtype=torch.int64)
    reach, top = [], 0
    for step, row in enumerate(feeds):
        top = max([top, *(f.at + 1 for f in row)])
        reach.append(top)
        for f in row:
            if f.keep:
                valid_from[f.at] = min(int(valid_from[f.at]), step)
    return PackedPlan(
        total,
        mask,
        n_in,
        n_out,
        feed_slot=table(([f.slot for f in row] for row in feeds), width),
        feed_src=table(([f.source for f in row] for row in feeds), width),
        feed_addr=table(([f.at for f in row] for row in feeds), width),
        keep=table(([int(f.keep) for f in row] for row in feeds), width) > 0,
        take=table(([-1 if node is None else node for node in row.values()] for row in decided), outs),
        out_slot=table((list(row) for row in decided), outs),
        valid_from=valid_from,
        reach=tuple(reach),
        has_queries=any(f.source < 0 for row in feeds for f in row),
    )


def _check(total: int, passes: Sequence[Pass]) -> None:
    """The invariants that make a schedule executable."""
    known: set[int] = set()
    final: set[int] = set()  # addresses that hold a slot's own token for good
    for step, one in enumerate(passes):
        used: set[int] = set()
        for feed in one.feeds:
            if feed.at in used:
                raise ValueError(f"plan: pass {step} writes address {feed.at} twice")
            if feed.source >= 0 and feed.source not in known and feed.source not in one.forced():
                raise ValueError(
                    f"plan: pass {step} feeds the token of slot {feed.source} before it is decided"
                )
            own = feed.source == feed.slot
            if feed.at in final and not own:
                raise ValueError(f"plan: pass {step} overwrites the final entry at address {feed.at}")
            used.add(feed.at)
            if own and feed.keep:
                final.add(feed.at)
        for slot, node in one.decided.items():
            if not 0 <= slot < total or slot in known:
                raise ValueError(
                    f"plan: pass {step} decides slot {slot}, which is out of range or decided already"
                )
            if node is not None and step > 0 and not 0 <= node < len(one.feeds):
                raise ValueError(
                    f"plan: pass {step} takes slot {slot} from vector {node} of {len(one.feeds)}"
                )
        known |= one.decided.keys()
    if len(known) != total:
        raise ValueError(f"plan: {total - len(known)} of {total} slots are never decided")
    if not passes or list(passes[0].decided) != [0] or passes[0].feeds:
        raise ValueError("plan: pass 0 is the prompt's: it decides slot 0 and feeds nothing")


class PlanDecoder(Decoder):
    """Runs a static schedule. All samples of a batch are in step, so the host knows every shape in
    advance."""

    requires = frozenset({"tree_mask"})

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[tuple[Layout, torch.device], PackedPlan] = {}

    @abstractmethod
    def plan(self, layout: Layout) -> PackedPlan:
        """The schedule for a layout, on the CPU."""

    def plan_on(self, layout: Layout, device: torch.device) -> PackedPlan:
        key = (layout, device)
        if key not in self._plans:
            self._plans[key] = self.plan(layout).to(device)
        return self._plans[key]

    def max_nodes(self, layout: Layout) -> int:
        return self.plan_on(layout, torch.device("cpu")).width

    def propose(self, run: Run) -> Proposal:
        plan, step = self.plan_on(run.layout, run.device), run.step
        fed = slice(plan.n_in[step])
        source = plan.feed_src[step, fed]
        tokens = run.sequence[:, source.clamp(min=0)]
        shape = tokens.shape
        return Proposal(
            tokens,
            plan.feed_slot[step, fed].expand(shape),
            torch.ones(shape, dtype=torch.bool, device=run.device),
            address=plan.feed_addr[step, fed].expand(shape),
            context=plan.sees(step, fed).expand(*shape, -1),
            reach=plan.reach[step],
            special=torch.where(source < 0, -1 - source, -1) if plan.has_queries else None,
        )

    def _decided(self, run: Run) -> tuple[Tensor, Tensor]:
        """Predicting vector (-1: forced) and slot of every slot the present pass decides: int64 [R] each."""
        plan, step = self.plan_on(run.layout, run.device), run.step - 1
        decided = slice(plan.n_out[step])
        return plan.take[step, decided], plan.out_slot[step, decided]

    def predicted_slots(self, run: Run, proposal: Proposal) -> Tensor:
        take, out = self._decided(run)
        # vectors that predict nothing point beyond the layout; forced slots write to a spare column
        slots = torch.full((proposal.size + 1,), run.total, device=run.device)
        slots[torch.where(take < 0, proposal.size, take)] = out
        return slots[:-1].expand(run.batch, -1)

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        take, out = self._decided(run)
        slots = out.expand(run.batch, -1)
        tokens = gumbel_draw(run, law[:, take.clamp(min=0)], slots, bound=run.total)
        tokens = tokens.masked_fill(take < 0, 0)
        return Verdict(tokens, slots, torch.ones_like(slots, dtype=torch.bool))
