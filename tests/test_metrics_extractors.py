"""Feature extractors, CLIP scores and HPS on small random networks of the real classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visacc.metrics import create_extractor, extractor_names, register_extractor
from visacc.metrics.extractors.base import load_state, parameter_digest
from visacc.metrics.images import pil_to_tensor

timm = pytest.importorskip("timm")
open_clip = pytest.importorskip("open_clip")
pytest.importorskip("torchvision")

from visacc.metrics.clip_score import HPS, ClipScore, hps_model, prefixed_tokens, scale_cosines  # noqa: E402
from visacc.metrics.extractors.clip_models import ClipExtractor, ClipModel  # noqa: E402
from visacc.metrics.extractors.timm_models import DinoV2, TimmExtractor, interpolate_positions  # noqa: E402
from visacc.metrics.extractors.vgg import VGG16  # noqa: E402

IMAGES = torch.randint(0, 256, (3, 3, 40, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_registry() -> None:
    assert {"inception", "dinov2", "clip", "clip-cmmd", "vgg16", "efflite0", "timm"} <= set(extractor_names())
    with pytest.raises(ValueError, match=r"unknown feature extractor 'incption'; known: .*clip"):
        create_extractor("incption")
    with pytest.raises(ValueError, match="exists already"):
        register_extractor("inception", lambda: None)
    with pytest.raises(ValueError, match="do not fit extractor 'inception'"):
        create_extractor("inception", colour="red")
    with pytest.raises(ValueError, match="needs weights=PATH"):
        create_extractor("efflite0")


def test_weights_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_state(tmp_path / "none.pth")
    torch.save({"code": test_registry}, tmp_path / "pickle.pth")
    with pytest.raises(ValueError, match="pickled objects other than weights"):
        load_state(tmp_path / "pickle.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        load_state(tmp_path / "list.pth")
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "nested.pth")
    assert list(load_state(tmp_path / "nested.pth")) == ["a"]
    with pytest.raises(ValueError, match="does not hold FID-Inception weights"):
        create_extractor("inception", weights=tmp_path / "nested.pth")
    a, b = {"x": torch.zeros(3), "y": torch.ones(2)}, {"y": torch.ones(2), "x": torch.zeros(3)}
    assert parameter_digest(a) == parameter_digest(b) != parameter_digest({**a, "x": torch.ones(3)})


def test_timm_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", pretrained=False).eval()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    net = TimmExtractor("test_efficientnet", tmp_path / "w.pth", side=64, device="cpu")
    out = net(IMAGES)
    pil = torch.stack(
        [
            pil_to_tensor(
                Image.fromarray(i.permute(1, 2, 0).numpy()).resize((64, 64), Image.Resampling.BICUBIC)
            )
            for i in IMAGES
        ]
    )
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        want = model((pil / 255 - mean[:, None, None]) / std[:, None, None])
    torch.testing.assert_close(out["logits"], want, atol=1e-5, rtol=1e-5)
    assert out["features"].shape == (3, net.heads["features"])
    torch.testing.assert_close(net(list(IMAGES))["features"], out["features"], atol=1e-6, rtol=1e-5)
    renamed = {f"other.{k}": v for k, v in model.state_dict().items()}
    torch.save(renamed, tmp_path / "renamed.pth")
    with pytest.raises(ValueError, match="does not fit the model: missing"):
        TimmExtractor("test_efficientnet", tmp_path / "renamed.pth", side=64, device="cpu")
    same = TimmExtractor("test_efficientnet", tmp_path / "renamed.pth", side=64, in_order=True, device="cpu")
    assert same.weights == net.weights
    assert torch.equal(same(IMAGES)["features"], out["features"])
    torch.save(dict(list(renamed.items())[:-1]), tmp_path / "short.pth")
    with pytest.raises(ValueError, match="tensors, the model has"):
        TimmExtractor("test_efficientnet", tmp_path / "short.pth", side=64, in_order=True, device="cpu")
    cropped = TimmExtractor("test_efficientnet", tmp_path / "w.pth", side=64, crop=0.8, device="cpu")
    assert cropped._resized(IMAGES).shape == (3, 3, 64, 64)
    assert cropped.id != net.id
    tall = torch.zeros(1, 3, 80, 40, dtype=torch.uint8)
    tall[:, :, 20:60] = 255  # the centre square is all white, whatever the border
    assert cropped._resized(tall).min() > 200


def cubic(x: float) -> float:
    """Cubic convolution kernel with a = -3/4."""
    x, a = abs(x), -0.75
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def test_dinov2_positions_are_sampled_with_the_offset(tmp_path: Path) -> None:
    n, grid, offset = 9, 4, 0.1
    table = torch.randn(1, 1 + n * n, 2, generator=torch.Generator().manual_seed(1))
    got = interpolate_positions(table, grid, offset)
    assert torch.equal(got[:, 0], table[:, 0])
    weights = np.zeros((grid, n))
    for i in range(grid):
        centre = (i + 0.5) * n / (grid + offset) - 0.5
        for j in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            weights[i, min(max(j, 0), n - 1)] += cubic(centre - j)
    maps = table[0, 1:].reshape(n, n, 2).numpy()
    want = np.einsum("ia,jb,abd->ijd", weights, weights, maps).reshape(grid * grid, 2)
    np.testing.assert_allclose(got[0, 1:].numpy(), want, atol=1e-5)
    tiny = {"embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 14 * n, "init_values": 1.0}
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", pretrained=False, **tiny).eval()
    torch.save(model.state_dict(), tmp_path / "d.pth")
    net = DinoV2(tmp_path / "d.pth", "vit_small_patch14_dinov2", side=14 * grid, device="cpu", **tiny)
    assert net.heads == {"features": 24}
    rows = net(IMAGES)["features"]
    assert rows.shape == (3, 24)
    assert (rows[0] - rows[1]).abs().max() > 1e-3


def test_vgg_features_come_before_the_relu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    class Small(nn.Module):
        """VGG16's three parts, 4 channels wide."""

        def __init__(self, weights: object = None):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(16))
            self.avgpool = nn.AdaptiveAvgPool2d(7)
            self.classifier = nn.Sequential(
                nn.Linear(4 * 49, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4096), nn.ReLU()
            )

    import torchvision.models

    monkeypatch.setattr(torchvision.models, "vgg16", Small)
    torch.manual_seed(0)
    torch.save(Small().state_dict(), tmp_path / "v.pth")
    rows = VGG16(tmp_path / "v.pth", device="cpu")(IMAGES)["features"]
    assert rows.shape == (3, 4096)
    assert (rows < 0).any()


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a tiny CLIP whose architecture is registered with open_clip as visacc-tiny."""
    folder = tmp_path_factory.mktemp("clip")
    sizes = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    }
    (folder / "visacc-tiny.json").write_text(json.dumps(sizes))
    open_clip.add_model_config(folder / "visacc-tiny.json")
    torch.manual_seed(0)
    torch.save(
        {"state_dict": open_clip.create_model("visacc-tiny", pretrained=None).state_dict()}, folder / "w.pt"
    )
    return folder / "w.pt"


def test_clip_pixels_are_open_clips_transform(tiny_clip: Path) -> None:
    model = ClipModel("visacc-tiny", None, tiny_clip, "cpu")
    transform = open_clip.image_transform(32, is_train=False)
    for size in ((40, 56), (57, 33), (32, 32), (20, 90)):
        image = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8)
        want = transform(Image.fromarray(image[0].permute(1, 2, 0).numpy()))
        torch.testing.assert_close(model.pixels(image)[0], want, atol=1e-6, rtol=0)


def test_clip_extractors(tiny_clip: Path) -> None:
    net = ClipExtractor("visacc-tiny", None, tiny_clip, device="cpu")
    unit = ClipExtractor("visacc-tiny", None, tiny_clip, resize="torch-bicubic", normalise=True, device="cpu")
    assert net.id != unit.id
    torch.testing.assert_close(unit(IMAGES)["features"].norm(dim=1), torch.ones(3))
    assert net(IMAGES)["features"].shape == (3, 16)
    with pytest.raises(ValueError, match="knows no architecture"):
        ClipExtractor("ViT-Q-1", device="cpu")
    with pytest.raises(ValueError, match="unknown resize rule"):
        ClipExtractor("visacc-tiny", resize="best", device="cpu")


def test_clip_scores_in_their_scales(tiny_clip: Path) -> None:
    model = ClipModel("visacc-tiny", None, tiny_clip, "cpu")
    texts = ["a red apple", "two dogs", "a bench"]
    score = ClipScore(model, prompts="toy")
    score.update(IMAGES[:2], texts[:2])
    score.update(IMAGES[2:], texts[2:])
    image = torch.nn.functional.normalize(model.encode_images(IMAGES), dim=1)
    text = torch.nn.functional.normalize(model.encode_text(texts), dim=1)
    cosines = (image * text).sum(1)
    got = score.compute()
    assert got.value == pytest.approx(100 * float(cosines.mean()), rel=1e-5)
    assert got.protocol.settings == (("prompts", "toy"), ("scale", "100cos"))
    np.testing.assert_allclose(scale_cosines(np.array([-0.2, 0.3]), "clipscore"), [0, 0.75])
    np.testing.assert_allclose(scale_cosines(np.array([-0.2, 0.3]), "cosine"), [-0.2, 0.3])
    other = ClipScore(model, prompts="toy")
    other.update(IMAGES, texts)
    score.merge_state(other)
    assert len(score.cosines) == 6
    with pytest.raises(ValueError, match="another model or scale"):
        score.merge_state(ClipScore(model, "clipscore"))
    with pytest.raises(ValueError, match="3 images but 2 texts"):
        score.update(IMAGES, texts[:2])
    with pytest.raises(ValueError, match="text 1 is empty"):
        score.update(IMAGES, ["a", " ", "b"])
    with pytest.raises(ValueError, match="scale must be one of"):
        ClipScore(model, "percent")
    score.reset()
    with pytest.raises(ValueError, match="no images were scored"):
        score.compute()


def test_gigagan_prefix(tiny_clip: Path) -> None:
    """Three tokens after the start token; a row that was full ends with the end token."""
    start, end = 49406, 49407
    tokens = torch.zeros(2, 77, dtype=torch.long)
    tokens[0, :4] = torch.tensor([start, 5, 6, end])
    tokens[1, 0], tokens[1, 1:76], tokens[1, 76] = start, torch.arange(75), end
    rows = prefixed_tokens(tokens, torch.tensor([320, 1125, 24970]), end)
    assert rows[0, :8].tolist() == [start, 320, 1125, 24970, 5, 6, end, 0]
    assert rows[1, :5].tolist() == [start, 320, 1125, 24970, 0]
    assert rows[1, -1] == end
    score = ClipScore(ClipModel("visacc-tiny", None, tiny_clip, "cpu"), "gigagan")
    inserted = score._tokens(["a red apple"])[0, :8].tolist()
    plain = open_clip.get_tokenizer("visacc-tiny")(["A photo depicts a red apple"])[0, :8].tolist()
    assert inserted == plain


def test_hps_versions_are_explicit(tiny_clip: Path) -> None:
    model = hps_model("v2.1", tiny_clip, "cpu", architecture="visacc-tiny")
    score = HPS(model)
    score.update(IMAGES, ["a", "b", "c"])
    got = score.compute()
    assert got.protocol.extractor == "hps-v2.1"
    assert -1 <= got.value <= 1
    with pytest.raises(ValueError, match=r"one of v2\.0, v2\.1"):
        hps_model("v3", tiny_clip)


def test_geneval_colour_encoder(tiny_clip: Path) -> None:
    from visacc.metrics.geneval import ColourClassifier, OpenClipEncoder
    from visacc.metrics.geneval.logic import COLORS, Found

    encoder = OpenClipEncoder("visacc-tiny", None, str(tiny_clip), "cpu")
    image = Image.fromarray(IMAGES[0].permute(1, 2, 0).numpy())
    boxes = [[2, 3, 30, 20, 0.9], [0, 0, 0, 0, 0.8]]  # the second comes from an empty mask
    objects = [Found(np.array(b, np.float32), i) for i, b in enumerate(boxes)]
    names = ColourClassifier(encoder)(image, "bench", objects)
    assert len(names) == 2
    assert set(names) <= set(COLORS)
    assert "visacc-tiny" in encoder.id
    assert encoder.id.endswith("float32")


def test_embedded_extractor_needs_no_download_and_sees_damage() -> None:
    """Distances of true scenes to other true scenes, then blurred, then with other colours (fixed seeds)."""
    from visacc.metrics import frechet_from_features
    from visacc.models.shapes import ASSETS
    from visacc.models.shapes.captions import sample
    from visacc.models.shapes.world import render

    if not (ASSETS / "t2i" / "vq.safetensors").exists():
        pytest.skip("the tokenizer is not there")
    net = create_extractor("shapes-vq", device="cpu")
    images = torch.from_numpy(
        np.stack([np.round(render(sample(i).scene) * 255).astype(np.uint8) for i in range(96)])
    )
    images = images.permute(0, 3, 1, 2).contiguous()
    real, clean = net(images[:48])["features"], images[48:]
    assert real.shape == (48, 128)
    soft = torch.nn.functional.avg_pool2d(clean.float(), 3, 1, 1).to(torch.uint8)
    values = [frechet_from_features(net(x)["features"], real) for x in (clean, soft, clean.flip(1))]
    assert values[0] < values[1]
    assert values[0] < values[2]
    with pytest.raises(ValueError, match="sides divisible by"):
        net(images[:1, :, :63])


def test_clip_command_on_a_folder(tiny_clip: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from visacc.eval.cli import app

    for i, image in enumerate(IMAGES):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
    texts = ["a red apple", "two dogs", "a bench"]
    (tmp_path / "p.txt").write_text("\n".join(texts))
    out = tmp_path / "out.json"
    arguments = ["clip", tmp_path, tmp_path / "p.txt", "--model", "visacc-tiny", "--weights", tiny_clip,
                 "--device", "cpu", "--batch", 2, "--out", out, "--quiet"]  # fmt: skip
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.exception
    score = json.loads(out.read_text())[0]
    want = ClipScore(ClipModel("visacc-tiny", None, tiny_clip, "cpu"))
    want.update(IMAGES, texts)
    assert score["value"] == pytest.approx(want.compute().value, rel=1e-4)
    assert score["protocol"]["settings"] == {"scale": "100cos"}
