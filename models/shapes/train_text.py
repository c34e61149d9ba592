"""Teaching the text encoder what captions mean, from text alone.

LlamaGen conditions on a pretrained T5. Left to the image loss, a small encoder learns which words occur long before
it learns what belongs to what ("a red circle and a blue square", "left of"): that is one bit in a picture of nine
hundred nats. So the encoder is tuned to predict each shape's number, colour and place from the mean of its features,
which is all that LlamaGen's image tokens can see of a prefix without positions. Held-out combinations stay unseen.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.shapes.captions import HELD_COUNTS, HELD_PAIRS, Metadata, request
from visacc.models.shapes.text import D_MODEL, build_tokenizer, tokenize
from visacc.models.shapes.train_util import schedule
from visacc.models.shapes.world import COLOURS, SHAPES

#: Classes per question: how many, which colour (0: not said), vertical and horizontal place (0: not said).
QUESTIONS = (5, 1 + len(COLOURS), 3, 3)
TEXT_SEED = 70_000_000
#: Dimensions of the vectors that stand for shapes and colours in `binding`.
SHAPE_DIM, COLOUR_DIM = 5, 6


def meaning(metadata: Metadata) -> list[list[int]]:
    """Answers [shapes][question] that a caption with this metadata gives."""
    answers = {shape: [0, 0, 0, 0] for shape in SHAPES}
    for clause in metadata["include"]:
        answers[clause["class"]][0] = clause["count"]
        if "color" in clause:
            answers[clause["class"]][1] = 1 + list(COLOURS).index(clause["color"])
        if "position" in clause:
            relation, index = clause["position"]
            question, first = {"above": (2, 1), "below": (2, 2), "left of": (3, 1), "right of": (3, 2)}[
                relation
            ]
            answers[clause["class"]][question] = first
            answers[metadata["include"][index]["class"]][question] = 3 - first
    return [answers[shape] for shape in SHAPES]


def taught() -> list[Tensor]:
    """Per question, bool [shapes, classes]: answers that occur in training.

    The others are left out of the loss: learning that a red star never comes would spoil the held-out test.
    """
    masks = [torch.ones(len(SHAPES), classes, dtype=torch.bool) for classes in QUESTIONS]
    for number, shape in HELD_COUNTS:
        masks[0][SHAPES.index(shape), number] = False
    for colour, shape in HELD_PAIRS:
        masks[1][SHAPES.index(shape), 1 + list(COLOURS).index(colour)] = False
    return masks


class Reader(nn.Module):
    """Linear reading of the mean feature: logits of every question about every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D_MODEL, len(SHAPES) * sum(QUESTIONS))

    def forward(self, pooled: Tensor) -> list[Tensor]:
        """pooled [B, C] -> one [B, shapes, classes] per question."""
        return list(self.head(pooled).view(-1, len(SHAPES), sum(QUESTIONS)).split(QUESTIONS, dim=-1))


def pooled_features(encoder: Any, words: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid words of the encoder's features, [B, C]."""
    hidden = encoder(input_ids=words, attention_mask=mask).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def tune_text_encoder(
    encoder: Any,
    steps: int = 1500,
    batch: int = 256,
    captions: int = 40_000,
    lr: float = 3e-3,
    keep: float = 0.2,
    seed: int = 0,
) -> Reader:
    """Tunes `encoder` in place; its mean features are held near the old ones, which a GPT may already know."""
    rng = np.random.default_rng(TEXT_SEED)
    drawn = [request(rng)[:2] for _ in range(captions)]
    words, mask = tokenize(build_tokenizer(), [caption for caption, _ in drawn])
    answers = torch.tensor([meaning(metadata) for _, metadata in drawn])
    masks = taught()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    reader, old = Reader(), copy.deepcopy(encoder)
    with torch.no_grad():
        spread = pooled_features(old, words[:2000], mask[:2000]).var(0).mean()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *reader.parameters()], lr=lr, weight_decay=0.01)
    for step in range(steps):
        pick = torch.randint(captions, (batch,), generator=generator)
        width = int(mask[pick].sum(1).max())
        inputs = words[pick, :width], mask[pick, :width]
        pooled = pooled_features(encoder, *inputs)
        with torch.no_grad():
            before = pooled_features(old, *inputs)
        loss = keep * (pooled - before).square().mean() / spread
        for i, (logits, known) in enumerate(zip(reader(pooled), masks, strict=True)):
            logits = logits.masked_fill(~known, -1e4)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), answers[pick, :, i].flatten()) * len(SHAPES)
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"text encoder: step {step + 1} of {steps}, loss {loss.item():.4f}", flush=True)
    return reader


