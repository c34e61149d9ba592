"""How pixels become bytes: each family's published formula, rounding where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy import TableModel

from visacc.eval.generate import guard_model
from visacc.metrics.images import to_uint8
from visacc.models.base import ImageModel
from visacc.models.cosmos.adapter import CosmosModel
from visacc.models.hf import chameleon, emu3, emu35, janus, lumina
from visacc.models.llamagen.adapter import LlamaGen
from visacc.models.lpd.adapter import LPDModel
from visacc.models.nbp.adapter import NBPModel

# the decoder's x in [-1, 1]: 255 levels, their halves, what lies just beside both, and the far ends
LEVELS = torch.arange(0, 511, dtype=torch.float64) / 2
X = (torch.cat([LEVELS, LEVELS + 0.01, LEVELS - 0.01, LEVELS + 0.3]) / 127.5 - 1).clamp(-1, 1)
PIXELS = ((X + 1) / 2).float()


def bytes_of(family: type[ImageModel]) -> np.ndarray:
    model = object.__new__(family)
    return model.to_uint8(PIXELS).numpy()


def same_off_ties(ours: np.ndarray, theirs: np.ndarray, edge: torch.Tensor) -> None:
    """Equal wherever float32 cannot fall on the other side of the rule's edge."""
    clear = ((edge - edge.round()).abs() > 1e-3).numpy()
    assert clear.sum() > 500
    assert np.array_equal(ours[clear], theirs[clear])
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


@pytest.mark.parametrize(
    "family", [janus.Janus, chameleon.Chameleon, emu3.Emu3, emu35.Emu35, lumina.Lumina, CosmosModel]
)
def test_families_that_cut_off(family: type[ImageModel]) -> None:
    official = np.clip((X.numpy() + 1) / 2 * 255, 0, 255).astype(np.uint8)
    same_off_ties(bytes_of(family), official, (X + 1) / 2 * 255)
    rounded = np.round((X.numpy() + 1) / 2 * 255)
    assert (bytes_of(family) != rounded).mean() > 0.3  # what a wrong rule would do to published distances


def test_llamagen() -> None:
    official = np.clip(127.5 * X.numpy() + 128, 0, 255).astype(np.uint8)
    same_off_ties(bytes_of(LlamaGen), official, 127.5 * X + 128)


@pytest.mark.parametrize("family", [LPDModel, NBPModel, TableModel])
def test_rounding(family: type[ImageModel]) -> None:
    official = np.round(np.clip((X.numpy() + 1) / 2 * 255, 0, 255)).astype(np.uint8)
    same_off_ties(bytes_of(family), official, (X + 1) / 2 * 255 + 0.5)
    assert np.array_equal(bytes_of(family), to_uint8(PIXELS.expand(1, 3, 1, -1))[0, 0, 0].numpy())


def test_exact_ties() -> None:
    tie = torch.tensor([0.5])  # 127.5
    assert [f.to_uint8(object.__new__(f), tie).item() for f in (LPDModel, LlamaGen, CosmosModel)] == [
        128,
        128,
        127,
    ]
    assert LPDModel.to_uint8(object.__new__(LPDModel), torch.tensor([2.5 / 255])).item() == 2
    assert LlamaGen.to_uint8(object.__new__(LlamaGen), torch.tensor([2.5 / 255])).item() == 3


def test_half_precision_pixels_are_scaled_in_float32() -> None:
    p = torch.tensor([200.5 / 255])
    half = p.half()
    assert torch.equal(bytes_like(half), bytes_like(half.float()))


def bytes_like(p: torch.Tensor) -> torch.Tensor:
    return object.__new__(CosmosModel).to_uint8(p)


def test_unknown_rules_are_refused() -> None:
    class Odd(TableModel):
        pixel_rule = "ceil"

    with pytest.raises(ValueError, match="pixel_rule must be round, half-up or floor, got 'ceil'"):
        object.__new__(Odd).to_uint8(PIXELS)


def test_an_evaluation_does_not_mix_rules(tmp_path) -> None:
    class Pipe:
        model = type("M", (), {"fingerprint": lambda self: "f", "pixel_rule": "round"})()

    guard_model(tmp_path, Pipe)
    guard_model(tmp_path, Pipe)
    Pipe.model.pixel_rule = "floor"
    with pytest.raises(ValueError, match="begun with pixel rule 'round', this model has 'floor'"):
        guard_model(tmp_path, Pipe)
