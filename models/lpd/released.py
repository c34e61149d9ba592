"""Published LPD files: sizes, settings of the published figures, checkpoint reading."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.models.llamagen.vq import VQConfig, VQModel
from visacc.models.lpd.model import LPD, LPDConfig
from visacc.reading import naming, read_entry
from visacc.weights import load_checked, read_weights, tensors_in

#: name -> (width, layers, heads)
SIZES = {"l": (1024, 24, 16), "xl": (1280, 36, 20), "xxl": (1536, 48, 24)}


@dataclass(frozen=True)
class Preset:
    """Settings behind one row of the published table (guidance grows linearly, tau = 1, no filtering)."""

    file: str
    steps: int
    repulsion: float
    guidance_scale: float
    fid: float


PRESETS = {
    "lpd-l-256-20": Preset("lpd_l_256.pth", 20, 2, 4.8, 2.40),
    "lpd-xl-256-20": Preset("lpd_xl_256.pth", 20, 2, 4.9, 2.10),
    "lpd-xxl-256-20": Preset("lpd_xxl_256.pth", 20, 3, 5.9, 2.00),
    "lpd-l-256-32": Preset("lpd_l_256.pth", 32, 2, 5.4, 2.29),
    "lpd-xl-256-32": Preset("lpd_xl_256.pth", 32, 2, 5.0, 1.92),
    "lpd-l-512-48": Preset("lpd_l_512.pth", 48, 4, 7.3, 2.54),
    "lpd-xl-512-48": Preset("lpd_xl_512.pth", 48, 4, 6.0, 2.10),
}


def read_container(path: str | Path) -> tuple[dict[str, Tensor], LPDConfig | None]:
    """State dict of a published file: ``{'model': ...}`` or bare. Training snapshots carry an argparse.Namespace.

    Files that ``visacc train lpd`` wrote also hold their hyper-parameters.
    """
    content, metadata = read_weights(path, allow_training_state=True)
    state = tensors_in(path, content, ("model",))
    if "config" not in metadata:
        return state, None
    with naming(path):
        return state, LPDConfig(**read_entry(path, metadata, "config"))


def config_of(state: dict[str, Tensor], heads: int | None = None) -> LPDConfig:
    """Hyper-parameters from tensor shapes; the head size is 64 in all published models unless ``heads`` says else."""
    needed = ("class_emb.weight", "token_emb.weight", "pos_embed", "head.weight", "mask_token")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(
            f"not an LPD checkpoint: {', '.join(missing)} missing (found {', '.join(list(state)[:4])}, ...)"
        )
    vocab, dim = state["token_emb.weight"].shape
    cells = state["pos_embed"].shape[1] - 1
    grid = round(cells**0.5)
    if grid * grid != cells:
        raise ValueError(f"LPD grids are square, but pos_embed has {cells} image rows")
    words = state.get("word_emb.weight")
    return LPDConfig(
        dim=dim,
        depth=1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        heads=heads or max(1, dim // 64),
        vocab=vocab,
        classes=state["class_emb.weight"].shape[0],
        grid=grid,
        text_vocab=0 if words is None else words.shape[0],
        text_len=0 if words is None else state["word_pos"].shape[1],
    )


def load_lpd(path: str | Path, *, heads: int | None = None, dtype: torch.dtype = torch.float32) -> LPD:
    """Model of a published (or own) file, in evaluation mode. Strict: every tensor must match."""
    state, stored = read_container(path)
    with naming(path):
        config = stored or config_of(state, heads)
    return (
        load_checked(path, lambda: LPD(config), state, "the LPD model its first tensors describe")
        .to(dtype)
        .eval()
    )


def load_vq(path: str | Path, config: VQConfig | None = None) -> VQModel:
    """LlamaGen's VQ-16 as LPD ships it; ``quantize.codebook_used`` (a usage counter) is dropped."""
    config = config or VQConfig()
    state = {k: v.float() for k, v in read_container(path)[0].items() if k != "quantize.codebook_used"}
    found = state.get("quantize.embedding.weight")
    shape = (config.codebook_size, config.codebook_dim)
    if found is None or tuple(found.shape) != shape:
        got = "no codebook" if found is None else f"a codebook of {tuple(found.shape)}"
        raise ValueError(
            f"{path} holds {got}, but this LPD model was trained on one of {shape}: another tokenizer"
        )
    return load_checked(path, lambda: VQModel(config), state, "LPD's VQ tokenizer").eval()


def resize_positions(table: Tensor, grid: int) -> Tensor:
    """Position table [1, N + 1, D] -> [1, grid² + 1, D], bicubic; the class row is kept (512 px starts from 256)."""
    old = round((table.shape[1] - 1) ** 0.5)
    image = table[:, 1:].unflatten(1, (old, old)).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1], image.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def upscale(model: LPD, grid: int) -> LPD:
    """A copy for a larger grid, started from the weights of ``model``."""
    bigger = LPD(replace(model.config, grid=grid))
    bigger.load_state_dict(
        {**model.state_dict(), "pos_embed": resize_positions(model.pos_embed.detach(), grid)}
    )
    return bigger
