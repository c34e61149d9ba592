"""What a number says about itself: resolution, papers' protocols by name, and what is refused before hours are spent."""

from __future__ import annotations

import json
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_runs import ColourGrid, StandIn, config, prompts
from PIL import Image
from typer.testing import CliRunner

from visacc import metrics as vm
from visacc.eval.cli import app
from visacc.eval.config import parse
from visacc.eval.run import run
from visacc.eval.spec import apply_recipe, apply_text_recipe, check_spec
from visacc.eval.world import World
from visacc.metrics.images import PREPARE, file_sizes, prepared, resolution_name
from visacc.metrics.metric import KernelDistance
from visacc.metrics.recipes import PAPERS, TEXT_PAPERS
from visacc.metrics.scores import FeatureSet, compute


def pictures(n: int, size: tuple[int, int], seed: int = 0) -> np.ndarray:
    """uint8 [n, h, w, 3] for size (width, height)."""
    return np.random.default_rng(seed).integers(0, 256, (n, size[1], size[0], 3), dtype=np.uint8)


def write(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}.png")
    return folder


def call(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


# ---------------------------------------------------------------- resolution


def test_the_resolution_is_part_of_the_protocol(tmp_path: Path) -> None:
    small, large = (write(tmp_path / str(w), pictures(8, (w, 6))) for w in (8, 12))
    scores = {}
    for folder in (small, large):
        out = tmp_path / f"{folder.name}.json"
        done = call("fid", folder, small, "--extractor", "colour-grid", "--metric", "fd", "--out", out, "-q")
        assert done.exit_code == 0, done.exception
        scores[folder.name] = json.loads(out.read_text())[0]
    assert scores["8"]["protocol"]["resolution"] == "8x6"
    assert "/8x6/" in scores["8"]["protocol_id"]
    assert "/12x6/" in scores["12"]["protocol_id"]  # another column
    Image.new("RGB", (9, 9)).save(small / "0.png")
    out = tmp_path / "mixed.json"
    call(
        "fid",
        small,
        large,
        "--extractor",
        "colour-grid",
        "--metric",
        "fd",
        "--out",
        out,
        "-q",
        "--mixed-sizes",
    )
    assert json.loads(out.read_text())[0]["protocol"]["resolution"] == "mixed"


def test_sizes_are_read_from_headers(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pictures(3, (8, 6)))
    (folder / "bad.png").write_bytes(b"no picture")
    files = sorted(folder.iterdir())
    assert resolution_name(file_sizes(files)) == "8x6"
    assert resolution_name([]) == ""
    assert resolution_name([(8, 6), (6, 8)]) == "mixed"


def test_metric_objects_know_the_resolution() -> None:
    x = torch.from_numpy(pictures(30, (8, 6))).permute(0, 3, 1, 2)
    for make in (vm.FID, lambda net: KernelDistance(net, subsets=2, subset_size=5)):
        metric = make(ColourGrid())
        metric.update(x[:20], real=True)
        metric.update(x)
        assert metric.compute().protocol.resolution == "8x6"
        other = make(ColourGrid())
        other.update(x[:, :, :, :4], real=False)
        metric.merge_state(other)
        assert metric.resolution == "mixed"
        metric.reset()
        assert metric.resolution == ""


def test_image_files_of_the_adm_kind_can_be_scored(tmp_path: Path) -> None:
    images, other = pictures(30, (8, 6)), pictures(30, (8, 6), 1)
    folder, reference = write(tmp_path / "gen", images), write(tmp_path / "ref", other)
    np.savez(tmp_path / "gen.npz", arr_0=images)
    values = []
    for gen in (folder, tmp_path / "gen.npz"):
        out = tmp_path / "o.json"
        done = call("fid", gen, reference, "--extractor", "colour-grid", "--metric", "fd", "--out", out, "-q")
        assert done.exit_code == 0, done.exception
        values.append(json.loads(out.read_text())[0])
    assert values[0]["value"] == values[1]["value"]
    assert values[0]["protocol"]["resolution"] == values[1]["protocol"]["resolution"] == "8x6"
    refused = call(
        "fid", tmp_path / "gen.npz", reference, "--prepare", "bicubic-256", "--extractor", "colour-grid", "-q"
    )
    assert "are taken as they are" in str(refused.exception)
    (tmp_path / "p.txt").write_text("a\n")
    assert "folder of images" in str(call("clip", tmp_path / "gen.npz", tmp_path / "p.txt", "-q").exception)


# ---------------------------------------------------------------- protocols of papers


def test_recipes_fill_in_metric_settings() -> None:
    spec, chosen = apply_recipe({"metric": "prdc", "reference": "x", "protocol": "lantern-pr"})
    assert spec["prdc"] == {"k": 3, "strict": True}
    assert (spec["extractor"], chosen and chosen.metrics) == ("vgg16", ("precision", "recall"))
    spec, _ = apply_recipe({"metric": "is", "protocol": "sjd-is"})
    assert (spec["prepare"], spec["is"]) == ("squeeze-299", {"splits": 10})
    for entry, message in (
        ({"metric": "prdc", "protocol": "lantern-pr", "prdc": {"k": 5}}, "fixes k to 3, the entry says 5"),
        (
            {"metric": "fid", "protocol": "sjd-coco5k", "extractor_options": {"flavour": "clean-fid"}},
            "fixes flavour to 'pytorch-fid', the entry says 'clean-fid'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            apply_recipe(entry)


def test_text_recipes() -> None:
    spec = apply_text_recipe({"metric": "clip", "protocol": "gigagan-clip"})
    assert (spec["model"], spec["scale"], spec["prepare"]) == (
        "ViT-B-32",
        "gigagan",
        "center-crop-lanczos-256",
    )
    assert apply_text_recipe({"metric": "hps", "protocol": "lantern-hps"})["version"] == "v2.1"
    with pytest.raises(ValueError, match="'lantern-hps' is one of hps"):
        apply_text_recipe({"metric": "clip", "protocol": "lantern-hps"})
    with pytest.raises(ValueError, match="fixes scale to '100cos', the entry says 'cosine'"):
        apply_text_recipe({"metric": "clip", "protocol": "sjd-clip", "scale": "cosine"})
    with pytest.raises(ValueError, match="unknown protocol 'clip'; known: sjd-clip"):
        apply_text_recipe({"metric": "clip", "protocol": "clip"})


def test_every_recipe_names_what_exists() -> None:
    for r in PAPERS.values():
        assert r.extractor in vm.extractor_names()
        assert {r.images, r.reference_images} <= set(PREPARE)
        metric = "prdc" if "precision" in r.metrics and "fid" not in r.metrics else r.metrics[0]
        check_spec({"metric": metric, "protocol": r.name, "reference": "shapes:10"})
    for t in TEXT_PAPERS.values():
        check_spec({"metric": t.metric, "protocol": t.name})


def test_squeezing_keeps_levels_and_ignores_the_aspect_ratio(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (40, 20), (10, 200, 30)).save(path)
    assert prepared(path, "squeeze-299").shape == (3, 299, 299)
    assert prepared(path, "squeeze-299")[:, 7, 280].tolist() == [10, 200, 30]
    assert prepared(path).shape == (3, 20, 40)
    with pytest.raises(ValueError, match="unknown image preparation 'squash'"):
        prepared(path, "squash")


# ---------------------------------------------------------------- refused at once


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"metric": "fd", "reference": "shapes:9", "extractor": "inceptoin"},
            "unknown extractor 'inceptoin'; known",
        ),
        ({"metric": "fd", "reference": "shapes:9", "prepare": "crop"}, "unknown prepare 'crop'"),
        ({"metric": "fd", "reference": "shapes:9", "on_error": "pass"}, "unknown on_error 'pass'"),
        ({"metric": "fd", "reference": "nowhere/photos"}, "reference nowhere/photos does not exist"),
        ({"metric": "fd", "reference": "shapes:9", "weights": "no.pth"}, "weights no.pth does not exist"),
        ({"metric": "fd", "reference": "shapes:9", "protocol": "fid"}, "unknown protocol 'fid'"),
        ({"metric": "geneval", "detector": "mask3former"}, "unknown detector 'mask3former'; known"),
        ({"metric": "geneval", "weights": "no.pth"}, "weights no.pth does not exist"),
        ({"metric": "clip", "scale": "percent"}, "unknown scale 'percent'"),
        ({"metric": "hps"}, "needs `version: v2.0` or `version: v2.1`"),
        ({"metric": "hps", "version": "v3"}, "unknown version 'v3'"),
    ],
)
def test_wrong_names_fail_before_anything_is_generated(tmp_path: Path, entry: dict, message: str) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("nothing may be generated")

    with pytest.raises(ValueError, match=message):
        run(config(tmp_path / "out", metrics=[entry]), world=World(), quiet=True, build=never)


