"""Argument checks. Shapes, dtypes and devices always; values (which cost a synchronisation) only on
request.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def shape(name: str, a: Tensor, dims: tuple[str, ...], *sizes: int) -> None:
    if a.shape != sizes:
        wanted = ", ".join(f"{d}={s}" for d, s in zip(dims, sizes, strict=True))
        raise ValueError(f"{name} must have shape [{wanted}], got {list(a.shape)}")


def optional(name: str, a: Tensor | None, dims: tuple[str, ...], *sizes: int) -> None:
    if a is not None:
        shape(name, a, dims, *sizes)


def dtype(name: str, a: Tensor, wanted: torch.dtype) -> None:
    if a.dtype != wanted:
        raise ValueError(f"{name} must be {wanted}, got {a.dtype}")


def law_dtype(name: str, a: Tensor) -> None:
    """Laws are float32. float64 is let through for proofs; it always takes the reference."""
    if a.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be torch.float32, got {a.dtype}")


def per_row(name: str, a: Tensor | float | None, rows: int, above: float | None) -> None:
    """A number (checked) or a tensor [rows] (values unchecked: looking would synchronise)."""
    if isinstance(a, Tensor):
        if a.ndim:
            shape(name, a, ("R",), rows)
    elif a is not None and above is not None and not a > above:
        raise ValueError(f"{name} must be above {above:g}, got {a}")


def same_device(*tensors: object) -> None:
    devices = {t.device for t in tensors if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(str(d) for d in devices)}")


def enabled(validate: bool) -> bool:
    """Whether value checks run: on request, or everywhere with VISACC_DEBUG=1."""
    return validate or os.environ.get("VISACC_DEBUG", "0") == "1"


def _first(bad: Tensor) -> str:
    """Position of the first True of [B, N] as 'row b, slot n' ([R]: 'row r')."""
    at = [int(i) for i in bad.nonzero()[0]]
    return ", ".join(f"{word} {i}" for word, i in zip(("row", "slot", "entry"), at, strict=False))


def fail_where(bad: Tensor, message: str) -> None:
    """ValueError naming the first place where `bad` holds. Synchronises: debug checks only."""
    if bool(bad.any()):
        raise ValueError(f"{_first(bad)}: {message}")


def laws(name: str, p: Tensor, live: Tensor | None = None) -> None:
    """Every live row of p [..., V] is a probability distribution."""

    def check(bad: Tensor, message: str) -> None:
        fail_where(bad if live is None else bad & live, message)

    check(p.isnan().any(-1), f"{name} contains NaN (NaN logits, or no allowed id, upstream)")
    check((p < 0).any(-1), f"{name} has a negative entry")
    total = p.sum(-1)
    check(total == 0, f"{name} sums to zero: no token is possible")
    check((total - 1).abs() > 1e-3, f"{name} does not sum to one; normalise it (softmax) before verification")


def scores(name: str, p: Tensor, live: Tensor) -> None:
    """Every live row of p [B, N, V] has an arg-max: what a rule that looks at nothing else needs."""
    fail_where(live & p.isnan().any(-1), f"{name} contains NaN (NaN logits, or no allowed id, upstream)")
    fail_where(live & ~p.isfinite().any(-1), f"{name} has no finite entry: no token is possible")


def uniforms(u: Tensor) -> None:
    fail_where(~((u >= 0) & (u < 1)), "u must lie in [0, 1)")


def drafts(draft: Tensor, q: Tensor | None, onehot: Tensor | None, live: Tensor | None, vocab: int) -> None:
    """Drafted ids are in the vocabulary and could have come from their q."""
    alive = torch.ones_like(draft, dtype=torch.bool) if live is None else live
    fail_where(alive & ((draft < 0) | (draft >= vocab)), f"draft token outside the vocabulary 0..{vocab - 1}")
    if q is None:
        return
    dense = alive if onehot is None else alive & ~onehot
    laws("q", q, dense)
    q_x = q.gather(2, draft.clamp(0, vocab - 1)[..., None]).squeeze(2)
    fail_where(dense & (q_x <= 0), "q gives the drafted token probability 0, so it was not drawn from q")
