"""Teaching the text encoder what captions mean, from text alone.

LlamaGen conditions on a pretrained T5. Left to the image loss, a small encoder learns which words occur long before
it learns what belongs to what ("a red circle and a blue square", "left of"): that is one bit in a picture of nine
hundred nats. So the encoder is tuned to predict each shape's number, colour and place from the mean of its features,
which is all that LlamaGen's image tokens can see of a prefix without positions. Held-out combinations stay unseen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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


@torch.no_grad()
def understood(encoder: Any, reader: Reader, prompts: Sequence[Metadata]) -> float:
    """Fraction of prompts of which every answer is read correctly."""
    words, mask = tokenize(build_tokenizer(), [prompt["prompt"] for prompt in prompts])
    answers = torch.tensor([meaning(prompt) for prompt in prompts])
    logits = reader(pooled_features(encoder, words, mask))
    right = [(part.argmax(-1) == answers[..., i]).all(1) for i, part in enumerate(logits)]
    return float(torch.stack(right).all(0).float().mean())


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
