"""Parity of the native LlamaGen with the outputs of the official program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import golden_dir
from safetensors.torch import load_file
from torch import Tensor

from visacc.cache import window_mask
from visacc.decoders import AR
from visacc.engine import decode
from visacc.kernels import process_logits
from visacc.models.base import Proposal
from visacc.models.llamagen import (
    GPT,
    RELEASED,
    GPTConfig,
    LlamaGen,
    VQConfig,
    VQModel,
    clean_caption,
    load_gpt,
    load_vq,
    to_uint8,
)
from visacc.models.llamagen.checkpoint import read_state
from visacc.models.llamagen.config import rotary_table
from visacc.models.llamagen.gpt import prefix_causal_mask
from visacc.models.llamagen.released import SIZES, parameter_count
from visacc.models.llamagen.text import clean_once, left_pad
from visacc.sampling import SamplingParams

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("_no_grad")]
GOLDEN = golden_dir("llamagen")


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


def facts(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text())


def weights(kind: str) -> Path:
    return GOLDEN.find(f"gpt_{kind}.pt") or GOLDEN / f"gpt_{kind}.safetensors"


def adapter(gpt: GPT) -> LlamaGen:
    """The adapter needs a tokenizer with as many codes; these tests never decode pixels through it."""
    return LlamaGen(gpt, VQModel(VQConfig(ch=32, ch_mult=(1,), codebook_size=gpt.config.vocab_size)))


@pytest.fixture(scope="module")
def c2i() -> tuple[GPT, dict[str, Tensor]]:
    return load_gpt(weights("c2i")), load_file(GOLDEN / "gpt_c2i_io.safetensors")


@pytest.fixture(scope="module")
def t2i() -> tuple[GPT, dict[str, Tensor]]:
    return load_gpt(weights("t2i")), load_file(GOLDEN / "gpt_t2i_io.safetensors")


@pytest.fixture(scope="module")
def vq() -> tuple[VQModel, dict[str, Tensor]]:
    return load_vq(GOLDEN / "vq.pt"), load_file(GOLDEN / "vq_io.safetensors")


def close(actual: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def generate(
    model: LlamaGen,
    cond: Tensor,
    mask: Tensor | None,
    scale: float,
    choose: Callable[[Tensor], Tensor],
    interval: int = -1,
) -> tuple[Tensor, Tensor]:
    """Token by token through cache and guidance rows -> codes [B, N], guided logits [B, N, V]."""
    total = model.layout.total
    state, out = model.prefill(model.condition(cond, mask), guidance=scale > 1, window=1)
    tokens, logits = [], []
    for slot in range(total):
        guided = out.logits[:, 0]
        if out.uncond is not None and not (interval > -1 and slot > interval + 1):
            guided = out.uncond[:, 0] + (guided - out.uncond[:, 0]) * scale
        logits.append(guided)
        tokens.append(choose(guided))
        if slot + 1 == total:
            break
        position = torch.full_like(tokens[-1], slot)[:, None]
        state.limit = state.prefix + slot + 1
        out = model.forward(state, Proposal(tokens[-1][:, None], position, torch.ones_like(position).bool()))
        model.commit(state, torch.ones_like(tokens[-1]))
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


# ---- GPT --------------------------------------------------------------------------------------------------
def test_c2i_teacher_forcing(c2i):
    gpt, io = c2i
    close(gpt(io["tokens"], io["labels"]), io["tf_logits"], 1e-4)
    close(gpt(io["tokens"], gpt.null_condition(len(io["labels"]))), io["tf_logits_null"], 1e-4)


def test_c2i_rotary_table(c2i):
    gpt, io = c2i
    close(torch.view_as_real(rotary_table(gpt.config)), io["freqs_cis"], 1e-6)


def test_c2i_hidden_states_in_one_window(c2i):
    """The whole sequence as one window: the layer outputs are those of the official uncached forward."""
    gpt, io = c2i
    expected = io["tf_hidden_sample0"]
    length = expected.shape[1]
    tokens = gpt.tok_embeddings(io["tokens"][:1, : length - 1])
    inputs = torch.cat([gpt.embed_prefix(io["labels"][:1]), tokens], 1)
    order = torch.arange(length)[None]
    cache, mask = gpt.empty_cache(1, length), torch.ones(1, length, length).tril().bool()
    out = gpt.forward_window(inputs, order, order, mask, cache, hidden=range(len(expected)))
    close(torch.cat(out.hidden), expected, 1e-4)
    close(out.logits, io["tf_logits"][:1, :length], 1e-4)


@pytest.mark.parametrize(
    ("name", "scale", "interval"), [("cfg1", 1, -1), ("cfg3", 3, -1), ("cfg3_int10", 3, 10)]
)
def test_c2i_greedy(c2i, name, scale, interval):
    gpt, io = c2i
    tokens, logits = generate(adapter(gpt), io["labels"], None, scale, greedy, interval)
    assert torch.equal(tokens, io[f"g_{name}_tokens"])
    close(logits, io[f"g_{name}_logits"], 1e-3)
    model = adapter(gpt)
    sampling = SamplingParams(guidance_scale=scale, temperature=0.0, guidance_interval=interval)
    cond = model.encode(io["labels"].tolist())
    result = decode(model, AR(), cond, sampling, seeds=list(range(len(tokens))))
    assert torch.equal(result.sequence, io[f"g_{name}_tokens"])


def test_c2i_sampled_with_the_official_stream(c2i):
    gpt, io = c2i
    name = "s_cfg2_t0.9_k20_p0.9_seed2024_tokens"

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial(process_logits(logits, temperature=0.9, top_k=20, top_p=0.9), 1)[:, 0]

    model = adapter(gpt)
    torch.manual_seed(2024)
    tokens, _ = generate(model, io["labels"], None, 2.0, choose)
    assert torch.equal(tokens, io[name])


def test_t2i_left_padding_and_projection(t2i):
    gpt, io = t2i
    features, mask = left_pad(io["t5_emb_rightpad"], io["t5_mask_rightpad"])
    assert torch.equal(features, io["cond_leftpad"])
    assert torch.equal(mask, io["mask_leftpad"].bool())
    close(gpt.embed_prefix(features), io["cap_embed"], 1e-5)


def test_t2i_teacher_forcing(t2i):
    gpt, io = t2i
    cond, mask = io["cond_leftpad"], io["mask_leftpad"].bool()
    close(gpt(io["tokens"], cond, mask), io["tf_logits"], 1e-4)
    close(gpt(io["tokens"], gpt.null_condition(len(cond)), mask), io["tf_logits_null"], 1e-4)
    close(gpt(io["tokens"], cond), io["tf_logits_nomask"], 1e-4)


def test_t2i_masks(t2i):
    """Both the training mask and the mask the adapter builds step by step are the official one."""
    gpt, io = t2i
    cfg, mask, expected = gpt.config, io["mask_leftpad"].bool(), io["kv_mask_cfg1"]
    assert torch.equal(prefix_causal_mask(mask, cfg.max_len), expected[:, : cfg.max_len, : cfg.max_len])
    model = adapter(gpt)
    state, _ = model.prefill(model.condition(io["cond_leftpad"], mask), guidance=False, window=cfg.block_size)
    state.limit = cfg.max_len
    order = torch.arange(cfg.block_size).expand(len(mask), -1)
    seen = window_mask(state, Proposal(order, order, torch.ones_like(order).bool()))
    assert torch.equal(seen, expected[:, cfg.prefix_len : cfg.max_len, : cfg.max_len])


@pytest.mark.parametrize(
    ("name", "scale", "masked"), [("cfg1", 1, True), ("cfg7.5", 7.5, True), ("cfg7.5_nomask", 7.5, False)]
)
def test_t2i_greedy(t2i, name, scale, masked):
    gpt, io = t2i
    mask = io["mask_leftpad"].bool() if masked else None
    tokens, logits = generate(adapter(gpt), io["cond_leftpad"], mask, scale, greedy)
    assert torch.equal(tokens, io[f"g_{name}_tokens"])
    close(logits, io[f"g_{name}_logits"], 1e-3)
    model = adapter(gpt)
    sampling = SamplingParams(guidance_scale=scale, temperature=0.0)
    result = decode(model, AR(), model.condition(io["cond_leftpad"], mask), sampling, seeds=[0] * len(tokens))
    assert torch.equal(result.sequence, io[f"g_{name}_tokens"])


# ---- tokenizer --------------------------------------------------------------------------------------------
def test_vq_encode(vq):
    model, io = vq
    close(model.encoder(io["image"]), io["encoder_out"], 1e-4)
    close(model.quant_conv(model.encoder(io["image"])), io["pre_quant"], 1e-4)
    quantized = model.quantized(io["image"])
    assert torch.equal(quantized.codes, io["codes"])
    assert torch.equal(model.encode(io["image"]), io["codes"])
    close(quantized.z, io["quant"], 1e-6)
    close(model(io["image"]).recon, io["recon"], 1e-4)


def test_vq_decode(vq):
    model, io = vq
    grid = (io["image"].shape[2] // model.config.downsample, io["image"].shape[3] // model.config.downsample)
    close(model.decode_codes(io["codes"], grid), io["recon_from_codes"], 1e-4)
    close(model.decode_codes(io["codes_3x5"], (3, 5)), io["decoded_3x5"], 1e-4)
    pixels = model.decode_codes(io["grid_codes"], grid)
    close(pixels, io["grid_decoded"], 1e-4)
    assert torch.equal(to_uint8(pixels), io["grid_uint8"])
    assert torch.equal(to_uint8(pixels, 20), io["grid_bicubic20_uint8"])


def test_adapter_bytes(vq):
    """The pipeline's way (pixels in [0, 1], then bytes) gives the official bytes."""
    vq_model, io = vq
    codes = vq_model.config.codebook_size
    gpt = GPT(GPTConfig(dim=16, n_layer=1, n_head=1, vocab_size=codes, block_size=16))
    model = LlamaGen(gpt, vq_model)
    rows, columns = (s // vq_model.config.downsample for s in io["image"].shape[2:])
    pixels = model.decode(io["grid_codes"].view(-1, 1, rows, columns))
    assert torch.equal(model.to_uint8(pixels).movedim(1, -1), io["grid_uint8"])


# ---- sampling, text ---------------------------------------------------------------------------------------
def test_sampling_filters():
    """Equal to the official filters, with one documented difference: where the top-p border cuts a group of
    equal logits, the official sort keeps an arbitrary part of the group and ours keeps it whole."""
    io = load_file(GOLDEN / "sampling_io.safetensors")
    cases = [name for name in io if name.startswith("probs_")]
    assert cases
    for name in cases:
        t, k, p = (part[1:] for part in name.removeprefix("probs_").split("_"))
        temperature, top_k, top_p = max(float(t), 1e-5), int(k) or None, float(p)
        ours = process_logits(io["logits"], temperature=temperature, top_k=top_k, top_p=top_p)
        expected = io[name]
        border = io["logits"].masked_fill(expected == 0, torch.inf).amin(1, keepdim=True)
        extra = (ours > 0) & (expected == 0)
        assert top_p < 1 or not extra.any(), name
        assert (io["logits"] == border)[extra].all(), name
        common = ours.masked_fill(extra, 0)
        close(common / common.sum(1, keepdim=True), expected, 1e-6)


def test_text_cleaning():
    for case in json.loads((GOLDEN / "t5_text_cleaning.json").read_text()):
        assert clean_once(case["text"]) == case["clean_once"]
        assert clean_caption(case["text"]) == case["processed"]


# ---- files ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_every_file_variant_gives_the_same_weights(kind):
    reference = load_gpt(GOLDEN / f"gpt_{kind}.pt")
    expected = facts(f"gpt_{kind}.json")["config"]
    shared = {f.name for f in fields(GPTConfig)} & expected.keys()
    assert {name: getattr(reference.config, name) for name in shared} == {
        name: expected[name] for name in shared
    }
    files = [f"gpt_{kind}.safetensors"] + (["gpt_c2i_flat_fsdp.pt"] if kind == "c2i" else [])
    for file in files:
        other = load_gpt(GOLDEN / file, config=reference.config)
        assert other.config == reference.config
        state = other.state_dict()
        for name, tensor in reference.state_dict().items():
            assert torch.equal(state[name], tensor), (file, name)


def test_all_tensors_are_consumed():
    for kind in ("c2i", "t2i"):
        raw = torch.load(GOLDEN / f"gpt_{kind}.pt", weights_only=True)["model"]
        assert raw.keys() == load_gpt(GOLDEN / f"gpt_{kind}.pt").state_dict().keys()
    raw = torch.load(GOLDEN / "vq.pt", weights_only=True)["model"]
    assert raw.keys() - load_vq(GOLDEN / "vq.pt").state_dict().keys() == {"quantize.codebook_used"}
    assert read_state(GOLDEN / "vq.pt")[0].keys() == raw.keys()


def test_released_models_have_the_official_tensors():
    manifest = facts("keys_manifest.json")
    by_file = {entry.file.removesuffix(".pt"): entry for entry in RELEASED.values()}
    tokenizers = {"VQ-16": RELEASED["llamagen-vq-16-c2i"], "VQ-8": RELEASED["llamagen-vq-8-c2i"]}
    for name, facts_of in manifest.items():
        entry = tokenizers.get(name) or by_file[name]
        with torch.device("meta"):
            model = VQModel(entry.vq_config) if entry.kind == "vq" else GPT(entry.gpt_config)
        ours = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
        expected = dict(facts_of["tensors"])
        expected.pop("quantize.codebook_used", None)
        assert ours == expected, name
        assert sum(p.numel() for p in model.parameters()) == facts_of["params"]
        assert entry.min_bytes == 4 * facts_of["params"]
        if entry.kind != "vq":
            assert parameter_count(entry.gpt_config) == facts_of["params"]
            assert SIZES[entry.size][2] == facts_of["config"]["dim"]
