"""The pipeline: arguments, seeds, outputs, callbacks, registry and automatic window."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import save_tiny, tiny_llamagen

import visacc
from visacc import registry
from visacc.cli import main
from visacc.decoders import AR, MCSJD, Decoder
from visacc.kernels import rng
from visacc.loading import known_models
from visacc.models.llamagen import LlamaGen
from visacc.models.shapes import EMBEDDED
from visacc.noise import Noise, sample_seed
from visacc.pipeline import TextToImagePipeline, image_seeds
from visacc.window import CANDIDATES, AutoWindow, expected_compression, forward_costs


@pytest.fixture(scope="module")
def pipe():
    return TextToImagePipeline(tiny_llamagen(), "mc-sjd", window=8)


def test_outputs_of_every_type(pipe):
    pil = pipe([1, 2], seed=0)
    assert len(pil.images) == 2
    assert isinstance(pil.images[0], Image.Image)
    assert pil[0] is pil.images
    array = pipe([1, 2], seed=0, output_type="np").images
    assert array.dtype == np.uint8
    assert array.shape == (2, 12, 12, 3)
    assert np.array_equal(array[1], np.asarray(pil.images[1]))
    tensor = pipe([1, 2], seed=0, output_type="pt").images
    assert tensor.shape == (2, 3, 12, 12)
    assert 0 <= float(tensor.min()) <= float(tensor.max()) <= 1
    codes = pipe([1, 2], seed=0, output_type="codes").images
    assert codes.shape == (2, 1, 6, 6)
    assert torch.equal(codes, pil.codes)


def test_the_recorded_seed_reproduces_an_image_alone(pipe):
    many = pipe(
        [1, 2, 3], num_images_per_prompt=2, seed=7, batch_size=4, output_type="codes", guidance_scale=2.0
    )
    labels = [1, 1, 2, 2, 3, 3]
    assert many.seeds[0] == 7
    assert len(set(many.seeds)) == 6
    for i in (0, 3, 5):
        alone = pipe(labels[i], seed=many.seeds[i], output_type="codes", guidance_scale=2.0)
        assert torch.equal(alone.codes[0], many.codes[i])


def test_generator_and_random_seeds(pipe):
    first = pipe(1, generator=torch.Generator().manual_seed(3), output_type="codes")
    again = pipe(1, generator=torch.Generator().manual_seed(3), output_type="codes")
    assert torch.equal(first.codes, again.codes)
    assert pipe(1, output_type="codes").seeds != pipe(1, output_type="codes").seeds


def test_decoder_for_one_call(pipe):
    out = pipe(1, decoder="ar", seed=0, output_type="codes")
    assert out.stats.decoder == "ar"
    assert out.settings["lossless"] is True
    exact = pipe(1, decoder="mc-sjd", coupling="gumbel-exact", window=5, seed=0, output_type="codes")
    assert torch.equal(out.codes, exact.codes)
    assert pipe(1, seed=0, output_type="codes").stats.decoder == "mc-sjd"


def test_statistics_over_several_batches(pipe):
    out = pipe([1] * 5, batch_size=2, seed=0, output_type="codes")
    assert len(out.stats.steps) == 5
    assert out.stats.committed.shape[1] == 5
    assert out.stats.committed.sum(0).tolist() == [36] * 5
    assert out.stats.summary()["images"] == 5


def test_callback_sees_tensors_and_can_interrupt(pipe):
    seen = []

    def callback(p, step, committed, tensors):
        seen.append((step, tensors["token_ids"].shape, committed.shape))
        p.interrupt = step >= 3

    out = pipe(
        [1, 2], callback_on_step_end=callback, callback_on_step_end_tensor_inputs=["token_ids"], seed=0
    )
    assert [s[0] for s in seen] == [1, 2, 3]
    assert seen[0][1] == (2, 36)
    assert out.stats.unfinished


def test_progress_reaches_the_end(pipe):
    ticks = []
    pipe(
        [1, 2, 3],
        batch_size=2,
        seed=0,
        output_type="codes",
        progress=lambda done, total: ticks.append((done, total)),
    )
    assert ticks[-1] == (108, 108)
    assert ticks == sorted(ticks)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": " "}, "prompt is empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 2.5}, "prompt"),
        ({"prompt": [1, None]}, "prompt"),
        ({"prompt": 1, "num_images_per_prompt": 0}, "num_images_per_prompt"),
        ({"prompt": 1, "guidance_scale": -1}, "guidance_scale"),
        ({"prompt": 1, "top_p": 0}, "top_p"),
        ({"prompt": 1, "output_type": "jpeg"}, "output_type"),
        ({"prompt": 1, "seed": 1.5}, "seed"),
        ({"prompt": 1, "seed": [1, 2]}, "1 images need one seed"),
        ({"prompt": 1, "batch_size": -2}, "batch_size"),
        ({"prompt": 1, "window": 0}, "window"),
        ({"prompt": 1, "widow": 3}, "no option 'widow'"),
        ({"prompt": 1, "decoder": "mcsjd"}, "did you mean 'mc-sjd'"),
        ({"prompt": 99}, "class labels 0..9"),
        ({"prompt": "a cat"}, "class-conditional"),
        ({"prompt": 1, "negative_prompt": "ugly"}, "negative"),
        ({"prompt": 1, "decoder": AR(), "window": 4}, "decoder object"),
        ({"prompt": 1, "callback_on_step_end_tensor_inputs": ["logits"]}, "token_ids"),
    ],
)
def test_bad_arguments(pipe, arguments, text):
    with pytest.raises(ValueError, match=text):
        pipe(**arguments)


def test_load_reads_a_folder_and_reports_unknown_names(tmp_path):
    folder = save_tiny(tmp_path / "model")
    pipe = visacc.load(folder, decoder="sjd", window=4)
    assert pipe(3, seed=1, output_type="codes").stats.decoder == "sjd"
    with pytest.raises(ValueError, match=r"unknown model 'shapes-t2x'; did you mean 'shapes-t2i'"):
        visacc.load("shapes-t2x")
    with pytest.raises(ValueError, match="unknown decoder"):
        visacc.load(folder, decoder="warp")
    with pytest.raises(ValueError, match="unknown dtype"):
        visacc.load(folder, dtype="float99")
    with pytest.raises(ValueError, match="unknown device"):
        visacc.load(folder, device="abacus")
    (folder / "gpt.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"gpt\.safetensors"):
        visacc.load(folder)


def test_auto_window_prefers_what_is_worth_its_cost(monkeypatch):
    model = tiny_llamagen()
    assert expected_compression(1) == 1
    auto = AutoWindow(model)
    costs = forward_costs(model, (4, 8, 16), 1, guided=False, repeats=2)
    assert set(costs) == {4, 8, 16}
    assert all(c > 0 for c in costs.values())
    monkeypatch.setattr("visacc.window.forward_costs", lambda *a, **k: dict.fromkeys(CANDIDATES[:4], 1.0))
    assert auto.choose(MCSJD(), guided=False, batch=1) == CANDIDATES[3]
    monkeypatch.setattr("visacc.window.forward_costs", lambda *a, **k: {w: float(w) for w in CANDIDATES[:4]})
    assert auto.choose(MCSJD(), guided=True, batch=1) == CANDIDATES[0]
    with pytest.raises(ValueError, match="auto"):
        auto.choose(AR(), guided=False, batch=1)


def test_window_auto_through_the_pipeline():
    pipe = TextToImagePipeline(tiny_llamagen(), "mc-sjd", window="auto")
    out = pipe(1, seed=0, output_type="codes")
    assert out.settings["decoder_options"]["window"] in CANDIDATES


# ---- registry ---------------------------------------------------------------------------------------------


class FakeEntry:
    def __init__(self, name, target, package="other"):
        self.name, self._target = name, target
        self.dist = type("D", (), {"name": package})()

    def load(self):
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


class Leap(AR):
    name = "leap"
    summary = "third-party decoder"


def test_plugins_are_listed_and_broken_ones_only_warn(monkeypatch):
    plugins = (
        FakeEntry("leap", Leap),
        FakeEntry("ar", Leap),
        FakeEntry("bad", ImportError("no such module")),
        FakeEntry("wrong", int),
    )
    monkeypatch.setattr(registry, "_plugins", lambda group: plugins if group == "visacc.decoders" else ())
    with pytest.warns(UserWarning, match="plug-in") as caught:
        names = [e.name for e in registry.decoder_entries()]
    assert "leap" in names
    assert "other:ar" in names
    assert names.count("ar") == 1
    assert len([w for w in caught if "bad" in str(w.message) or "wrong" in str(w.message)]) == 2
    with pytest.warns(UserWarning, match="plug-in"):
        assert isinstance(registry.make_decoder("other:ar"), Leap)
    assert isinstance(registry.make_decoder("ar"), AR)
    assert not isinstance(registry.make_decoder("ar"), Leap)


@pytest.fixture
def installed_models(tmp_path, monkeypatch):
    """A package, installed beside this one, that registers a model, one that cannot be imported, and a built-in name."""
    (tmp_path / "other_models.py").write_text(
        "from tiny import tiny_llamagen\n\n\n"
        "def load(name_or_path, *, device, dtype, image_size, classes=10):\n"
        "    model = tiny_llamagen(grid=4, classes=classes)\n"
        "    model.asked = (name_or_path, device, dtype, image_size)\n"
        "    return model\n"
    )
    info = tmp_path / "other_models-2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-models\nVersion: 2\n")
    (info / "entry_points.txt").write_text(
        "[visacc.models]\nother-tiny = other_models:load\nother-broken = no_such_package:load\n"
        f"{next(iter(EMBEDDED))} = other_models:load\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


@pytest.mark.usefixtures("installed_models")
def test_models_of_other_packages_load_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.warns(UserWarning, match="plug-in 'other-broken' of other-models cannot be loaded"):
        model = visacc.load("other-tiny", "ar", device="cpu", model_options={"classes": 12}).model
    assert isinstance(model, LlamaGen)
    assert model.asked == ("other-tiny", torch.device("cpu"), torch.float32, None)
    assert model.gpt.config.num_classes == 12
    with pytest.warns(UserWarning, match="other-broken"), pytest.raises(SystemExit) as stop:
        main(["list", "models"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    assert re.search(r"other-tiny +│ added by a plug-in", listed)
    assert "other-broken" not in listed
    with pytest.warns(UserWarning, match="other-broken"):
        built_in = [known_models()[name] for name in EMBEDDED]
    assert "added by a plug-in" not in built_in  # a built-in name stays what it is
    with (
        pytest.warns(UserWarning, match="other-broken"),
        pytest.raises(ValueError, match=r"unknown model 'other-tinny'; did you mean 'other-tiny'"),
    ):
        visacc.load("other-tinny")
    with pytest.warns(UserWarning, match="other-broken"), pytest.raises(SystemExit) as stop:
        main(["generate", "3", "-m", "other-tiny", "-d", "ar", "-q", "-o", str(tmp_path / "out")])
    assert stop.value.code == 0
    assert (tmp_path / "out" / "000.png").is_file()


def test_every_registered_decoder_states_itself():
    for entry in registry.decoder_entries():
        assert issubclass(entry.cls, Decoder)
        assert entry.cls.summary
        assert entry.cls.name == entry.name


def test_every_built_in_decoder_is_exported():
    """``import visacc`` is enough for ``visacc.decoders.MCSJD(window=32)``."""
    assert visacc.decoders.MCSJD(window=32).options()["window"] == 32
    built_in = [e.cls for e in registry.decoder_entries() if e.cls.__module__.startswith("visacc.")]
    assert len(built_in) >= 13
    for cls in built_in:
        assert getattr(visacc.decoders, cls.__name__) is cls
        assert cls.__name__ in visacc.decoders.__all__
    with pytest.raises(AttributeError, match="has no attribute 'MCSDJ'"):
        visacc.decoders.MCSDJ  # noqa: B018
    code = "import sys, visacc; visacc.decoders.MCSJD(window=32); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- noise ------------------------------------------------------------------------------------------------


def test_image_seeds():
    assert image_seeds(5, None, 3)[0] == 5
    assert image_seeds([1, 2], None, 2) == [1, 2]
    assert sample_seed(5) != sample_seed(6)
    assert all(-(1 << 63) <= sample_seed(s, i) < 1 << 63 for s in (-3, 0, 1 << 70) for i in range(3))


def test_decisions_are_the_streams_they_name():
    noise = Noise(torch.tensor([1, -7]), 11, 20)
    slots = torch.tensor([[3, 4, 5], [9, 0, 1]])
    u, residual, word = noise.decisions(slots, 6)
    assert torch.equal(u, noise.uniform(rng.ACCEPT, slots, 6))
    assert torch.equal(residual, noise.integer(rng.RESIDUAL, slots, 6))
    assert torch.equal(word, noise.integer(rng.DRAW, slots, 6))


def test_noise_table_equals_direct_noise(monkeypatch):
    seeds = torch.tensor([1, -7])
    table, direct = Noise(seeds, 11, 20), Noise(seeds, 11, 20)
    slots = torch.tensor([[3, 4], [9, 0]])
    table.prepare(5)
    table.prepare(10)
    assert torch.equal(table.exponential(slots), direct.exponential(slots))
    monkeypatch.setattr("visacc.noise._TABLE_LIMIT", 1)
    big = Noise(seeds, 11, 20)
    big.prepare(10)
    assert torch.equal(big.exponential(slots), direct.exponential(slots))
