"""The one decode loop: propose -> forward -> judge -> commit, for every decoder on every model.

The engine owns the loop, the cache, the random numbers and the statistics; a decoder owns its two decisions (what to
propose, what to keep). Rows of a batch advance each at its own pace. Per-row state stays on the device; the host looks
at it once every ``check_every`` steps (every step on a CPU, where looking is free) to learn which rows are finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict
from visacc.models.base import Conditioning, DecodeState, ImageModel, Layout, ModelOutput, Proposal
from visacc.noise import Noise, sample_seed
from visacc.sampling import SamplingParams, probs
from visacc.stats import Clock, DecodeStats, check_interval


@dataclass
class Run:
    """State of one batch while it is decoded. Tensors have the live samples as first dimension.

    Attributes:
        sequence: int64 [B, total] committed codes (0 where nothing is committed yet).
        filled: bool [B, total] which slots are committed.
        count: int64 [B] number of committed slots (for raster decoders also the frontier).
        step: target forwards so far, the prompt's included; also the iteration number of the random streams.
        low, high: smallest and largest ``count`` when the host looked last.
        samples: int64 [B] place of each live row in the caller's batch.
    """

    model: ImageModel
    layout: Layout
    sampling: SamplingParams
    noise: Noise
    sequence: Tensor
    filled: Tensor
    count: Tensor
    samples: Tensor
    step: int = 1
    low: int = 0
    high: int = 0
    since_check: int = 0

    @property
    def batch(self) -> int:
        return self.sequence.shape[0]

    @property
    def device(self) -> torch.device:
        return self.sequence.device

    @property
    def total(self) -> int:
        return self.layout.total

    def last_tokens(self) -> Tensor:
        """int64 [B]: the token of the last slot before the frontier."""
        return self.sequence.gather(1, (self.count - 1)[:, None])[:, 0]

    def select(self, rows: Tensor) -> None:
        self.noise.select(rows)
        for name in ("sequence", "filled", "count", "samples"):
            setattr(self, name, getattr(self, name)[rows])


@dataclass
class StepInfo:
    """What a callback sees after each step. ``committed`` lives on the device; reading it is the callback's choice."""

    step: int
    total: int
    committed: Tensor
    run: Run = field(repr=False)


Callback = Callable[[StepInfo], object]


@dataclass
class DecodeResult:
    """Codes [B, T, H, W], the raw sequence [B, total] (forced slots hold code 0) and the statistics."""

    codes: Tensor
    sequence: Tensor
    stats: DecodeStats


# not inference_mode: tables that a model caches on first use would be unusable in later training
@torch.no_grad()
def decode(
    model: ImageModel,
    decoder: Decoder,
    cond: Conditioning,
    sampling: SamplingParams,
    seeds: list[int],
    *,
    callback: Callback | None = None,
    progress: Callable[[int, int], object] | None = None,
    check_every: int | None = None,
) -> DecodeResult:
    """Decode one batch to the end.

    Args:
        seeds: one user-level seed per sample; equal seeds give equal random numbers wherever the sample sits.
        callback: called after every step; returning ``False`` stops early (unfinished slots stay 0 and the statistics
            say so).
        progress: called at every host check with (slots committed by the slowest sample, total).
        check_every: steps between two looks of the host at the device; default 1 on a CPU, 8 elsewhere.

    Raises:
        ValueError: the decoder needs something the model lacks, guidance without an unconditional branch.
        RuntimeError: the model produced NaN logits (names the step and the first module that did).
    """
    decoder.check(model)
    if sampling.guided and not cond.has_uncond:
        raise ValueError(
            f"guidance_scale={sampling.guidance_scale} needs an unconditional branch, which {model.name} does not have;"
            " use guidance_scale=1"
        )
    layout, clock = model.layout, Clock(model.device)
    batch, total, device = cond.batch, layout.total, model.device
    if len(seeds) != batch:
        raise ValueError(f"{batch} samples need {batch} seeds, got {len(seeds)}")
    check = check_interval(check_every, device, 8)

    keys = torch.tensor([sample_seed(s) for s in seeds], dtype=torch.int64, device=device)
    run = Run(
        model,
        layout,
        sampling,
        Noise(keys, layout.vocab, total),
        sequence=torch.zeros(batch, total, dtype=torch.int64, device=device),
        filled=torch.zeros(batch, total, dtype=torch.bool, device=device),
        count=torch.zeros(batch, dtype=torch.int64, device=device),
        samples=torch.arange(batch, device=device),
    )
    stats = DecodeStats.empty(decoder.name, layout, batch, device)
    final = torch.zeros_like(run.sequence)
    broken = torch.zeros((), dtype=torch.int64, device=device)  # first step with NaN, 0 = none

    with clock("prefill"):
        opening = decoder.opening(run)
        room: dict[str, Any] = {"guidance": sampling.guided, "window": decoder.max_nodes(layout)}
        if opening is None:
            state, output = model.prefill(cond, **room, **decoder.prefill_options())
            decoder.prompted(run, state, output)
            slots = torch.arange(output.logits.shape[1], device=device).expand(batch, -1)
            law = probs(output, slots, layout, sampling, decoder.guidance(run, slots))
            verdict = decoder.start(run, law)
        else:
            state, output = model.open(cond, opening, **room)
            slots = decoder.predicted_slots(run, opening)
            law = probs(output, slots, layout, sampling, decoder.guidance(run, slots))
            verdict = decoder.judge(run, opening, law, output)
            model.commit(state, verdict.cached(), verdict.path)
        broken = _note_nan(broken, law, None, 1)
        _commit(run, verdict, stats, fed=1)
        run.low = run.high = run.low + verdict.tokens.shape[1]
        if opening is not None:
            decoder.advance(run, verdict)
    running = total > run.low and not (callback and callback(StepInfo(1, total, run.count, run)) is False)

    proposal: Proposal | None = None
    while running:
        with clock("propose"):
            proposal = decoder.propose(run)
            state.limit = _address_bound(state, run, proposal)
        with clock("forward"):
            output = model.forward(state, proposal, hidden=decoder.needs_hidden)
        run.step += 1
        with clock("judge"):
            slots = decoder.predicted_slots(run, proposal)
            law = probs(output, slots, layout, sampling, decoder.guidance(run, slots))
            broken = _note_nan(broken, law, proposal.take(proposal.live), run.step)
            verdict = decoder.judge(run, proposal, law, output)
        with clock("commit"):
            model.commit(state, verdict.cached(), verdict.path)
            _commit(run, verdict, stats, fed=proposal.size)
            decoder.advance(run, verdict)
        run.since_check += 1
        if callback and callback(StepInfo(run.step, total, run.count, run)) is False:
            break
        if run.since_check >= check or decoder.finished(run):
            with clock("check"):
                running = _check(run, state, decoder, final, broken, proposal, progress)
    if run.batch:
        _raise_if_broken(model, state, proposal, broken)
        final[run.samples] = run.sequence
        stats.unfinished = bool((run.count < total).any())
    stats.finish(clock)
    return DecodeResult(layout.to_grid(final), final, stats)


