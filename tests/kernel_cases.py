"""Random inputs of the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels.dispatch import interpreting
from visacc.verify import DraftTree

DEVICE = "cpu" if interpreting() else "cuda"
"""Kernels run interpreted on the CPU, or for real with TRITON_INTERPRET=0 on a machine with a GPU."""


def laws(g: torch.Generator, *shape: int, scale: float = 2.0, banned: float = 0.3) -> Tensor:
    """Random distributions float32 [*shape], some ids impossible."""
    z = scale * torch.randn(*shape, generator=g)
    z[torch.rand(*shape, generator=g) < banned] = -torch.inf
    z[..., 0] = torch.where(z.isinf().all(-1), 0.0, z[..., 0])
    return z.softmax(-1)


def sample(g: torch.Generator, p: Tensor) -> Tensor:
    """One token per law, int64 [...]."""
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=g).view(p.shape[:-1])


def words32(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 2**32, shape, generator=g)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chain_inputs(
    seed: int,
    B: int,
    N: int,
    D: int,
    V: int,
    with_q: bool,
    onehot: bool,
    ragged: bool,
    relation: str = "apart",
) -> dict[str, Tensor | None]:
    """Arguments of chain_verify. relation: how q and p relate ("apart", "equal", "disjoint")."""
    g = generator(seed)
    p, q = laws(g, B, N, V), laws(g, B, D, V)
    if relation == "equal":
        q = p[:, :D].clone()
    if relation == "disjoint":
        half = torch.arange(V) < V // 2
        p, q = p.masked_fill(half, 0) + 1e-6 * ~half, q.masked_fill(~half, 0) + 1e-6 * half
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    draft = sample(g, q) if D else torch.zeros(B, 0, dtype=torch.int64)
    return {
        "p": p,
        "draft": draft,
        "q": q if with_q else None,
        "q_onehot": torch.rand(B, D, generator=g) < 0.3 if with_q and onehot else None,
        "n_draft": torch.randint(0, D + 1, (B,), generator=g) if ragged else None,
        "u": torch.rand(B, D, generator=g),
        "U": words32(g, B, N),
    }


def random_tree(g: torch.Generator, B: int, T: int, dead: float = 0.1) -> tuple[Tensor, Tensor]:
    """parent int64 [B, T] with every earlier slot as possible parent, live bool [B, T] closed under
    parents."""
    parent = torch.full((B, T), -1)
    live = torch.rand(B, T, generator=g) >= dead
    live[:, 0] = True
    for s in range(1, T):
        reach = max(1, int(0.7 * s))
        parent[:, s] = torch.randint(0, reach, (B,), generator=g)
        live[:, s] &= live.gather(1, parent[:, s : s + 1]).squeeze(1)
    return parent, live


def sibling_tokens(g: torch.Generator, parent: Tensor, live: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] drawn without replacement among siblings from their parent's law q [B, T, V], and
    live."""
    B, T = parent.shape
    tokens, live = torch.zeros(B, T, dtype=torch.int64), live.clone()
    left = q.clone()
    rows = torch.arange(B)
    for s in range(1, T):
        up = parent[:, s]
        live[:, s] &= live[rows, up]
        law = left[rows, up]
        possible = law.sum(1) > 0
        x = torch.multinomial(law + (~possible)[:, None].float(), 1, generator=g).squeeze(1)
        live[:, s] &= possible
        tokens[:, s] = x
        drawn = live[:, s]
        left[rows[drawn], up[drawn], x[drawn]] = 0
    return tokens, live


def to(device: str, a: object) -> object:
    return a.to(device) if isinstance(a, Tensor) else a


def good_tree() -> tuple[DraftTree, dict[str, Tensor]]:
    """A valid tree of draws without replacement for two rows, and the other arguments of `verify`."""
    g = generator(0)
    parent, live = random_tree(g, 2, 6, dead=0)
    p, q = laws(g, 2, 6, 9, banned=0), laws(g, 2, 6, 9, banned=0)
    tokens, live = sibling_tokens(g, parent, live, q)
    tree = DraftTree(tokens, parent, live, "without_replacement", q, torch.arange(6).expand(2, 6))
    return tree, {"p": p, "u": torch.rand(2, 6, generator=g), "U": words32(g, 2, 6)}
