"""GenEval against the original evaluator: decisions, crops, colours, detector, result and summary files."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden import golden_dir
from PIL import Image
from safetensors.torch import load_file

from visacc.metrics.geneval.colours import TEMPLATES, ColourClassifier, class_weights, cut_out
from visacc.metrics.geneval.convert_mmdet import build, logits
from visacc.metrics.geneval.logic import CLASSES, COLORS, Found, Options, evaluate, official_prompts, select
from visacc.metrics.geneval.mask2former import normalise, postprocess, prepare
from visacc.metrics.geneval.summary import read_results, summarise, to_line

pytestmark = pytest.mark.golden
GOLDEN = golden_dir("metrics")


@lru_cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


@lru_cache
def document(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def test_every_decision_of_the_original() -> None:
    data = document("geneval_cases.json")
    assert vars(Options()) == data["defaults"]
    assert list(COLORS) == data["colors_list"]
    assert list(CLASSES) == data["class_names"]
    assert len(data["cases"]) > 400
    for case in data["cases"]:
        want, options = case["expected"], Options(**{**data["defaults"], **case["options"]})
        boxes = {k: np.array(v, np.float32).reshape(-1, 5) for k, v in case["detections"].items()}
        calls: list[list] = []

        def classify(name: str, objects: list[Found], case=case, calls=calls) -> list[str]:
            calls.append([name, [o.index for o in objects]])
            return [case["colors"][name][o.index] for o in objects]

        found = select(boxes, case["metadata"]["tag"], options, classes=CLASSES)
        if "error" in want:  # the original dies with an IndexError; here the prompt is refused
            with pytest.raises(ValueError, match="does not stand before it"):
                evaluate(found, case["metadata"], classify, options)
            continue
        got = evaluate(found, case["metadata"], classify, options)
        assert (got.correct, got.reason) == (want["correct"], want["reason_sorted"]), case["name"]
        assert got.details == want["details"], case["name"]
        assert calls == want["color_calls"], case["name"]


def test_cases_use_the_shipped_prompts() -> None:
    ours = {json.dumps(p) for p in official_prompts()}
    random = [c for c in document("geneval_cases.json")["cases"] if c["name"].startswith("random/")]
    assert len(random) > 50
    assert all(json.dumps(c["metadata"]) in ours for c in random)


def test_crops() -> None:
    t = tensors("geneval_arrays")
    image = Image.fromarray(t["crop.image"].numpy())
    cases = document("geneval_arrays.json")["crops"]
    assert len(cases) > 50
    for case in cases:
        mask = None if case["mask"] < 0 else t[f"crop.mask{case['mask']}"].numpy()
        options = case["options"]
        got = cut_out(
            image,
            np.array(case["box"], np.float32),
            mask,
            background=options.get("bgcolor", "#999"),
            crop=options.get("crop", "1") == "1",
        )
        np.testing.assert_array_equal(np.asarray(got), t[case["key"]].numpy(), err_msg=case["key"])


class StandIn:
    """The golden's encoder: hashed bytes for text, pooled pixels times a matrix for images."""

    def __init__(self, t: dict[str, torch.Tensor]):
        self.table, self.matrix = t["clf.E"], t["clf.Wi"]

    def text(self, texts) -> torch.Tensor:
        rows = []
        for text in texts:
            b = torch.zeros(64, dtype=torch.long)
            raw = torch.tensor(list(text.encode()))
            b[: len(raw)] = raw
            rows.append((self.table[b] + 0.3 * self.table[(b + torch.arange(64)) % 256]).sum(0))
        return torch.stack(rows)

    def images(self, images) -> torch.Tensor:
        rows = []
        for image in images:
            small = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)).copy()
            x = torch.from_numpy(small).permute(2, 0, 1).float() / 255 * 2 - 1
            rows.append(F.adaptive_avg_pool2d(x, 8).flatten() @ self.matrix)
        return torch.stack(rows)


def test_colour_classifier() -> None:
    t, want = tensors("geneval_arrays"), document("geneval_arrays.json")["classifier"]
    encoder, name = StandIn(t), want["class"]
    texts = [[p.format(colour=c, name=name) for p in TEMPLATES] for c in COLORS]
    assert texts == want["texts_per_color"]
    embedded = torch.stack([F.normalize(encoder.text(row), dim=1) for row in texts])
    torch.testing.assert_close(embedded, t["clf.text_embeddings_normalised"], atol=1e-5, rtol=0)
    torch.testing.assert_close(class_weights(encoder, name), t["clf.weights"], atol=1e-5, rtol=0)
    image = Image.fromarray(t["clf.image"].numpy())
    objects = [
        Found(box.numpy(), i, mask.numpy())
        for i, (box, mask) in enumerate(zip(t["clf.boxes"], t["clf.masks"], strict=True))
    ]
    classifier = ColourClassifier(encoder)
    torch.testing.assert_close(classifier.logits(image, name, objects), t["clf.logits"], atol=1e-3, rtol=0)
    assert classifier(image, name, objects) == want["colors"]


