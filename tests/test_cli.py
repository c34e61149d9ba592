"""The command line: files written, one-line errors, nothing half-written."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from tiny import save_tiny

from visacc.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


def visacc(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_generate_writes_pictures_and_statistics(capsys, tmp_path, model):
    out = tmp_path / "out"
    code, text, _ = visacc(
        capsys, "generate", "3", "4", "-m", model, "-d", "mc-sjd", "--window", "8", "-n", "2", "--seed", "1", "-o", str(out),
        "--trace", "-q", "-O", "coupling=gumbel-exact", "--guidance-scale", "2",
    )  # fmt: skip
    assert code == 0
    assert "4 images" in text
    assert "step compression" in text
    files = {p.name for p in out.iterdir()}
    assert files == {"contact_sheet.png", "stats.json"} | {
        f"{p}00{i}.png" for p in ("", "trace_") for i in range(4)
    }
    assert Image.open(out / "000.png").size == (12, 12)
    assert text.endswith(", seed 1\n")
    record = json.loads((out / "stats.json").read_text())
    assert record["decoder"] == "mc-sjd"
    assert record["decoder_options"] == {"window": 8, "coupling": "gumbel-exact", "init": "random"}
    assert record["sampling"]["guidance_scale"] == 2
    assert [i["prompt"] for i in record["images"]] == [3, 3, 4, 4]
    assert record["stats"]["tokens_per_image"] == 36
    assert record["stats"]["mean_steps"] < 36

    again = tmp_path / "again"
    seed = str(record["images"][2]["seed"])
    visacc(
        capsys,
        "generate",
        "4",
        "-m",
        model,
        "-d",
        "ar",
        "--seed",
        seed,
        "-o",
        str(again),
        "-q",
        "--guidance-scale",
        "2",
    )
    assert list(Image.open(again / "000.png").getdata()) == list(Image.open(out / "002.png").getdata())


def test_prompts_file(capsys, tmp_path, model):
    file = tmp_path / "prompts.txt"
    file.write_text("1\n\n2\n")
    code, text, _ = visacc(
        capsys, "generate", "-m", model, "--prompts-file", str(file), "-o", str(tmp_path / "o"), "-q"
    )
    assert code == 0
    assert "2 images" in text


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["1", "-d", "mcsjd"], "did you mean 'mc-sjd'"),
        (["1", "-d", "mc-sjd", "--window", "0"], "window"),
        (["1", "-d", "mc-sjd", "--window", "wide"], "window"),
        (["1", "-d", "ar", "-O", "widow=3"], "no option 'widow'"),
        (["1", "-d", "ar", "-O", "widow"], "name=value"),
        (["1", "--top-p", "2"], "top_p"),
        (["1", "--guidance-scale", "-1"], "guidance_scale"),
        (["1", "-n", "0"], "num_images_per_prompt"),
        (["a cat"], "class-conditional"),
        ([""], "prompt"),
        ([], "prompt"),
        (["1", "--prompts-file", "missing.txt"], "missing.txt"),
        (["1", "--device", "cuda:99"], "cuda:99"),
        (["1", "--image-size", "wide"], "size must be pixels as 512, '768x512' (height x width)"),
        (["1", "--image-size", "0"], "size must be pixels"),
        (["1", "--image-size", "768x512"], "draws squares; 768x512 pixels is none"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, model, args, text):
    out = tmp_path / "out"
    code, _, err = visacc(capsys, "generate", *args, "-m", model, "-o", str(out), "-q")
    assert code == 2
    assert text in err
    assert err.count("\n") == 1
    assert err.startswith("visacc: error: ")
    assert not out.exists() or not any(out.iterdir())


def test_unknown_model_and_bad_checkpoint(capsys, tmp_path):
    code, _, err = visacc(capsys, "generate", "1", "-m", "shapes-t2x", "-o", str(tmp_path / "o"), "-q")
    assert code == 2
    assert "did you mean 'shapes-t2i'" in err
    broken = tmp_path / "x.safetensors"
    broken.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    code, _, err = visacc(capsys, "generate", "1", "-m", str(broken), "-o", str(tmp_path / "o"), "-q")
    assert code == 2
    assert err.count("\n") == 1


def test_output_folder_must_be_a_writable_folder(capsys, tmp_path, model):
    file = tmp_path / "file"
    file.write_text("x")
    code, _, err = visacc(capsys, "generate", "1", "-m", model, "-o", str(file), "-q")
    assert code == 2
    assert "is a file" in err
    code, _, err = visacc(capsys, "generate", "1", "-m", model, "-o", str(file / "below"), "-q")
    assert code == 2
    assert "cannot write" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(capsys, tmp_path, model):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    code, _, err = visacc(capsys, "generate", "1", "-m", model, "-o", str(locked), "-q")
    assert code == 2
    assert "cannot write" in err


def test_list_shows_decoders_and_models(capsys):
    code, text, _ = visacc(capsys, "list")
    assert code == 0
    for word in ("mc-sjd", "lossless", "shapes-t2i", "llamagen-t2i-xl-512"):
        assert word in text
    code, _, err = visacc(capsys, "list", "colours")
    assert code == 2
    assert "colours" in err


def test_list_shows_what_loads_elsewhere(capsys, monkeypatch):
    from visacc import cli

    monkeypatch.setattr(cli, "console", Console(width=250))
    code, text, _ = visacc(capsys, "list", "models")
    assert code == 0
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert "visacc video" in lines["moving-nbp"]
    assert "visacc video" in lines["moving-ntp"]
    assert "visacc caption" in lines["shapes-captioner"]
    assert "visacc" not in lines["shapes-t2i"].replace("shapes-t2i", "")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("moving-nbp", "visacc video, or visacc.video_models.load_video_model"),
        ("shapes-captioner", "visacc caption, or visacc.speculate.CaptionPipeline"),
    ],
)
def test_models_of_other_commands_are_pointed_to(capsys, tmp_path, name, way):
    code, _, error = visacc(capsys, "generate", "a star", "-m", name, "-o", str(tmp_path))
    assert code == 2
    assert f"{name} is not loaded with visacc.load" in error
    assert way in error
    *_, path = way.split()
    module, _, attribute = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_module_entry_point_and_quick_import():
    done = subprocess.run(
        [sys.executable, "-m", "visacc", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("visacc ")
    light = "import sys, visacc; assert 'torch' not in sys.modules, 'import visacc alone must not load torch'"
    subprocess.run([sys.executable, "-c", light], check=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["-O", "device=cpu"], "device: no option of a decoder"),
        (["-O", "compile=1", "-O", "decoder=ar"], "compile, decoder: no option of a decoder"),
        (["--model-option", "dtype=float16"], "dtype: no option of a model's loader"),
        (["--batch-size", "0"], "batch_size must be a positive integer, got 0"),
        (["--guidance-scale", "1e300"], "guidance_scale must be at most 1e+06"),
        (["--temperature", "1e-45"], "temperature must be 0 (greedy) or lie between"),
    ],
)
def test_options_that_would_be_lost_or_break(capsys, tmp_path, model, wrong, said):
    code, _, err = visacc(capsys, "generate", "3", "-m", model, "-o", str(tmp_path / "out"), "-q", *wrong)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_options_of_several_commands_are_spelled_once():
    """In visacc/cli_options.py, whatever the help of one command or another says about them."""
    code = Path(__file__).parent.parent / "visacc"
    places = defaultdict(set)
    for file in code.rglob("*.py"):
        for call in re.finditer(
            r'typer\.Option\(((?:\s*(?:"-[^"]*"|\*\w+),?)+)', file.read_text(encoding="utf-8")
        ):
            for name in re.findall(r'"(--[^"/]+)', call[1]):
                places[name].add(file.relative_to(code).as_posix())
    assert places["--out"] == places["--model"] == {"cli_options.py"}
    several = {name for name, files in places.items() if len(files) > 1}
    assert several == {"--format"}  # of clips, and of a drafter for a server: two options of one name
