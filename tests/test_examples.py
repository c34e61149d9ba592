"""Every example runs, with small settings, as its reader would run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_blocks import ROOT, blocks, check_command, shell_commands
from PIL import Image

EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
PROMPT = "a red circle left of a blue square"


def start(*command: str | Path, **changes: Any) -> str:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), **changes.pop("env", {})}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, **changes
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


# ---- the plug-in ------------------------------------------------------------------------------------------
PLUGIN = EXAMPLES / "plugin_decoder"
USE = """
import torch, visacc
from visacc.registry import decoder_entry
entry = decoder_entry("replay")
assert entry.package == "visacc-replay" and entry.cls.lossless, entry
pipe = visacc.load("shapes-t2i")
prompts, seed = ["a red circle left of a blue square", "three green triangles"], 5
plain = pipe(prompts, seed=seed, decoder="ar", output_type="codes").codes
bare = pipe(prompts, seed=seed, decoder="replay", window=32)
assert (bare.codes == plain).all()
again = pipe(prompts, seed=seed, decoder="replay", window=32, codes=plain)
assert (again.codes == plain).all()
wrong = plain.clone()
wrong[:, 0, 8:] = 0
mended = pipe(prompts, seed=seed, decoder="replay", window=32, codes=wrong, output_type="codes")
assert (mended.codes == plain).all()
print(again.stats.nfe, mended.stats.nfe, bare.stats.nfe)
try:
    pipe(prompts[0], decoder="replay", codes=plain)
except ValueError as error:
    assert "shape [1, 1, 16, 16]" in str(error), error
