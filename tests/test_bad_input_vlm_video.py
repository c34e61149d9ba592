"""Bad input of captions, LPD pictures and videos on the command line: one line that says what is wrong, exit code 2
(rows of a batch fail alone: exit code 1). The same through Python is in the tests of each part.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from visacc.cli import main
from visacc.models.llamagen.checkpoint import save_model
from visacc.models.llamagen.vq import VQConfig, VQModel
from visacc.models.lpd import LPDConfig
from visacc.models.lpd.model import LPD
from visacc.models.nbp import Magvit2, Magvit2Config, NBPConfig
from visacc.models.nbp.gpt import NBP
from visacc.models.vlm.captioner import build_model, build_processor
from visacc.models.vlm.scenes import draw_scene, picture
from visacc.speculate.checkpoints import save_drafter
from visacc.speculate.config import DrafterConfig
from visacc.speculate.drafter import Drafter
from visacc.video_io import write_clip
from visacc.writing import write_safetensors


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(w) for w in words])
    return int(str(stop.value.code))


def refused(capsys: pytest.CaptureFixture[str], message: str, *words: object) -> None:
    """The command ends with exit code 2 and one line that holds ``message``."""
    assert call(*words) == 2
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.strip() and "Loading weights" not in line
    ]
    assert message in said[-1]
    assert len(said) == 1


# ---- captions -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("vlm")
    build_model().save_pretrained(folder / "model")
    build_processor().save_pretrained(folder / "model")
    Image.fromarray(picture(draw_scene(0))).save(folder / "a.png")
    Image.fromarray(picture(draw_scene(1))).save(folder / "b.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def caption(vlm: Path, *words: object) -> tuple[object, ...]:
    shared = ("-m", vlm / "model", "--max-new-tokens", 4, "--device", "cpu", "--no-progress")
    return ("caption", vlm / "a.png", *shared, *words)


def test_drafter_of_another_target(vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape: dict[str, Any] = {
        "intermediate_size": 48,
        "num_heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "vocab_size": 61,
    }
    target = {"model_type": "llava", "hidden_size": 32, "vocab_size": 61, "layers": 3}
    save_drafter(Drafter(DrafterConfig("msd", 32, target=target, **shape)), tmp_path / "other")
    refused(capsys, "was trained for another target", *caption(vlm, "--speculator", tmp_path / "other"))
    refused(capsys, "no trained 'dream' drafter", *caption(vlm, "--speculator", "dream"))
    refused(capsys, "does not exist", *caption(vlm, "--speculator", tmp_path / "nowhere"))


def test_unsupported_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    refused(capsys, "models of type 'bert' are not supported", "caption", "a.png", "-m", tmp_path / "bert")


def test_rows_fail_alone(vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unreadable picture, too many placeholders, a context that is too short: these rows say so."""
    out = tmp_path / "rows.jsonl"
    assert call(*caption(vlm, vlm / "broken.png", vlm / "b.png", "-o", out)) == 1
    rows = {Path(row["image"]).name: row for row in map(json.loads, out.read_text().splitlines())}
    assert "broken.png" in rows["broken.png"]["error"]
    assert {name for name, row in rows.items() if "text" in row} == {"a.png", "b.png"}
    assert "1 of 3 pictures failed" in capsys.readouterr().err
    for words, message in (
        (("-p", "<image> <image> describe ."), "2 image placeholders"),
        (("--max-new-tokens", 100000), "exceed the model's context"),
    ):
        assert call(*caption(vlm, *words)) == 1
        row = json.loads(capsys.readouterr().out)
        assert message in row["error"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", -1, "temperature must be 0 (greedy) or lie between"),
        ("--top-p", 0, "top_p must lie in (0, 1]"),
        ("--top-k", -3, "top_k must be 0 (off) or positive"),
        ("--repetition-penalty", 0, "repetition_penalty must be positive"),
        ("--max-new-tokens", 0, "max_new_tokens must be at least 1"),
        ("--batch-size", 0, "batch_size must be at least 1"),
        ("--dtype", "int8", "dtype must be one of float32, float16, bfloat16"),
    ],
)
def test_options_of_captions(
    vlm: Path, option: str, value: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, message, *caption(vlm, option, value))


def test_stop_strings_of_captions(vlm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*caption(vlm, "--max-new-tokens", 12)) == 0
    words = json.loads(capsys.readouterr().out)["text"].split()
    assert call(*caption(vlm, "--max-new-tokens", 12, "--stop", words[2], "--stop", "nothing")) == 0
    assert json.loads(capsys.readouterr().out)["text"].split()[-1] == words[2]


