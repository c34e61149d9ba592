"""Golden files of LPD, NBP and Cosmos, their networks, and a recorder of logits."""

from __future__ import annotations

import json
from typing import Any

import torch
from golden import golden_dir
from safetensors.torch import load_file
from torch import Tensor

from visacc.models.base import ImageModel
from visacc.models.cosmos.positions import Yarn
from visacc.models.cosmos.released import load_cosmos
from visacc.models.cosmos.transformer import Cosmos
from visacc.models.nbp.gpt import NBP as NBPNet
from visacc.models.nbp.released import load_nbp

ROOT = golden_dir("lpdnbp")


def config(folder: str) -> dict[str, Any]:
    return json.loads((ROOT / f"{folder}/config.json").read_text())


def tensors(folder: str, file: str = "io.safetensors") -> dict[str, Tensor]:
    return load_file(ROOT / f"{folder}/{file}")


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


class Recorder:
    """Collects the logits of every forward that a decode makes, conditional and unconditional."""

    def __init__(self, model: ImageModel) -> None:
        self.outputs: list[Any] = []
        for name in ("prefill", "open", "forward"):
            setattr(model, name, self._wrap(getattr(model, name)))

    def _wrap(self, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.outputs.append(result[1] if isinstance(result, tuple) else result)
            return result

        return wrapped

    def logits(self) -> Tensor:
        return torch.cat([o.logits for o in self.outputs], dim=1)

    def uncond(self) -> Tensor:
        return torch.cat([o.uncond for o in self.outputs], dim=1)


def nbp_net(folder: str) -> NBPNet:
    cfg = config(folder)
    return load_nbp(
        ROOT / f"{folder}/checkpoint.ckpt",
        heads=cfg["n_head"],
        grid=tuple(cfg["latent"]),
        block=cfg["token_number_per_step"],
        video_vocab=cfg["video_vocab"],
        text_vocab=cfg["text_vocab"],
    )


def cosmos_net(folder: str) -> Cosmos:
    cfg = config(folder)
    yarn = None
    if cfg["apply_yarn"]:
        yarn = Yarn(
            tuple(cfg["original_latent_shape"]),
            cfg["yarn_scale"],
            cfg["yarn_beta_fast"],
            cfg["yarn_beta_slow"],
        )
    return load_cosmos(
        ROOT / f"{folder}/model.pt", dtype=torch.float32, grid=tuple(cfg["video_latent_shape"]), yarn=yarn
    )