else:
    raise SystemExit("codes of another batch were taken")
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The plug-in installed into a folder of its own; the environment that sees it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")
    start(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
          "--target", folder / "site", source)  # fmt: skip
    return {"PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])}


def test_the_plugin_is_a_whole_package_in_less_than_60_lines() -> None:
    files = [f for f in PLUGIN.rglob("*") if f.suffix in (".py", ".toml")]
    assert len(files) == 2
    assert sum(len(f.read_text().splitlines()) for f in files) < 60


def test_plugin_draws_the_pictures_of_plain_decoding(plugin: dict[str, str], tmp_path: Path) -> None:
    again, mended, bare = map(float, start(sys.executable, "-c", USE, env=plugin, cwd=tmp_path).split()[-3:])
    assert again == 1 + -(
        -255 // 32
    )  # the prompt's forward, then 31 standing drafts and the token behind them a step
    assert again < mended <= bare + again


@pytest.mark.slow
def test_plugin_in_a_table_and_a_report(plugin: dict[str, str], tmp_path: Path) -> None:
    """What a newcomer does with a decoder of their own: it is listed, compared and reported like the built-in ones."""
    pytest.importorskip("matplotlib")
    visacc = (sys.executable, "-m", "visacc")
    listed = start(*visacc, "list", "decoders", env={**plugin, "COLUMNS": "200"}, cwd=tmp_path)
    assert "visacc-replay" in listed
    (tmp_path / "prompts.txt").write_text(PROMPT + "\n")
    bench = (
        "bench",
        "decoders",
        "-d",
        "ar",
        "-d",
        "replay:window=16",
        "--prompts",
        "prompts.txt",
        "--no-plot",
        "-q",
    )
    said = start(*visacc, *bench, "-o", "bench", env=plugin, cwd=tmp_path)
    assert re.search(r"\| `replay.*\| exact \|", said)
    plain, replayed = (
        next((tmp_path / "bench" / "pictures").glob(f"{name}*/*.png")) for name in ("ar", "replay")
    )
    assert plain.read_bytes() == replayed.read_bytes()
    start(*visacc, "report", "bench", "-o", "report.html", env=plugin, cwd=tmp_path)
    assert "replay" in (tmp_path / "report.html").read_text()


# ---- scripts ----------------------------------------------------------------------------------------------
def test_text_to_image(tmp_path: Path) -> None:
    said = start(
        sys.executable, EXAMPLES / "text_to_image.py", PROMPT, "-n", "2", "--out", tmp_path / "o", "--compare"
    )
    with Image.open(tmp_path / "o" / "001.png") as image:
        assert image.size == (64, 64)
    assert "2 of 2 pictures are the same" in said
    steps = float(re.findall(r"([\d.]+) steps for 256 tokens", said)[0])
    assert steps < 150


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA of transformers' own classes with random weights, saved as any other checkpoint is."""
    from visacc.models.vlm.captioner import build_model, build_processor

    folder = tmp_path_factory.mktemp("vlm")
    torch.manual_seed(0)
    build_model().save_pretrained(folder)
    build_processor().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_caption_folder(vlm: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(pictures / f"{i}.png")
    (pictures / "broken.jpg").write_bytes(b"no picture")
    out = tmp_path / "captions.jsonl"
    command = (sys.executable, EXAMPLES / "caption_folder.py", pictures, "--model", vlm, "--out", out,
               "--max-new-tokens", "12")  # fmt: skip
    assert "4 pictures, 4 to do" in start(*command)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {Path(r["image"]).name: r["text"] for r in rows if "text" in r}
    assert sorted(texts) == ["0.png", "1.png", "2.png"]
    assert [r["image"] for r in rows if "error" in r] == [str(pictures / "broken.jpg")]
    assert "4 pictures, 1 to do" in start(*command)  # the others are answered
    from visacc.speculate.pipeline import CaptionPipeline

    plain = CaptionPipeline(str(vlm), speculator=None, device="cpu")
    files = [pictures / f"{i}.png" for i in range(3)]
    rows = plain(files, "Describe the image.", max_new_tokens=12)
    assert [row.text for row in rows] == [
        texts[f.name] for f in files
    ]  # greedy: the speculator changes nothing


@pytest.mark.slow
def test_train_drafter(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\nthree green triangles\ntwo stars\n")
    small = {"OUT": "run", "STEPS": "2", "BATCH": "1", "POOL": "2", "HELD_OUT": "1", "EVERY": "2"}
    environment = {
        **small,
        "PROMPTS": "prompts.txt",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    said = start("bash", EXAMPLES / "train_drafter.sh", env=environment, cwd=tmp_path)
    assert "eagle" in said
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()
    assert (tmp_path / "run" / "picture" / "000.png").is_file()


# ---- evaluation runs --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_eval_shapes(tmp_path: Path) -> None:
    """The example as it is, on the first prompt only."""
    yaml = pytest.importorskip("yaml")
    from visacc.eval.config import load_config
    from visacc.eval.run import run
    from visacc.eval.world import World

    config = yaml.safe_load((EXAMPLES / "eval_shapes.yaml").read_text())
    assert (EXAMPLES / config["output"]).resolve() == ROOT / "runs" / "eval-shapes"
    config |= {"limit": 1, "output": "run"}
    config["metrics"][1] |= {"reference": "shapes:4", "kid": {"subset_size": 2, "subsets": 2}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = run(load_config(tmp_path / "small.yaml"), world=World(), quiet=True)
    assert [row.name for row in rows] == ["ar", "sjd", "mc-sjd-window=16", "mc-sjd-window=32"]
    assert all({"fd", "kid"} <= {score.name for score in row.scores} for row in rows)
    assert (tmp_path / "run" / "summary.md").is_file()
    ar, mc = (
        sorted((tmp_path / "run" / name / "images").rglob("*.png")) for name in ("ar", "mc-sjd-window=32")
    )
    assert len(ar) == 2
    assert [f.read_bytes() for f in ar] == [f.read_bytes() for f in mc]


def test_fid50k_is_a_valid_run_of_50_000_pictures(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    from visacc.eval.config import load_config
    from visacc.eval.prompts import load_prompts
    from visacc.eval.run import _check
    from visacc.loading import known_models
    from visacc.metrics.protocol import recipe

    np.savez(tmp_path / "VIRTUAL_imagenet256_labeled.npz", arr_0=np.zeros((2, 256, 256, 3), dtype=np.uint8))
    config = load_config(shutil.copy(EXAMPLES / "fid50k.yaml", tmp_path))
    prompts = load_prompts(config.prompts)
    _check(config, prompts)  # decoders, their options and metric entries
    assert config.model in known_models()
    wanted = recipe(config.metrics[0]["protocol"])
    assert not wanted.check_counts(len(prompts) * config.samples_per_prompt, wanted.n_ref)


@pytest.mark.parametrize("name", ["eval_shapes", "fid50k"])
def test_pages_show_the_examples_as_they_are(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    page = ROOT / "docs" / {"eval_shapes": "metrics.md", "fid50k": "scale.md"}[name]
    shown = [yaml.safe_load(b.text) for b in blocks(page) if b.language == "yaml"]
    assert yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) in shown
    if name == "fid50k":
        script = next(b.text.splitlines() for b in blocks(page) if b.text.startswith("#!"))
        whole = (EXAMPLES / "fid50k.slurm").read_text().splitlines()
        assert script == [line for line in whole if not line.startswith("# ")]


@pytest.mark.parametrize(
    "name",
    [
        "fid50k.yaml",
        "fid50k.slurm",
        "train_drafter.sh",
        "text_to_image.py",
        "eval_shapes.yaml",
        "caption_folder.py",
    ],
)
def test_commands_in_examples_exist(name: str) -> None:
    found = 0
    for line in (EXAMPLES / name).read_text().replace("\\\n", " ").splitlines():
        match = re.search(r"((?:accelerate launch|python|visacc) .*)", line)
        if match and ("-m visacc" in line or "visacc eval" in line or "examples/" in match[1]):
            text = re.sub(r"\"$|\$\{PROMPTS:\+.*?\}|\\(?=\$)", "", match[1]).replace(
                '"${launch[@]}"', "python"
            )
            for command in shell_commands(re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", text), name):
                found += 1
                check_command(command)
    assert found


@pytest.mark.parametrize("script", ["fid50k.slurm", "train_drafter.sh"])
def test_shell_scripts_parse(script: str) -> None:
    start("bash", "-n", EXAMPLES / script)
