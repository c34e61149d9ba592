"""Jacobi windows against the samplers of SJD, SCD and GSD, recorded with fixed uniforms and arg-max draws."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from golden import golden_dir
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from visacc.kernels import race
from visacc.kernels.reference.chain import residual_weights
from visacc.kernels.reference.relaxed import group_members
from visacc.models.base import Layout, Proposal
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.sampling import SamplingParams, probs
from visacc.verify import ChainVerdict, Grouped, verify_chain

pytestmark = pytest.mark.golden

GRID = 512
"""The redraws are checked as histograms: integers U on this grid reproduce a law up to one grid step."""


class Window:
    """A recorded case: slot k holds the law of draft k + 1, input 0 is the committed token."""

    def __init__(self, t: dict[str, Tensor], name: str) -> None:
        self.p, self.q = t[f"{name}.p"], t[f"{name}.q"][:, 1:]
        self.draft, self.u = t[f"{name}.draft"][:, 1:], t[f"{name}.u"][:, 1:]
        self.fresh = t[f"{name}.advanced"]
        self.rows, self.length = self.p.shape[:2]
        self.onehot = (self.q == 1).any(2)

    def verdict(self, unbroken: bool, copies: int = 1, flags: bool = False) -> ChainVerdict:
        U = (torch.arange(copies) * (2**32 // copies) + 2**31 // copies).repeat_interleave(self.rows)

        def tile(x: Tensor) -> Tensor:
            return x.repeat(copies, *[1] * (x.ndim - 1))

        return verify_chain(
            tile(self.p),
            tile(self.draft),
            torch.full((copies * self.rows,), self.length - 1),
            tile(self.fresh),
            q=tile(self.q),
            onehot=tile(self.onehot) if flags else None,
            u=tile(self.u),
            U=U[:, None].expand(-1, self.length - 1),
            unbroken=unbroken,
        )


def accept_cases() -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = golden_dir("jacobi")
    return (
        json.loads((folder / "accept_cases.json").read_text()),
        load_file(folder / "accept_cases.safetensors"),
    )


@pytest.mark.parametrize("flags", [False, True], ids=["dense q", "one-hot flags"])
def test_accepted_runs_and_probabilities(flags: bool) -> None:
    """Committed counts of SJD and maximal coupling, and min(1, p/q) of every draft on its own."""
    meta, t = accept_cases()
    for case in meta["cases"]:
        name = case["name"]
        window = Window(t, name)
        for unbroken, key in ((False, "sjd"), (True, "mc"), (True, "cosmos")):
            verdict = window.verdict(unbroken, flags=flags)
            committed = (verdict.n_accepted + 1).clamp(max=window.length)
            assert committed.tolist() == case[f"{key}_first_misaligned"], name
        assert torch.equal(verdict.accepted, window.u < t[f"{name}.accept_prob"]), name


def test_residuals() -> None:
    """The law behind every redraw is the recorded residual, for rejected and accepted drafts alike."""
    meta, t = accept_cases()
    for case in meta["cases"]:
        name = case["name"]
        window = Window(t, name)
        everywhere = torch.ones_like(window.onehot)
        for onehot in (None, window.onehot):
            weights = residual_weights(window.p[:, :-1], window.q, window.draft, onehot, everywhere)
            law = weights / weights.sum(2, keepdim=True).clamp(min=1e-30)
            torch.testing.assert_close(law, t[f"{name}.residual"], atol=1e-6, rtol=1e-5)


def test_window_tokens() -> None:
    """Kept, redrawn and fresh tokens of the unbroken window; redraws as histograms of the recorded residual.

    The recorded samplers redraw by arg-max, so redrawn slots are compared through the residual's law.
    """
    meta, t = accept_cases()
    for case in meta["cases"]:
        name = case["name"]
        window = Window(t, name)
        verdict = window.verdict(True, GRID)
        coupled = verdict.coupled.view(GRID, window.rows, window.length)
        for recorded in (t[f"{name}.mc_tokens"], t[f"{name}.cosmos_tokens"]):
            accepted = verdict.accepted[: window.rows]
            assert torch.equal(coupled[0][:, :-1][accepted], recorded[:, :-1][accepted]), name
            assert torch.equal(coupled[0][:, -1], recorded[:, -1]), name
            best = t[f"{name}.residual"].argmax(2)
            assert torch.equal(best[~accepted], recorded[:, :-1][~accepted]), name
        tokens = coupled[:, :, :-1].permute(1, 2, 0)
        histogram = torch.zeros_like(t[f"{name}.residual"]).scatter_add_(2, tokens, torch.ones(tokens.shape))
        wanted = t[f"{name}.residual"][~accepted]
        torch.testing.assert_close(histogram[~accepted] / GRID, wanted, atol=1.5 / GRID, rtol=0)


def test_sjd_tokens() -> None:
    """Broken window: drafts up to the first rejection, the recorded fresh samples behind it."""
    meta, t = accept_cases()
    for case in meta["cases"]:
        name = case["name"]
        window = Window(t, name)
        verdict = window.verdict(False)
        slots = torch.arange(window.length)
        redrawn = (slots == verdict.n_accepted[:, None]) & (slots < window.length - 1)
        assert torch.equal(verdict.coupled[~redrawn], t[f"{name}.sjd_tokens"][~redrawn]), name


def test_gumbel_tokens() -> None:
    """Races with the recorded noise; E = exp(-g) with the originals' own epsilons."""
    meta, t = accept_cases()
    for case in meta["cases"]:
        name = case["name"]
        noise = -(t[f"{name}.gumbel_u"] + 1e-9).log() + 1e-9
        p = t[f"{name}.p"]
        assert torch.equal(race(p, noise.expand_as(p)), t[f"{name}.gumbel_tokens"]), name


