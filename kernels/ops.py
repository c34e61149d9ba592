"""Public ops on probabilities: shape checks, then the Triton kernel or the torch reference.

Every function takes tensors only and returns new tensors. Rows are independent of each other. Given equal
probabilities and random numbers, all ops except `process_logits` are bit-exact across backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.kernels import checks
from visacc.kernels.dispatch import choose, launcher
from visacc.kernels.reference import chain as _chain
from visacc.kernels.reference import logits as _logits
from visacc.kernels.reference import relaxed as _relaxed
from visacc.kernels.reference import sampling as _sampling


def process_logits(
    logits: Tensor,
    uncond: Tensor | None = None,
    scale: Tensor | float | None = None,
    allowed: Tensor | None = None,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Processed probabilities float32 [R, V]: guidance -> allowed ids -> temperature -> top-k -> top-p ->
    softmax.

    logits, uncond: [R, V], any float dtype (strided views welcome); guidance is uncond + scale (logits -
    uncond). allowed: bool [V] or [R, V]; other ids get probability 0. scale, temperature (> 0), top_k (0 or
    >= V: off), top_p (>= 1: off): one number, or one per row [R]. Numbers are cheaper than tensors: a
    neutral one skips its stage.

    Ties are kept: top-k keeps every logit >= the k-th largest value, top-p keeps a group of equal logits
    whole iff the mass strictly above it is < p. A row with a NaN logit, or with no allowed id, is NaN.
    Backends agree to 1e-6 plus 1e-5 relative; traffic floor 2 R V (logit bytes) + 4 R V.
    """
    checks.shape("logits", logits, ("R", "V"), R := logits.shape[0], V := logits.shape[-1])
    checks.optional("uncond", uncond, ("R", "V"), R, V)
    if (uncond is None) != (scale is None):
        raise ValueError("guidance needs both uncond and scale; give both or neither")
    if allowed is not None:
        checks.dtype("allowed", allowed, torch.bool)
        if allowed.shape not in ((V,), (R, V)):
            raise ValueError(f"allowed must be [V={V}] or [R={R}, V={V}], got {list(allowed.shape)}")
    for name, a, lowest in (("temperature", temperature, 0.0), ("top_p", top_p, 0.0), ("scale", scale, None)):
        checks.per_row(name, a, R, lowest)
    checks.per_row("top_k", top_k, R, None)
    checks.same_device(logits, uncond, allowed, scale, temperature, top_k, top_p)
    given = (logits, uncond, scale, allowed, temperature, top_k, top_p)
    if choose(backend, (logits,)) == "triton":
        return launcher("logits").process_logits(*given)
    return _logits.process_logits(*given)


