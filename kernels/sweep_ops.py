"""The sweep of neighbour-corrected coupling over a window of drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels import checks
from visacc.kernels.dispatch import choose, launcher
from visacc.kernels.reference import sweep as _sweep


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
    given: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    q: Tensor | None = None,
    q_onehot: Tensor | None = None,
    has_draft: Tensor | None = None,
    u: Tensor | None = None,
    U: Tensor | None = None,
    E: Tensor | None = None,
    validate: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Correct the laws of a window for neighbours that moved, and redraw it, from front to back.

    For k = 0..W-1, with j = first + k and a neighbour at slot c = neighbour[o, j] for every offset o that has one::

        law_k  = softmax(log p_k + sum_o  (gate_k,o * (left[o, token at c] - left[o, seen[c]])) @ right[o])
        token at j = redraw(law_k)

    The token at c is the one that this sweep has just put there, or known[c] in front of the window; left[o, seen[c]] is
    left out for fresh positions. Where nothing moved the law stays p_k, bit for bit. The redraw is the race against E if
    that is given, else the maximal coupling with the draft (see `window_resample`). Each law depends on tokens before its
    position only.

    p: float32 [B, W, V]. draft: int64 [B, W]. known, seen: int64 [B, S], tokens by slot now and as the forward read
    them. first: int64 [B]. neighbour: int64 [O, S] earlier slots, -1 for none. left, right: float32 [O, V, r] and
    [O, r, V]. fresh: bool [B, W], positions that no forward has read yet. given: bool [B, W], positions that keep their
    draft and their law. gate: float32 [B, W, O, r], all 1 if None. q, q_onehot, has_draft, u, U: as in
    `window_resample`, with shape [B, W, ...]. E: float32 [B, W, V].

    Returns tokens int64 [B, W] and laws float32 [B, W, V]. Positions from slot S on keep draft and law. Backends agree in
    the laws to 1e-6 plus 1e-5 relative, in a token unless its random number lies that close to a boundary.
    """
    B, W, V = p.shape
    O, S = neighbour.shape
    checks.law_dtype("p", p)
    for name, a in (("draft", draft), ("fresh", fresh)):
        checks.shape(name, a, ("B", "W"), B, W)
    for name, a in (("known", known), ("seen", seen)):
        checks.shape(name, a, ("B", "S"), B, S)
    checks.shape("first", first, ("B",), B)
    checks.shape("left", left, ("O", "V", "r"), O, V, r := left.shape[-1])
    checks.shape("right", right, ("O", "r", "V"), O, r, V)
    for name, b in (("given", given), ("q_onehot", q_onehot), ("has_draft", has_draft), ("u", u), ("U", U)):
        checks.optional(name, b, ("B", "W"), B, W)
    checks.optional("gate", gate, ("B", "W", "O", "r"), B, W, O, r)
    checks.optional("q", q, ("B", "W", "V"), B, W, V)
    checks.optional("E", E, ("B", "W", "V"), B, W, V)
    if E is None and (u is None or U is None):
        raise ValueError("the redraw needs u and U (maximal coupling), or E (race)")
    checks.same_device(p, draft, known, seen, first, neighbour, left, right, fresh, given, gate, q, q_onehot)
    checks.same_device(p, has_draft, u, U, E)
    if checks.enabled(validate):
        _check_values(p, draft, neighbour, given, first)
    choices = (None,) * 5 if E is not None else (q, q_onehot, has_draft, u, U)
    arguments = (p, draft, known, seen, first, neighbour, left, right, fresh, given, gate, *choices, E)
    if choose(backend, (p,)) == "triton":
        return launcher("sweep").neighbour_sweep(*arguments)
    return _sweep.neighbour_sweep(*arguments)


def _check_values(p: Tensor, draft: Tensor, neighbour: Tensor, given: Tensor | None, first: Tensor) -> None:
    later = neighbour >= torch.arange(neighbour.shape[1], device=neighbour.device)
    checks.fail_where(later, _sweep.LATER)
    live = first[:, None] + torch.arange(p.shape[1], device=p.device) < neighbour.shape[1]
    checks.laws("p", p, live if given is None else live & ~given)
    V = p.shape[2]
    checks.fail_where(live & ((draft < 0) | (draft >= V)), f"draft token outside the vocabulary 0..{V - 1}")
