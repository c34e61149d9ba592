"""Output laws of decoders: by enumeration of every random decision, and by chi-square on the real engine."""

from __future__ import annotations

import math

import torch
from scipy import stats as scipy_stats
from toy import TableModel

import visacc.decoders.base as decoder_base
import visacc.decoders.jacobi as jacobi_module
import visacc.decoders.window_init as init_module
import visacc.kernels.reference.chain as chain_module
from visacc.decoders import Jacobi
from visacc.engine import Run, _commit, decode
from visacc.models.base import ModelOutput
from visacc.sampling import SamplingParams, probs
from visacc.stats import DecodeStats
from visacc.verify import EXACT, Rule


class Script:
    """Every random decision enumerated: the branches are the rows of the batch, each with its probability."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.choices: torch.Tensor  # [B, columns] outcome of each decision of this pass
        self.weight: torch.Tensor  # [B] float64
        self.low: torch.Tensor  # [B, T] interval of the one uniform behind a slot's Gumbel noise (V = 2)
        self.high: torch.Tensor
        self.column = 0

    def patch(self, monkeypatch, decoder: Jacobi) -> None:
        """Put the script in the place of every random draw."""
        for module in (jacobi_module, init_module, chain_module):
            if hasattr(module, "draw"):
                monkeypatch.setattr(module, "draw", self.draw)
        for module in (jacobi_module, decoder_base):
            monkeypatch.setattr(module, "gumbel_draw", self.gumbel)
        decoder.rule = ScriptedRule(self)

    def columns(self, decoder: Jacobi, size: int, init_columns: list[int]) -> list[int]:
        """Number of outcomes of each decision of a pass over ``size`` nodes, in the order they are taken."""
        vocab, drafts = self.vocab, size - 1
        if decoder.coupling == "independent":
            base = [vocab] * size + [2] * drafts + ([vocab] if drafts else [])
        elif decoder.coupling == "maximal":
            base = [vocab] + [2] * drafts + [vocab] * drafts
        elif decoder.coupling == "gumbel":
            base = [vocab] * size + [2] * drafts + ([vocab] if drafts else [])
        else:
            base = [vocab] * size
        return base + init_columns

    def take(self, count: int) -> torch.Tensor:
        taken = self.choices[:, self.column : self.column + count]
        assert taken.shape[1] == count, "the pass asked for more decisions than were enumerated"
        self.column += count
        return taken

    def draw(self, weights, U, fallback=None):
        rows = len(self.weight)
        tokens = self.take(len(weights) // rows)
        total = weights.sum(1, keepdim=True)
        if fallback is not None:
            weights = torch.where(total > 0, weights, fallback)
        p = weights / weights.sum(1, keepdim=True)
        self.weight = self.weight * p.view(rows, -1, self.vocab).gather(2, tokens[..., None])[..., 0].prod(1)
        return tokens.reshape(-1)

    def gumbel(self, run, law, slots, bound):
        tokens = self.take(slots.shape[1])
        p0 = law[..., 0]
        for k in range(slots.shape[1]):
            slot = slots[:, k : k + 1]
            low, high = self.low.gather(1, slot), self.high.gather(1, slot)
            cut = p0[:, k : k + 1].clamp(low, high)
            zero = tokens[:, k : k + 1] == 0
            new_low, new_high = torch.where(zero, low, cut), torch.where(zero, cut, high)
            width = high - low
            self.weight = self.weight * torch.where(width > 0, (new_high - new_low) / width, 0)[:, 0]
            self.low = self.low.scatter(1, slot, new_low)
            self.high = self.high.scatter(1, slot, new_high)
        return tokens

    def accept(self, p, q, drafts, onehot):
        bits = self.take(drafts.shape[1]).bool()
        p_x = p.gather(2, drafts[..., None])[..., 0]
        q_x = torch.ones_like(p_x) if q is None else q.gather(2, drafts[..., None])[..., 0]
        q_x = torch.where(onehot, 1.0, q_x)
        ratio = torch.where(q_x > 0, p_x / q_x, 0).clamp(max=1)
        ratio = torch.where(p_x >= q_x, torch.ones_like(ratio), ratio)
        self.weight = self.weight * torch.where(bits, ratio, 1 - ratio).prod(1)
        u = torch.where(bits, torch.zeros_like(ratio), torch.full_like(ratio, 1 - 2.0**-24))
        passed = EXACT.accept(p, q, drafts, onehot, u)
        assert bool((passed == bits)[self.weight > 1e-6].all())
        return bits


class ScriptedRule(Rule):
    """Passes the drafts that the script says: 0 < 1 accepts and 0 < 0 rejects, the uniforms being 0."""

    lossless = True

    def __init__(self, script: Script) -> None:
        self.script = script

    def chain_ratio(self, p, q, drafts, onehot):
        bits = self.script.accept(p, q, drafts, onehot)
        return bits.float(), torch.ones_like(bits, dtype=torch.float32)


class ScriptedNoise:
    """The init stream of ``random`` is turned into an enumerated token; the other streams are read by the script."""

    def __init__(self, script: Script, vocab: int) -> None:
        self.script, self.vocab = script, vocab

    def uniform(self, purpose, slots, iteration):
        return torch.zeros(slots.shape)

    def decisions(self, slots, iteration):
        return torch.zeros(slots.shape), torch.zeros_like(slots), torch.zeros_like(slots)

    def integer(self, purpose, slots, iteration):
        if purpose == init_module.rng.INIT and self.script.init_random:
            tokens = self.script.take(slots.shape[1])
            self.script.weight = self.script.weight * (1 / self.vocab) ** slots.shape[1]
            return ((tokens << 32) + self.vocab - 1) // self.vocab
        return torch.zeros_like(slots)

    def prepare(self, bound):
        pass

    def select(self, rows):
        raise AssertionError("rows are branches and stay")


def _product(base: list[int]) -> torch.Tensor:
    return (
        torch.cartesian_prod(*[torch.arange(b) for b in base]).view(-1, len(base))
        if base
        else torch.zeros(1, 0).long()
    )


def enumerate_law(
    model: TableModel, decoder: Jacobi, top_k: int, monkeypatch, script: Script | None = None
) -> dict[tuple[int, ...], float]:
    """Output law of the real decoder code, with every random draw branched."""
    layout, vocab = model.layout, model.layout.vocab
    script = script or Script(vocab)
    script.init_random = decoder.init == "random"
    script.patch(monkeypatch, decoder)

    def process(output: ModelOutput) -> torch.Tensor:
        z = output.logits
        if top_k:
            z = z.masked_fill(z < z.topk(top_k, -1).values[..., -1:], -math.inf)
        return z.softmax(-1)

    width = min(decoder.window, layout.total) - 1
    keeps = decoder.init.startswith("sample")
    init_columns = [vocab] * width if script.init_random or keeps else []
    columns = [vocab, *init_columns]
    script.choices = _product(columns)
    rows = len(script.choices)
    script.weight = torch.ones(rows, dtype=torch.float64)
    # slot 0 is drawn by race in the first column; its interval is not needed afterwards
    script.low = torch.zeros(rows, layout.total, dtype=torch.float64)
    script.high = torch.ones(rows, layout.total, dtype=torch.float64)
    state, output = model.prefill(model.encode([""] * rows), guidance=False, window=decoder.max_nodes(layout))
    run = Run(
        model,
        layout,
        SamplingParams(),
        ScriptedNoise(script, vocab),
        sequence=torch.zeros(rows, layout.total, dtype=torch.int64),
        filled=torch.zeros(rows, layout.total, dtype=torch.bool),
        count=torch.zeros(rows, dtype=torch.int64),
        samples=torch.arange(rows),
    )
    law = process(output)

    def first(run, law, slots, bound):
        tokens = script.take(1)
        script.weight = script.weight * law[:, 0].gather(1, tokens)[:, 0]
        return tokens

    monkeypatch.setattr(decoder_base, "gumbel_draw", first)
    token = decoder.begin(run, law[:, 0])
    slot0 = torch.zeros(rows, 1, dtype=torch.int64)
    stats = DecodeStats.empty("x", layout, rows, torch.device("cpu"))
    _commit(run, decoder_base.Verdict(token[:, None], slot0, slot0 == 0), stats, 1)
    final: dict[tuple[int, ...], float] = {}

    for _ in range(layout.total + 1):
        done = run.count >= layout.total
        for row in done.nonzero()[:, 0].tolist():
            key = tuple(run.sequence[row].tolist())
            final[key] = final.get(key, 0.0) + float(script.weight[row])
        # merge equal states, drop finished and impossible ones
        live = ~done & (script.weight > 0)
        if not live.any():
            return final
        parts = [run.sequence.double(), run.count[:, None].double(), script.low, script.high]
        parts += [v.double().flatten(1) for v in decoder.state.values() if v is not None]
        table = torch.cat(parts, dim=1)[live]
        unique, inverse = torch.unique((table * 2**40).round(), dim=0, return_inverse=True)
        weight = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, inverse, script.weight[live])
        chosen = torch.zeros(len(unique), dtype=torch.int64).scatter_(0, inverse, live.nonzero()[:, 0])
        size = max(1, min(decoder.window, layout.total - int(run.count[chosen].min())))
        combos = _product(script.columns(decoder, size, init_columns))
        spread = chosen.repeat_interleave(len(combos))
        script.choices = combos.repeat(len(chosen), 1)
        script.weight = weight.repeat_interleave(len(combos))
        script.low, script.high = script.low[spread], script.high[spread]
        script.column = 0
        state.kv, state.lengths = state.kv[:, :, spread], state.lengths[spread]
        state.prefix_mask, state.batch = state.prefix_mask[spread], len(spread)
        decoder.select(spread)
        for name in ("sequence", "filled", "count"):
            setattr(run, name, getattr(run, name)[spread])
        run.samples = torch.arange(len(spread))
        run.low, run.high, run.step = int(run.count.min()), int(run.count.max()), run.step + 1
        stats = DecodeStats.empty("x", layout, len(spread), torch.device("cpu"))
        proposal = decoder.propose(run)
        output = model.forward(state, proposal)
        verdict = decoder.judge(run, proposal, process(output), output)
        model.commit(state, verdict.cached())
        _commit(run, verdict, stats, proposal.size)
    raise AssertionError("the decoder did not finish in the largest possible number of steps")


ALPHA = 1e-6  # per test; fixed seeds, so the level only matters when the code or torch changes
SAMPLES = 40_000
LAYOUTS = {"plain": None, "forced": (-1, -1, 9, -1, -1, 9)}


def chi_square(
    model: TableModel, decoder, sampling: SamplingParams, count: int = SAMPLES, batches: int = 1
) -> float:
    """p-value of Pearson's test of the sampled sequences against the chain-rule law (rare cells pooled)."""
    sequence = torch.cat(
        [
            decode(model, decoder, model.encode([""] * len(seeds)), sampling, seeds).sequence
            for seeds in (list(range(i, count, batches)) for i in range(batches))
        ]
    )

    def processed(logits, uncond, slot):
        output = ModelOutput(logits[None].float(), uncond[None].float() if sampling.guided else None)
        return probs(output, torch.tensor([[slot]]), model.layout, sampling)[0].double()

    law = model.law(processed)
    base = model.layout.vocab ** torch.arange(model.layout.total - 1, -1, -1)
    observed = torch.bincount((sequence * base).sum(1), minlength=model.layout.vocab**model.layout.total)
    expected = torch.zeros(len(observed), dtype=torch.float64)
    for key, mass in law.items():
        expected[int((torch.tensor(key) * base).sum())] = mass * count
    assert int(observed[expected == 0].sum()) == 0, "a sequence of probability 0 was sampled"
    big = expected >= 10
    o = torch.cat([observed[big].double(), observed[~big].sum()[None].double()])
    e = torch.cat([expected[big], expected[~big].sum()[None]])
    if e[-1] < 10:
        o, e = torch.cat([o[:-2], o[-2:].sum()[None]]), torch.cat([e[:-2], e[-2:].sum()[None]])
    return float(scipy_stats.chi2.sf(float(((o - e) ** 2 / e).sum()), len(o) - 1))