def draw(weights: Tensor, U: Tensor, fallback: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """One token per row by exact integer inverse CDF: int64 [R].

    weights: float32 [R, V], non-negative, unnormalised, at most about 1 per entry. U: int64 [R], uniform in
    [0, 2**32). fallback: weights used where a row is empty (all below 2**-40). An id of weight 0 is never
    returned.

    w = round(weights 2**39); r = floor(U sum(w) / 2**32); token = min {v : prefix_sum(w)_v > r}. The law of
    the output is off by at most V 2**-40 in total variation.
    """
    checks.law_dtype("weights", weights)
    checks.shape("weights", weights, ("R", "V"), R := weights.shape[0], V := weights.shape[-1])
    checks.shape("U", U, ("R",), R)
    checks.dtype("U", U, torch.int64)
    checks.optional("fallback", fallback, ("R", "V"), R, V)
    checks.same_device(weights, U, fallback)
    if choose(backend, (weights,)) == "triton":
        return launcher("sampling").draw(weights, U, fallback)
    return _sampling.draw(weights, U, fallback)


def race(p: Tensor, E: Tensor, *, backend: str | None = None) -> Tensor:
    """Exponential race argmax_v p[v] / E[v], ties to the lowest id: int64 [...] from p, E float32 [..., V].

    With E exponential this is a draw from p (p need not be normalised); with E fixed it is the Gumbel-max
    coupling.
    """
    if p.shape != E.shape:
        raise ValueError(f"E must have the shape of p, {list(p.shape)}, got {list(E.shape)}")
    checks.same_device(p, E)
    if choose(backend, (p,)) == "triton":
        V = p.shape[-1]
        return launcher("sampling").race(p.reshape(-1, V), E.reshape(-1, V)).view(p.shape[:-1])
    return _sampling.race(p, E)


def race_topk(p: Tensor, E: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first m finishers of the race: m draws from p without replacement, in drawing order.

    p, E: float32 [..., V]. Returns ids int64 [..., m] and live bool [..., m]; an id is not live when p has
    fewer than m tokens with mass. (`torch.topk` on every backend.)
    """
    if p.shape != E.shape:
        raise ValueError(f"E must have the shape of p, {list(p.shape)}, got {list(E.shape)}")
    if not 1 <= m <= p.shape[-1]:
        raise ValueError(f"m must be in 1..{p.shape[-1]} (the vocabulary), got {m}")
    return _sampling.race_topk(p, E, m)


def chain_verify(
    p: Tensor,
    draft: Tensor,
    q: Tensor | None = None,
    q_onehot: Tensor | None = None,
    n_draft: Tensor | None = None,
    *,
    u: Tensor,
    U: Tensor,
    fresh: Tensor | None = None,
    unbroken: bool = False,
    numerator: Tensor | None = None,
    denominator: Tensor | None = None,
    validate: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Test a chain of drafts and draw what replaces the first that fails. Returns (n, accepted, tokens).

    p: float32 [B, N, V], row k is the law of the token that draft k proposes (and of the extra token behind
    the last draft). draft: int64 [B, D], D in {N-1, N}. q: float32 [B, D, V], the laws the drafts were
    drawn from; rows flagged in q_onehot bool [B, D] (all rows if q is None) are point masses. n_draft: int
    [B], how many of the D drafts are real. u: float32 [B, D] in [0, 1). U: int64 [B, N] ([B, D] is enough
    with `fresh`), uniform below 2**32.

    Draft k passes iff ``u q(x) < p(x)``. n int64 [B] counts the leading passes, accepted bool [B, D] is
    every draft's own test (False behind n_draft). tokens int64 [B, N]:

    * slots before n hold the drafts;
    * slot n holds the extra token: a draw from max(p - q, 0) after a rejection, else from p (or `fresh`);
    * slots behind n: -1, or `fresh` if given; with ``unbroken`` every slot is its passed draft or its
      residual draw (the maximal coupling of q and p), and a draw from p (or `fresh`) from slot n_draft on.

    fresh: int64 [B, N] tokens already drawn from p. numerator, denominator: float32 [B, D] replace p(x) and
    q(x) in the test (relaxed rules). If D == N and every draft passes, there is no extra token.
    """
    B, N, V = p.shape
    D = draft.shape[1]
    checks.law_dtype("p", p)
    if D not in (N - 1, N):
        raise ValueError(f"draft must have N-1={N - 1} or N={N} columns, got {D}")
    checks.shape("draft", draft, ("B", "D"), B, D)
    checks.optional("q", q, ("B", "D", "V"), B, D, V)
    checks.optional("q_onehot", q_onehot, ("B", "D"), B, D)
    checks.optional("n_draft", n_draft, ("B",), B)
    checks.shape("u", u, ("B", "D"), B, D)
    checks.optional("fresh", fresh, ("B", "N"), B, N)
    if U.shape != (B, N) and not (fresh is not None and U.shape == (B, D)):
        raise ValueError(f"U must be [B={B}, N={N}] (or [B, D={D}] with fresh), got {list(U.shape)}")
    for name, a in (("numerator", numerator), ("denominator", denominator)):
        checks.optional(name, a, ("B", "D"), B, D)
    checks.same_device(p, draft, q, q_onehot, n_draft, u, U, fresh, numerator, denominator)
    if checks.enabled(validate):
        live = None if n_draft is None else torch.arange(D, device=p.device) < n_draft[:, None]
        checks.laws("p", p)
        checks.drafts(draft, q, q_onehot, live, V)
        checks.uniforms(u)
    given = (p, draft, q, q_onehot, n_draft, u, U, fresh, unbroken, numerator, denominator)
    if choose(backend, (p,)) == "triton":
        return launcher("chain").chain_verify(*given)
    return _chain.chain_verify(*given)


def window_resample(
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    u: Tensor,
    U: Tensor,
    q_onehot: Tensor | None = None,
    *,
    has_draft: Tensor | None = None,
    validate: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Maximal coupling of independent rows: keep x where ``u q(x) < p(x)``, else draw from max(p - q, 0).

    p, q: float32 [R, V]; x, U: int64 [R]; u: float32 [R]; q_onehot, has_draft: bool [R]. Rows without a
    draft draw from p. Returns kept bool [R] and tokens int64 [R]; each token has law p if x has law q.
    """
    one = None if has_draft is None else has_draft.to(torch.int64)
    _, kept, tokens = chain_verify(
        p[:, None],
        x[:, None],
        None if q is None else q[:, None],
        None if q_onehot is None else q_onehot[:, None],
        one,
        u=u[:, None],
        U=U[:, None],
        unbroken=True,
        validate=validate,
        backend=backend,
    )
    return kept[:, 0], tokens[:, 0]


def neighbour_mass(p: Tensor, companions: Tensor, bound: Tensor, *, backend: str | None = None) -> Tensor:
    """LANTERN's m(x): the largest prefix sum of p over the companions that stays within the bound.

    p: float32 [..., V]. companions: int32 [..., K] ids of the neighbours, nearest first, -1 = none (adds
    nothing). bound: float32 [...]. Returns float32 [...]: max {c_j : c_j <= bound}, c_j = p[companions[0]]
    + ... + p[companions[j]], or 0. The sum stops at the first violation, it does not skip heavy neighbours.
    """
    lead, K = p.shape[:-1], companions.shape[-1]
    checks.law_dtype("p", p)
    checks.shape("companions", companions, ("...",) * len(lead) + ("K",), *lead, K)
    checks.shape("bound", bound, ("...",) * len(lead), *lead)
    checks.same_device(p, companions, bound)
    if choose(backend, (p,)) == "triton":
        flat = launcher("relaxed").neighbour_mass(
            p.reshape(-1, p.shape[-1]), companions.reshape(-1, K), bound.reshape(-1)
        )
        return flat.view(lead)
    return _relaxed.neighbour_mass(p, companions, bound)


def group_sums(
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    onehot: Tensor | None,
    embedding: Tensor,
    size: int,
    prob_threshold: float,
    distance_threshold: float,
    *,
    official_edges: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """GSD's p(G) and q(G), float32 [R] each: masses of the dynamic group of x under p and q.

    p, q: float32 [R, V]; x: int64 [R]; onehot: bool [R], rows whose q is the point mass on x (all if q is
    None). embedding: [V, d]. The group is x and those of the `size` - 1 ids around it in the ascending
    order of (p, id) that satisfy |p(y) - p(x)| < prob_threshold and |e(y) - e(x)|^2 < distance_threshold.
    Only ids with p > 0 take part, and p(x) = 0 gives p(G) = 0. `official_edges` reproduces the original's
    window at the ends of the order.
    """
    checks.law_dtype("p", p)
    checks.shape("x", x, ("R",), R := p.shape[0])
    checks.optional("q", q, ("R", "V"), R, p.shape[1])
    checks.optional("onehot", onehot, ("R",), R)
    checks.shape("embedding", embedding, ("V", "d"), p.shape[1], embedding.shape[-1])
    checks.same_device(p, q, x, onehot, embedding)
    given = (p, q, x, onehot, embedding, size, prob_threshold, distance_threshold)
    if choose(backend, (p,)) == "triton" and not official_edges:
        return launcher("relaxed").group_sums(*given)
    return _relaxed.group_sums(*given, official_edges)
