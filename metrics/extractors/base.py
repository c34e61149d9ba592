"""What a feature extractor is: uint8 images in, named feature rows out, and an id that says exactly what it
did.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from visacc.metrics.images import group_by_size, to_uint8
from visacc.weights import check_state, read_weights, tensors_in


class Extractor:
    """Base class. Sub-classes set the fields and write `forward` for a batch of equal sizes.

    name: the network. preprocess: resize rule, input size and value scale. weights: hash of the parameters.
    heads: output name -> width; "features" is the one distances use, "logits" the one an Inception Score
    uses.
    """

    name: str
    preprocess: str
    weights: str
    heads: dict[str, int]
    device: torch.device

    @property
    def id(self) -> str:
        return f"{self.name}@{self.weights}/{self.preprocess}"

    @property
    def dim(self) -> int:
        return self.heads["features"]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [b, 3, h, w] on `device` -> float32 rows [b, width] per head."""
        raise NotImplementedError

    @torch.inference_mode()
    def __call__(self, images: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
        """Rows in the order of the images, on the CPU. Images of different sizes are grouped."""
        if isinstance(images, Tensor):
            return {k: v.float().cpu() for k, v in self.forward(to_uint8(images).to(self.device)).items()}
        if len(images) == 0:
            raise ValueError("no images to extract features from")
        out: dict[str, Tensor] = {}
        for index, batch in group_by_size(images):
            for head, rows in self(batch).items():
                out.setdefault(head, torch.empty(len(images), rows.shape[1]))[index] = rows
        return out


def require(module: str, package: str, extra: str = "eval") -> ModuleType:
    """Import a heavy optional dependency, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package} is needed here and not installed: pip install 'visacc[{extra}]' (or {package})"
        ) from error


def parameter_digest(state: Mapping[str, Tensor] | nn.Module, length: int = 12) -> str:
    """Hash of all tensors by sorted name: equal for the same weights whatever file they came in."""
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    h = hashlib.sha256()
    for key in sorted(tensors):
        if key.endswith("num_batches_tracked"):
            continue
        t = tensors[key].detach().cpu().contiguous()
        h.update(f"{key}{tuple(t.shape)}{t.dtype}".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()[:length]


def load_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict from .safetensors or a torch file (tensors only); one level of nesting is unwrapped."""
    return tensors_in(path, read_weights(path)[0], ("state_dict", "model"))


def fill(net: torch.nn.Module, state: dict[str, Tensor], source: str | Path, what: str) -> None:
    """Strict ``load_state_dict`` (counters of batch norms may be missing); what does not fit is named with its file."""
    counters = [name for name in net.state_dict() if name.endswith("num_batches_tracked")]
    check_state(source, net, state, what, optional=counters)
    net.load_state_dict(state, strict=False)


def pick_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def download_failed(what: str, option: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"could not download {what} ({type(error).__name__}: {error}). "
        f"Fetch the file on a connected machine and pass its path as {option}"
    )


def channels(values: Sequence[float], device: torch.device) -> Tensor:
    """[3, 1, 1] for arithmetic with [b, 3, h, w]."""
    return torch.tensor(list(values), dtype=torch.float32, device=device)[:, None, None]
