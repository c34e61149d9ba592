"""A small image-text scorer that needs no CLIP weights: ridge regression from image features to sentence
embeddings.

Fitted in seconds on captioned pictures (e.g. EfficientNet-Lite0 features and MiniLM embeddings of emoji
names). Good enough to see that a mismatched or damaged picture scores lower; its numbers are no CLIP scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.metrics.extractors.base import Extractor

TextEncoder = Callable[[Sequence[str]], Tensor]


class MiniLM:
    """Sentence embeddings of a BERT-type folder: mean over tokens, unit norm."""

    def __init__(self, folder: str | Path):
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.model = AutoModel.from_pretrained(str(folder)).eval().requires_grad_(False)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """[n, d] float32."""
        batch = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@dataclass
class RidgeScorer:
    """score(images, texts) = cosine of the predicted and the true sentence embedding."""

    extractor: Extractor
    text: TextEncoder
    mean: Tensor
    scale: Tensor
    centre: Tensor
    weights: Tensor

    @classmethod
    def fit(
        cls,
        extractor: Extractor,
        text: TextEncoder,
        features: Tensor,
        captions: Sequence[str],
        penalty: float = 500.0,
    ) -> RidgeScorer:
        """features: [n, d] of the extractor, one caption each."""
        if len(features) != len(captions):
            raise ValueError(f"{len(features)} feature rows but {len(captions)} captions")
        x = features.double()
        mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
        x = (x - mean) / scale
        y = text(captions).double()
        centre = y.mean(0)
        gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64)
        return cls(extractor, text, mean, scale, centre, torch.linalg.solve(gram, x.T @ (y - centre)))

    def embed(self, features: Tensor) -> Tensor:
        """Predicted sentence embeddings, centred and of unit norm."""
        return F.normalize((features.double() - self.mean) / self.scale @ self.weights, dim=1)

    def embed_text(self, texts: Sequence[str]) -> Tensor:
        return F.normalize(self.text(texts).double() - self.centre, dim=1)

    def score(self, images: Tensor | Sequence[Tensor], texts: Sequence[str]) -> Tensor:
        """[n] cosines."""
        if len(images) != len(texts):
            raise ValueError(f"{len(images)} images but {len(texts)} texts")
        return (self.embed(self.extractor(images)["features"]) * self.embed_text(texts)).sum(1)
