"""Parity of LPD, NBP, Cosmos and the FVD parts with the outputs of the original programs."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lpdnbp_cases import ROOT, Recorder, close, config, cosmos_net, nbp_net, tensors
from torch import Tensor

from visacc.decoders.ar import AR
from visacc.decoders.lpd import LPD as LPDDecoder
from visacc.decoders.nbp import NBP as NBPDecoder
from visacc.engine import decode
from visacc.kernels import process_logits
from visacc.metrics.frechet import frechet_from_features
from visacc.metrics.fvd import VideoProtocol, crop_resize, preprocess
from visacc.metrics.fvd_i3d import I3D
from visacc.models.cosmos.haar import patch, unpatch
from visacc.models.cosmos.positions import Yarn, absolute_table, rope_frequencies, rope_tables
from visacc.models.cosmos.tokenizer import TokenizerConfig, load_tokenizer
from visacc.models.llamagen.vq import VQConfig
from visacc.models.lpd import LPDModel, load_lpd, load_vq, lpd_order, resize_positions, training_mask
from visacc.models.lpd.train import lr_at
from visacc.models.nbp.adapter import NBPModel
from visacc.models.nbp.fsq import FSQ
from visacc.models.nbp.gpt import block_mask, input_ids
from visacc.models.nbp.magvit2 import Magvit2Config, load_magvit2
from visacc.models.nbp.released import right_padded, ucf_text
from visacc.sampling import SamplingParams

pytestmark = pytest.mark.golden


# ---- LPD ------------------------------------------------------------------------------------------------------


def test_lpd_orders() -> None:
    cases = json.loads((ROOT / "lpd_orders/orders.json").read_text())["cases"]
    assert cases
    for case in cases:
        rng, numpy_rng = random.Random(case["seed"]), np.random.RandomState(case["seed"])
        order = lpd_order(
            case["group_sizes"],
            case["grid_size"],
            proximity=case["proximity_threshold"],
            repulsion=case["repulsion_threshold"],
            rng=rng,
            numpy_rng=numpy_rng,
        )
        assert order == case["order"], case["name"]
        assert rng.random() == case["next_random_after"], case["name"]


def test_lpd_training_forward() -> None:
    cfg, io = config("lpd_model"), tensors("lpd_model")
    net = load_lpd(ROOT / "lpd_model/checkpoint.pth", heads=cfg["num_heads"])
    sizes = cfg["group_sizes"]
    tokens, labels, orders = io["train.tokens"], io["train.labels"], io["train.orders"]
    assert torch.equal(training_mask(sizes), io["train.mask"].bool())
    close(net.training_rows(tokens, labels, orders, sizes[-1], None), io["train.input_embeds"])
    logits = net(tokens, labels, orders, sizes)
    close(logits, io["train.logits"])
    target = tokens.gather(1, orders)
    assert torch.equal(target, io["train.target"])
    close(F.cross_entropy(logits.flatten(0, 1), target.flatten()).reshape(1), io["train.loss"])


@pytest.mark.parametrize("run", ["nocfg", "cfg_linear", "cfg_constant", "uncond"])
def test_lpd_greedy_decode(run: str) -> None:
    cfg, io = config("lpd_model"), tensors("lpd_model")
    model = LPDModel(load_lpd(ROOT / "lpd_model/checkpoint.pth", heads=cfg["num_heads"]))
    record = Recorder(model)
    orders = io["decode.orders"]
    labels = [None] * len(orders) if run == "uncond" else io["decode.labels"].tolist()
    scale = cfg["cfg"] if run.startswith("cfg") else 1.0
    schedule = "constant" if run == "cfg_constant" else "linear"
    decoder = LPDDecoder(group_sizes=cfg["group_sizes"], orders=orders, guidance_schedule=schedule)
    result = decode(
        model,
        decoder,
        model.encode(labels),
        SamplingParams(guidance_scale=scale, temperature=0),
        [0] * len(orders),
    )
    assert torch.equal(result.sequence, io[f"decode.{run}.tokens_raster"])
    assert result.stats.forwards == len(cfg["group_sizes"])
    logits = record.logits()
    if scale != 1:
        place = torch.arange(orders.shape[1])[:, None] / orders.shape[1]
        weight = 1 + (scale - 1) * place if schedule == "linear" else scale
        logits = record.uncond() + weight * (logits - record.uncond())
    close(logits, io[f"decode.{run}.logits_genorder"])


def test_lpd_filters() -> None:
    cfg, io = config("lpd_model"), tensors("lpd_model")
    for setting, expected in zip(cfg["filter_settings"], io["filter.probs"], strict=True):
        temperature, top_k, top_p = setting
        law = process_logits(
            io["filter.logits"][:, 0],
            temperature=temperature,
            top_k=top_k or None,
            top_p=None if top_p == 1 else top_p,
        )
        close(law, expected)


def test_lpd_vqgan() -> None:
    cfg, io = config("lpd_vqgan"), tensors("lpd_vqgan")
    shape = VQConfig(
        ch=cfg["ch"],
        ch_mult=cfg["ch_mult"],
        num_res_blocks=cfg["num_res_blocks"],
        z_channels=cfg["z_channels"],
        codebook_size=cfg["codebook_size"],
        codebook_dim=cfg["embed_dim"],
    )
    vq = load_vq(ROOT / "lpd_vqgan/checkpoint.pt", shape)
    close(vq.quant_conv(vq.encoder(io["image"])), io["pre_quant"])
    quantized = vq.quantized(io["image"])
    assert torch.equal(quantized.codes, io["indices"])
    close(quantized.z, io["quant"])
    side = io["pre_quant"].shape[-1]
    decoded = vq.decode_codes(io["codes"], (side, side))
    close(decoded, io["decoded"])
    net = load_lpd(ROOT / "lpd_model/checkpoint.pth", heads=config("lpd_model")["num_heads"])
    model = LPDModel(net)
    model.vq = vq
    pixels = model.decode(io["codes"].unflatten(1, (1, side, side)))
    bytes_ = model.to_uint8(pixels).movedim(1, -1)
    off = (bytes_.int() - io["decoded_uint8"].int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3  # only values within 1e-4 of a rounding boundary may differ


def test_lpd_extras() -> None:
    cfg, io = config("lpd_extras"), tensors("lpd_extras")
    close(resize_positions(io["pos_embed_old"], cfg["new_grid"]), io["pos_embed_new"])
    for epoch, expected in cfg["lr"]["256"].items():
        value = lr_at(float(epoch), peak=8e-4, floor=1e-5, warmup=50, decay_from=400, epochs=450)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-15)
    for epoch, expected in cfg["lr"]["512"].items():
        value = lr_at(float(epoch), peak=5e-4, floor=1e-5, warmup=1, decay_from=1, epochs=50)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-15)


# ---- NBP ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["nbp_hybrid", "nbp_frame", "nbp_ntp"])
def test_nbp_training_forward(folder: str) -> None:
    io, net = tensors(folder), nbp_net(folder)
    video, text = io["video_tokens"].flatten(1), io.get("cond_tokens")
    length = io["train.input_ids"].shape[1]
    ids = input_ids(net.config, video, text, net.config.tokens)[:, :length]
    assert torch.equal(ids, io["train.input_ids"])
    expected = io["train.mask"].bool()
    assert torch.equal(block_mask(net.config, length, text).expand_as(expected), expected)
    logits = net(video, text)
    close(logits, io["train.logits"])
    assert torch.equal(net.target(video), io["train.target"])
    close(net.loss(video, text).reshape(1), io["train.loss"])


@pytest.mark.parametrize("folder", ["nbp_hybrid", "nbp_frame", "nbp_ntp"])
def test_nbp_greedy_decode(folder: str) -> None:
    io, net = tensors(folder), nbp_net(folder)
    hybrid = net.config.hybrid
    model = NBPModel(net, given_frames=0 if hybrid else 2, joint_ids=True)
    record = Recorder(model)
    video = io["video_tokens"]
    data: dict[str, Any] = {"given": video[:, : model.given_frames].flatten(1)}
    if hybrid:
        data["text"] = io["cond_tokens"]
    prefix = input_ids(net.config, data["given"], data.get("text"), model.given_tokens)
    assert torch.equal(prefix, io["decode.prefix_ids"])
    mask = block_mask(net.config, prefix.shape[1], data.get("text"))
    assert torch.equal(mask.expand_as(io["decode.prefix_mask"]), io["decode.prefix_mask"].bool())
    decoder = NBPDecoder() if net.config.block > 1 else AR()
    cond = model.conditioning(data, len(video))
    result = decode(model, decoder, cond, SamplingParams(temperature=0), [0] * len(video))
    assert torch.equal(result.sequence, io["decode.tokens_raw"])
    close(record.logits(), io["decode.logits"])
    n, blocks = net.config.block, model.layout.total // net.config.block
    assert result.stats.forwards == (blocks + n - 1 if hybrid else blocks)
    if hybrid:
        assert torch.equal(model.video_codes(result.sequence), io["decode.tokens_video_clamped"])


def test_nbp_text() -> None:
    prompts = json.loads((ROOT / "nbp_text/ucf101_prompts.json").read_text())
    for name, entry in prompts.items():
        assert ucf_text(name) == entry["text"]
        assert right_padded(entry["ids_unpadded"]).tolist() == entry["ids_right_padded8"]


def test_nbp_fsq() -> None:
    io, fsq = tensors("nbp_fsq"), FSQ(variant="nbp")
    close(fsq.bound(io["z"]), io["bounded"])
    close(fsq.quantize(io["z"]), io["codes"])
    assert torch.equal(fsq.codes(io["codes"]), io["indices"].long())
    assert torch.equal(fsq.codes(fsq.quantize(io["z"])), io["indices"].long())
    close(fsq.values(io["decode_indices"]), io["decode_codes"])


def test_nbp_magvit2() -> None:
    cfg, io = config("nbp_magvit2"), tensors("nbp_magvit2")
    a, b, c = cfg["channels"]
    shape = Magvit2Config(widths=(a, b, b, c), groups=cfg["norm_groups"], levels=cfg["fsq_levels"])
    net = load_magvit2(ROOT / "nbp_magvit2/checkpoint.pt", shape)
    assert {f"module.{k}": list(v.shape) for k, v in net.state_dict().items()} == cfg["keys"]
    video = io["video"].transpose(1, 2)
    close(net.features(video), io["pre_quant"])
    close(net.quantized(video), io["quant"])
    assert torch.equal(net.encode(video), io["indices"].long())
    codes = io["codes"].view_as(io["indices"])
    assert torch.equal(net.encode(video[:, :1]), io["indices_first_frame_only"].long())
    assert net.frames(codes.shape[1]) == video.shape[1]
    z = net.quantizer.values(codes).movedim(-1, 1)
    close(net.decode_features(z).transpose(1, 2), io["decoded"])
    close(net.decode_features(z[:, :, :1]).transpose(1, 2), io["decoded_first_latent_only"])
    close(net.decode(codes), io["decoded"].transpose(1, 2).clamp(0, 1))


# ---- Cosmos ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["cosmos_base", "cosmos_video2world_yarn"])
def test_cosmos_logits(folder: str) -> None:
    cfg, io, net = config(folder), tensors(folder), cosmos_net(folder)
    text = net.config.text
    cos, sin = rope_tables(
        net.config.grid, net.config.head_dim, yarn=net.config.yarn, begin=text, rows=cfg["max_seq_len"]
    )
    close(cos, io["rope_cos"])
    close(sin, io["rope_sin"])
    if text:
        close(
            absolute_table(net.config.grid, net.config.dim, begin=True, rows=cfg["max_seq_len"]),
            io["abs_pos_emb"],
        )
    tokens, context = io["tokens"], io.get("context")
    close(net(tokens, context), io["logits_full"])

    kv = None if context is None else net.context_kv(context)
    batch, length = tokens.shape
    cache = net.empty_cache(batch, length)

    def run(ids: Tensor, start: int) -> Tensor:
        stop = start + ids.shape[1]
        slots = torch.arange(start, stop).expand(batch, -1)
        mask = torch.arange(stop) <= slots[..., None]
        return net.forward_window(ids, slots, mask, cache, stop, kv)

    prefix = cfg["prefix_len"]
    close(run(tokens[:, :prefix], 0), io["logits_prefill"])
    steps = io["logits_steps"].shape[1]
    got = torch.cat([run(tokens[:, i : i + 1], i) for i in range(prefix, prefix + steps)], dim=1)
    close(got, io["logits_steps"])
    start, size = prefix + steps, io["logits_window"].shape[1]
    run((tokens[:, start : start + size] + 1) % net.config.vocab, start)  # wrong drafts, to be overwritten
    close(run(tokens[:, start : start + size], start), io["logits_window"])


@pytest.mark.parametrize("folder", ["cosmos_base", "cosmos_video2world_yarn"])
def test_cosmos_filters(folder: str) -> None:
    cfg, io = config(folder), tensors(folder)
    for (kind, temperature, value), expected in zip(cfg["filters"], io["filter_probs"], strict=True):
        law = process_logits(io["filter_logits"][:, 0], temperature=temperature, **{kind: value})
        close(law, expected)


def test_cosmos_full_rope() -> None:
    io = tensors("cosmos_rope_full")
    for size, yarn in (("4b", None), ("12b", Yarn((3, 40, 64)))):
        spatial, time = rope_frequencies(128, 500000.0, yarn)
        close(spatial, io[f"{size}_spatial_inv_freq"], 1e-6)
        close(time, io[f"{size}_temporal_inv_freq"], 1e-6)
        cos, sin = rope_tables((5, 40, 64), 128, yarn=yarn)
        close(cos[io["rows"]], io[f"{size}_cos"])
        close(sin[io["rows"]], io[f"{size}_sin"])


def test_cosmos_fsq() -> None:
    io, fsq = tensors("cosmos_dv", "fsq.safetensors"), FSQ(variant="cosmos")
    close(fsq.bound(io["z"]), io["bounded"])
    close(fsq.quantize(io["z"]), io["codes"])
    assert torch.equal(fsq.codes(fsq.quantize(io["z"])), io["indices"].long())


def test_cosmos_tokenizer() -> None:
    cfg, io = config("cosmos_dv"), tensors("cosmos_dv")
    shape = TokenizerConfig(
        channels=cfg["channels"],
        multipliers=cfg["channels_mult"],
        blocks=cfg["num_res_blocks"],
        z_channels=cfg["z_channels"],
        spatial=cfg["spatial_compression"],
        temporal=cfg["temporal_compression"],
        patch=cfg["patch_size"],
        levels=cfg["levels"],
    )
    net = load_tokenizer(ROOT / "cosmos_dv/state_dict.pt", shape)
    assert {k: list(v.shape) for k, v in net.state_dict().items()} == cfg["keys"]
    close(patch(io["haar_in"]), io["haar_out"])
    close(unpatch(io["haar_out"]), io["haar_back"])
    video = io["video_uint8"].float() / 127.5 - 1
    z = net.features(video)
    close(z, io["pre_quant"])
    close(net.quantizer.quantize(z.movedim(1, -1)).movedim(-1, 1), io["quant"])
    unit = (video / 2 + 0.5).transpose(1, 2)
    assert torch.equal(net.encode(unit), io["indices"].long())
    assert torch.equal(net.encode(unit[:, :1]), io["indices_first_frame_only"].long())
    assert torch.equal(net.encode(unit[:, :9]), io["indices_9_frames"].long())
    close(net.quantizer.values(io["codes"]).movedim(-1, 1), io["codes_quant"])
    decoded = net.decoder(net.post_quant_conv(io["codes_quant"]))
    close(decoded, io["decoded"])
    close(net.decode(io["codes"]), (io["decoded"] * 0.5 + 0.5).clamp(0, 1).transpose(1, 2))


# ---- FVD ------------------------------------------------------------------------------------------------------


def test_fvd_distance() -> None:
    cfg, io = config("fvd"), tensors("fvd")
    for name, values in cfg["frechet"].items():
        distance = frechet_from_features(io[f"fd_{name}_fake"], io[f"fd_{name}_real"])
        assert distance == pytest.approx(values["styleganv"], rel=1e-7)
        assert distance == pytest.approx(values["videogpt"], rel=1e-6)


def test_fvd_preprocessing() -> None:
    io = tensors("fvd")
    wide = io["pre_in_wide"].transpose(0, 1)  # frames first
    for key, clip, size in (("wide_24", wide, 24), ("tall_9", wide.transpose(2, 3), 9)):
        got = crop_resize(clip, size).transpose(0, 1)
        close(2 * got - 1, io[f"pre_out_{key}"], 1e-5)
    close(crop_resize(wide, 24).transpose(0, 1), io["pre_out_wide_24_nonorm"], 1e-5)
    whole = preprocess(wide[None].clamp(0, 1), VideoProtocol(frames=4, size=24))[0]
    close(whole, io["pre_out_wide_24"], 1e-5)
    pixels = io["nbpre_in_uint8"].movedim(-1, 2).float() / 255
    close(preprocess(pixels, VideoProtocol(frames=4, resize="stretch", size=20)), io["nbpre_out_20x20"], 1e-5)


@pytest.mark.slow
def test_fvd_i3d() -> None:
    cfg, io = config("fvd"), tensors("fvd")
    net = I3D().eval()
    state = net.state_dict()
    assert {k: list(v.shape) for k, v in state.items()} == cfg["i3d_keys"]
    rs = np.random.RandomState(cfg["weight_seed"])
    for key in sorted(state):
        shape = state[key].shape
        if key.endswith("num_batches_tracked"):
            continue
        if key.endswith(("running_var", "bn.weight")):
            value = rs.uniform(0.5, 1.5, shape)
        elif key.endswith("conv3d.weight"):
            value = rs.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        else:
            value = rs.standard_normal(shape) * 0.1
        state[key] = torch.from_numpy(np.asarray(value, np.float32))
    net.load_state_dict(state)
    rs = np.random.RandomState(cfg["input_seed"])
    for name, frames in (("a", 10), ("b", 16)):
        clip = torch.from_numpy(rs.uniform(-1, 1, (1, 3, frames, 224, 224)).astype(np.float32))
        with torch.inference_mode():
            pooled = net.pooled(clip)
            logits = net.logits(pooled).flatten(2).mean(2)
        torch.testing.assert_close(pooled, io[f"i3d_avgpool_{name}"], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(logits, io[f"i3d_logits_{name}"], rtol=1e-3, atol=1e-3)
