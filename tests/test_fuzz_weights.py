"""Damaged and hostile weight files: every reader refuses them in one line, runs no code and stays small."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
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
from llamagen_tiny import gpt_config, make_gpt
from torch import Tensor
from weight_readers import NAMES, PICKLES, SAFETENSORS, Reader, all_readers, saved

from visacc.drafters.neighbours import cached_table
from visacc.metrics.extractors.base import load_state
from visacc.metrics.fvd_i3d import I3DFeatures
from visacc.metrics.geneval.detectors import create as create_detector
from visacc.models.cosmos import load_cosmos
from visacc.models.cosmos.tokenizer import load_tokenizer
from visacc.models.llamagen import load_gpt, load_vq
from visacc.models.lpd.released import load_lpd
from visacc.models.nbp import load_magvit2, load_nbp
from visacc.reading import read_array
from visacc.weights import read_weights

CASES = 120
"""Damaged copies of every file."""


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return all_readers(tmp_path_factory.mktemp("files"))


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
