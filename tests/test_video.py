"""Video pipelines, clip files and the video distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from visacc import video_cli
from visacc.metrics.frechet import frechet_from_features
from visacc.metrics.fvd import FVD, PROTOCOLS, RandomVideoFeatures, VideoProtocol, preprocess
from visacc.metrics.fvd_i3d import I3DFeatures
from visacc.models.nbp import Magvit2, Magvit2Config, NBPConfig, NBPModel, moving
from visacc.models.nbp.gpt import NBP as Net
from visacc.video import TextToVideoPipeline, VideoContinuationPipeline
from visacc.video_io import frame_sheet, read_clip, reduce, to_frames, write_clip
from visacc.video_models import default_decoder, known_video_models, load_video_model


def build(block: int = 4, given: int = 0) -> NBPModel:
    torch.manual_seed(0)
    tokenizer = Magvit2(
        Magvit2Config(
            widths=(4, 4, 4), units=(1, 1, 1), strides=((1, 2, 2), (2, 2, 2)), groups=2, levels=(4, 3, 2)
        )
    ).eval()
    net = Net(
        NBPConfig(
            dim=32,
            layers=1,
            heads=2,
            grid=(3, 4, 4),
            block=block,
            video_vocab=24,
            text_vocab=moving.TEXT_VOCAB,
            cond_tokens=moving.TEXT_TOKENS,
            positions=80,
            cond_drop=0.1,
        )
    )
    return NBPModel(net, tokenizer, given_frames=given, read_text=moving.read_text, defaults={})


def gradient(frames: int = 5, height: int = 16, width: int = 24) -> np.ndarray:
    t, y, x = np.mgrid[0:frames, 0:height, 0:width]
    return np.stack([x * 10 % 256, y * 15 % 256, t * 40 % 256], axis=-1).astype(np.uint8)


def test_text_to_video() -> None:
    pipe = TextToVideoPipeline(build(), "nbp")
    texts = ["red circle moves left", "blue star grows"]
    out = pipe(texts, num_videos_per_prompt=2, seed=3, batch_size=3, guidance_scale=2.0)
    assert len(out.videos) == 4
    assert out.videos[0].shape == (5, 16, 16, 3)
    assert out.videos[0].dtype == np.uint8
    assert out.codes.shape == (4, 3, 4, 4)
    again = pipe("blue star grows", seed=out.seeds[2], guidance_scale=2.0)
    assert torch.equal(again.codes[0], out.codes[2])
    difference = np.abs(
        again.videos[0].astype(int) - out.videos[2]
    )  # batches of other sizes round float sums otherwise
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01
    assert out.settings["decoder"] == "nbp"
    assert isinstance(pipe(texts[0], seed=1, output_type="pil").videos[0][0], Image.Image)
    assert pipe(texts[0], seed=1, output_type="pt").videos.shape == (1, 5, 3, 16, 16)


def test_continuation_keeps_the_given_codes() -> None:
    model = build(given=2)
    pipe = VideoContinuationPipeline(model, "nbp")
    assert pipe.frames_needed == 3
    clips = [torch.rand(3, 3, 16, 16), gradient(3, 16, 16)]
    out = pipe(clips, seed=1)
    assert model.tokenizer is not None
    given = model.tokenizer.encode(torch.stack([to_frames(c) for c in clips]))
    assert torch.equal(out.codes[:, :2], given)
    assert out.stats.tokens == 16
    with pytest.raises(ValueError, match="2 clips need one text"):
        pipe(clips, ["red circle moves left"])
    with pytest.raises(ValueError, match="continues exactly 3 frames"):
        pipe(clips[0][:2])


def test_any_next_token_decoder_drives_the_twin() -> None:
    model = build(block=1)
    codes = {}
    for name, options in (
        ("ar", {}),
        ("mc-sjd", {"window": 16, "coupling": "gumbel-exact"}),
        ("sjd", {"window": 8}),
    ):
        out = TextToVideoPipeline(model, name, **options)(
            "red circle moves left", seed=5, output_type="codes"
        )
        codes[name] = out.codes
    assert torch.equal(codes["ar"], codes["mc-sjd"])


def test_pipelines_refuse_the_wrong_model() -> None:
    with pytest.raises(ValueError, match="VideoContinuationPipeline"):
        TextToVideoPipeline(build(given=1), "nbp")
    with pytest.raises(ValueError, match="given_frames=1"):
        VideoContinuationPipeline(build(), "nbp")
    with pytest.raises(ValueError, match="use 'nbp'"):
        TextToVideoPipeline(build(), "ar")
    pipe = TextToVideoPipeline(build(), "nbp")
    with pytest.raises(ValueError, match="non-empty text"):
        pipe("  ")
    with pytest.raises(ValueError, match="output_type"):
        pipe("red circle moves left", output_type="webm")
    with pytest.raises(ValueError, match="unknown video model"):
        load_video_model("moving-nbq")
    with pytest.raises(ValueError, match="not bundled"):
        load_video_model("cosmos-ar-4b")
    assert [default_decoder(build(block=block)) for block in (4, 1)] == ["nbp", "ar"]


def test_missing_weights_name_their_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visacc.models.nbp.embedded.ASSETS", tmp_path)
    with pytest.raises(ValueError, match=r"train_nbp_moving\.py"):
        load_video_model("moving-nbp")
    assert "moving-nbp" not in known_video_models()


@pytest.mark.parametrize("suffix", ["mp4", "gif", "png"])
def test_clip_files(tmp_path: Path, suffix: str) -> None:
    if suffix == "mp4":
        pytest.importorskip("av")
    clip, path = gradient(), tmp_path / f"clip.{suffix}"
    write_clip(clip, path, fps=8, side=64)
    back = read_clip(path)
    if suffix == "png":
        assert len(back) == 1
        return
    assert back.shape == (5, 64, 96, 3)
    small = back[:, 2::4, 2::4].astype(int)
    assert np.abs(small - clip).mean() < (6 if suffix == "mp4" else 20)


def test_clip_files_refuse_nonsense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint8 array"):
        write_clip(gradient().astype(float), tmp_path / "a.gif")
    with pytest.raises(ValueError, match="cannot write"):
        write_clip(gradient(), tmp_path / "a.webm")
    with pytest.raises(ValueError, match="does not exist"):
        read_clip(tmp_path / "none.mp4")
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    pytest.importorskip("av")
    with pytest.raises(ValueError, match="truncated or not a video"):
        read_clip(tmp_path / "broken.mp4")


def test_frame_sheet() -> None:
    sheet = frame_sheet([gradient(), gradient(3)], columns=4, side=16)
    assert sheet.size == (2 + 4 * 26, 2 + 2 * 18)
    with pytest.raises(ValueError, match="same size"):
        frame_sheet([gradient(), gradient(width=32)], side=16)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *, given_frames: int = 0, **_: Any) -> NBPModel:
        return build(given=given_frames)

    monkeypatch.setattr("visacc.video_models.load_video_model", load)
    command = [
        "generate",
        "red circle moves left",
        "-n",
        "2",
        "-o",
        str(tmp_path),
        "-f",
        "gif",
        "--seed",
        "1",
        "-q",
    ]
    result = CliRunner().invoke(video_cli.app, [*command, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert {p.name for p in tmp_path.iterdir()} == {"000.gif", "001.gif", "frames.png", "stats.json"}
    assert "15.0 steps for 48 tokens" in result.output
    source = tmp_path / "000.gif"
    command = ["continue", str(source), "-o", str(tmp_path / "b"), "-f", "gif", "-q", "--device", "cpu"]
    result = CliRunner().invoke(video_cli.app, command)
    assert result.exit_code == 0, result.output  # clips are written enlarged, and read as they were
    assert read_clip(source).shape[1:3] == read_clip(tmp_path / "b" / "000.gif").shape[1:3]


@pytest.mark.parametrize("model", ["moving-nbp", "moving-ntp"])
def test_embedded_models_continue_their_own_clips(tmp_path: Path, model: str) -> None:
    common = ["-m", model, "-f", "gif", "-q", "--device", "cpu", "--seed", "1"]
    made = CliRunner().invoke(
        video_cli.app, ["generate", "red circle moves left", *common, "-o", str(tmp_path)]
    )
    assert made.exit_code == 0, made.output
    line = [
        "continue",
        str(tmp_path / "000.gif"),
        *common,
        "-p",
        "red circle moves left",
        "-o",
        str(tmp_path / "b"),
    ]
    done = CliRunner().invoke(video_cli.app, line)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (tmp_path / "b" / "000.gif").is_file()


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_written_clips_are_read_back_in_their_own_size(tmp_path: Path, suffix: str) -> None:
    if suffix == ".mp4":
        pytest.importorskip("av")
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (5, 16, 16, 3)).astype(np.uint8)
    write_clip(small, tmp_path / f"a{suffix}", side=128)
    found = read_clip(tmp_path / f"a{suffix}")
    assert found.shape[1:3] == (128, 128)
    back = reduce(found, (16, 16))
    assert back.shape == small.shape
    assert np.abs(back.astype(int) - small).mean() < 20  # a palette of 256 colours, or a lossy codec
    other = rng.integers(0, 256, (5, 128, 128, 3)).astype(np.uint8)
    assert reduce(other, (16, 16)) is other
    assert reduce(small, (16, 16)) is small


@pytest.mark.filterwarnings("ignore:.*covariance is singular")
def test_streaming_distance_equals_the_direct_one() -> None:
    torch.manual_seed(0)
    real, fake = torch.rand(20, 5, 3, 16, 16), torch.rand(20, 5, 3, 16, 16) * 0.8
    features = RandomVideoFeatures()
    whole = FVD(features, None).update(real, real=True).update(fake, real=False)
    parts = [FVD(features, None) for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 7), slice(7, 20)), strict=True):
        part.update(real[rows], real=True).update(fake[rows], real=False)
    direct = frechet_from_features(features(fake), features(real))
    assert whole.compute() == pytest.approx(direct, rel=1e-6)
    assert parts[0].merge(parts[1]).compute() == pytest.approx(direct, rel=1e-6)
    assert torch.equal(RandomVideoFeatures()(real), features(real))


def test_protocols() -> None:
    clip = torch.rand(1, 17, 3, 20, 30)
    for name, protocol in PROTOCOLS.items():
        small = VideoProtocol(protocol.frames, min(protocol.reduce, 8), protocol.resize, 16)
        out = preprocess(clip, small)
        assert out.shape == (1, 3, 16, 16, 16), name
        assert float(out.min()) >= -1
        assert float(out.max()) <= 1
    with pytest.raises(ValueError, match="truncated video"):
        preprocess(clip[:, :15], PROTOCOLS["ucf101"])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        preprocess(clip * 255, PROTOCOLS["ucf101"])
    with pytest.raises(ValueError, match="do not exist"):
        I3DFeatures("nowhere/i3d_torchscript.pt")
    with pytest.raises(ValueError, match="hub:owner/name/file"):
        I3DFeatures("hub:owner")
    with pytest.raises(ValueError, match="real and generated"):
        FVD(RandomVideoFeatures(), None).compute()
