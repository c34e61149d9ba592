"""Published NBP files: checkpoint reading, text preparation, turning a next-token model into a next-block one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.models.nbp.gpt import NBP, PAD, NBPConfig
from visacc.reading import naming, read_entry
from visacc.weights import load_checked, read_weights, tensors_in

VIDEO_VOCAB, TEXT_VOCAB, TEXT_TOKENS = 64000, 32000, 8
#: file -> heads (the only thing its tensors do not tell)
HEADS = {
    "ucf_base_nbp16_hybrid.ckpt": 16,
    "ucf_3b_nbp16_hybrid.ckpt": 32,
    "k600_base_nbp16.ckpt": 16,
    "k600_3b_nbp16.ckpt": 32,
}
_HEADS_BY_WIDTH = {1536: 16, 2048: 32, 3072: 32}


def read_container(path: str | Path) -> tuple[dict[str, Tensor], NBPConfig | None]:
    """Transformer tensors of a Lightning checkpoint, without prefixes, masks and a frozen tokenizer.

    Files that ``visacc train nbp`` wrote also hold their hyper-parameters.
    """
    content, metadata = read_weights(path)
    found = {}
    for key, value in tensors_in(path, content, ("state_dict",)).items():
        key = key.removeprefix("module.")
        if key.startswith("transformer.") and "mask" not in key:
            found[key.removeprefix("transformer.")] = value
    if "tok_emb.weight" not in found or "pos_emb" not in found:
        raise ValueError(
            f"{path} is no NBP checkpoint: transformer.tok_emb.weight and transformer.pos_emb are missing"
        )
    if "config" not in metadata:
        return found, None
    with naming(path):
        return found, NBPConfig(**read_entry(path, metadata, "config"))


def config_of(
    state: dict[str, Tensor],
    *,
    heads: int | None = None,
    grid: tuple[int, int, int] = (5, 16, 16),
    block: int | None = None,
    video_vocab: int = VIDEO_VOCAB,
    text_vocab: int = TEXT_VOCAB,
) -> NBPConfig:
    """Hyper-parameters from tensor shapes: with text, the block size is what the two vocabularies leave."""
    vocab, dim = state["tok_emb.weight"].shape
    uncond = state.get("uncond_embedding")
    cond = 0 if uncond is None or vocab == video_vocab else uncond.shape[0]
    if cond:
        special = vocab - video_vocab - text_vocab
        if special < 1:
            raise ValueError(
                f"{vocab} ids cannot hold {video_vocab} video and {text_vocab} text ids: other vocabularies"
            )
        if block not in (None, special):
            raise ValueError(
                f"this checkpoint has {special} special tokens, i.e. block size {special}, not {block}"
            )
        block = special
    elif vocab != video_vocab:
        raise ValueError(f"{vocab} ids without a condition, but {video_vocab} video codes were expected")
    heads = heads or _HEADS_BY_WIDTH.get(dim)
    if heads is None:
        raise ValueError(f"no published model is {dim} wide: say how many heads it has")
    return NBPConfig(
        dim=dim,
        layers=1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        heads=heads,
        grid=grid,
        block=block or 16,
        video_vocab=video_vocab,
        text_vocab=text_vocab if cond else 0,
        cond_tokens=cond,
        positions=state["pos_emb"].shape[1],
    )


def load_nbp(path: str | Path, *, dtype: torch.dtype = torch.float32, **shape: Any) -> NBP:
    """Model of a published file, in evaluation mode; ``shape`` as for :func:`config_of`, not read for own files."""
    state, stored = read_container(path)
    shape.setdefault("heads", HEADS.get(Path(path).name))
    with naming(path):
        config = stored or config_of(state, **shape)
    if "uncond_embedding" not in state or not config.hybrid:
        state["uncond_embedding"] = torch.zeros(config.cond_tokens, config.dim)
    return (
        load_checked(path, lambda: NBP(config), state, "the NBP model its first tensors describe")
        .to(dtype)
        .eval()
    )


def ucf_text(name: str) -> str:
    """Class folder name to prompt text: "ApplyEyeMakeup" -> "apply eye makeup"."""
    return re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()


def right_padded(ids: list[int], length: int = TEXT_TOKENS, pad: int = PAD) -> Tensor:
    """Text ids cut or padded on the right to int64 [length], whatever side the tokenizer itself would pad.

    Positions are absolute and pads are attended to, so padding on the left (the default of fast LLaMA tokenizers) would
    feed the model prompts it has never seen.
    """
    ids = ids[:length]
    return torch.tensor(ids + [pad] * (length - len(ids)))


def llama_reader(tokenizer: Callable[..., Any], length: int = TEXT_TOKENS) -> Callable[[str], Tensor]:
    """Text -> ids [length] with a LLaMA tokenizer of transformers."""

    def read(text: str) -> Tensor:
        return right_padded(list(tokenizer(text)["input_ids"]), length)

    return read


def to_next_block(model: NBP, block: int, *, seed: int = 0) -> NBP:
    """A next-block model started from a next-token one (block size 1): same tensors, new middle tokens.

    The new special rows copy the begin-of-video row plus normal noise (0.02); fine-tune it at a reduced rate.
    """
    old = model.config
    if old.block != 1:
        raise ValueError(f"expected a next-token model (block size 1), got block size {old.block}")
    new = NBP(replace(old, block=block))
    state = dict(model.state_dict())
    if old.hybrid:
        generator = torch.Generator().manual_seed(seed)
        for key in ("tok_emb.weight", "head.weight"):
            rows = state[key]
            noise = torch.randn(block - 1, rows.shape[1], generator=generator) * 0.02
            state[key] = torch.cat([rows[:1], rows[:1] + noise.to(rows), rows[1:]])
    new.load_state_dict(state)
    return new