def _commit(run: Run, verdict: Verdict, stats: DecodeStats, fed: int) -> None:
    """Write the kept tokens of every row, advance the counts, log the step."""
    where = verdict.slots.clamp(max=run.total - 1)
    old = run.sequence.gather(1, where)
    # a rejected entry may share its clamped slot with a kept one, so kept ones must win: write through a spare column
    spare = torch.where(verdict.keep, where, run.total)
    run.sequence = _scatter(run.sequence, spare, torch.where(verdict.keep, verdict.tokens, old))
    run.filled = _scatter(run.filled, spare, verdict.keep)
    gained = verdict.keep.sum(1)
    run.count = run.count + gained
    stats.log(run.samples, spare, verdict, gained, run.step, fed)


def _scatter(target: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Scatter along dim 1 where index == width means "nowhere"."""
    padded = torch.cat([target, target[:, :1]], dim=1)
    return padded.scatter(1, index, value)[:, :-1]


def _address_bound(state: DecodeState, run: Run, proposal: Proposal) -> int:
    """Host-side bound on the cache addresses this proposal may touch; grows between two checks."""
    if run.model.static_shapes:
        return state.kv.shape[4]
    if proposal.reach is not None:
        return min(state.prefix + proposal.reach, state.kv.shape[4])
    if proposal.address is not None:
        return state.kv.shape[4]
    grown = run.high + (run.since_check + 1) * proposal.size
    return min(state.prefix + grown, state.kv.shape[4])


def _check(
    run: Run,
    state: DecodeState,
    decoder: Decoder,
    final: Tensor,
    broken: Tensor,
    proposal: Proposal,
    progress: Callable[[int, int], object] | None,
) -> bool:
    """The periodic look of the host: progress, NaN, finished rows leave the batch. Returns whether to go on."""
    run.since_check = 0
    low, high, bad = torch.stack([run.count.min(), run.count.max(), broken]).tolist()
    if bad:
        _raise_if_broken(run.model, state, proposal, broken)
    run.low, run.high = low, high
    if progress:
        progress(low, run.total)
    if low >= run.total:
        return False
    if high >= run.total and not run.model.static_shapes:
        done = run.count >= run.total
        final[run.samples[done]] = run.sequence[done]
        rows = (~done).nonzero()[:, 0]
        run.select(rows)
        state.select(rows)
        decoder.select(rows)
        run.high = run.total
    return True


def _note_nan(broken: Tensor, law: Tensor, live: Tensor | None, step: int) -> Tensor:
    """Remember the first step whose law is NaN (softmax spreads a NaN over its whole row) without a synchronisation."""
    nan = law[..., 0].isnan()
    if live is not None:
        nan = nan & live
    return torch.where((broken == 0) & nan.any(), step, broken)


def _raise_if_broken(
    model: ImageModel, state: DecodeState, proposal: Proposal | None, broken: Tensor
) -> None:
    step = int(broken)
    if not step:
        return
    culprit = ""
    if proposal is not None:
        culprit = _first_nan_module(model, state, proposal)
    where = f"; the first module with NaN output is {culprit!r}" if culprit else ""
    raise RuntimeError(
        f"{model.name} produced NaN logits in step {step}{where}. Check the weights, or run in float32"
        " (float16 overflows in many of these models)"
    )


def _first_nan_module(model: ImageModel, state: DecodeState, proposal: Proposal) -> str:
    """Repeat a forward with hooks to find where NaN appears first."""
    found: list[str] = []

    def hook(name: str) -> Callable[[torch.nn.Module, object, object], None]:
        def look(_module: torch.nn.Module, _inputs: object, result: object) -> None:
            if not found and isinstance(result, Tensor) and bool(result.isnan().any()):
                found.append(name)

        return look

    leaves = [(n, m) for n, m in model.module.named_modules() if n and not list(m.children())]
    handles = [m.register_forward_hook(hook(n)) for n, m in leaves]
    try:
        model.forward(state, proposal)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    bad = [n for n, p in model.module.named_parameters() if bool(p.isnan().any())]
    return bad[0] if bad else ""


__all__ = ["Callback", "DecodeResult", "ModelOutput", "Run", "StepInfo", "decode"]