def test_grouped_acceptance() -> None:
    """GSD: acceptance probabilities, decisions and groups of every draft on its own, committed count."""
    folder = golden_dir("jacobi")
    meta = json.loads((folder / "gsd_cases.json").read_text())
    t = load_file(folder / "gsd_cases.safetensors")
    rule = Grouped(t["embed"], official_edges=True)
    for case in meta["cases"]:
        name = case["name"]
        p, q = t[f"{name}.p"][None], t[f"{name}.q"][None, 1:]
        draft, u = t[f"{name}.draft"][None, 1:], t[f"{name}.u"][None, 1:]
        numerator, denominator = rule.chain_ratio(p[:, :-1], q, draft, None)
        assert numerator is not None
        assert denominator is not None
        passed = rule.accept(p[:, :-1], q, draft, None, u)[0]
        members = group_members(p[0, :-1], draft[0], rule.group_size, True)
        finite = (t[f"{name}.logits"] > -math.inf).sum(1)
        for row in case["rows"]:
            k, where = row["i"] - 1, f"{name} draft {row['i']}"
            assert bool(passed[k]) == row["accept"], where
            impossible = bool(p[0, k, draft[0, k]] == 0)
            if row["final_p"] is None or (name == "topk_onehot" and impossible):
                continue
            ratio = float((numerator / denominator)[0, k].clamp(max=1))
            assert math.isclose(ratio, row["final_p"], rel_tol=1e-4, abs_tol=1e-6), where
            inside = row["rank"] - rule.group_size // 2 >= meta["V"] - int(finite[k])
            if inside and not row["fallback"]:
                group = {int(i) for i in members[k] if i >= 0} | {int(draft[0, k])}
                assert group == set(row["cluster"]), where
        run = int(passed.long().cumprod(0).sum())
        assert min(run + 1, meta["L"]) == case["first_misaligned"], name


# ---- whole loop: recorded passes of a tiny model through our runner, cache and processing ------------------


class TraceModel(SharedVocabularyModel):
    """The recorded tiny Llama with Lumina's grammar; the unconditional row starts at the last prompt token."""

    family = "trace"

    @property
    def text_model(self) -> Any:
        return self.model.model

    @property
    def pad(self) -> int:
        return 0

    def prompt_ids(self, text: str) -> list[int]:
        raise AssertionError("prompts are given as ids")

    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        return prompt[-1:]

    def pixels(self, codes: Tensor) -> Tensor:
        raise AssertionError("there is no pixel decoder")


