"""Every reader of weights with a good file, to be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hf_tiny import taming
from llamagen_tiny import gpt_config, make_gpt, make_vq
from safetensors.torch import save_file
from test_cosmos import build as cosmos
from test_eagle import drafter_for
from test_lpd import build as lpd
from test_nbp import build as nbp
from test_nbp import tokenizer as magvit2
from test_vlm_eagle3 import untrained as eagle3
from test_vlm_generate import drafter as vlm_drafter
from tiny import tiny_llamagen
from torch import Tensor

from visacc.decoders.neighbour_tables import NeighbourTables
from visacc.drafters import checkpoint as drafters
from visacc.metrics.extractors.base import load_state
from visacc.models.assets_io import read_asset, save_asset
from visacc.models.cosmos import load_cosmos
from visacc.models.cosmos.tokenizer import CosmosTokenizer, TokenizerConfig, load_tokenizer
from visacc.models.hf.taming import TamingDecoder, read_decoder
from visacc.models.llamagen import VQConfig, load_gpt, load_vq, save_model
from visacc.models.llamagen.converted import load_converted
from visacc.models.lpd.released import load_lpd
from visacc.models.lpd.released import load_vq as load_lpd_vq
from visacc.models.nbp import load_magvit2, load_nbp
from visacc.models.shapes.train_util import load_checkpoint
from visacc.speculate import checkpoints as speculators

METHODS = ("msd", "flash", "dream", "vispec", "eagle3")


@dataclass
class Reader:
    """A reader with a good file: ``path`` is damaged, ``read`` must refuse it or live with it."""

    path: Path
    read: Callable[[], Any]


def saved(path: Path, state: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path, **options)
    else:
        torch.save(state, path, **options)
    return path


def converted_folder(folder: Path) -> Path:
    """A GPT in the transformers-style layout of LANTERN's targets."""
    gpt = make_gpt("t2i")
    c = gpt.config
    names = {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    outer = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    state: dict[str, Tensor] = {}
    for name, value in gpt.state_dict().items():
        part = name.removesuffix(".weight")
        if part in outer:
            state[f"{outer[part]}.weight"] = value
        elif name.startswith("cls_embedding."):
            state[f"model.{name}"] = value
        else:
            _, layer, inner = part.split(".", 2)
            if inner == "attention.wqkv":
                for letter, piece in zip("qkv", value.chunk(3), strict=True):
                    state[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] = piece
            else:
                state[f"model.layers.{layer}.{names[inner]}.weight"] = value
    saved(folder / "model.safetensors", state)
    sizes = {"hidden_size": c.dim, "num_attention_heads": c.n_head, "num_hidden_layers": c.n_layer}
    extra = {"vocab_size": c.vocab_size, "block_size": c.block_size, "caption_dim": c.caption_dim}
    raw = {**sizes, **extra, "cls_token_num": c.cls_token_num}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def released_drafter(folder: Path) -> Path:
    """An EAGLE-type image drafter as LANTERN stores them: a pickle and the target's configuration."""
    network = drafter_for(tiny_llamagen(grid=24, classes=10), kv_heads=2)
    saved(folder / "pytorch_model.bin", network.state_dict())
    c = network.config
    raw = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "vocab_size": c.vocab_size,
        "input_type": "c2i",
        "rms_norm_eps": c.eps,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def all_readers(root: Path) -> dict[str, Reader]:
    """By name, with their files in a folder."""
    gpt, vq, lpd_model, video, world = make_gpt("c2i"), make_vq(), lpd(), nbp(), cosmos()
    config = gpt_config("c2i")
    found: dict[str, Reader] = {}

    def add(name: str, path: Path, read: Callable[[Path], Any]) -> None:
        found[name] = Reader(path, lambda: read(path))

    save_model(root / "gpt.safetensors", gpt)
    save_model(root / "vq.safetensors", vq)
    add("gpt, safetensors", root / "gpt.safetensors", load_gpt)
    add("gpt, zip", saved(root / "gpt.pt", gpt.state_dict()), lambda p: load_gpt(p, config=config))
    old = saved(root / "old.pt", gpt.state_dict(), _use_new_zipfile_serialization=False)
    add("gpt, before zip", old, lambda p: load_gpt(p, config=config))
    side = saved(root / "side" / "gpt.pt", gpt.state_dict())
    side.with_suffix(".json").write_text(json.dumps({"config": asdict(config)}))
    found["gpt, configuration beside it"] = Reader(side.with_suffix(".json"), lambda: load_gpt(side))
    add("vq, safetensors", root / "vq.safetensors", load_vq)
    add("vq, zip", saved(root / "vq.pt", {"model": vq.state_dict()}), load_vq)
    folder = converted_folder(root / "converted")
    for file in ("model.safetensors", "config.json"):
        found[f"converted gpt, {file}"] = Reader(folder / file, lambda: load_converted(folder))
    add("lpd", saved(root / "lpd.pth", {"model": lpd_model.net.state_dict()}), lambda p: load_lpd(p, heads=4))
    shape = VQConfig(ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=8, codebook_size=48)
    add("lpd, vq", saved(root / "ds16.pt", vq.state_dict()), lambda p: load_lpd_vq(p, shape))
    inner = {f"transformer.{k}": v for k, v in video.net.state_dict().items()}
    sizes = {"heads": 4, "grid": (3, 4, 4), "video_vocab": 24, "text_vocab": 20}
    path = saved(root / "nbp.ckpt", {"state_dict": inner, "epoch": 3})
    add("nbp", path, lambda p: load_nbp(p, **sizes))
    tokens = magvit2()
    state = {f"module.{k}": v for k, v in tokens.state_dict().items()}
    path = saved(root / "magvit2.pth", {"model_state_dict": state})
    add("magvit2", path, lambda p: load_magvit2(p, tokens.config))
    state = {f"model.{k}": v for k, v in world.net.state_dict().items()}
    path = saved(root / "cosmos" / "model.pt", {"model": state})
    add("cosmos", path, lambda p: load_cosmos(p, grid=(3, 4, 5)))
    shape_of = TokenizerConfig(channels=2, z_channels=8, blocks=1, levels=(8, 2, 2))
    path = saved(root / "tokenizer.pt", CosmosTokenizer(shape_of).state_dict())
    add("cosmos tokenizer", path, lambda p: load_tokenizer(p, shape_of))
    path = saved(root / "vqgan.ckpt", {"state_dict": taming(20, 6, 3).state_dict()})
    add("taming", path, lambda p: TamingDecoder.from_tensors(read_decoder(p), p))
    ours = root / "drafter"
    drafters.save_drafter(drafter_for(tiny_llamagen(grid=4)), ours)
    theirs = released_drafter(root / "released-drafter")
    for where, file in ((ours, "model.safetensors"), (ours, "config.json"), (theirs, "pytorch_model.bin"),
                        (theirs, "config.json")):  # fmt: skip
        reader = Reader(where / file, lambda where=where: drafters.load_drafter(where))
        found[f"image drafter, {where.name}, {file}"] = reader
    for method in METHODS:
        where = root / method
        speculators.save_drafter(eagle3() if method == "eagle3" else vlm_drafter(method), where)
        for file in ("model.safetensors", "config.json"):
            reader = Reader(where / file, lambda where=where: speculators.load_drafter(where))
            found[f"{method} drafter, {file}"] = reader
    g = torch.Generator().manual_seed(0)
    parts = (torch.rand(2, 6, 2, generator=g), torch.rand(2, 2, 6, generator=g), torch.rand(6, generator=g))
    NeighbourTables(((0, 0, -1), (0, -1, 0)), *parts, "print").save(root / "neighbours.safetensors")
    add("neighbour tables", root / "neighbours.safetensors", NeighbourTables.load)
    add("metric weights", saved(root / "w.pth", {"state_dict": {"a": torch.ones(3, 3)}}), load_state)
    save_asset(make_vq(), vq.config, root / "asset.safetensors", note="x")
    add("shipped weights", root / "asset.safetensors", read_asset)
    run = {"model": gpt.state_dict(), "optimizers": [{"state": {0: {"m": torch.ones(2)}}}], "step": 3}
    add("training state", saved(root / "state.pt", run), load_checkpoint)
    return found


NAMES = [
    "gpt, safetensors", "gpt, zip", "gpt, before zip", "gpt, configuration beside it", "vq, safetensors", "vq, zip",
    "converted gpt, model.safetensors", "converted gpt, config.json", "lpd", "lpd, vq", "nbp", "magvit2", "cosmos",
    "cosmos tokenizer", "taming", "image drafter, drafter, model.safetensors", "image drafter, drafter, config.json",
    "image drafter, released-drafter, pytorch_model.bin", "image drafter, released-drafter, config.json",
    *(f"{m} drafter, {f}" for m in METHODS for f in ("model.safetensors", "config.json")),
    "neighbour tables", "metric weights", "shipped weights", "training state",
]  # fmt: skip
PICKLES = [
    "gpt, zip", "gpt, before zip", "vq, zip", "lpd", "lpd, vq", "nbp", "magvit2", "cosmos", "cosmos tokenizer", "taming",
    "image drafter, released-drafter, pytorch_model.bin", "metric weights", "training state",
]  # fmt: skip
SAFETENSORS = [
    "gpt, safetensors", "vq, safetensors", "converted gpt, model.safetensors", "image drafter, drafter, model.safetensors",
    "msd drafter, model.safetensors", "eagle3 drafter, model.safetensors", "neighbour tables", "shipped weights",
]  # fmt: skip
