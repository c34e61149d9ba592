"""`visacc eval`: folder commands end to end with a registered extractor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import visacc.metrics as vm
from visacc.eval.cli import app
from visacc.metrics import extractors
from visacc.metrics.extractors.base import Extractor
from visacc.metrics.npz import save_stats
from visacc.metrics.stats import FeatureStats


class Cells(Extractor):
    """Mean colour of four cells."""

    def __init__(self, device: Any = None, cells: int = 2):
        self.name, self.preprocess, self.weights = "cells", f"area-{cells}", "none"
        self.cells, self.device = cells, torch.device("cpu")
        self.heads = {"features": 3 * cells**2, "logits": 3 * cells**2}

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, self.cells).flatten(1)
        return {"features": rows, "logits": rows * 4}


if "cells" not in extractors.names():
    extractors.register("cells", Cells)


def write(folder: Path, n: int, seed: int) -> np.ndarray:
    folder.mkdir()
    images = np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}.png")
    return images


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path, float]:
    a, b = write(tmp_path / "gen", 30, 0), write(tmp_path / "ref", 40, 1)
    rows = [Cells()(torch.from_numpy(x).permute(0, 3, 1, 2))["features"] for x in (a, b)]
    return tmp_path / "gen", tmp_path / "ref", vm.frechet_from_features(*rows)


def call(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def test_fid_of_folders_files_and_statistics(sets: tuple[Path, Path, float], tmp_path: Path) -> None:
    gen, ref, want = sets
    out = tmp_path / "out.json"
    done = call("fid", gen, ref, "--extractor", "cells", "--metric", "fd", "--metric", "is", "--metric", "prdc",
                "--out", out, "--quiet", "--batch", 7)  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    scores = {s["protocol"]["metric"]: s for s in json.loads(out.read_text())}
    assert scores["fd"]["value"] == pytest.approx(want, rel=1e-9)
    assert set(scores) == {"fd", "is", "precision", "recall", "density", "coverage"}
    assert "cells@none/area-2" in done.output
    assert "30v40" in done.output
    images = np.stack([np.asarray(Image.open(ref / f"{i}.png")) for i in range(40)])
    np.savez(tmp_path / "ref.npz", arr_0=images)
    save_stats(tmp_path / "stats.npz", FeatureStats.of(Cells()(torch.from_numpy(images).permute(0, 3, 1, 2))["features"], Cells().id))  # noqa: E501  # fmt: skip
    for reference in ("ref.npz", "stats.npz"):
        call(
            "fid",
            gen,
            tmp_path / reference,
            "--extractor",
            "cells",
            "--metric",
            "fd",
            "--out",
            out,
            "--quiet",
        )
        assert json.loads(out.read_text())[0]["value"] == pytest.approx(want, rel=1e-9)
    failed = call("fid", gen, tmp_path / "stats.npz", "--extractor", "cells", "--metric", "prdc", "--quiet")
    assert "only its statistics are given" in str(failed.exception)
    other = call("fid", gen, tmp_path / "stats.npz", "--extractor", "cells", "-O", "cells=1", "--quiet")
    assert "made with another extractor" in str(other.exception)


def test_kid_and_its_refusals(sets: tuple[Path, Path, float], tmp_path: Path) -> None:
    gen, ref, _ = sets
    out = tmp_path / "o.json"
    done = call(
        "kid", gen, ref, "--extractor", "cells", "--subset", 20, "--subsets", 3, "--out", out, "--quiet"
    )
    assert done.exit_code == 0, done.exception
    assert json.loads(out.read_text())[0]["protocol"]["settings"] == {
        "seed": "2020",
        "size": "20",
        "subsets": "3",
    }
    assert "fewer than subset_size=1000" in str(
        call("kid", gen, ref, "--extractor", "cells", "--quiet").exception
    )


def test_damaged_and_mixed_folders(sets: tuple[Path, Path, float], tmp_path: Path) -> None:
    gen, ref, _ = sets
    args = (
        "fid",
        gen,
        ref,
        "--extractor",
        "cells",
        "--metric",
        "fd",
        "--quiet",
        "--out",
        tmp_path / "o.json",
    )
    (gen / "4.png").write_bytes((gen / "4.png").read_bytes()[:60])
    assert "4.png" in str(call(*args).exception)
    assert call(*args, "--skip-unreadable").exit_code == 0
    assert json.loads((tmp_path / "o.json").read_text())[0]["protocol"]["n_gen"] == 29
    Image.new("RGB", (9, 8)).save(gen / "4.png")
    assert "different sizes" in str(call(*args).exception)
    assert call(*args, "--mixed-sizes").exit_code == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no images in" in str(call("fid", empty, ref, "--extractor", "cells", "--quiet").exception)
    one = tmp_path / "one"
    write(one, 1, 0)
    refused = call("fid", one, ref, "--extractor", "cells", "--metric", "fd", "--quiet")
    assert "at least 2 images" in str(refused.exception)


def test_work_folders_resume_and_guard(sets: tuple[Path, Path, float], tmp_path: Path) -> None:
    gen, ref, _ = sets
    args = ("fid", gen, ref, "--extractor", "cells", "--metric", "fd", "--quiet", "--work", tmp_path / "w")
    first = call(*args)
    assert first.exit_code == 0
    assert call(*args).output == first.output
    (gen / "0.png").unlink()
    assert "another image set" in str(call(*args).exception)


def test_changed_inputs_are_not_answered_from_the_work_folder(
    sets: tuple[Path, Path, float], tmp_path: Path
) -> None:
    """Another reference under the same name gives another score, rewritten images of the same size a refusal."""
    gen, ref, want = sets
    command = [
        "fid",
        gen,
        ref,
        "--extractor",
        "cells",
        "--metric",
        "fd",
        "--work",
        tmp_path / "work",
        "--quiet",
    ]
    out = tmp_path / "out.json"

    def value() -> float:
        done = call(*command, "--out", out)
        assert done.exit_code == 0, (done.output, done.exception)
        return float(json.loads(out.read_text())[0]["value"])

    assert value() == pytest.approx(want, rel=1e-9)
    later = write(tmp_path / "later", 40, 5)
    for i, image in enumerate(later):
        Image.fromarray(image).save(ref / f"{i}.png")
    rows = [
        Cells()(torch.from_numpy(np.stack(x)).permute(0, 3, 1, 2))["features"]
        for x in ([np.asarray(Image.open(gen / f"{i}.png")) for i in range(30)], later)
    ]
    changed = vm.frechet_from_features(*rows)
    assert changed != pytest.approx(want, rel=1e-3)
    assert value() == pytest.approx(changed, rel=1e-9)
    same = (gen / "0.png").read_bytes()
    (gen / "0.png").write_bytes(same)
    assert "the images changed" in str(call(*command).exception)


def test_a_generated_folder_is_scored_without_its_sheet_and_leftovers(
    sets: tuple[Path, Path, float], tmp_path: Path
) -> None:
    gen, ref, want = sets
    names = [f"{i}.png" for i in range(30)]
    for name in ("contact_sheet.png", "trace_0.png", "30.png"):
        Image.new("RGB", (8, 8), "red").save(gen / name)
    record = {"decoder": "ar", "images": [{"file": name} for name in names]}
    (gen / "stats.json").write_text(json.dumps(record))
    done = call(
        "fid", gen, ref, "--extractor", "cells", "--metric", "fd", "--out", tmp_path / "o.json", "--quiet"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads((tmp_path / "o.json").read_text())[0]["value"] == pytest.approx(want, rel=1e-9)


def test_protocols_by_name(sets: tuple[Path, Path, float], tmp_path: Path) -> None:
    gen, ref, _ = sets
    assert "unknown protocol" in str(call("fid", gen, ref, "--protocol", "coco").exception)
    from visacc.eval.spec import apply_recipe, named
    from visacc.metrics.protocol import Protocol, Score

    spec, chosen = apply_recipe({"metric": "fid", "reference": "x", "protocol": "gigagan-coco5k"})
    assert spec["extractor_options"] == {"flavour": "clean-fid"}
    assert spec["prepare"] == spec["reference_prepare"] == "center-crop-lanczos-256"
    with pytest.raises(ValueError, match="fixes prepare"):
        apply_recipe({"metric": "fid", "protocol": "gigagan-coco5k", "prepare": "as-is"})
    full = named(Score(1.0, Protocol("fid", "i", n_gen=5000, n_ref=5000)), chosen)
    assert full.protocol.name == "gigagan-coco5k"
    assert full.protocol.id.startswith("gigagan-coco5k:")
    small = named(Score(1.0, Protocol("fid", "i", n_gen=30, n_ref=5000)), chosen)
    assert small.protocol.name == "custom"
    assert "30 generated images instead of 5000" in small.warnings[0]


def test_prompt_counts_must_match(sets: tuple[Path, Path, float], tmp_path: Path) -> None:
    gen, _, _ = sets
    (tmp_path / "p.txt").write_text("a\nb\n")
    assert "30 images but 2 prompts" in str(call("clip", gen, tmp_path / "p.txt", "--quiet").exception)
    assert "no prompt file" in str(call("clip", gen, tmp_path / "q.txt", "--quiet").exception)


def test_run_command(tmp_path: Path) -> None:
    assert "no configuration file" in str(call("run", tmp_path / "none.yaml").exception)
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "not valid YAML" in str(call("run", tmp_path / "bad.yaml").exception)
    prompts = tmp_path / "prompts.jsonl"
    from visacc.models.shapes.captions import heldout_prompts

    prompts.write_text("".join(json.dumps(m) + "\n" for m in heldout_prompts(1)))
    (tmp_path / "run.yaml").write_text(
        "pipeline: eval_runs:build\nprompts: prompts.jsonl\noutput: out\nbatch_size: 3\n"
        "decoders: {good: {decoder: a}}\n"
        "metrics:\n- {metric: fd, extractor: cells, reference: 'shapes:10'}\n- {metric: geneval, detector: shapes}\n"
    )
    done = call("run", tmp_path / "run.yaml", "--quiet")
    assert done.exit_code == 0, done.exception
    assert "| good | 6 |" in done.output
    assert (tmp_path / "out" / "summary.json").exists()


def test_compare_command(tmp_path: Path) -> None:
    from visacc.metrics.geneval.summary import record, to_line

    lines = [to_line(record("a", {"tag": "colors", "prompt": str(i)}, i % 2 == 0, "", {})) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done = call("compare", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert json.loads(done.output)["difference"] == 0
