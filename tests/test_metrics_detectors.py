"""Detectors of GenEval: Mask2Former and YOLO, their files, preprocessing and boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visacc.metrics.geneval import (
    CLASSES,
    create_detector,
)
from visacc.metrics.geneval.convert_mmdet import config, convert, permute_merging
from visacc.metrics.geneval.mask2former import Mask2FormerDetector, mask_boxes, prepare, resize_uint8
from visacc.metrics.geneval.yolo import (
    ANCHORS,
    Network,
    YoloV3Tiny,
    decode,
    letterbox,
    load_darknet,
    suppress,
)


def test_mask2former_detector_end_to_end(tmp_path: Path) -> None:
    """A tiny random network: a batch of mixed sizes equals single images, boxes are the masks' boxes."""
    from transformers import Mask2FormerForUniversalSegmentation

    torch.manual_seed(0)
    sizes = {"embed": 12, "depths": (1, 1, 1, 1), "heads": (1, 2, 3, 4), "features": 32, "encoder_ff": 16,
             "decoder_ff": 16, "encoder_layers": 1, "decoder_layers": 1, "queries": 5, "attention_heads": 4}  # fmt: skip
    model = Mask2FormerForUniversalSegmentation(config(**sizes))
    detector = Mask2FormerDetector(model, "tiny", device="cpu", keep_masks=0.0)
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in ((24, 32), (32, 24), (24, 32))
    ]
    scale = {"prepare": lambda image: prepare(image, (133, 80))}
    import visacc.metrics.geneval.mask2former as module

    original = module.prepare
    module.prepare = scale["prepare"]  # type: ignore[assignment]
    try:
        together = detector(images)
        alone = [detector([image])[0] for image in images]
    finally:
        module.prepare = original
    for image, a, b in zip(images, together, alone, strict=True):
        assert sum(len(v) for v in a.boxes.values()) == 100
        assert list(a.boxes) == list(b.boxes)
        assert a.masks is not None
        for name, boxes in a.boxes.items():
            np.testing.assert_allclose(boxes, b.boxes[name], atol=1e-4)
            for box, mask in zip(boxes, a.masks[name], strict=True):
                if mask is not None and mask.any():
                    assert mask.shape == (image.height, image.width)
                    ys, xs = np.nonzero(mask)
                    assert box[:4].tolist() == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
    small = Mask2FormerForUniversalSegmentation(config(**{**sizes, "classes": 7}))
    with pytest.raises(ValueError, match="has 7 classes, GenEval needs 80"):
        Mask2FormerDetector(small, "x", device="cpu")
    with pytest.raises(ValueError, match="does not exist"):
        create_detector("mask2former", weights=tmp_path / "none.pth")


def test_preprocessing_details() -> None:
    assert (
        prepare(Image.new("RGB", (512, 512))).resized,
        prepare(Image.new("RGB", (512, 512))).pixels.shape,
    ) == (
        (800, 800),
        (3, 800, 800),
    )
    wide = prepare(Image.new("RGB", (1000, 500), "white"))
    assert wide.resized == (667, 1333)
    assert wide.pixels.shape == (3, 672, 1344)
    assert wide.pixels[:, 667:].unique().tolist() == [128]
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    assert np.array_equal(resize_uint8(image, (9, 7)), image)
    flat = np.full((5, 6, 3), 77, np.uint8)
    assert set(resize_uint8(flat, (13, 4)).flatten().tolist()) == {77}
    masks = torch.zeros(2, 5, 6, dtype=torch.bool)
    masks[1, 2:4, 1:] = True
    assert mask_boxes(masks).tolist() == [[0, 0, 0, 0], [1, 2, 6, 4]]


def test_merging_permutation() -> None:
    channels, groups = 3, ["00", "01", "10", "11"]
    names = [f"{c}:{g}" for c in range(channels) for g in groups]
    order = permute_merging(torch.arange(len(names))[None])[0].tolist()
    assert [names[i] for i in order] == [
        f"{c}:{g}" for g in ("00", "10", "01", "11") for c in range(channels)
    ]
    with pytest.raises(ValueError, match="not part of an mmdet"):
        convert({"head.weight": torch.zeros(1)})


def darknet_file(net: Network, path: Path) -> Path:
    parts = [np.zeros(5, np.float32)]
    for conv, norm in zip(net.convs, net.norms, strict=True):
        tensors = (
            [norm.bias, norm.weight, norm.running_mean, norm.running_var]
            if hasattr(norm, "bias")
            else [conv.bias]
        )
        parts += [t.detach().numpy().ravel() for t in (*tensors, conv.weight)]
    np.concatenate(parts).tofile(path)
    return path


def test_yolo_file_and_boxes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Network().eval()
    for norm in net.norms:
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    path = darknet_file(net, tmp_path / "w.weights")
    assert (path.stat().st_size - 20) // 4 == 8_858_734  # the published file's count
    back = load_darknet(path)
    for key, value in net.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert torch.equal(back.state_dict()[key], value), key
    for name, data, message in (
        ("short", path.read_bytes()[:-400], "ends early"),
        ("long", path.read_bytes() + b"\0" * 8, "another network"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load_darknet(tmp_path / name)
    head = torch.full((255, 13, 13), -20.0)
    view = head.view(3, 85, 13, 13)
    view[1, :4, 4, 6] = torch.tensor([0.0, 0.0, 0.0, 0.0])  # centre of cell (row 4, column 6), anchor-sized
    view[1, 4, 4, 6], view[1, 5 + 16, 4, 6] = 20.0, 20.0
    boxes, scores = decode(head, ANCHORS[3:])
    best = int(scores.max(dim=1).values.argmax())
    assert int(scores[best].argmax()) == CLASSES.index("dog")
    w, h = ANCHORS[4]
    want = [6.5 * 32 - w / 2, 4.5 * 32 - h / 2, 6.5 * 32 + w / 2, 4.5 * 32 + h / 2]
    np.testing.assert_allclose(boxes[best].numpy(), want, rtol=1e-6)
    pixels, scale, (left, top) = letterbox(Image.new("RGB", (832, 416), "white"))
    assert (pixels.shape, scale, left, top) == ((3, 416, 416), 0.5, 0, 104)
    assert pixels[0, 0, 0] == pytest.approx(128 / 255)
    table = np.array([[0, 0, 10, 10, 0.5], [1, 0, 11, 10, 0.9], [30, 30, 40, 40, 0.1]], np.float32)
    assert suppress(table, 0.45) == [1, 2]
    image = Image.new("RGB", (60, 40), "red")
    with torch.no_grad():
        heads = back(letterbox(image)[0][None])
    scores = torch.cat([decode(heads[0][0], ANCHORS[3:])[1], decode(heads[1][0], ANCHORS[:3])[1]])
    floor = float(scores.flatten().topk(40).values[-1])  # a random network has no idea: keep its best 39
    found = YoloV3Tiny(path, floor=floor, overlap=1.0, device="cpu")([image])[0]
    assert sum(len(v) for v in found.boxes.values()) == int((scores > floor).sum())
    for boxes_of in found.boxes.values():
        assert (boxes_of[:, 4] > floor).all()
        assert (boxes_of[:, :4] >= 0).all()
        assert (boxes_of[:, 2] <= 60).all()
        assert (boxes_of[:, 3] <= 40).all()
