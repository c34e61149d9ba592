"""The released LlamaGen files: where they are, what they hold, their usual sampling settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from visacc.models.llamagen.config import GPTConfig
from visacc.models.llamagen.vq import VQConfig

#: size name -> (layers, heads, width); "1B", "7B" and "XXXL" are defined in the official code only
SIZES: dict[str, tuple[int, int, int]] = {
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "XXXL": (48, 40, 2560),
    "1B": (22, 32, 2048),
    "3B": (24, 32, 3200),
    "7B": (32, 32, 4096),
}
#: (width, layers) -> heads: the only way to learn the head count from a checkpoint
HEADS = {(dim, layers): heads for layers, heads, dim in SIZES.values()}
#: (width, layers) -> size name
SIZE_NAMES = {(dim, layers): name for name, (layers, _, dim) in SIZES.items()}

C2I_REPO, T2I_REPO = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"
TEXT_ENCODER = "google/flan-t5-xl"


@dataclass(frozen=True)
class Released:
    """One released file.

    Attributes:
        name: how users ask for it.
        repo, file: address on the Hugging Face hub.
        kind: "c2i" and "t2i" are GPTs, "vq" is a tokenizer.
        size: key of ``SIZES`` (GPT) or pixels per code along a side (tokenizer).
        image_size: pixels along a side (GPT), 0 for a tokenizer.
        guidance, top_k: settings of the official scripts; for c2i those of the published FID figures.
        tokenizer: name of the tokenizer its codes belong to.
    """

    name: str
    repo: str
    file: str
    kind: Literal["c2i", "t2i", "vq"]
    size: str
    image_size: int = 0
    guidance: float = 1.0
    top_k: int = 0
    tokenizer: str = ""

    @property
    def gpt_config(self) -> GPTConfig:
        layers, heads, dim = SIZES[self.size]
        return GPTConfig(
            dim=dim,
            n_layer=layers,
            n_head=heads,
            model_type="t2i" if self.kind == "t2i" else "c2i",
            cls_token_num=120 if self.kind == "t2i" else 1,
            block_size=(self.image_size // 16) ** 2,
        )

    @property
    def vq_config(self) -> VQConfig:
        return VQConfig(ch_mult=(1, 1, 2, 2, 4) if self.size == "16" else (1, 2, 2, 4))

    @property
    def min_bytes(self) -> int:
        """Bytes of the float32 weights: a shorter file is truncated."""
        if self.kind == "vq":
            return 4 * (71_883_403 if self.size == "16" else 70_109_835)
        return 4 * parameter_count(self.gpt_config)

    def __str__(self) -> str:
        if self.kind == "vq":
            return f"{self.name} (VQ-{self.size} tokenizer)"
        task = "text" if self.kind == "t2i" else "class"
        return f"{self.name} (GPT-{self.size}, {task}-conditional, {self.image_size} px)"


def parameter_count(config: GPTConfig) -> int:
    """Trainable parameters of a GPT, without building it."""
    attention = config.dim * (config.n_head + 2 * config.kv_heads) * config.head_dim + config.dim**2
    block = attention + 3 * config.dim * config.ffn_dim + 2 * config.dim
    if config.model_type == "c2i":
        condition = (config.num_classes + 1) * config.dim
    else:
        condition = config.caption_dim * config.dim + config.dim**2
    return config.n_layer * block + 2 * config.vocab_size * config.dim + config.dim + condition


def _table() -> tuple[Released, ...]:
    guidance = {"B": 2.0, "L": 2.0, "XL": 1.75, "XXL": 1.75, "3B": 1.65}
    released = [("B", 256), ("B", 384), ("L", 256), ("L", 384), ("XL", 384), ("XXL", 384), ("3B", 384)]
    c2i = [
        Released(
            name=f"llamagen-c2i-{size.lower()}-{pixels}",
            repo=C2I_REPO,
            file=f"c2i_{size}_{pixels}.pt",
            kind="c2i",
            size=size,
            image_size=pixels,
            guidance=guidance[size],
            tokenizer="llamagen-vq-16-c2i",
        )
        for size, pixels in released
    ]
    t2i = [
        Released(
            name=f"llamagen-t2i-xl-{pixels}",
            repo=T2I_REPO,
            file=f"t2i_XL_stage{stage}_{pixels}.pt",
            kind="t2i",
            size="XL",
            image_size=pixels,
            guidance=7.5,
            top_k=1000,
            tokenizer="llamagen-vq-16-t2i",
        )
        for stage, pixels in ((1, 256), (2, 512))
    ]
    tokenizers = [
        Released("llamagen-vq-16-c2i", C2I_REPO, "vq_ds16_c2i.pt", "vq", "16"),
        Released("llamagen-vq-8-c2i", C2I_REPO, "vq_ds8_c2i.pt", "vq", "8"),
        Released("llamagen-vq-16-t2i", T2I_REPO, "vq_ds16_t2i.pt", "vq", "16"),
    ]
    return (*c2i, *t2i, *tokenizers)


RELEASED: dict[str, Released] = {entry.name: entry for entry in _table()}
_BY_FILE = {entry.file: entry for entry in RELEASED.values()}


def released_file(path: str | Path) -> Released | None:
    """The table's entry for an official file name, whatever folder it lies in."""
    return _BY_FILE.get(Path(path).name)


def fetch(name: str, folder: str | Path | None = None) -> Path:
    """Local path of a released file: from ``folder`` if given, else from the hub or its local cache."""
    if name not in RELEASED:
        raise ValueError(f"unknown LlamaGen file {name!r}; released are: {', '.join(RELEASED)}")
    entry = RELEASED[name]
    if folder is not None:
        path = Path(folder) / entry.file
        if not path.is_file():
            raise ValueError(f"{folder} does not hold {entry.file}, the file of {entry}")
        return path
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(entry.repo, entry.file))
    except Exception as error:  # the hub client's errors share no base class, and its transport varies
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"cannot get {entry.file} of {entry} from huggingface.co/{entry.repo} and it is not in the local "
            f"Hugging Face cache ({reason}); download it there and pass the folder that holds it"
        ) from error
