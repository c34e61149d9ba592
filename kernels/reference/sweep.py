"""Correction and coupled redraw of a window of drafts, from its first position to its last.

The definition is sequential: a position reads the tokens that positions before it end with. Positions that no chain of
neighbours connects are decided together, wave by wave: on a grid a wave is a slanting line through its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from visacc.kernels.reference.chain import residual_weights, token_masses
from visacc.kernels.reference.sampling import draw, race

LATER = "neighbour must lie before its slot: a correction that looks ahead is not lossless"


@dataclass
class Coupling:
    """What redraws take part in, by flat window position n = b W + k; either E alone, or the others.

    Attributes:
        draft: int64 [N].
        bar: float32 [N], the draft stands iff its law's mass exceeds this; infinite where there is no draft.
        q, onehot, drafted, U: as in `visacc.kernels.window_resample`, with N rows.
        E: float32 [N, V] noise of the race.
    """

    draft: Tensor
    bar: Tensor | None = None
    q: Tensor | None = None
    onehot: Tensor | None = None
    drafted: Tensor | None = None
    U: Tensor | None = None
    E: Tensor | None = None


def neighbour_sweep(
    p: Tensor,
    draft: Tensor,
    known: Tensor,
    seen: Tensor,
    first: Tensor,
    neighbour: Tensor,
    left: Tensor,
    right: Tensor,
    fresh: Tensor,
    given: Tensor | None,
    gate: Tensor | None,
    q: Tensor | None,
    q_onehot: Tensor | None,
    has_draft: Tensor | None,
    u: Tensor | None,
    U: Tensor | None,
    E: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `visacc.kernels.neighbour_sweep`."""
    (B, W, V), (O, total) = p.shape, neighbour.shape
    slots = first[:, None] + torch.arange(W, device=p.device)
    inside = slots < total
    moving = inside if given is None else inside & ~given
    at, bounds = _waves(slots, moving, neighbour)

    # Tokens by row and slot in one list. The last column of a row says "no token", id V; what lies outside of the
    # layout is written there too, and put right again.
    width = total + 1
    now = torch.nn.functional.pad(known, (0, 1), value=V).flatten()
    before = torch.nn.functional.pad(seen, (0, 1), value=V).flatten()
    base = (torch.arange(B, device=p.device) * width)[:, None]
    target = (base + slots.clamp(max=total)).flatten()
    now[target] = draft.flatten()
    now[base[:, 0] + total] = V
    cells = neighbour.mT[slots.clamp(max=total - 1)]
    cells = (torch.where(cells < 0, total, cells) + base[..., None]).flatten(0, 1)[at]
    # and the rows of the left factors one after the other, with one of zeros for "no token"
    factors = torch.nn.functional.pad(left, (0, 0, 0, 1)).to(p.dtype).flatten(0, 1)
    shift = torch.arange(O, device=p.device) * (V + 1)
    read = torch.where(fresh.flatten()[at, None], V, before[cells])
    had = factors[read + shift].flatten(1)
    opening = None if gate is None else gate.reshape(B * W, -1)[at].to(p.dtype)
    weights = right.flatten(0, 1).to(p.dtype)

    tokens, start = draft.flatten().clone(), p.reshape(B * W, V)[at]
    logs, target = start.log(), target[at]
    laws = p.clone().view(B * W, V)
    coupling = _coupling(p, draft, q, q_onehot, has_draft, u, U, E)
    for a, b in bounds:
        ids = now[cells[a:b]]
        moved = (ids != read[a:b]).any(1)
        change = factors[ids + shift].flatten(1).sub_(had[a:b])
        if opening is not None:
            change *= opening[a:b]
        law = torch.addmm(logs[a:b], change, weights).softmax(1)
        law = torch.where(moved[:, None], law, start[a:b])
        new = choose(law, at[a:b], coupling)
        now[target[a:b]] = new
        tokens[at[a:b]], laws[at[a:b]] = new, law
    return tokens.view(B, W), laws.view(B, W, V)


def _waves(slots: Tensor, moving: Tensor, neighbour: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Flat positions of the window that move, wave by wave, and the bounds of each wave in that list."""
    low, high = int(slots.min()), min(int(slots.max()) + 1, neighbour.shape[1])
    level: list[int] = []
    for cells in neighbour[:, low:high].mT.tolist():
        if max(cells) >= low + len(level):
            raise ValueError(LATER)
        level.append(1 + max((level[c - low] for c in cells if c >= low), default=-1))
    if not level:
        return slots.new_zeros(0), []
    depth = torch.tensor(level, device=slots.device)[(slots - low).clamp(max=len(level) - 1)]
    depth = (depth - depth.amin(1, keepdim=True)).masked_fill(~moving, len(level)).flatten()
    sizes = torch.bincount(depth, minlength=len(level) + 1)[:-1].tolist()
    ends = list(accumulate(sizes, initial=0))
    return depth.argsort(stable=True)[: ends[-1]], [(a, b) for a, b in pairwise(ends) if b > a]


def _coupling(
    p: Tensor,
    draft: Tensor,
    q: Tensor | None,
    onehot: Tensor | None,
    has_draft: Tensor | None,
    u: Tensor | None,
    U: Tensor | None,
    E: Tensor | None,
) -> Coupling:
    if E is not None:
        return Coupling(draft.flatten(), E=E.flatten(0, 1))
    assert u is not None and U is not None
    bar = u * token_masses(p, q, draft, onehot)[1]
    if has_draft is None:
        has_draft = torch.ones_like(draft, dtype=torch.bool)
    bar = bar.masked_fill(~has_draft, torch.inf)
    one = None if onehot is None else onehot.flatten()
    dense = None if q is None else q.flatten(0, 1)
    return Coupling(draft.flatten(), bar.flatten(), dense, one, has_draft.flatten(), U.flatten())


def choose(law: Tensor, at: Tensor, coupling: Coupling) -> Tensor:
    """Tokens [n] for the flat window positions ``at`` [n] under their laws [n, V]."""
    c = coupling
    if c.E is not None:
        return race(law, c.E[at])
    assert c.bar is not None and c.drafted is not None and c.U is not None
    x = c.draft[at]
    redo = (c.bar[at] >= law.gather(1, x[:, None])[:, 0]).nonzero()[:, 0]
    if len(redo):
        law, at = law[redo], at[redo]
        q, onehot = (None if a is None else a[at] for a in (c.q, c.onehot))
        x[redo] = draw(residual_weights(law, q, x[redo], onehot, c.drafted[at]), c.U[at], law)
    return x