# ---------------------------------------------------------------- DPG-Bench's layout


def test_dpg_layout(tmp_path: Path) -> None:
    texts = tmp_path / "dpg"
    texts.mkdir()
    known = [m["prompt"] for m in prompts()[:3]]
    for name, text in zip(("COCOval0", "p_10", "p_2"), known, strict=True):
        (texts / f"{name}.txt").write_text(text + "\n")
    data = {"pipeline": "eval_runs:build", "prompts": str(texts), "samples_per_prompt": 4, "batch_size": 5, "seed": 1,
            "decoders": {"good": {"decoder": "a"}}}  # fmt: skip
    output = tmp_path / "out"
    run(parse(data, output=output), world=World(), quiet=True)
    grids = sorted((output / "good" / "dpg").iterdir())
    assert [g.name for g in grids] == ["COCOval0.png", "p_10.png", "p_2.png"]
    samples = [Image.open(output / "good" / "images" / f"{i:06d}.png") for i in range(4, 8)]
    crops = vm.dpg.grid_crops(Image.open(grids[1]), samples[0].width)
    assert [c.tobytes() for c in crops] == [s.tobytes() for s in samples]
    before = grids[0].read_bytes()
    grids[0].unlink()
    run(parse(data, output=output), world=World(), quiet=True)
    assert grids[0].read_bytes() == before
    (texts / "p_2.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"p_2\.txt holds no prompt"):
        run(parse(data, output=tmp_path / "other"), world=World(), quiet=True)


# ---------------------------------------------------------------- memory


def test_a_run_keeps_one_batch_of_pictures(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []
    most = 0

    class Watched(StandIn):
        def __call__(self, *args: Any, **options: Any) -> Any:
            nonlocal most
            most = max(most, sum(r() is not None for r in alive))
            out = super().__call__(*args, **options)
            alive.extend(weakref.ref(image) for image in out.images)
            return out

    run(
        config(tmp_path / "out", metrics=[]),
        world=World(),
        quiet=True,
        build=lambda cell: Watched(cell.decoder),
    )
    assert len(alive) == 48
    assert most <= 4  # the batch before, which the loop's own variables still hold


@pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc/self"), reason="needs Linux")
def test_scores_of_50000_images_need_no_memory_for_them(tmp_path: Path) -> None:
    """A child that may claim little more memory than it has computes FID, KID and IS of 50 000 rows on disk."""
    n, d, classes = 50_000, 448, 200
    block = np.random.default_rng(0).standard_normal((5000, max(d, classes)), dtype=np.float32)
    for name, width in (("features", d), ("logits", classes)):
        rows = np.lib.format.open_memmap(
            tmp_path / f"{name}.npy", mode="w+", dtype=np.float32, shape=(n, width)
        )
        for i in range(0, n, 5000):
            rows[i : i + 5000] = block[:, :width] + i / n
        del rows
    net = ColourGrid()

    def job() -> None:
        rows = {k: np.load(tmp_path / f"{k}.npy", mmap_mode="r") for k in ("features", "logits")}
        sets = [FeatureSet(n, net.id, name, rows) for name in ("a", "b")]
        options = {"kid": {"subsets": 2, "subset_size": 1000}}
        scores = compute(["fd", "kid", "is"], net, *sets, options=options, bootstrap=True)
        assert abs(scores[0].value) < 1e-6

    def tables() -> None:
        assert np.zeros(held // 8).sum() == 0

    def limited(extra: int, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                torch.set_num_threads(1)
                data = next(
                    li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith("VmData")
                )
                limit = int(data.split()[1]) * 1024 + extra
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
                work()
                code = 0
            except (MemoryError, RuntimeError):
                code = 1
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    held = n * (d + classes) * 8  # both tables in float64: 259 MB
    assert limited(held // 2, job) == 0
    assert limited(held // 2, tables) != 0  # the limit is real
