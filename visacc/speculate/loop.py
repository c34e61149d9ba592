"""The decode loop of vision-language targets: draft a tree, run it, verify, commit; every row at its own
pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visacc.kernels import rng
from visacc.models.base import DecodeState, Proposal
from visacc.models.vlm.target import VLMTarget
from visacc.noise import Noise, sample_seed
from visacc.speculate.contract import TextDrafter, remember
from visacc.speculate.params import Laws, TextParams
from visacc.speculate.sampler import DraftSampler
from visacc.speculate.stats import TextResult, TextStats
from visacc.speculate.trees import Grown, TreePolicy
from visacc.speculate.views import AcceptedStep, PromptView
from visacc.stats import check_interval
from visacc.verify import EXACT, GREEDY, GUMBEL_EXACT, DraftTree, verify

Stop = Callable[[Tensor, int], bool]
"""Further stopping, asked after every token: ids [1, L] of one row, prompt included, and how many are
generated.
"""


@dataclass
class _Rows:
    """Live rows of the batch. ``ids`` int64 [B, max_new + spare]; ``samples`` their place in the caller's
    batch.
    """

    ids: Tensor
    count: Tensor
    done: Tensor
    root: Tensor
    samples: Tensor
    noise: Noise
    laws: Laws
    prompt: Tensor
    valid: Tensor
    high: int = 1

    def select(self, rows: Tensor) -> None:
        for name in ("ids", "count", "done", "root", "samples", "prompt", "valid"):
            setattr(self, name, getattr(self, name)[rows])
        self.noise.select(rows)
        self.laws.select(rows)


@dataclass
class _Run:
    """One generation: the pieces that do not change from step to step."""

    target: VLMTarget
    drafter: TextDrafter | None
    policy: TreePolicy | None
    params: TextParams
    stop: Stop | None
    on_tokens: Callable[[Tensor, Tensor], object] | None
    sampled: bool
    ends: Tensor
    clock: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "target": 0.0})

    @property
    def slots(self) -> int:
        return 1 if self.policy is None else self.policy.slots


@torch.no_grad()
def generate(
    target: VLMTarget,
    drafter: TextDrafter | None,
    policy: TreePolicy | None,
    inputs: Mapping[str, Any],
    params: TextParams,
    seeds: Sequence[int],
    *,
    stop: Stop | None = None,
    on_tokens: Callable[[Tensor, Tensor], object] | None = None,
    sampled_drafts: bool = False,
    check_every: int | None = None,
) -> TextResult:
    """Generate text for one batch.

    Args:
        drafter, policy: ``None`` decodes one token a step (the yardstick).
        inputs: the processor's output, left-padded.
        seeds: one per row; used when sampling. With the default coupling a seed gives the same text with
            every drafter and without one.
        stop: further stopping rule, asked for every committed token (looks at the host every step).
        on_tokens: called after every step with (rows int64 [R], new ids int64 [R, K] padded with -1).
        sampled_drafts: static trees: draw drafts from the draft law and verify by the ratio test, instead of
            taking the likeliest ones. Exact too, but the text then depends on the drafter.
        check_every: steps between two looks of the host; default 1 on a CPU, 4 elsewhere.

    Raises:
        ValueError: wrong number of seeds, a text that does not fit the context.
    """
    begun = time.perf_counter()
    batch = inputs["input_ids"].shape[0]
    if len(seeds) != batch:
        raise ValueError(f"{batch} prompts need {batch} seeds, got {len(seeds)}")
    if (drafter is None) != (policy is None):
        raise ValueError("a drafter needs a tree policy and the other way round")
    mask = inputs.get("attention_mask")
    longest = int(mask.sum(1).max()) if mask is not None else inputs["input_ids"].shape[1]
    if longest + params.max_new_tokens > target.context:
        raise ValueError(
            f"a prompt of {longest} positions and max_new_tokens={params.max_new_tokens} exceed the model's context"
            f" of {target.context}"
        )
    device = target.device
    ends = torch.tensor(params.eos, dtype=torch.int64, device=device)
    run = _Run(target, drafter, policy, params, stop, on_tokens, sampled_drafts, ends)
    check = 1 if stop is not None else check_interval(check_every, device, 4)
    levels = 0 if policy is None else policy.levels
    scratch = 0 if policy is None else max(policy.slots, policy.scratch)
    room = params.max_new_tokens + 1 + scratch + (levels + 1) * (check + 1)
    done = target.prefill(inputs, room=room)
    rows = _begin(run, done.view, done.logits, seeds, levels + 2)
    prefill_seconds = time.perf_counter() - begun
    state, final = done.state, _Final(batch, params, levels + 2, device)
    draft = None
    if drafter is not None:
        mark = time.perf_counter()
        draft = drafter.prefill(done.view, done.feats, rows.root, room=room)
        run.clock["draft"] += time.perf_counter() - mark
    del done
    since, running = 0, True
    while running:
        since += 1
        if since >= check or rows.high == 1:
            since = 0
            running = _check(rows, state, draft, final)
            if not running:
                break
        _step(run, rows, state, draft, final)
        rows.high = min(rows.high + levels + 1, params.max_new_tokens)
    stats = TextStats(final.lengths, final.steps, final.accepted, prefill_seconds)
    stats.draft_seconds, stats.target_seconds = run.clock["draft"], run.clock["target"]
    stats.seconds = time.perf_counter() - begun
    final.committed[0] = 0  # rows that were done already
    stats.committed = final.committed.cpu()
    width = int(final.lengths.max())
    if drafter is not None:
        for row, length in zip(final.ids, final.lengths.tolist(), strict=True):
            remember(drafter, row[:length])
    return TextResult(final.ids[:, :width], final.lengths, stats)


class _Final:
    """Results of all rows of the caller's batch."""

    def __init__(self, batch: int, params: TextParams, most: int, device: torch.device) -> None:
        self.ids = torch.full((batch, params.max_new_tokens), params.pad, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.steps = torch.zeros_like(self.lengths)
        self.accepted = torch.zeros_like(self.lengths)
        self.committed = torch.zeros(most, dtype=torch.int64, device=device)


def _begin(run: _Run, view: PromptView, logits: Tensor, seeds: Sequence[int], spare: int) -> _Rows:
    """Sample the first token of every row."""
    batch, device = view.batch, logits.device
    p, vocab = run.params, run.target.vocab_size
    keys = torch.tensor([sample_seed(s) for s in seeds], dtype=torch.int64, device=device)
    noise = Noise(keys, vocab, p.max_new_tokens)
    laws = Laws(p, torch.where(view.valid, view.input_ids, vocab), vocab)
    zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    # the law of token 0 has no drafted ancestors: the prompt's last token stands in for its path
    law = laws(logits[:, None], view.input_ids[:, -1:], (zero == 0)[..., None], zero)
    tree = DraftTree(zero, zero - 1, zero == 0, max_children=1, max_depth=0)
    if p.greedy:
        root = verify(tree, law, GREEDY).next_root
    else:
        root = verify(tree, law, GUMBEL_EXACT, noise=noise.exponential(zero)).next_root
    ids = torch.full((batch, p.max_new_tokens + spare), p.pad, dtype=torch.int64, device=device)
    ids[:, 0] = root
    laws.add(root[:, None], zero == 0)
    ends = _is_end(root[:, None], run.ends)[:, 0] | (p.max_new_tokens == 1)
    samples = torch.arange(batch, device=device)
    rows = _Rows(ids, torch.ones_like(root), ends, root, samples, noise, laws, view.input_ids, view.valid)
    if run.stop is not None:
        _ask(run.stop, rows, torch.ones_like(root), root[:, None], torch.zeros_like(root))
    if run.on_tokens is not None:
        run.on_tokens(samples, root[:, None])
    return rows


def _is_end(tokens: Tensor, ends: Tensor) -> Tensor:
    return (tokens[..., None] == ends).any(-1)


def _step(run: _Run, rows: _Rows, state: DecodeState, draft: Any, final: _Final) -> None:
    """One round for all live rows."""
    mark = time.perf_counter()
    grown = _grow(run, rows, draft)
    tree = DraftTree(
        grown.tokens,
        grown.parent,
        grown.live,
        grown.kind,
        grown.q_rows,
        grown.q_row_of,
        max_depth=0 if run.policy is None else run.policy.levels,
    )
    size = grown.tokens.shape[1]
    eye = torch.eye(size, dtype=torch.bool, device=grown.tokens.device)
    visible = tree.index.ancestors | eye
    state.limit = min(state.prefix + rows.high + size, state.kv.shape[4])
    run.clock["draft"] += time.perf_counter() - mark
    mark = time.perf_counter()
    logits, feats = run.target.step(state, Proposal(grown.tokens, grown.depth, grown.live, visible=visible))
    index = rows.count[:, None] + grown.depth
    law = rows.laws(logits, grown.tokens, visible, index)
    run.clock["target"] += time.perf_counter() - mark
    verdict = _judge(run, rows, tree, law, index)
    kept = _emit(run, rows, verdict.tokens, verdict.n, verdict.next_root, final)
    alive = torch.where(rows.done, 0, verdict.n)
    path = verdict.path.clamp(min=0).long()
    run.target.commit(state, path, alive)
    rows.root = verdict.next_root
    if run.on_tokens is not None:
        run.on_tokens(rows.samples, kept)
    if run.drafter is not None:
        mark = time.perf_counter()
        step = AcceptedStep(path, alive, verdict.tokens.clamp(min=0), feats.gather(path), verdict.next_root)
        run.drafter.observe(draft, step)
        run.clock["draft"] += time.perf_counter() - mark


def _grow(run: _Run, rows: _Rows, draft: Any) -> Grown:
    if run.policy is None or run.drafter is None:
        root = rows.root[:, None]
        zero = torch.zeros_like(root)
        return Grown(root, zero - 1, zero, zero == 0, zero.float())
    sampler = None
    if run.sampled and not run.params.greedy:
        sampler = DraftSampler(rows.noise.seeds, rows.count, run.params.filter)
    session = run.drafter.session(draft)
    return run.policy.grow(session, rows.root, draft.feature, draft.logits, sampler)


def _judge(run: _Run, rows: _Rows, tree: DraftTree, law: Tensor, index: Tensor) -> Any:
    if run.params.greedy:
        return verify(tree, law, GREEDY)
    if tree.q_kind == "point":
        # nodes of one depth predict the same token number, hence share its noise
        levels = tree.width
        numbers = rows.count[:, None] + torch.arange(levels, device=law.device)
        noise = rows.noise.exponential(numbers)
        batch = torch.arange(law.shape[0], device=law.device)[:, None]
        return verify(tree, law, GUMBEL_EXACT, noise=noise[batch, index - rows.count[:, None]])
    slots = torch.arange(law.shape[1], device=law.device) * rng.NODE_STRIDE
    seeds, at = rows.noise.seeds[:, None], index
    u = rng.uniform(seeds, 0, at, 0, rng.ACCEPT + slots)
    integers = rng.integer(seeds, 0, at, 0, rng.RESIDUAL + slots)
    return verify(tree, law, EXACT, u=u, U=integers)


def _emit(run: _Run, rows: _Rows, path_tokens: Tensor, n: Tensor, next_root: Tensor, final: _Final) -> Tensor:
    """Append the accepted drafts and the new root, cut at the first end token and at the length limit.

    Returns the appended tokens [B, A], -1 where there are none.
    """
    p = run.params
    new = torch.cat([path_tokens[:, 1:], next_root[:, None]], dim=1)
    order = torch.arange(new.shape[1], device=new.device)
    new = torch.where(order == (n - 1)[:, None], next_root[:, None], new)
    offered = order < n[:, None]
    ends = _is_end(new, run.ends) & offered
    before = ends.long().cumsum(1) - ends.long()  # ends strictly before
    keep = offered & (before == 0) & (rows.count[:, None] + order < p.max_new_tokens) & ~rows.done[:, None]
    gained = keep.sum(1)
    if run.stop is not None:
        gained = _ask(run.stop, rows, gained, new, rows.count)
        keep = keep & (order < gained[:, None])
    spare = rows.ids.shape[1] - 1
    at = torch.where(keep, rows.count[:, None] + order, spare)
    rows.ids = rows.ids.scatter(1, at, torch.where(keep, new, p.pad))
    final.steps[rows.samples] += (~rows.done).long()
    drafts = torch.minimum(gained, n - 1).clamp(min=0)
    final.accepted[rows.samples] += drafts
    final.committed.scatter_add_(0, gained, torch.ones_like(gained))
    rows.laws.add(new.clamp(min=0), keep)
    rows.count = rows.count + gained
    rows.done = rows.done | (ends & keep).any(1) | (rows.count >= p.max_new_tokens)
    return torch.where(keep, new, -1)


def _ask(stop: Stop, rows: _Rows, gained: Tensor, new: Tensor, known: Tensor) -> Tensor:
    """Cut each row behind the first of its ``gained`` [B] new tokens at which ``stop`` says so.

    ``known`` int64 [B] tokens precede them. A host loop by nature: stopping rules are arbitrary code.
    """
    counts = gained.tolist()
    for b, gain in enumerate(counts):
        if bool(rows.done[b]):
            continue
        text = torch.cat([rows.prompt[b][rows.valid[b]], rows.ids[b, : int(known[b])]])
        for i in range(gain):
            text = torch.cat([text, new[b, i : i + 1]])
            if stop(text[None], int(known[b]) + i + 1):
                counts[b] = i + 1
                rows.done[b] = True
                break
    return torch.tensor(counts, device=gained.device)


def _check(rows: _Rows, state: DecodeState, draft: Any, final: _Final) -> bool:
    """The look of the host: finished rows leave the batch. Returns whether any is left."""
    done = rows.done
    final.ids[rows.samples] = rows.ids[:, : final.ids.shape[1]]
    final.lengths[rows.samples] = rows.count
    if bool(done.all()):
        return False
    if bool(done.any()):
        alive = (~done).nonzero()[:, 0]
        rows.select(alive)
        state.select(alive)
        if draft is not None:
            draft.select(alive)
    rows.high = int(rows.count.max())
    if draft is not None and hasattr(draft, "tighten"):
        draft.tighten()
    return True
