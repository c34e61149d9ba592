"""Evaluation runs on the real engine: a tiny class-conditional LlamaGen through visacc.load and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import accelerate_launch, torchrun
from llamagen_tiny import make_gpt, make_vq

from visacc.eval.config import parse
from visacc.eval.files import read_json
from visacc.eval.run import run
from visacc.eval.world import World
from visacc.models.llamagen.checkpoint import save_model

DECODERS = {"ar": {"decoder": "ar"}, "mc-sjd": {"decoder": "mc-sjd", "window": 4}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c2i")
    save_model(folder / "gpt.safetensors", make_gpt("c2i"))
    save_model(folder / "vq.safetensors", make_vq())
    return folder


def settings(model: Path, output: Path, **changes: Any) -> Any:
    data = {"model": str(model), "prompts": "labels:3x4", "batch_size": 5, "seed": 3, "decoders": DECODERS,
            "sampling": {"guidance_scale": 2.0, "top_k": 20}}  # fmt: skip
    return parse({**data, **changes}, output=output)


def pixels(folder: Path) -> list[bytes]:
    files = sorted((folder / "images").glob("*.png"))
    assert len(files) == 12
    return [f.read_bytes() for f in files]


def test_decoders_of_the_engine(model: Path, tmp_path: Path) -> None:
    rows = run(settings(model, tmp_path / "out"), world=World(), quiet=True)
    ar, mc = (r.speed for r in rows)
    assert ar.images == mc.images == 12
    assert ar.steps == 16  # one target forward per token of the 4 x 4 grid
    assert ar.compression == pytest.approx(1.0)
    assert mc.steps is not None
    assert mc.steps < 16
    assert mc.compression == pytest.approx(16 / mc.steps)
    assert ar.seconds is not None
    # the default coupling draws the pictures of plain decoding, seed for seed
    assert pixels(tmp_path / "out" / "ar") == pixels(tmp_path / "out" / "mc-sjd")
    chunk = read_json(tmp_path / "out" / "ar" / "chunks" / "000001.json")
    assert [row["prompt"] for row in chunk["images"]] == [1, 1, 1, 2, 2]
    assert chunk["tokens"] == 16


def test_other_weights_under_the_same_path_are_refused(model: Path, tmp_path: Path) -> None:
    from visacc.models.llamagen.checkpoint import load_gpt

    config = settings(model, tmp_path / "out", decoders={"ar": {"decoder": "ar"}})
    run(config, world=World(), quiet=True)
    (tmp_path / "out" / "ar" / "chunks" / "000002.json").unlink()
    path = model / "gpt.safetensors"
    saved = path.read_bytes()
    try:
        gpt = load_gpt(path)
        gpt.output.weight.data.neg_()
        save_model(path, gpt)
        with pytest.raises(ValueError, match="other weights"):
            run(config, world=World(), quiet=True)
    finally:
        path.write_bytes(saved)
    run(config, world=World(), quiet=True)
    assert len(pixels(tmp_path / "out" / "ar")) == 12


def test_unknown_decoders_and_options_fail_at_once(model: Path, tmp_path: Path) -> None:
    for decoders, message in (
        ({"ar": None, "x": {"decoder": "sdj"}}, "sdj"),
        ({"ar": None, "x": {"decoder": "sjd", "windw": 3}}, "windw"),
    ):
        with pytest.raises(ValueError, match=message):
            run(settings(model, tmp_path / "out", decoders=decoders), world=World(), quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_decoders_that_learn_while_they_decode_are_refused(model: Path, tmp_path: Path) -> None:
    """Their pictures would depend on the number of processes and on a resume; gumbel-exact ones do not."""
    learning = {"decoder": "nc-sjd", "tables": "online", "window": 4}
    with pytest.raises(ValueError, match="learns while it decodes"):
        run(settings(model, tmp_path / "a", decoders={"nc": learning}), world=World(), quiet=True)
    assert not list((tmp_path / "a").rglob("*.png"))
    run(
        settings(model, tmp_path / "b", decoders={"nc": {**learning, "coupling": "gumbel-exact"}}),
        world=World(),
        quiet=True,
    )
    assert list((tmp_path / "b").rglob("*.png"))


@pytest.mark.parametrize("launch", [torchrun, accelerate_launch])
def test_two_processes(launch: Any, model: Path, tmp_path: Path) -> None:
    """The command as users start it; same pictures as one process."""
    pytest.importorskip("accelerate")
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    data = {"model": str(model), "prompts": "labels:3x4", "batch_size": 5, "seed": 3, "decoders": DECODERS,
            "sampling": {"guidance_scale": 2.0, "top_k": 20}, "output": "out"}  # fmt: skip
    file.write_text(yaml.safe_dump(data))
    done = launch("-m", "visacc", "eval", "run", str(file), "--quiet")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| ar | 12 |") == 1
    ranks = {read_json(p)["rank"] for p in (tmp_path / "out" / "ar" / "timing").glob("*.json")}
    assert ranks == {0, 1}
    run(settings(model, tmp_path / "one"), world=World(), quiet=True)
    assert pixels(tmp_path / "out" / "ar") == pixels(tmp_path / "one" / "ar")
