"""Published Cosmos autoregressive files: sizes and checkpoint reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.models.cosmos.positions import Yarn
from visacc.models.cosmos.transformer import Cosmos, CosmosConfig
from visacc.reading import naming
from visacc.weights import blank, read_weights, tensors_in

_YARN = Yarn(original=(3, 40, 64))
#: (width, layers, has text) -> name and hyper-parameters
RELEASED = {
    "cosmos-ar-4b": CosmosConfig(),
    "cosmos-ar-5b-video2world": CosmosConfig(context_dim=1024),
    "cosmos-ar-12b": CosmosConfig(dim=5120, layers=40, yarn=_YARN),
    "cosmos-ar-13b-video2world": CosmosConfig(dim=5120, layers=40, context_dim=1024, yarn=_YARN),
}
#: top_p of the published settings (temperature 1, no guidance)
TOP_P = {False: 0.8, True: 0.7}


def read_container(path: str | Path) -> dict[str, Tensor]:
    """State dict of a ``model.pt``: under ``model`` or bare, optional ``model.`` prefix, ``_extra_state`` dropped."""
    path = Path(path)
    if path.is_dir():
        path = path / "model.pt"
    content, _ = read_weights(path, mapped=True)
    found = {
        key.removeprefix("model."): value
        for key, value in tensors_in(path, content, ("model",)).items()
        if not key.endswith("_extra_state")
    }
    if "tok_embeddings.weight" not in found or "layers.0.attention.wq.weight" not in found:
        raise ValueError(
            f"{path} is no Cosmos autoregressive checkpoint: tok_embeddings / layers.0.attention missing"
        )
    return found


def config_of(state: dict[str, Tensor], **shape: Any) -> CosmosConfig:
    """Hyper-parameters from tensor shapes; ``shape`` sets what shapes cannot tell (grid, yarn, rope_theta).

    YaRN is on by default for 40-layer models (12B, 13B), which is how they were published.
    """
    layers = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("layers."))
    head_dim = state["layers.0.attention.q_norm.weight"].shape[0]
    cross = state.get("layers.0.cross_attention.wk.weight")
    shape.setdefault("yarn", _YARN if layers == 40 else None)
    return CosmosConfig(
        dim=state["tok_embeddings.weight"].shape[1],
        layers=layers,
        heads=state["layers.0.attention.wq.weight"].shape[0] // head_dim,
        kv_heads=state["layers.0.attention.wk.weight"].shape[0] // head_dim,
        head_dim=head_dim,
        ffn_dim=state["layers.0.feed_forward.w1.weight"].shape[0],
        vocab=state["output.weight"].shape[0],
        context_dim=0 if cross is None else cross.shape[1],
        **shape,
    )


def load_cosmos(
    path: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", **shape: Any
) -> Cosmos:
    """Model of a published file, in evaluation mode; ``shape`` as for :func:`config_of`. Strict."""
    state = read_container(path)
    with naming(path):
        config = config_of(state, **shape)
    model = blank(path, lambda: Cosmos(config), state, "the Cosmos model its first tensors describe")
    moved = {key: value.to(device=device, dtype=dtype) for key, value in state.items()}
    model.load_state_dict(moved, assign=True)
    return model.eval()
