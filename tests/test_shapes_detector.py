"""The detector, from pixels alone: at least 99 % of rendered scenes exactly right, and robust to soft pictures."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFilter

from visacc.models.shapes.captions import sample
from visacc.models.shapes.detector import components, detect
from visacc.models.shapes.world import COLOURS, SHAPES, Scene, SceneObject, extent, random_background, render

SEED = 1_000_000


def picture(scene: Scene) -> np.ndarray:
    return np.round(render(scene) * 255).astype(np.uint8)


def names(found) -> list[tuple[str, str]]:
    return sorted((item.shape, item.colour) for item in found)


@pytest.fixture(scope="module")
def scenes():
    return [sample(SEED + i).scene for i in range(500)]


def test_99_percent_of_rendered_scenes_are_read_exactly(scenes):
    right = [names(detect(picture(scene))) == names(scene.objects) for scene in scenes]
    assert np.mean(right) >= 0.99


def test_boxes_fit_the_objects(scenes):
    errors = []
    for scene in scenes[:100]:
        found = detect(picture(scene))
        for item in scene.objects:
            close = min(
                found,
                key=lambda d: abs(d.box[0] + d.box[2] - 2 * item.cx) + abs(d.box[1] + d.box[3] - 2 * item.cy),
            )
            x0, y0, x1, y1 = close.box
            errors.append(abs(max(x1 - x0, y1 - y0) / 2 - extent(item)))
            assert abs((x0 + x1) / 2 - item.cx) < 2.5
            assert abs((y0 + y1) / 2 - item.cy) < 2.5
    assert np.mean(errors) < 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_colour_of_every_shape(shape):
    rng = np.random.default_rng(5)
    for colour in COLOURS:
        scene = Scene((SceneObject(shape, colour, 30.0, 33.0, 12.0),), random_background(rng))
        assert names(detect(picture(scene))) == [(shape, colour)]


def test_soft_and_noisy_pictures(scenes):
    rng = np.random.default_rng(0)
    right = []
    for scene in scenes[:120]:
        soft = Image.fromarray(picture(scene)).filter(ImageFilter.GaussianBlur(0.7))
        noisy = np.asarray(soft) + rng.normal(0, 6, (64, 64, 3))
        right.append(names(detect(np.clip(noisy, 0, 255).astype(np.uint8))) == names(scene.objects))
    assert np.mean(right) >= 0.95


def test_backgrounds_alone_hold_nothing(scenes):
    for scene in scenes[:60]:
        assert detect(picture(Scene((), scene.background))) == []


def test_it_looks_at_pixels_of_every_common_form(scenes):
    image = picture(scenes[0])
    expected = detect(image)
    assert expected
    assert detect(Image.fromarray(image)) == expected
    assert detect(image / 255.0) == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((64, 64), np.uint8), "RGB picture"),
        (np.zeros((64, 64, 3), np.int32), "uint8 or floating"),
        (np.full((64, 64, 3), 2.0), r"\[0, 1\]"),
        (np.full((64, 64, 3), np.nan), "finite"),
    ],
)
def test_bad_pictures_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        detect(bad)


def test_components_separate_touching_labels():
    labels = np.array([[0, 0, -1, 1], [-1, 0, -1, 1], [1, 1, -1, 0]])
    ids = components(labels)
    assert (ids[labels < 0] == 0).all()
    assert len(np.unique(ids[ids > 0])) == 4
    assert ids[0, 0] == ids[1, 1] != ids[2, 1]
