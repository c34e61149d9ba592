"""Parity with transformers' own image generation on tiny random models (golden folder ``hfar``)."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import GoldenDir, golden_dir
from safetensors.torch import load_file
from torch import Tensor

from visacc.engine import decode
from visacc.models.base import Conditioning, DecodeState, Layout, ModelOutput, Proposal
from visacc.models.hf import HFImageModel, load_hf
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.models.hf.taming import TamingDecoder, read_decoder
from visacc.registry import decoder_entries, make_decoder
from visacc.sampling import SamplingParams, probs

pytestmark = pytest.mark.golden
FOLDERS = ("janus", "emu3", "chameleon")
IMPLEMENTATIONS = ("sdpa", "eager", "visacc_tree")
TOLERANCE, PIXELS = 2e-5, 1e-5


@dataclass
class Case:
    model: HFImageModel
    golden: dict[str, Tensor]
    meta: dict[str, Any]
    ids: Tensor  # model id of every code
    codes: Tensor  # golden tokens as codes, 0 in forced slots

    @property
    def total(self) -> int:
        return self.golden["tokens"].shape[1]

    def conditioning(self, rows: slice = slice(None)) -> Conditioning:
        g = self.golden
        prompts = _unpad(g["prompt_ids"], g["prompt_mask"])[rows]
        negative = _unpad(g["negative_ids"], g["negative_mask"])[rows] if "negative_ids" in g else None
        return self.model.encode(prompts, negative)

    def raw(self, index: Any = slice(None)) -> Tensor:
        """Golden raw logits in code space [R, N, V]."""
        return self.golden["raw_logits"][:, index][..., self.ids]


def _unpad(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


_CASES: dict[tuple[str, str], Case] = {}


def case(name: str, implementation: str = "sdpa") -> Case:
    if (name, implementation) not in _CASES:
        folder = GoldenDir("hfar")
        meta = json.loads((folder / "meta.json").read_text())[name]
        path = Path(folder / f"{name}/config.json").parent
        golden = load_file(str(folder / f"{name}/golden.safetensors"))
        options: dict[str, Any] = {"attn_implementation": implementation, "positions": meta["positions"]}
        if name != "janus":
            options["grid"] = (meta["H"], meta["W"])
        if name == "chameleon":  # with row ends, so the grammar of Lumina-mGPT
            options["family"] = "lumina-mgpt"
        model = load_hf(path, **options)
        ids = getattr(model, "code_ids", torch.arange(model.layout.vocab))
        codes = golden["tokens"]
        if name != "janus":
            back = torch.zeros(int(ids.max()) + 1 + 4096, dtype=torch.long)
            back[ids] = torch.arange(len(ids))
            codes = torch.where(torch.tensor(model.layout.forced) < 0, back[codes], 0)
        _CASES[name, implementation] = Case(model, golden, meta, ids, codes)
    return _CASES[name, implementation]


def chain(tokens: Tensor, start: int) -> Proposal:
    """A chain of tokens [B, N] at slots start.."""
    slots = (start + torch.arange(tokens.shape[1])).expand_as(tokens)
    return Proposal(tokens, slots, torch.ones_like(slots, dtype=torch.bool))


def feed(c: Case, state: DecodeState, proposal: Proposal) -> Tensor:
    """Raw logits [R, N, V] of a proposal."""
    state.limit = state.prefix + int(state.lengths.max()) + proposal.size
    return rows(c.model.forward(state, proposal))


def rows(output: ModelOutput) -> Tensor:
    assert output.uncond is not None
    return torch.cat([output.logits, output.uncond])


def without_grammar(c: Case) -> Case:
    """The same model with every slot an image slot and every vocabulary id a code."""
    model = copy.copy(c.model)
    vocab = c.golden["raw_logits"].shape[-1]
    model.layout = Layout((1, 1, c.total), vocab)
    every = torch.arange(vocab)
    if isinstance(model, SharedVocabularyModel):
        model.code_ids, model._range, model._tables = every, slice(0, vocab), {}
    return dataclasses.replace(c, model=model, ids=every, codes=c.golden["tokens"])


def start(c: Case, window: int = 32) -> tuple[DecodeState, Tensor]:
    state, output = c.model.prefill(c.conditioning(), guidance=True, window=window)
    return state, rows(output)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_one_forward_of_all_drafts(name: str, implementation: str) -> None:
    c = case(name, implementation)
    state, first = start(c)
    rest = feed(c, state, chain(c.codes[:, :-1], 0))
    assert (torch.cat([first, rest], 1) - c.raw()).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_single_steps(name: str) -> None:
    c = case(name)
    state, logits = start(c)
    for i in range(c.total):
        assert (logits - c.raw(slice(i, i + 1))).abs().max() < TOLERANCE
        if i + 1 < c.total:
            logits = feed(c, state, chain(c.codes[:, i : i + 1], i))
            c.model.commit(state, torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_rejected_drafts_leave_no_trace(name: str, implementation: str) -> None:
    c = case(name, implementation)
    state, _ = start(c)
    wrong = (c.codes[:, :9] + 17) % c.model.layout.vocab
    feed(c, state, chain(wrong, 0))
    c.model.commit(state, torch.zeros(2, dtype=torch.long))
    assert (feed(c, state, chain(c.codes[:, :9], 0)) - c.raw(slice(1, 10))).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_rows_accept_different_numbers(name: str) -> None:
    c = case(name)
    state, _ = start(c)
    drafts = c.codes[:, :5].clone()
    drafts[1, 2:] = (drafts[1, 2:] + 5) % c.model.layout.vocab
    feed(c, state, chain(drafts, 0))
    keep = torch.tensor([5, 2])
    c.model.commit(state, keep)
    slots = keep[:, None] + torch.arange(4)
    proposal = Proposal(c.codes.gather(1, slots), slots, torch.ones_like(slots, dtype=torch.bool))
    got = feed(c, state, proposal)
    for row in range(2):
        for branch in (0, 2):
            wanted = c.raw(slots[row] + 1)[row + branch]
            assert (got[row + branch] - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_tree_block(name: str, implementation: str) -> None:
    # the golden tree holds row ends and image codes for the same slot
    c = without_grammar(case(name, implementation))
    g, accept = c.golden, c.meta["accept"]
    parents = g["tree_parents"].tolist()
    state, _ = start(c)
    feed(c, state, chain(c.codes[:, :accept], 0))
    c.model.commit(state, torch.full((2,), accept))
    depth: list[int] = []
    size = len(parents)
    visible = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(parents):
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            visible[node] |= visible[parent]
    tokens = g["tree_tokens"]
    slots = (accept + torch.tensor(depth)).expand(2, -1)
    proposal = Proposal(
        tokens, slots, torch.ones_like(slots, dtype=torch.bool), visible=visible.expand(2, -1, -1)
    )
    got = feed(c, state, proposal)
    assert (got - g["tree_raw_logits"][..., c.ids]).abs().max() < TOLERANCE
    if implementation != "sdpa":
        return
    # keep the path to the last node and go on: the same as having fed that path as a chain
    path = [size - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    after = tokens[:, :1]
    c.model.commit(state, torch.full((2,), len(path)), torch.tensor(path).expand(2, -1))
    tree_next = feed(c, state, chain(after, accept + len(path)))
    state, _ = start(c)
    straight = torch.cat([c.codes[:, :accept], tokens[:, path], after], dim=1)
    assert (feed(c, state, chain(straight, 0))[:, -1:] - tree_next).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_sampling_probabilities(name: str) -> None:
    c = case(name)
    g = c.golden
    wanted = g["sampling_probs_T0p9_K12_P0p8"]
    steps = wanted.shape[1]
    raw = c.raw(slice(0, steps))
    slots = torch.arange(steps).expand(2, -1)
    sampling = SamplingParams(c.meta["guidance"], temperature=0.9, top_k=12, top_p=0.8)
    law = probs(ModelOutput(raw[:2], raw[2:]), slots, c.model.layout, sampling)
    forced = c.model.layout.forced_ids
    image = torch.ones(steps, dtype=torch.bool) if forced is None else forced[:steps] < 0
    assert (law[:, image] - wanted[:, image][..., c.ids]).abs().max() < 1e-6
    assert (wanted[:, image].sum(-1) - wanted[:, image][..., c.ids].sum(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("name", FOLDERS)
@torch.inference_mode()
def test_pixels(name: str) -> None:
    c = case(name)
    grid = c.model.layout.to_grid(c.codes)
    if "codes" in c.golden:
        assert torch.equal(grid[:, 0], c.golden["codes"])
    raw = c.model.pixels(grid[:, 0])
    assert (raw.movedim(1, -1) - c.golden["pixels"]).abs().max() < PIXELS
    image = c.model.to_uint8(c.model.decode(grid)).movedim(1, -1)
    off = (image.int() - c.golden["image_uint8"].int()).abs()
    edge = (c.golden["pixels"] + 1) / 2 * 255
    assert off.max() <= 1
    assert bool(((edge - edge.round()).abs()[off > 0] < 1e-3).all())


def test_chameleon_decoder_file() -> None:
    folder = golden_dir("hfar")
    decoder = TamingDecoder.from_tensors(read_decoder(folder / "chameleon/vqgan_decoder.safetensors"))
    given = json.loads((folder / "chameleon/vqgan_config.json").read_text())
    given = given.get("ddconfig", given)
    if "ch_mult" in given:
        assert decoder.config.widths == tuple(given["ch"] * m for m in given["ch_mult"])
        assert decoder.config.blocks == given["num_res_blocks"] + 1


@torch.inference_mode()
def test_chameleon_image_codes() -> None:
    c = case("chameleon")
    found = c.model.module.model.vqmodel.encode(c.golden["encode_input"]).image_tokens  # type: ignore[union-attr]
    assert torch.equal(found.flatten(), c.golden["encode_codes"].flatten())


def exact_decoders(model: HFImageModel) -> list[str]:
    """Registered decoders whose greedy limit must be plain AR on this model, at their default options."""
    found = []
    for entry in decoder_entries():
        decoder = make_decoder(entry.name)
        if entry.package == "visacc" and decoder.lossless:
            try:
                decoder.check(model)
            except ValueError:
                continue
            found.append(entry.name)
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_tokens_with_every_exact_decoder(name: str, implementation: str) -> None:
    c = case(name, implementation)
    names = ["ar", "sjd", "mc-sjd"]
    assert set(names) <= {*exact_decoders(c.model), *names}
    for decoder in ({*names, *exact_decoders(c.model)}) if implementation == "sdpa" else names:
        result = decode(
            c.model,
            make_decoder(decoder),
            c.conditioning(),
            SamplingParams(c.meta["guidance"], temperature=0),
            [1, 2],
        )
        sequence = result.sequence
        ids = c.model.sequence_ids(sequence) if name != "janus" else sequence  # type: ignore[attr-defined]
        assert torch.equal(ids, c.golden["tokens"]), f"{decoder} differs"
        assert not result.stats.unfinished


@pytest.mark.parametrize("name", FOLDERS)
def test_prompts_alone_and_together(name: str) -> None:
    """The same pictures whether prompts of different lengths are batched or not, sampled with equal seeds."""
    c = case(name)
    sampling = SamplingParams(c.meta["guidance"], top_k=20)
    both = decode(c.model, make_decoder("mc-sjd", window=6), c.conditioning(), sampling, [5, 6]).sequence
    for row in range(2):
        alone = c.conditioning(slice(row, row + 1))
        one = decode(c.model, make_decoder("mc-sjd", window=6), alone, sampling, [5 + row]).sequence
        assert torch.equal(one[0], both[row])
