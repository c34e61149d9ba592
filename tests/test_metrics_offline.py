"""Real weights and real pictures, end to end: packages of the public registries, downloaded at test time.

Skips without a network. About 180 MB once, then from the cache (VISACC_CACHE).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFilter

import visacc.metrics as vm
from visacc.metrics.geneval import Judge, create_detector, pairs, sample_path, scan, score_files, summarise
from visacc.metrics.images import load_image, pil_to_tensor
from visacc.metrics.offline import ASSETS, Unavailable, fetch
from visacc.metrics.ridge_scorer import MiniLM, RidgeScorer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def offline() -> Callable[[str], Path]:
    """Folder of a registry asset; the test is skipped where it cannot be had."""

    def get(name: str) -> Path:
        try:
            return fetch(name)
        except Unavailable as error:
            pytest.skip(str(error))

    return get


@pytest.fixture(scope="module")
def network(offline: Callable[[str], Path]) -> vm.Extractor:
    pytest.importorskip("timm")
    return vm.create_extractor("efflite0", weights=next(offline("efflite0").glob("*.pth")), device="cpu")


def on_white(path: Path, side: int = 64) -> torch.Tensor:
    """uint8 [3, side, side] of a picture with transparency."""
    with Image.open(path) as file:
        rgba = file.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    canvas.alpha_composite(rgba)
    return pil_to_tensor(canvas.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


def emoji_caption(file: Path) -> str | None:
    """Unicode name of a single-character emoji picture in lower case; None for sequences (flags, skin
    tones).
    """
    points = [int(p, 16) for p in Path(file).stem.split("-") if p != "fe0f"]
    if len(points) != 1:
        return None
    return unicodedata.name(chr(points[0]), "").lower() or None


def emoji(folder: Path, count: int) -> tuple[torch.Tensor, list[str]]:
    """`count` emoji spread over the Unicode order, and their names."""
    named = [(f, c) for f in sorted(folder.glob("*.webp")) if (c := emoji_caption(f))]
    chosen = named[:: len(named) // count][:count]
    return torch.stack([on_white(f) for f, _ in chosen]), [c for _, c in chosen]


def test_unknown_assets_and_licences() -> None:
    assert all(a.about and len(a.sha256) == 64 for a in ASSETS.values())
    with pytest.raises(ValueError, match="unknown asset 'clip'"):
        fetch("clip")


def test_imagenet_network_recognises_photographs(
    offline: Callable[[str], Path], network: vm.Extractor
) -> None:
    files = sorted(offline("foolbox").glob("imagenet_*"))
    labels = torch.tensor([int(f.stem.split("_")[2]) for f in files])
    assert len(files) == 20
    out = network([pil_to_tensor(load_image(f)) for f in files])
    assert int((out["logits"].argmax(1) == labels).sum()) >= 17  # 18 when this was written
    assert out["features"].shape == (20, 1280)
    assert network.id.startswith("efflite0-1280@")


def test_distances_grow_with_damage(offline: Callable[[str], Path], network: vm.Extractor) -> None:
    """Real features of real pictures: clean < slightly blurred < strongly blurred, for three distances."""
    images, _ = emoji(offline("emoji"), 90)
    reference, clean = images[::2], images[1::2]

    def blurred(sigma: float) -> torch.Tensor:
        pil = [
            Image.fromarray(i.permute(1, 2, 0).numpy()).filter(ImageFilter.GaussianBlur(sigma)) for i in clean
        ]
        return torch.stack([pil_to_tensor(p) for p in pil])

    real = network(reference)["features"]
    rows = [network(x)["features"] for x in (clean, blurred(1.0), blurred(2.0))]
    for distance in (
        vm.frechet_from_features,
        lambda a, b: vm.kid(a, b, subsets=4, subset_size=40).mean,
        vm.mind,
    ):
        values = [distance(r, real) for r in rows]
        assert values[0] < values[1] < values[2]


def test_image_text_scores_prefer_the_right_caption(
    offline: Callable[[str], Path], network: vm.Extractor
) -> None:
    images, captions = emoji(offline("emoji"), 240)
    rows = network(images)["features"]
    held = torch.arange(len(images)) % 5 == 0
    names = [c for c, h in zip(captions, held.tolist(), strict=True) if h]
    known = [c for c, h in zip(captions, held.tolist(), strict=True) if not h]
    scorer = RidgeScorer.fit(network, MiniLM(offline("minilm")), rows[~held], known)
    similarity = scorer.embed(rows[held]) @ scorer.embed_text(names).T
    n = len(names)
    rank = (similarity > similarity.diagonal()[:, None]).sum(1)
    # chance: R@5 = 5/n (0.10); 0.25 or more by chance has probability below 1e-3 for n = 48 (binomial)
    assert float((rank < 5).double().mean()) >= 0.25
    assert similarity.diagonal().mean() > similarity[~torch.eye(n, dtype=torch.bool)].mean() + 0.05
    direct = scorer.score(images[held][:3], names[:3])
    torch.testing.assert_close(direct, similarity.diagonal()[:3], atol=1e-4, rtol=1e-3)


def test_real_detector_behind_geneval(offline: Callable[[str], Path], tmp_path: Path) -> None:
    """Photographs in GenEval's layout through YOLOv3-tiny: true prompts hold, false ones fail with a reason."""
    photos = sorted(offline("foolbox").glob("imagenet_*"))
    dog, chairs, truck, bird = photos[0], photos[1], photos[6], photos[14]

    def ask(tag: str, count: int, name: str) -> dict:
        item = {"tag": tag, "prompt": f"{count} {name}", "include": [{"class": name, "count": count}]}
        return item | ({"exclude": [{"class": name, "count": count + 1}]} if tag == "counting" else {})

    cases = [
        (dog, ask("single_object", 1, "dog"), True),
        (chairs, ask("two_object", 4, "chair"), True),
        (truck, ask("counting", 1, "truck"), True),
        (bird, ask("single_object", 1, "bird"), True),
        (dog, ask("single_object", 1, "truck"), False),
        (truck, ask("single_object", 1, "dog"), False),
    ]
    for i, (file, metadata, _) in enumerate(cases):
        path = sample_path(tmp_path, i, 0)
        path.parent.mkdir(parents=True)
        load_image(file).save(path)
        (path.parent.parent / "metadata.jsonl").write_text(json.dumps(metadata))
    weights = next(offline("yolov3-tiny").glob("*.weights"))
    judge = Judge(create_detector("yolov3-tiny", weights=weights, device="cpu"))
    records = list(score_files(judge, pairs(scan(tmp_path)), root=tmp_path, batch=3))
    assert [r["correct"] for r in records] == [want for _, _, want in cases]
    assert records[4]["reason"] == "expected truck>=1, found 0"
    assert summarise(records, resamples=10).tasks["single_object"] == (2, 4)