def binding(metadata: Metadata) -> Tensor:
    """What belongs to which shape, [SHAPE_DIM * (COLOUR_DIM + 2)]: the sum over clauses of shape (x) (colour, down, right).

    Shapes and colours are fixed vectors in fewer dimensions than there are of them, so that a combination
    never seen lies between those that were.
    """
    generator = torch.Generator().manual_seed(TEXT_SEED)
    shapes = torch.eye(len(SHAPES)) - 1 / len(SHAPES)
    shapes = torch.linalg.svd(shapes)[0][:, :SHAPE_DIM] * len(SHAPES) ** 0.5 / SHAPE_DIM**0.5
    colours = F.normalize(torch.randn(len(COLOURS), COLOUR_DIM, generator=generator), dim=-1)
    total = torch.zeros(SHAPE_DIM, COLOUR_DIM + 2)
    for shape, (_, colour, vertical, horizontal) in enumerate(meaning(metadata)):
        attributes = torch.zeros(COLOUR_DIM + 2)
        if colour:
            attributes[:COLOUR_DIM] = colours[colour - 1]
        for slot, place in ((-2, vertical), (-1, horizontal)):
            attributes[slot] = (0.0, -1.0, 1.0)[place]
        total += shapes[shape, :, None] * attributes
    return total.flatten()


def teach_binding(
    encoder: Any,
    projection: nn.Module,
    steps: int = 800,
    batch: int = 192,
    captions: int = 40_000,
    lr: float = 2e-3,
    amplitude: float = 3.0,
    keep: float = 1.0,
    seed: int = 0,
) -> float:
    """Tunes `encoder` and the GPT's caption `projection` in place so that `binding` stands out in their output.

    A linear reader finds it before, too, but so faint beside the words themselves that a GPT would need many
    thousand steps to. It is written, `amplitude` times, into the mean over the words of those directions that
    vary least; all others are held. Returns the fraction of the variance of `binding` explained on new captions.
    """
    rng = np.random.default_rng(TEXT_SEED + 1)
    drawn = [request(rng)[:2] for _ in range(captions)]
    words, mask = tokenize(build_tokenizer(), [caption for caption, _ in drawn])
    wanted = amplitude * torch.stack([binding(metadata) for _, metadata in drawn])
    old = copy.deepcopy(encoder), copy.deepcopy(projection)
    test = slice(captions - 2000, captions)

    def features(modules: tuple[Any, nn.Module], rows: Any) -> tuple[Tensor, Tensor]:
        width = int(mask[rows].sum(1).max())
        seen = mask[rows, :width]
        hidden = modules[0](input_ids=words[rows, :width], attention_mask=seen).last_hidden_state
        return modules[1](hidden), seen[..., None].float()

    with torch.no_grad():
        before, seen = features(old, test)
        flat = before[seen[..., 0].bool()]
        variance, directions = torch.linalg.eigh(torch.cov(flat.T))
    low, high = directions[:, : wanted.shape[1]], directions[:, wanted.shape[1] :]
    spread = variance[wanted.shape[1] :].sum()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *projection.parameters()], lr=lr, weight_decay=0.0)
    for step in range(steps):
        rows = torch.randint(captions - 2000, (batch,), generator=generator)
        now, seen = features((encoder, projection), rows)
        with torch.no_grad():
            before, _ = features(old, rows)
        drift = (((now - before) @ high).square().sum(-1, keepdim=True) * seen).sum() / seen.sum() / spread
        read = ((now @ low) * seen).sum(1) / seen.sum(1)
        miss = (read - wanted[rows]).square().sum() / wanted[rows].square().sum()
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps)
        optimizer.zero_grad(set_to_none=True)
        (miss + keep * drift).backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(
                f"binding: step {step + 1} of {steps}, missed {miss.item():.4f}, drift {drift.item():.4f}",
                flush=True,
            )
    with torch.no_grad():
        now, seen = features((encoder, projection), test)
        read = ((now @ low) * seen).sum(1) / seen.sum(1)
    return float(1 - (read - wanted[test]).square().sum() / wanted[test].square().sum())
