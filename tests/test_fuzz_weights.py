"""Damaged and hostile weight files: every reader refuses them in one line, runs no code and stays small."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import (
    Canary,
    as_bytes,
    bent,
    damaged,
    memory_bound,
    outcome,
    sings,
    survive,
    wrong_safetensors,
)
from hf_tiny import taming
from safetensors.torch import save_file
from test_cosmos import build as cosmos
from test_eagle import drafter_for
from test_llamagen_files import gpt_config, make_gpt, make_vq
from test_lpd import build as lpd
from test_nbp import build as nbp
from test_nbp import tokenizer as magvit2
from test_vlm_eagle3 import untrained as eagle3
from test_vlm_generate import drafter as vlm_drafter
from tiny import tiny_llamagen
from torch import Tensor

from visacc.decoders.neighbour_tables import NeighbourTables
from visacc.drafters import checkpoint as drafters
from visacc.drafters.neighbours import cached_table
from visacc.metrics.extractors.base import load_state
from visacc.metrics.fvd_i3d import I3DFeatures
from visacc.metrics.geneval.detectors import create as create_detector
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
from visacc.reading import read_array
from visacc.speculate import checkpoints as speculators
from visacc.weights import read_weights

METHODS = ("msd", "flash", "dream", "vispec", "eagle3")
CASES = 120
"""Damaged copies of every file."""


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


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    root = tmp_path_factory.mktemp("files")
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


def test_all_readers_are_here(readers: dict[str, Reader]) -> None:
    assert sorted(NAMES) == sorted(readers)
    for reader in readers.values():
        reader.read()


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes(readers: dict[str, Reader], name: str) -> None:
    reader = readers[name]
    with memory_bound(256):
        survive(reader.read, reader.path, damaged(reader.path.read_bytes(), CASES, seed=1), least=CASES // 5)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("config.json") or "beside" in n])
def test_bent_configurations(readers: dict[str, Reader], name: str) -> None:
    """Values of other kinds and absurd sizes: nothing of them is allocated, no loop runs over a claimed number."""
    reader = readers[name]
    tree = json.loads(reader.path.read_text())
    with memory_bound(256):
        survive(reader.read, reader.path, as_bytes(bent(tree, CASES, seed=2)), least=CASES // 10)


@pytest.mark.parametrize("size", [10**5, 10**9, 10**30])
@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("config.json") or "beside" in n])
def test_huge_sizes_in_configurations(readers: dict[str, Reader], name: str, size: int) -> None:
    """Every number of a configuration in turn claims to be huge."""
    reader = readers[name]
    tree = json.loads(reader.path.read_text())

    def places(node: Any) -> list[tuple[Any, Any]]:
        inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        found = [p for _, value in inner for p in places(value)]
        return found + [(node, key) for key, value in inner if type(value) in (int, float)]

    contents = []
    for node, key in places(tree):
        node[key], kept = size, node[key]
        contents.append(json.dumps(tree).encode())
        node[key] = kept
    assert contents
    with memory_bound(256):
        survive(reader.read, reader.path, iter(contents))


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors_that_break_a_rule(readers: dict[str, Reader], name: str) -> None:
    reader = readers[name]
    cases = wrong_safetensors()
    with memory_bound(64):
        survive(reader.read, reader.path, iter(cases.values()), least=len(cases))


def test_tensors_of_other_kinds_are_named(tmp_path: Path) -> None:
    """Whole numbers, complex and block-scaled formats, sparse, quantised and empty tensors where weights should be."""
    state = make_gpt("c2i").state_dict()
    name = "layers.0.attention.wqkv.weight"
    good = state[name]
    kinds = [good.long(), good.to(torch.complex64), good > 0, good.to(torch.float8_e8m0fnu)]
    for value in kinds:
        path = saved(tmp_path / "kinds.safetensors", {**state, name: value})
        with pytest.raises(ValueError, match=rf"kinds.safetensors does not fit .*number formats: {name}"):
            load_gpt(path, config=gpt_config("c2i"))
    odd = [
        good.to_sparse(),
        torch.quantize_per_tensor(good, 0.1, 0, torch.qint8),
        torch.empty(96, 32, device="meta"),
    ]
    for value in odd:
        path = saved(tmp_path / "odd.pt", {**state, name: value})
        with pytest.raises(ValueError, match=f"odd.pt: tensor {name} is sparse, quantised or empty"):
            load_gpt(path, config=gpt_config("c2i"))


# ---- code -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PICKLES)
def test_code_is_never_run(readers: dict[str, Reader], tmp_path: Path, name: str) -> None:
    """At the top, among the weights, as a key, in both pickle formats and as a plain pickle."""
    reader, canary = readers[name], Canary(tmp_path / "canary")
    assert sings(canary)
    content = torch.load(reader.path, weights_only=True)
    first = next(iter(content))
    inner = {**content[first], "x": canary} if isinstance(content[first], dict) else canary
    trees = [
        {**content, "extra": canary},
        {**content, first: inner},
        canary,
        [canary],
        {"a": {"b": [canary]}},
    ]
    files = [pickle.dumps(canary, protocol) for protocol in (0, 2, 4, 5)]
    for tree in trees:
        for zipped in (True, False):
            sink = io.BytesIO()
            torch.save(tree, sink, _use_new_zipfile_serialization=zipped)
            files.append(sink.getvalue())
    survive(reader.read, reader.path, iter(files), least=len(files))
    survive(reader.read, reader.path, damaged(files[4], 40, seed=3), least=40)
    assert not canary.sung


def test_code_in_arrays_is_never_run(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "canary")
    assert sings(canary)
    path = tmp_path / "codes.npy"
    np.save(path, np.array([canary] * 4, dtype=object), allow_pickle=True)
    assert not outcome(lambda: read_array(path), path, "an array of objects")
    assert not canary.sung


def test_torchscript_is_no_weight_file(tmp_path: Path) -> None:
    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    path = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(Program()), path)
    for read in (load_gpt, load_vq, load_lpd, load_nbp, load_magvit2, load_cosmos, load_state):
        with pytest.raises(ValueError, match=r"program\.pt is a TorchScript archive, which is a program"):
            read(path)
    (tmp_path / "jit").mkdir()
    for name in ("encoder.jit", "decoder.jit"):
        (tmp_path / "jit" / name).write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"encoder\.jit is truncated or no TorchScript file"):
        load_tokenizer(tmp_path / "jit")
    with pytest.raises(ValueError, match="is no TorchScript file"):
        I3DFeatures(saved(tmp_path / "i3d.pt", {"a": torch.ones(2)}))


# ---- bombs ------------------------------------------------------------------------------------------------
def bomb(path: Path, megabytes: int, method: int) -> Path:
    """A checkpoint whose only storage inflates to so many megabytes of zeros."""
    sink = io.BytesIO()
    torch.save({"model": {"tok_embeddings.weight": torch.zeros(4, 4)}}, sink)
    with zipfile.ZipFile(sink) as old, zipfile.ZipFile(path, "w", method) as new:
        for member in old.infolist():
            if not member.filename.endswith("data/0"):
                new.writestr(member.filename, old.read(member))
                continue
            with new.open(member.filename, "w", force_zip64=True) as stream:
                for _ in range(megabytes >> 6):
                    stream.write(bytes(1 << 26))
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2], ids=["deflate", "bzip2"])
def test_zip_bombs_are_refused_before_they_inflate(
    readers: dict[str, Reader], tmp_path: Path, method: int
) -> None:
    content = bomb(tmp_path / "bomb.pt", 256, method).read_bytes()
    assert len(content) < 1 << 20
    with memory_bound(64):
        for name in PICKLES:
            reader = readers[name]
            survive(reader.read, reader.path, iter([content]))


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    """Uncompressed, but a thousand directory entries point at one member."""
    path = saved(tmp_path / "overlap.pt", {"w": torch.zeros(1 << 16)})
    with zipfile.ZipFile(path, "a") as archive:
        big = max(archive.infolist(), key=lambda m: m.file_size)
        archive.filelist += [big] * 1000
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"overlap\.pt is a compressed archive"):
        read_weights(path)


def test_views_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    """Four bytes that claim to be terabytes: copying such a tensor would allocate them."""
    state = make_gpt("c2i").state_dict()
    for zipped in (True, False):
        huge = {**state, "output.weight": torch.zeros(1).expand(2**20, 2**20)}
        path = saved(tmp_path / "huge.pt", {"model": huge}, _use_new_zipfile_serialization=zipped)
        with memory_bound(64), pytest.raises(ValueError, match=r"huge\.pt: tensor output\.weight .* claims"):
            load_gpt(path, config=gpt_config("c2i"))


def test_a_file_that_refers_to_itself(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"w": torch.ones(2)}
    loop["again"] = loop
    nest: Any = ()
    for _ in range(60):
        nest = (nest, nest)  # 2 ** 60 leaves, 60 objects
    path = saved(tmp_path / "loop.pt", {"model": {"w": torch.ones(2)}, "loop": loop, "nest": nest})
    content, _ = read_weights(path)
    assert content["loop"]["again"] is content["loop"]


# ---- what cannot be fuzzed cheaply ------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 3, 19, 20, 24, 4096])
def test_short_darknet_files(tmp_path: Path, size: int) -> None:
    path = tmp_path / "yolo.weights"
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=r"yolo\.weights ends early"):
        create_detector("yolov3-tiny", weights=path)


def test_foreign_weights_of_metric_networks(tmp_path: Path) -> None:
    path = saved(tmp_path / "foreign.pth", {"state_dict": {"a": torch.ones(3)}})
    with pytest.raises(ValueError, match=r"foreign\.pth does not fit the I3D network.*missing"):
        I3DFeatures(path, "videogpt")
    with pytest.raises(ValueError, match=r"not part of an mmdet Mask2Former-Swin"):
        create_detector("mask2former", weights=path)


def test_a_damaged_cache_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of neighbour tables is ours: damage costs a computation and no error."""
    monkeypatch.setenv("VISACC_CACHE", str(tmp_path))
    book = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
    good = cached_table(book, 4)
    (path,) = (tmp_path / "neighbours").iterdir()
    for content in [*damaged(path.read_bytes(), 60, seed=4), *wrong_safetensors().values()]:
        path.write_bytes(content)
        again = cached_table(book, 4)
        assert again.neighbours.shape == good.neighbours.shape
        assert int(again.neighbours.min()) >= 0
        assert int(again.neighbours.max()) < 12
