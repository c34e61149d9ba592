"""Training of LPD models: the published recipe's parts (arXiv 2507.01957) and one loop for any code data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.models.fit import Fit, fit
from visacc.models.lpd.groups import training_lists
from visacc.models.lpd.model import LPD, LPDConfig
from visacc.models.shapes.captions import vocabulary
from visacc.models.shapes.text import MAX_WORDS, SPECIALS, build_tokenizer, tokenize
from visacc.models.shapes.world import COLOURS, SHAPES, Scene


def lr_at(
    epoch: float, *, peak: float, floor: float, warmup: float, decay_from: float, epochs: float
) -> float:
    """Published learning rate at a fractional epoch: linear warm-up from 0, constant, then half a cosine to ``floor``."""
    if epoch < warmup:
        return peak * epoch / warmup
    if epoch < decay_from:
        return peak
    progress = (epoch - decay_from) / (epochs - decay_from)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


#: the embedded model; as large as shipped weights may be
SHAPES_MODEL = LPDConfig(
    dim=192,
    depth=6,
    heads=3,
    vocab=512,
    classes=len(COLOURS) * len(SHAPES),
    grid=16,
    dropout=0.0,
    class_drop=0.1,
    text_vocab=-(-(len(SPECIALS) + len(vocabulary())) // 8) * 8,
    text_len=MAX_WORDS,
)
#: class names of the shapes model, by label
CLASS_NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def class_of(scene: Scene) -> int:
    """Label of a scene: its object's colour and shape, or -1 unless there is exactly one object."""
    if len(scene.objects) != 1:
        return -1
    return CLASS_NAMES.index(f"{scene.objects[0].colour} {scene.objects[0].shape}")


def caption_reader() -> Callable[[str], Tensor]:
    """Caption -> word ids [text_len], as the shapes world tokenizes; unknown words raise ``ValueError``."""
    tokenizer = build_tokenizer()

    def read(text: str) -> Tensor:
        ids, _ = tokenize(tokenizer, [text])
        unknown = tokenizer.convert_tokens_to_ids("<unk>")
        if unknown in ids.flatten().tolist():
            raise ValueError(f"{text!r} has words that the shapes world does not know")
        return ids[0]

    return read


def permutations(batch: int, tokens: int) -> Tensor:
    """Uniform random orders int64 [batch, tokens] from torch's global generator."""
    return torch.rand(batch, tokens).argsort(dim=1)


def lpd_loss(
    model: LPD,
    tokens: Tensor,
    labels: Tensor,
    words: Tensor | None,
    groups: Sequence[int],
    orders: Tensor | None = None,
) -> Tensor:
    """Mean cross entropy over all places for one group-size list, in ``orders`` [B, N] or in a random order."""
    if orders is None:
        orders = permutations(*tokens.shape).to(tokens.device)
    logits = model(tokens, labels, orders, groups, words)
    return F.cross_entropy(logits.flatten(0, 1), tokens.gather(1, orders).flatten())


def conditioned_loss(
    model: LPD,
    tokens: Tensor,
    labels: Tensor,
    words: Tensor | None,
    groups: Sequence[int],
    **orders: Tensor | None,
) -> Tensor:
    """:func:`lpd_loss` where samples that have both a label and a caption show the model one of the two at random."""
    if words is not None:
        by_label = (labels >= 0) & (torch.rand(len(labels), device=labels.device) < 0.5)
        labels, words = torch.where(by_label, labels, -1), words.masked_fill(by_label[:, None], 0)
    return lpd_loss(model, tokens, labels, words, groups, **orders)


def train_lpd(
    model: LPD,
    codes: Tensor,
    labels: Tensor,
    words: Tensor | None,
    folder: Path,
    settings: Fit,
    *,
    name: str = "lpd",
    raster: bool = False,
) -> LPD:
    """Train, or resume, on a data set of codes. Every step draws one of the group-size lists, as published.

    Args:
        codes: int64 [count, N] raster order; labels: int64 [count], -1 for none; words: int64 [count, text_len].
            Samples that have both a label and a caption show the model one of the two at random.
        raster: train the twin that an LPD model is measured against: the same network, one code a step, row by row.
    """
    tokens = model.config.tokens
    lists = [(1,) * tokens] if raster else training_lists(tokens)

    def loss(pick: Tensor) -> Tensor:
        groups = lists[int(torch.randint(len(lists), (1,)))]
        words_of = None if words is None else words[pick]
        orders = torch.arange(tokens).expand(len(pick), -1) if raster else None
        return conditioned_loss(model, codes[pick], labels[pick], words_of, groups, orders=orders)

    fit(model, loss, len(codes), folder, name, settings, matrices=model.blocks)
    return model
