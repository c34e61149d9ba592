"""ZipAR against the published programs: schedules, and greedy runs on the tiny LlamaGen models."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pytest
import torch
from golden import golden_dir
from plans import pass_of
from safetensors.torch import load_file

from visacc.decoders.zipar import ZipAR
from visacc.decoders.zipar_plan import zipar_plan
from visacc.engine import decode
from visacc.models.base import Layout
from visacc.models.llamagen import LlamaGen, VQConfig, VQModel, load_gpt
from visacc.sampling import SamplingParams

pytestmark = pytest.mark.golden
GOLDEN = golden_dir("llamagen")
VARIANTS = {
    "official": {"unwritten": "zero"},
    "masked": {"unwritten": "mask"},
    "masked_auxhidden": {"unwritten": "mask", "stand_in_visible": False},
}


def schedules(code: str) -> list[dict]:
    if GOLDEN.find("zipar_schedules.json") is None:
        return []
    return [s for s in json.loads((GOLDEN / "zipar_schedules.json").read_text()) if s["code"] == code]


def label(entry: dict) -> str:
    height, width = entry["grid"]
    return f"{entry['code']}_{height}x{width}_w{entry['window']}"


def runs() -> list[dict]:
    return json.loads((GOLDEN / "zipar.json").read_text())["runs"] if GOLDEN.find("zipar.json") else []


@lru_cache
def arrays() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "zipar_schedules.npz"))


@lru_cache
def model(name: str) -> LlamaGen:
    gpt = load_gpt(GOLDEN / f"{name}.pt")
    return LlamaGen(gpt, VQModel(VQConfig(ch=32, ch_mult=(1,), codebook_size=gpt.config.vocab_size)))


def lumina_layout(height: int, width: int) -> Layout:
    """Image start, two size tokens, rows with a row-end token, then image end and end of turn."""
    rows = ([-1] * width + [8803]) * height
    return Layout((1, height, width), 8192, (8197, 8828, 8828, *rows, 8196, 8710))


@pytest.mark.parametrize("entry", schedules("llamagen"), ids=label)
def test_llamagen_schedule(entry):
    height, width = entry["grid"]
    plan = zipar_plan(Layout((1, height, width), 16384), entry["window"], mode="llamagen")
    assert pass_of(plan).tolist() == arrays()[label(entry)].tolist()
    assert plan.passes == entry["passes"] == 2 * width + (height - 2) * entry["window"]
    assert max(plan.n_out) == entry["max_parallel"]
    borrowed = [
        (step, int(slot), int(source))
        for step in range(plan.passes)
        for slot, source in zip(plan.feed_slot[step], plan.feed_src[step], strict=True)
        if slot != source
    ]
    assert borrowed == [tuple(row) for row in arrays()[label(entry) + "_standins"].tolist()]


@pytest.mark.parametrize("entry", schedules("lumina"), ids=label)
def test_lumina_schedule(entry):
    height, width = entry["grid"]
    layout = lumina_layout(height, width)
    plan = zipar_plan(layout, entry["window"], mode="lumina")
    assert pass_of(plan)[layout.cell_slots].tolist() == arrays()[label(entry)].tolist()
    assert plan.passes == entry["passes"] == 3 + width + (height - 1) * (entry["window"] - 1)


class Recorder(ZipAR):
    """Also keeps the guided logits by slot and what each pass fed and decided."""

    def begin(self, run, law):
        self.logits = torch.zeros(run.batch, run.total, run.layout.vocab)
        self.fed, self.decided, self.stand_ins = [], [[0]], []
        return super().begin(run, law)

    def judge(self, run, proposal, law, output):
        logits = output.logits
        if output.uncond is not None:
            scale = self.guidance(run, self.predicted_slots(run, proposal))
            scale = run.sampling.guidance_scale if scale is None else scale[..., None]
            logits = output.uncond + scale * (output.logits - output.uncond)
        plan = self.plan_on(run.layout, run.device)
        take, out = self._decided(run)
        self.logits[:, out] = logits[:, take]
        self.fed.append(proposal.positions[0].tolist())
        self.decided.append(out.tolist())
        for node in (plan.feed_slot[run.step - 1] != plan.feed_src[run.step - 1]).nonzero()[:, 0].tolist():
            self.stand_ins.append(
                (run.step - 1, int(proposal.positions[0, node]), proposal.tokens[:, node].tolist())
            )
        return super().judge(run, proposal, law, output)


@pytest.mark.parametrize("entry", runs(), ids=lambda r: r["name"])
def test_greedy_run(entry):
    io = load_file(GOLDEN / "zipar_io.safetensors")
    inputs = load_file(GOLDEN / f"{entry['model']}_io.safetensors")
    net = model(entry["model"])
    text = net.gpt.config.model_type == "t2i"
    cond = (
        net.condition(inputs["cond_leftpad"], inputs["mask_leftpad"])
        if text
        else net.condition(inputs["labels"])
    )
    sampling = SamplingParams(
        guidance_scale=entry["cfg_scale"], temperature=0, guidance_interval=entry["cfg_interval"]
    )
    decoder = Recorder(
        entry["window"],
        "llamagen",
        legacy_interval=entry["cfg_interval"] >= 0,
        **VARIANTS[entry["variant"]],
    )
    result = decode(net, decoder, cond, sampling, [0] * cond.batch)
    assert torch.equal(result.sequence, io[f"tokens/{entry['name']}"])
    assert result.stats.forwards == entry["passes"]
    assert [sorted(slots) for slots in decoder.fed] == entry["inputs_per_pass"][1:]
    assert [sorted(slots) for slots in decoder.decided] == entry["decoded_per_pass"]
    expected = [(s["pass_"], s["slot"], s["token_per_sample"]) for s in entry["stand_ins"]]
    assert decoder.stand_ins == expected
    logits = io.get(f"logits/{entry['name']}")
    if logits is not None:
        torch.testing.assert_close(decoder.logits[:, 1:], logits[:, 1:], atol=1e-3, rtol=0)
