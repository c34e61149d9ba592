"""``visacc train lpd`` and ``visacc train nbp``: train parallel decoders' models on a folder of codes.

The folder holds ``codes.npy`` (integers [count, N] or [count, ...] that flatten to N, raster order) and optionally
``labels.npy`` (int [count], -1 for none; LPD) and ``texts.npy`` (int [count, c] text ids; LPD pads on the right with 0).
Rates, decay and clipping are those of the published recipes; runs resume from their folder. What comes out is loaded by its
path.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visacc.cli_options import Device, batch_option, out_option, start_option
from visacc.reading import read_array

if TYPE_CHECKING:
    from torch import Tensor

_Out = Annotated[Path, out_option("Folder of the run: checkpoint, log, result.")]
_Start = Annotated[Path | None, start_option("Checkpoint to start from.")]
_Batch = Annotated[int, batch_option("Samples per step.")]


def read_codes(folder: Path, vocab: int, tokens: int) -> Tensor:
    """int64 [count, tokens], checked against the model."""
    import numpy as np
    import torch

    file = folder / "codes.npy"
    if not file.is_file():
        raise ValueError(f"{folder} holds no codes.npy")
    array = read_array(file)
    if array.dtype.kind not in "iu" or array.ndim < 2 or not array.size:
        raise ValueError(
            f"{file} must hold integers [count, codes], got {array.dtype} of shape {array.shape}"
        )
    codes = torch.from_numpy(array.astype(np.int64)).flatten(1)
    if codes.shape[1] != tokens:
        raise ValueError(f"{file} has {codes.shape[1]} codes a sample, the model {tokens}")
    if int(codes.min()) < 0 or int(codes.max()) >= vocab:
        raise ValueError(f"{file} has codes outside 0..{vocab - 1}: another tokenizer")
    return codes


def _column(folder: Path, name: str, count: int) -> Tensor | None:
    import numpy as np
    import torch

    file = folder / name
    if not file.is_file():
        return None
    array = read_array(file)
    if array.dtype.kind not in "iu" or not array.ndim:
        raise ValueError(
            f"{file} must hold integers, a row a sample, got {array.dtype} of shape {array.shape}"
        )
    values = torch.from_numpy(array.astype(np.int64))
    if len(values) != count:
        raise ValueError(f"{file} has {len(values)} rows, codes.npy {count}")
    return values


def lpd(
    data: Annotated[Path, typer.Argument(help="Folder with codes.npy, and labels.npy or texts.npy or both.")],
    out: _Out = Path("lpd"),
    size: Annotated[str, typer.Option(help="l, xl, xxl, or width:layers:heads.")] = "l",
    grid: Annotated[int, typer.Option(help="Codes along a side of the picture.")] = 16,
    vocab: Annotated[int, typer.Option(help="Size of the codebook.")] = 16384,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 1000,
    text_vocab: Annotated[
        int, typer.Option(help="Size of the text tokenizer's vocabulary; 0 trains without captions.")
    ] = 0,
    start: _Start = None,
    epochs: Annotated[float, typer.Option(help="Epochs (published: 450 at 256 px, 50 at 512 px).")] = 450,
    batch_size: _Batch = 256,
    lr: Annotated[float | None, typer.Option(help="Peak rate; 1e-4 batch / 256 by default.")] = None,
    device: Device = None,
) -> None:
    """Train an LPD model, by class, by caption, or both; ``--init`` a smaller grid starts it from that model, positions
    interpolated.
    """
    import torch

    from visacc.eval.world import refuse_several
    from visacc.loading import as_device
    from visacc.models.fit import Fit, fit
    from visacc.models.lpd import LPD, LPDConfig, load_lpd, training_lists, upscale
    from visacc.models.lpd.released import SIZES
    from visacc.models.lpd.train import conditioned_loss, lr_at

    refuse_several("visacc train lpd")
    where = as_device(device)
    _positive(grid=grid, vocab=vocab, classes=classes, batch_size=batch_size, epochs=epochs, lr=lr)
    old = load_lpd(start) if start is not None else None
    if old is not None:
        config = replace(old.config, grid=grid)
    else:
        width, depth, heads = SIZES[size] if size in SIZES else _numbers(size)
        config = LPDConfig(width, depth, heads, vocab, classes, grid)
    # a wrong folder must not cost the time and the memory of building the model
    codes = read_codes(data, config.vocab, config.tokens)
    words = _column(data, "texts.npy", len(codes))
    if old is None and text_vocab:
        if words is None or words.ndim != 2:
            raise ValueError(f"--text-vocab needs {data / 'texts.npy'}, integers [count, words]")
        config = replace(config, text_vocab=text_vocab, text_len=words.shape[1])
    _check_words(words, config.text_vocab, config.text_len)
    given = _column(data, "labels.npy", len(codes))
    labels = torch.full((len(codes),), -1) if given is None else given
    if int(labels.max()) >= config.classes:
        raise ValueError(f"labels.npy has class {int(labels.max())}, the model {config.classes} classes")
    if old is None:
        model = LPD(config).to(where)
    else:
        model = (old if old.config.grid == grid else upscale(old, grid)).to(where)
    lists = training_lists(model.config.tokens)
    peak = lr if lr is not None else 1e-4 * batch_size / 256
    per_epoch = max(len(codes) // min(batch_size, len(codes)), 1)
    steps = max(1, round(epochs * per_epoch))

    def loss(pick: Tensor) -> Tensor:
        groups = lists[int(torch.randint(len(lists), (1,)))]
        text = None if words is None else words[pick].to(where)
        return conditioned_loss(model, codes[pick].to(where), labels[pick].to(where), text, groups)

    def factor(step: int) -> float:
        at = step / per_epoch / epochs  # published: 50 of 450 epochs up, the last 50 down
        rate = lr_at(at, peak=peak, floor=min(1e-5, peak), warmup=1 / 9, decay_from=8 / 9, epochs=1)
        return rate / peak

    settings = Fit(
        steps=steps,
        batch=batch_size,
        muon_lr=0,
        adam_lr=peak,
        weight_decay=0.02,
        clip=3.0,
        betas=(0.9, 0.95),
        ema=0.0,
    )
    fit(model, loss, len(codes), out, "lpd", settings, decays=lambda _, p: p.ndim > 1, factor=factor)
    _save(out / "lpd.safetensors", model.state_dict(), model.config)


def nbp(
    data: Annotated[Path, typer.Argument(help="Folder with codes.npy and, for text models, texts.npy.")],
    start: Annotated[
        Path,
        start_option("NTP checkpoint to fine-tune, or an NBP one to go on with."),
    ],
    out: _Out = Path("nbp"),
    block: Annotated[int, typer.Option(help="Tokens predicted at once.")] = 16,
    heads: Annotated[int | None, typer.Option(help="Attention heads, where the width does not tell.")] = None,
    grid: Annotated[str, typer.Option(help="Latent frames:rows:columns.")] = "5:16:16",
    video_vocab: Annotated[int, typer.Option(help="Video codes.")] = 64000,
    text_vocab: Annotated[int, typer.Option(help="Text ids.")] = 32000,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 10000,
    batch_size: _Batch = 256,
    lr: Annotated[
        float, typer.Option(help="Peak rate; keep it well below that of training from scratch.")
    ] = 1e-4,
    cond_drop: Annotated[
        float, typer.Option(help="Texts dropped in training; above 0 makes guidance possible.")
    ] = 0.0,
    device: Device = None,
) -> None:
    """Fine-tune a next-token video model into a next-block one (or go on training a next-block one)."""
    from visacc.eval.world import refuse_several
    from visacc.loading import as_device
    from visacc.models.fit import Fit, fit
    from visacc.models.nbp import load_nbp, to_next_block

    refuse_several("visacc train nbp")
    where = as_device(device)
    t, h, w = _numbers(grid)
    _positive(block=block, video_vocab=video_vocab, steps=steps, batch_size=batch_size, lr=lr, heads=heads)
    if not 0 <= cond_drop < 1:
        raise ValueError(f"--cond-drop must lie in [0, 1), got {cond_drop}")
    shape: dict[str, Any] = {
        "heads": heads,
        "grid": (t, h, w),
        "video_vocab": video_vocab,
        "text_vocab": text_vocab,
    }
    try:
        model = load_nbp(start, block=1, **shape)
    except ValueError as error:
        if "special tokens" not in str(error):
            raise
        model = load_nbp(start, block=block, **shape)
    if model.config.block != block:
        model = to_next_block(model, block)
    model.config = replace(model.config, cond_drop=cond_drop)
    model = model.to(where)
    codes = read_codes(data, model.config.video_vocab, model.config.tokens)
    texts = _column(data, "texts.npy", len(codes))
    if model.config.hybrid != (texts is not None):
        raise ValueError("texts.npy must be given exactly for models with a text condition")

    def loss(pick: Tensor) -> Tensor:
        return model.loss(codes[pick].to(where), None if texts is None else texts[pick].to(where))

    def decays(name: str, value: Tensor) -> bool:
        return value.ndim == 2 and name != "tok_emb.weight"

    settings = Fit(
        steps=steps,
        batch=batch_size,
        muon_lr=0,
        adam_lr=lr,
        weight_decay=0.01,
        clip=1.0,
        betas=(0.9, 0.95),
        warmup=max(1, steps // 20),
        ema=0.0,
    )
    fit(model, loss, len(codes), out, "nbp", settings, decays=decays)
    state = {f"transformer.{k}": v for k, v in model.state_dict().items()}
    _save(out / "nbp.safetensors", state, model.config)


def _positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be a positive number, got {value}")


def _numbers(text: str) -> tuple[int, int, int]:
    parts = text.split(":")
    if len(parts) != 3 or not all(p.isdecimal() and len(p) < 10 and int(p) > 0 for p in parts):
        raise ValueError(f"expected three numbers a:b:c, got {text!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def _save(path: Path, state: dict[str, Tensor], config: Any) -> None:
    """Weights with their hyper-parameters, which the tensors do not tell in full."""
    import json

    from visacc.writing import write_safetensors

    write_safetensors(path, state, {"config": json.dumps(asdict(config))})
    print(f"wrote {path}")


def _check_words(words: Tensor | None, vocab: int, length: int) -> None:
    if words is None:
        if length:
            raise ValueError(f"the model reads captions of {length} words: texts.npy is missing")
        return
    if not length:
        raise ValueError("texts.npy is there, but the model reads no captions: give --text-vocab")
    if words.shape[1:] != (length,):
        raise ValueError(
            f"texts.npy has rows of shape {tuple(words.shape[1:])}, the model reads {length} words"
        )
    if int(words.min()) < 0 or int(words.max()) >= vocab:
        raise ValueError(f"texts.npy has ids outside 0..{vocab - 1}: another tokenizer")
