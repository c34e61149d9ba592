"""The soak script in short: memory stays flat over a few hundred images, and the script notices where it does not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "soak.py"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


def test_objects_stay_flat(soak: ModuleType) -> None:
    rows = soak.soak(400, batch=10, grid=2)
    assert rows[-1].images == 400
    assert len(rows) >= 10
    _, objects, tensors = soak.growth(rows)
    assert objects <= 500
    assert tensors <= 20


def test_a_leak_is_noticed(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that keeps every image must show in the counts, or they count for nothing."""
    kept: list[object] = []
    call = soak.TextToImagePipeline.__call__

    def leaky(self, *args, **kwargs):
        out = call(self, *args, **kwargs)
        kept.append([out.codes.clone(), out.stats])
        return out

    monkeypatch.setattr(soak.TextToImagePipeline, "__call__", leaky)
    rows = soak.soak(400, batch=10, grid=2, decoders=("ar",))
    _, objects, tensors = soak.growth(rows)
    assert tensors > 50
    assert objects > 100


def test_the_script_says_so() -> None:
    line = [sys.executable, str(SCRIPT), "--images", "60", "--batch", "5", "--grid", "2", "--decoders", "ar"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after the first tenth" in done.stdout
    done = subprocess.run([*line, "--rss-bound", "-1000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "memory grows" in done.stderr
