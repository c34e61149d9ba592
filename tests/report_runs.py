"""Small real runs for the report's tests: the commands' own writers on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny import save_tiny, tiny_llamagen

from visacc.bench.report import write
from visacc.bench.run import Entry, bench_decoders
from visacc.eval.config import parse
from visacc.eval.files import write_json
from visacc.eval.run import run
from visacc.eval.world import World
from visacc.models.shapes.captions import all_prompts
from visacc.pipeline import TextToImagePipeline
from visacc.sampling import SamplingParams

ENTRIES = [
    Entry("ar"),
    Entry("mc-sjd", {"window": 6, "coupling": "gumbel-exact"}),
    Entry("gsd", {"window": 6, "group_size": 6}),
    Entry("gsd", {"window": 6, "group_size": 20}),
    Entry("eagle"),
]


def bench_run(folder: Path, *, judged: bool = True) -> Path:
    """``visacc bench decoders``; with the shapes world's clauses on class labels, so that its judge runs too."""
    prompts: list[Any] = [1, 2, 3]
    if judged:
        prompts = [{**p, "prompt": i} for i, p in enumerate(all_prompts(1))]
    sampling = SamplingParams(guidance_scale=2.0, top_k=16)
    model = tiny_llamagen(grid=4, vocab=24)
    bench = bench_decoders(model, prompts, ENTRIES, sampling=sampling, batch=4, permutations=19, pictures=4)
    write(bench, folder, with_plot=False)
    return folder


class Labelled:
    """A pipeline of texts on a model of class labels."""

    def __init__(self, decoder: str, **options: Any) -> None:
        options.pop("device")
        self.pipe = TextToImagePipeline(tiny_llamagen(grid=4, vocab=24), decoder, **options)
        self.model = self.pipe.model

    def __call__(self, prompt: list[str], **options: Any) -> Any:
        return self.pipe([len(text) % 10 for text in prompt], **options)


def eval_run(folder: Path, *, finish: bool = True) -> Path:
    """``visacc eval run`` with GenEval's judge of the shapes world, and a distance."""
    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in all_prompts(1)))
    config = parse(
        {
            "pipeline": f"{__name__}:Labelled",
            "prompts": str(prompts),
            "batch_size": 4,
            "decoders": {"ar": None, "mc-sjd": {"decoder": "mc-sjd", "window": [3, 6]}},
            "metrics": [
                {"metric": "geneval", "detector": "shapes"},
                {"metric": "fd", "extractor": "shapes-vq", "reference": "shapes:6"},
            ],
        },
        output=folder,
    )
    run(config, world=World(), quiet=True)
    if not finish:
        (folder / "summary.json").unlink()
    return folder


def generate_run(folder: Path, model: Path, decoder: str, *options: str) -> Path:
    """``visacc generate`` as typed."""
    from visacc.cli import main

    if not model.exists():
        save_tiny(model)
    args = [
        "generate",
        "3",
        "4",
        "-m",
        str(model),
        "-d",
        decoder,
        "-n",
        "2",
        "--seed",
        "1",
        "-q",
        "-o",
        str(folder),
    ]
    with pytest.raises(SystemExit) as stop:
        main([*args, *options])
    assert not stop.value.code
    return folder


def video_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``visacc video generate`` as typed, on a tiny model of blocks."""
    from test_video import build

    from visacc.cli import main

    monkeypatch.setattr("visacc.video_models.load_video_model", lambda name, **options: build())
    args = [
        "video",
        "generate",
        "red circle moves left",
        "-n",
        "2",
        "-f",
        "gif",
        "--seed",
        "1",
        "-q",
        "--device",
        "cpu",
    ]
    with pytest.raises(SystemExit) as stop:
        main([*args, "-o", str(folder)])
    assert not stop.value.code
    return folder


def vlm_run(file: Path) -> Path:
    """``visacc bench vlm`` on an untrained captioner."""
    from visacc.models.vlm.captioner import build_model, build_processor
    from visacc.models.vlm.scenes import draw_scene, picture
    from visacc.speculate.bench import bench

    torch.manual_seed(3)
    folder = file.parent / "captioner"
    build_model().save_pretrained(folder)
    build_processor().save_pretrained(folder)
    pictures = file.parent / "scenes"
    pictures.mkdir()
    for i in range(2):
        Image.fromarray(picture(draw_scene(i))).save(pictures / f"{i}.png")
    text = "describe the image ."
    report = bench(
        str(folder), ["ngram"], [0.0, 1.0], images=pictures, prompt=text, count=2, max_new_tokens=8, repeats=1,
        device="cpu",
    )  # fmt: skip
    file.write_text(json.dumps(report, indent=1) + "\n")
    return file


def score_file(file: Path, images: Path) -> Path:
    """``visacc eval fid -o FILE`` on the pictures of a run."""
    from visacc.eval.run import folder_task
    from visacc.eval.score import score

    spec = {"metric": ["fd"], "extractor": "shapes-vq", "reference": str(images)}
    scores = score(World(), folder_task(images, file.parent / "work", quiet=True), spec)
    write_json(file, [s.to_json() for s in scores])
    return file