# ---- LPD ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def lpd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("lpd")
    config = LPDConfig(dim=32, depth=1, heads=2, vocab=8, classes=3, grid=4)
    write_safetensors(
        folder / "lpd.safetensors", LPD(config).state_dict(), {"config": json.dumps(asdict(config))}
    )
    shape = VQConfig(ch=8, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, codebook_size=8, norm_groups=4)
    save_model(folder / "vq.safetensors", VQModel(shape), torch.float32)
    return folder


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("orders=raster", "orders must be a list of integers, got 'raster'"),
        ("orders=[0, 1]", "orders must be [16]"),
        (f"orders={[0] * 16}", "every order must be a permutation"),
        ("group_sizes=[1, 4]", "group sizes sum to 5, but 16 of 16 cells"),
        ("group_sizes=[4, 12]", "the first group must hold one cell"),
        ("steps=17", "from 1 to the number of tokens (16)"),
        ("steps=0", "steps must be an integer of at least 1"),
        ("group_sizes=[1.5, 14.5]", "group_sizes must be a list of integers"),
        ("group_sizes=4", "group_sizes must be a list of integers, got 4"),
        ("known=middle", "known must be a list of integers"),
        ("proximity=far", "proximity of decoder 'lpd' must be a finite number, got 'far'"),
        ("repulsion=-1", "repulsion must be a finite number of at least 0"),
        ("guidance_schedule=cosine", "guidance_schedule must be one of linear, constant"),
        (f"known={[[9] * 4] * 4}", "codes of another tokenizer?"),
        (f"known={[[1] * 4] * 4}", "every cell is known"),
        (f"known={[[-1] * 3] * 4}", "known must be integer codes [4, 4]"),
        ("rho=1", "no option 'rho'"),
    ],
)
def test_options_of_lpd(
    lpd: Path, option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = drawn_by(lpd, tmp_path)
    steps = () if option.startswith("steps") else ("-O", "steps=4")
    refused(capsys, message, *line, *steps, "-O", option, "--device", "cpu")


def drawn_by(lpd: Path, out: Path) -> list[object]:
    vq = f"vq={lpd / 'vq.safetensors'}"
    model = ["-m", lpd / "lpd.safetensors", "--model-option", vq, "-d", "lpd"]
    return ["generate", 1, *model, "-q", "-o", out]


def test_inpainting_on_the_command_line(lpd: Path, tmp_path: Path) -> None:
    """Codes to keep are an option like any other."""
    known = [[3, 3, -1, -1]] * 4
    line = drawn_by(lpd, tmp_path)
    assert call(*line, "-O", f"known={known}", "-O", "steps=2", "--device", "cpu") == 0


def test_decoder_of_other_models(lpd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", 1, "-m", lpd / "lpd.safetensors", "-q", "-o", tmp_path, "--device", "cpu"]
    refused(capsys, "use 'lpd'", *line, "-d", "ar")
    refused(capsys, "without a tokenizer", *line, "-d", "lpd", "-O", "steps=2")
    refused(capsys, "requires ['set_query']", "generate", "a red circle", "-d", "lpd", "-q", "-o", tmp_path)


# ---- video --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A next-block model that continues two latent frames, its tokenizer, a foreign one, and clips."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("video")
    config = NBPConfig(
        dim=32,
        layers=1,
        heads=2,
        grid=(3, 4, 4),
        block=4,
        video_vocab=24,
        text_vocab=0,
        cond_tokens=0,
        positions=80,
    )
    weights = {f"transformer.{k}": v for k, v in NBP(config).state_dict().items()}
    write_safetensors(folder / "nbp.safetensors", weights, {"config": json.dumps(asdict(config))})
    rng = np.random.default_rng(0)
    for name, shape in {"right": (5, 16, 16, 3), "short": (2, 16, 16, 3), "large": (5, 32, 32, 3)}.items():
        write_clip(rng.integers(0, 255, shape).astype(np.uint8), folder / f"{name}.gif", side=0)
    (folder / "cut.gif").write_bytes((folder / "right.gif").read_bytes()[:200])
    return folder


def tokenizer(levels: tuple[int, ...]) -> Magvit2:
    torch.manual_seed(0)
    strides = ((1, 2, 2), (2, 2, 2))
    shape = Magvit2Config(widths=(4, 4, 4), units=(1, 1, 1), strides=strides, groups=2, levels=levels)
    return Magvit2(shape).eval()


def test_clips(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"levels": (4, 3, 2)}
    monkeypatch.setattr("visacc.models.nbp.load_magvit2", lambda path: tokenizer(found["levels"]))

    def line(clip: str, *more: object) -> tuple[object, ...]:
        model = ("--model", video / "nbp.safetensors", "--tokenizer", "any.pt")
        return (
            "video",
            "continue",
            video / clip,
            *model,
            "-o",
            tmp_path,
            "-f",
            "gif",
            "-q",
            "--device",
            "cpu",
            *more,
        )

    assert call(*line("right.gif")) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"000.gif", "frames.png", "stats.json"}
    refused(capsys, "short.gif has 2 frames, nbp continues 3: truncated video?", *line("short.gif"))
    refused(capsys, "another frame size", *line("large.gif"))
    refused(capsys, "cut.gif", *line("cut.gif"))
    refused(capsys, "none.gif", *line("none.gif"))
    refused(capsys, "given_frames must be below that", *line("right.gif", "--given-frames", 3))
    refused(capsys, "no text condition", *line("right.gif", "-p", "a dog"))
    refused(capsys, "use 'nbp'", *line("right.gif", "-d", "ar"))
    refused(capsys, "--format must be mp4, gif or both", *line("right.gif", "-f", "webm"))
    found["levels"] = (4, 3, 3)
    refused(capsys, "its tokenizer 36: another tokenizer", *line("right.gif"))


def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("video", "generate", "-o", tmp_path, "-f", "gif", "-q")
    refused(capsys, "purple", *line, "a purple dog moves left")
    refused(capsys, "unknown video model", *line, "red circle moves left", "-m", "moving-nbq")
    refused(capsys, "not bundled", *line, "red circle moves left", "-m", "cosmos-ar-4b")
    refused(capsys, "does not exist", *line, "red circle moves left", "-m", tmp_path / "none.ckpt")