IMAGE_FIRST, IMAGE_LAST, IMAGE_END, IMAGE_START, ROW_END, GRID_0 = 4, 8195, 8196, 8197, 8803, 8804


def trace_model(meta: dict[str, Any]) -> TraceModel:
    state = load_file(golden_dir("jacobi") / "trace_model.safetensors")
    config = LlamaConfig(**meta["config"], bos_token_id=None, eos_token_id=None, pad_token_id=0)
    network = LlamaForCausalLM(config)
    missing, foreign = network.load_state_dict(state, strict=False)
    assert not foreign
    assert set(missing) <= {"lm_head.weight"}
    network.tie_weights()
    rows, columns = 2 * meta["h_grids"], 2 * meta["w_grids"]
    header = [IMAGE_START, GRID_0 + meta["h_grids"], GRID_0 + meta["w_grids"]]
    forced = [*header, *(([-1] * columns + [ROW_END]) * rows), IMAGE_END]
    layout = Layout((1, rows, columns), IMAGE_LAST - IMAGE_FIRST + 1, tuple(forced))
    return TraceModel(network, layout, torch.arange(IMAGE_FIRST, IMAGE_LAST + 1))


def test_trace_replay() -> None:
    """Every recorded pass, fed through our runner with its own cropped cache: laws 1e-5, committed counts equal."""
    path = golden_dir("jacobi") / "trace.json"
    if not path.is_file():
        pytest.skip("no recorded trace")
    meta = json.loads(path.read_text())
    model = trace_model(meta)
    layout, prompt = model.layout, meta["prompt"]
    sampling = SamplingParams(guidance_scale=meta["guidance"], top_k=meta["image_top_k"])
    with torch.no_grad():
        state, _ = model.prefill(model.encode([prompt]), guidance=True, window=meta["window"])
        compared = tested = 0
        for record in meta["iterations"][1:]:
            ids = torch.tensor([record["input_ids"]])
            start = record["cache_len"] - len(prompt)
            slots = start + torch.arange(ids.shape[1])[None]
            inside = slots < layout.total
            slots = slots.clamp(max=layout.total - 1)
            forced = layout.forced_ids[slots] >= 0
            codes = torch.where(forced, 0, ids - IMAGE_FIRST).clamp(min=0)
            # the recorded program drafts image ids for row ends and the like; ours cannot even express that, so the
            # comparison of a pass ends there (such a draft has p = 0 and is always rejected)
            sensible = (model.to_ids(codes, slots) == ids).long().cumprod(1).sum().item()
            state.lengths = torch.tensor([start])
            state.limit = state.kv.shape[4]
            output = model.forward(state, Proposal(codes, slots, inside))
            p = probs(output, slots + 1, layout, sampling)
            for k, row in enumerate(record["p"]):
                slot = start + k + 1
                if k >= sensible or slot >= layout.total or layout.forced_ids[slot] >= 0:
                    continue
                want = torch.zeros(layout.vocab)
                want[torch.tensor(row["ids"]) - IMAGE_FIRST] = torch.tensor(row["prob"])
                assert float((p[0, k] - want).abs().max()) < 1e-5
                assert torch.equal(p[0, k] > 0, want > 0)
                compared += 1
            size = ids.shape[1]
            if record["single"] or not bool(inside.all()):
                continue
            drafts = codes[:, 1:]
            q = torch.zeros(1, size - 1, layout.vocab)
            q.scatter_(2, drafts[..., None], torch.tensor(record["q_at_draft"])[None, :, None])
            verdict = verify_chain(
                p,
                drafts,
                torch.tensor([sensible - 1]),
                torch.zeros(1, size, dtype=torch.long),
                q=q,
                onehot=torch.tensor([record["q_support"]]) == 1,
                u=torch.tensor([record["u"]]),
                U=torch.zeros(1, size - 1, dtype=torch.long),
            )
            assert int(verdict.n_accepted) + 1 == record["matched"]
            tested += 1
    assert compared > 50
    assert tested > 10
