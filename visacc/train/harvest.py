"""Training data made by the target itself: its own samples, and the features of reading them.

Drafters of the published programs were trained on real images; trained on what the target says they see the contexts
that decoding has. Samples are kept as codes (small); features are recomputed when they are needed (large).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.ar import AR
from visacc.engine import decode
from visacc.models.base import Conditioning, ImageModel, Proposal
from visacc.sampling import SamplingParams
from visacc.train.loss import DraftBatch
from visacc.weights import read_weights
from visacc.writing import write_safetensors


@torch.no_grad()
def read_features(
    model: ImageModel, cond: Conditioning, codes: Tensor, *, guidance: bool, padding: str = ""
) -> Tensor:
    """Target features of prompt and tokens [rows, prefix + N - 1, D] (the last token is read by nobody).

    Args:
        codes: int64 [B, N] the sequence, forced slots 0.
    """
    batch, total = codes.shape
    options: dict[str, Any] = {"padding": padding} if padding else {}
    target: Any = model  # adapters with features take hidden=
    state, prompt = target.prefill(cond, guidance=guidance, window=1, hidden=True, **options)
    order = torch.arange(total - 1, device=codes.device).expand(batch, -1)
    live = torch.ones_like(order, dtype=torch.bool)
    state.limit = state.prefix + total - 1
    output = model.forward(state, Proposal(codes[:, :-1], order, live), hidden=True)
    assert prompt.hidden is not None and output.hidden is not None
    return torch.cat([prompt.hidden, output.hidden], dim=1)


def make_batch(
    model: ImageModel,
    cond: Conditioning,
    codes: Tensor,
    sampling: SamplingParams,
    padding: str = "",
    dtype: torch.dtype = torch.float32,
) -> DraftBatch:
    """Features and aligned ids of samples.

    Column j holds token j + 1: zeros in the prompt, the first token at the last prompt slot. Every column that is used
    in decoding is trained, that transition from prompt to image included.
    """
    guided = sampling.guided
    features = read_features(model, cond, codes, guidance=guided, padding=padding)
    rows, length = features.shape[:2]
    prefix = length - (codes.shape[1] - 1)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=codes.device)
    ids[:, prefix - 1 :] = codes.repeat(1 + guided, 1)
    mask = torch.ones(rows, length, device=codes.device)
    mask[:, : prefix - 1] = 0
    mask[:, -1] = 0  # its successor is not read, so there is no feature to compare with
    return DraftBatch(ids, features.to(dtype), mask, 1 + guided, sampling.guidance_scale)


def hash_text(items: Sequence[Any]) -> str:
    return hashlib.sha256(repr(list(items)).encode()).hexdigest()[:16]


@dataclass
class Harvest:
    """A stream of batches of the target's own samples.

    Args:
        prompts: cycled through in an order fixed by ``seed``.
        batch: samples per batch.
        reuse: batches made of every sample before it is replaced; sampling costs N forwards, reading it one.
        pool: samples held at a time.
        folder: where the pool in use is kept, so that a resumed run need not sample it again.
    """

    model: ImageModel
    prompts: Sequence[Any]
    sampling: SamplingParams
    batch: int
    pool: int
    reuse: int
    seed: int
    padding: str = ""
    sample_batch: int = 32
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("training needs at least one prompt")
        if min(self.batch, self.pool, self.reuse, self.sample_batch) < 1:
            raise ValueError("batch, pool, reuse and sample_batch must be at least 1")
        self.pool = max(self.pool, self.batch)

    def prompt_of(self, index: int) -> Any:
        """Prompt of sample ``index`` of the stream: every epoch is a permutation of all prompts."""
        epoch, place = divmod(index, len(self.prompts))
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return self.prompts[int(torch.randperm(len(self.prompts), generator=g)[place])]

    def sample(self, first: int, count: int) -> tuple[list[Any], Tensor]:
        """Samples ``first .. first + count - 1`` of the stream: prompts and codes int64 [count, total]."""
        prompts = [self.prompt_of(i) for i in range(first, first + count)]
        parts = []
        for start in range(0, count, self.sample_batch):
            chosen = prompts[start : start + self.sample_batch]
            seeds = [(self.seed << 32) + first + start + i for i in range(len(chosen))]
            cond = self.model.encode(chosen)
            parts.append(decode(self.model, AR(), cond, self.sampling, seeds).sequence)
        return prompts, torch.cat(parts)

    def batches(self, start: int = 0, worker: int = 0, workers: int = 1) -> Iterator[DraftBatch]:
        """Endless batches from batch number ``start`` on; worker w of n takes every n-th pool of samples."""
        per_pool = max(1, self.pool // self.batch) * self.reuse
        pool_index, skip = divmod(start, per_pool)
        while True:
            prompts, codes = self._held(pool_index * workers + worker, worker)
            for number, rows in enumerate(self._orders(pool_index)):
                if number >= skip:
                    cond = self.model.encode([prompts[i] for i in rows.tolist()])
                    yield make_batch(
                        self.model, cond, codes[rows.to(codes.device)], self.sampling, self.padding
                    )
            pool_index, skip = pool_index + 1, 0

    def _held(self, index: int, worker: int) -> tuple[list[Any], Tensor]:
        """Pool ``index`` of the stream, from the folder if it is the one kept there."""
        first = index * self.pool
        prompts = [self.prompt_of(i) for i in range(first, first + self.pool)]
        path = None if self.folder is None else self.folder / f"samples-{worker}.safetensors"
        key = (
            f"{self.model.fingerprint()} {self.sampling} {self.seed} {index} {self.pool} {hash_text(prompts)}"
        )
        if path is not None and path.is_file():
            tensors, metadata = read_weights(path)
            if metadata.get("key") == key:
                return prompts, tensors["codes"].to(self.model.device)
        _, codes = self.sample(first, self.pool)
        if path is not None:
            write_safetensors(path, {"codes": codes}, {"key": key})
        return prompts, codes

    def _orders(self, pool_index: int) -> Iterator[Tensor]:
        """Row choices of one pool: ``reuse`` shuffled passes of whole batches."""
        g = torch.Generator().manual_seed(self.seed * 7_919 + pool_index)
        count = max(1, self.pool // self.batch)
        for _ in range(self.reuse):
            order = torch.randperm(self.pool, generator=g)
            yield from order[: count * self.batch].view(count, self.batch).unbind(0)