def test_detector_preprocessing_is_opencvs_bit_for_bit() -> None:
    t = tensors("m2f_preprocess")
    for case in document("m2f_preprocess.json"):
        key = case["key"]
        got = prepare(
            Image.fromarray(t[f"{key}.image_rgb"].numpy()),
            tuple(case["scale"]),
            case["size_divisor"],
            case["pad_value_before_normalise"],
        )
        assert list(got.resized) == case["img_hw"]
        assert list(got.original) == case["ori_hw"]
        torch.testing.assert_close(got.pixels, t[f"{key}.resized_padded_uint8"][0], atol=0, rtol=0)
    grey = normalise(torch.full((1, 3, 2, 2), 128, dtype=torch.uint8))[0, :, 0, 0]
    torch.testing.assert_close(grey, torch.tensor([4.325 / 58.395, 11.72 / 57.12, 24.47 / 57.375]))


def _sorted(labels: torch.Tensor, boxes: torch.Tensor) -> list[tuple[float, ...]]:
    """Detections as a sorted list: ties between classes have no order."""
    rows = torch.cat([boxes[:, 4:].mul(1e5).round(), labels[:, None].float(), boxes[:, :4]], dim=1)
    return sorted(map(tuple, rows.tolist()))


def test_detector_postprocessing() -> None:
    t = tensors("geneval_arrays")
    for case in document("geneval_arrays.json")["postprocess"]:
        key = case["key"]
        got = postprocess(
            t[f"{key}.class_logits"][0],
            t[f"{key}.mask_logits"][0],
            tuple(case["padded_input"]),
            tuple(case["resized_image"]),
            tuple(case["original_image"]),
            case["max_per_image"],
        )
        want_boxes, want_labels = t[f"{key}.boxes_scores"], t[f"{key}.labels"]
        assert len(got.labels) == case["detections"]
        order = got.boxes[:, 4].argsort(descending=True, stable=True)
        torch.testing.assert_close(got.boxes[order, 4], want_boxes[:, 4], atol=1e-5, rtol=0)
        assert _sorted(got.labels, got.boxes) == _sorted(want_labels, want_boxes)
        areas = got.masks[order].flatten(1).sum(1)
        assert sorted(areas.tolist()) == sorted(t[f"{key}.mask_areas"].tolist())
        distinct = want_boxes[:6, 4].diff().abs() > 1e-5  # the first masks, where scores give them an order
        n = min(int(distinct.logical_not().float().argmax()) if not distinct.all() else 5, 5)
        torch.testing.assert_close(got.masks[order][:n], t[f"{key}.masks_top5"][:n])


def test_converted_mmdet_checkpoint() -> None:
    t, meta = tensors("m2f_tiny"), document("m2f_tiny.json")
    c = meta["config"]
    state = {k.removeprefix("weights."): v for k, v in t.items() if k.startswith("weights.")}
    names = {
        "embed": "E",
        "depths": "depths",
        "heads": "heads",
        "features": "feat",
        "queries": "Q",
        "classes": "C",
    }
    names |= {"encoder_ff": "ffE", "decoder_ff": "ffD", "encoder_layers": "encL", "decoder_layers": "decL"}
    sizes = {name: c[key] for name, key in {**names, "attention_heads": "nh"}.items()}
    model = build(state, **sizes)
    class_logits, mask_logits = logits(model, t["input"])
    torch.testing.assert_close(class_logits, t["class_logits"], atol=5e-5, rtol=0)
    torch.testing.assert_close(mask_logits, t["mask_logits"], atol=1e-4, rtol=0)
    with torch.inference_mode():
        maps = model.model.pixel_level_module.encoder(t["input"]).feature_maps
    for i, stage in enumerate(maps):
        torch.testing.assert_close(stage.mean((2, 3)), t[f"backbone_stage{i}_mean"], atol=1e-5, rtol=1e-4)
    hw = tuple(meta["image_hw"])
    got = postprocess(class_logits[0], mask_logits[0], hw, hw, tuple(meta["ori_hw"]))
    want = torch.tensor(meta["detections_class_x1y1x2y2score"])
    order = got.boxes[:, 4].argsort(descending=True, stable=True)
    assert len(order) == len(want)
    torch.testing.assert_close(got.boxes[order, 4], want[:, 5], atol=1e-4, rtol=0)
    torch.testing.assert_close(got.boxes[order, :4], want[:, 1:5], atol=0, rtol=0)
    swapped = dict(state)  # the permutation matters: without it the golden is missed
    key = "backbone.stages.0.downsample.reduction.weight"
    swapped[key] = state[key].flip(-1)
    assert (logits(build(swapped, **sizes), t["input"])[0] - t["class_logits"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="not part of an mmdet"):
        build({**state, "backbone.bogus": torch.zeros(1)}, **sizes)
    with pytest.raises(ValueError, match="missing"):
        build({k: v for k, v in state.items() if "query_feat" not in k}, **sizes)


def test_result_and_summary_files() -> None:
    path = GOLDEN / "geneval_results.jsonl"
    records = read_results(path)
    assert [to_line(r) for r in records] == path.read_text().splitlines()
    assert summarise(records, resamples=50).text() == (GOLDEN / "geneval_summary.txt").read_text().rstrip(
        "\n"
    )
