"""``visacc eval fvd``: folders of clips in, a distance with its protocol out; what is wrong with them in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visacc.cli import main
from visacc.eval.fvd import fvd_score
from visacc.metrics import fvd_i3d
from visacc.metrics.frechet import frechet_from_features
from visacc.metrics.fvd import PROTOCOLS, RandomVideoFeatures, preprocess
from visacc.pictures import save_image
from visacc.video_io import read_clip, to_frames, write_clip


def clip(seed: int, frames: int = 16, side: int = 20) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (
        np.repeat(rng.integers(0, 255, (frames, 5, side // 4, 3)), 4, axis=1)
        .repeat(4, axis=2)
        .astype(np.uint8)
    )


class Small:
    """In place of I3D: random convolutions on the network's input."""

    def __init__(self, weights: str, variant: str, device: Any) -> None:
        fvd_i3d.weight_file(weights)
        self.extractor = f"small-{variant}"

    def __call__(self, clips: torch.Tensor) -> torch.Tensor:
        return RandomVideoFeatures()(clips.transpose(1, 2)[..., ::16, ::16] / 2 + 0.5)[:, :2]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Generated clips as GIF files of two sizes, reference clips as folders of frames, and a file of weights."""
    made, real = tmp_path / "made", tmp_path / "real"
    made.mkdir()
    for i in range(5):
        write_clip(clip(i, side=20 if i < 3 else 24), made / f"{i}.gif", side=0)
        for t, frame in enumerate(clip(10 + i, frames=18)):
            (real / str(i)).mkdir(parents=True, exist_ok=True)
            from PIL import Image

            save_image(Image.fromarray(frame), real / str(i) / f"{t:03d}.png")
    weights = tmp_path / "i3d.pt"
    weights.write_bytes(b"weights")
    return made, real, weights


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["eval", "fvd", *(str(w) for w in words)])
    return int(str(stop.value.code))


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_two_folders(
    folders: tuple[Path, Path, Path], protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fvd_i3d, "I3DFeatures", Small)
    made, real, weights = folders
    out = tmp_path / "fvd.json"
    assert call(made, real, "--weights", weights, "--protocol", protocol, "--batch", 2, "-q", "-o", out) == 0
    (score,) = json.loads(out.read_text())
    port = "videogpt" if protocol == "tokenizer" else "styleganv"
    assert score["protocol"]["extractor"] == f"i3d-{port}"
    assert (score["protocol"]["n_gen"], score["protocol"]["n_ref"]) == (5, 5)
    assert score["protocol"]["settings"] == {"frames": "16"}
    network = Small(str(weights), port, "cpu")

    def rows(folder: Path) -> torch.Tensor:
        clips = [to_frames(read_clip(p))[None] for p in sorted(folder.iterdir())]
        return torch.cat([network(preprocess(c, PROTOCOLS[protocol])) for c in clips])

    assert score["value"] == pytest.approx(frechet_from_features(rows(made), rows(real)), rel=1e-4)
    build = pytest.importorskip("visacc.report.page").build
    assert score["protocol"]["metric"] in build([out], tmp_path / "page.html").read_text()


def test_bad_input(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, real, weights = folders
    for words, message in (
        ((made, real, "--weights", tmp_path / "none.pt"), "I3D weights"),
        ((made, real, "--weights", "hub:owner"), "hub:owner/name/file"),
        ((made, real, "--weights", weights), "no TorchScript file"),
        ((made, real, "--weights", weights, "--variant", "c3d"), "styleganv, videogpt"),
        ((made, real, "--weights", weights, "--protocol", "ucf"), "there are ucf101, k600, tokenizer"),
        ((tmp_path / "no", real, "--weights", weights), "is no folder of clips"),
        ((made, real, "--weights", weights, "--batch", 0), "batch must be at least 1"),
    ):
        assert call(*words) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no clips"):
        fvd_score(tmp_path / "empty", real, "ucf101", str(weights))


def test_truncated_clips_are_named(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fvd_i3d, "I3DFeatures", Small)
    made, real, weights = folders
    write_clip(clip(1, frames=7), made / "short.gif", side=0)
    assert call(made, real, "--weights", weights, "-q") == 2
    assert "short.gif has 7 frames, the protocol compares 16: truncated video?" in capsys.readouterr().err
