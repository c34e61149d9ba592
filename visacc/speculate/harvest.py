"""Training features of a target: online (nothing is stored) or from files written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visacc.models.vlm.families import placeholder_ids
from visacc.models.vlm.target import VLMTarget
from visacc.reading import read_object
from visacc.speculate.loop import generate
from visacc.speculate.losses import DraftBatch, attention_entropy, candidate_layers, entropy_choice
from visacc.speculate.params import TextParams
from visacc.speculate.views import PromptView, TargetFeatures
from visacc.weights import read_weights
from visacc.writing import write_json, write_safetensors

FORMAT = 1


@dataclass
class Answered:
    """Prompts (the processor's left-padded output) and their answers as token lists, end token included."""

    inputs: Mapping[str, Any]
    answers: list[list[int]]


def joined(batch: Answered, pad: int) -> tuple[dict[str, Any], Tensor]:
    """Prompts with answers behind them, left-padded again, and which tokens are answers: bool [B, N]."""
    ids = batch.inputs["input_ids"]
    mask = batch.inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    full = [a + b for a, b in zip(rows, batch.answers, strict=True)]
    width = max(map(len, full))
    out = torch.full((len(full), width), pad, dtype=torch.int64)
    valid, answer = torch.zeros_like(out), torch.zeros(len(full), width, dtype=torch.bool)
    for i, row in enumerate(full):
        out[i, width - len(row) :] = torch.tensor(row)
        valid[i, width - len(row) :] = 1
        answer[i, width - len(batch.answers[i]) :] = True
    lengthwise = ("token_type_ids", "mm_token_type_ids", "input_ids", "attention_mask", "position_ids")
    inputs = {k: v for k, v in batch.inputs.items() if k not in lengthwise}  # rebuilt for the new length
    return {**inputs, "input_ids": out, "attention_mask": valid}, answer


class OnlineHarvester:
    """Turns prompts into training batches with one target forward each.

    Args:
        target: with the taps the drafter reads.
        answers: "generated" writes the answers with the target itself, greedily (what the drafter will have
            to predict); "dataset" takes given ones.
        max_new_tokens: limit for generated answers.
        mid: also DREAM's intermediate states; with several candidate layers the model must use eager
            attention.
    """

    def __init__(
        self,
        target: VLMTarget,
        *,
        answers: str = "generated",
        max_new_tokens: int = 128,
        eos: tuple[int, ...] = (),
        pad: int = 0,
        mid: bool = False,
    ) -> None:
        if answers not in ("generated", "dataset"):
            raise ValueError(f"answers must be 'generated' or 'dataset', got {answers!r}")
        self.target, self.answers, self.pad = target, answers, pad
        self.params = TextParams(max_new_tokens=max_new_tokens, eos=eos, pad=pad)
        self.layers = candidate_layers(len(target.layers)) if mid else ()

    def __call__(self, batch: Answered | Mapping[str, Any]) -> DraftBatch:
        """One training batch.

        Raises:
            ValueError: answers are to come from the data set but are missing.
        """
        if not isinstance(batch, Answered):
            if self.answers == "dataset":
                raise ValueError("answers='dataset' needs answers with every prompt")
            batch = Answered(batch, [])
        if self.answers == "generated":
            result = generate(
                self.target, None, None, batch.inputs, self.params, [0] * len(batch.inputs["input_ids"])
            )
            texts = [row[:n].tolist() for row, n in zip(result.ids, result.lengths.tolist(), strict=True)]
            batch = Answered(batch.inputs, [self._written(text) for text in texts])
        inputs, answer = joined(batch, self.pad)
        taps = tuple(sorted({*self.target.taps, *self.layers}))
        inner = VLMTarget(self.target.model, taps, score=self.target.score)
        with torch.no_grad(), self._entropies() as entropies:
            done = inner.prefill(inputs, room=0)
        inputs_of = done.feats.taps
        mid = None
        if self.layers:
            choices = [inputs_of[i] for i in self.layers]
            mid = choices[0] if len(choices) == 1 else entropy_choice(choices, entropies, self.layers)
        feats = TargetFeatures(done.feats.last, {i: inputs_of[i] for i in self.target.taps})
        return DraftBatch(done.view, feats, answer.to(done.view.valid.device), mid)

    def _written(self, text: list[int]) -> list[int]:
        """The answer up to a placeholder token, which the model could not read back as text."""
        ends = [text.index(p) for p in placeholder_ids(self.target.config) if p in text]
        return text[: min(ends)] if ends else text

    @contextmanager
    def _entropies(self) -> Iterator[list[Tensor]]:
        """Attention entropies of the candidate layers, reduced at once; only when there is a choice."""
        found: list[Tensor] = []
        if len(self.layers) < 2:
            yield found
            return
        kind = getattr(self.target.text_config, "_attn_implementation", "")
        if kind != "eager":
            raise ValueError(
                "choosing DREAM's layer by attention entropy needs the attention maps; load the target with"
                f" attn_implementation='eager' (it runs with {kind!r})"
            )

        def look(_module: nn.Module, _args: Any, out: Any) -> None:
            found.append(attention_entropy(out[1].float()))

        handles = [self.target.layers[i].self_attn.register_forward_hook(look) for i in self.layers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def dump(self, batches: Iterable[Answered | Mapping[str, Any]], folder: str | Path) -> int:
        """Harvest, then write one safetensors file per sample and a header; returns how many samples were written."""
        return self.write(map(self, batches), folder)

    def write(self, batches: Iterable[DraftBatch], folder: str | Path) -> int:
        """Write features that this harvester made; see :meth:`dump`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        count = 0
        for done in batches:
            for b in range(done.view.batch):
                write_safetensors(folder / f"sample-{count:06d}.safetensors", _sample(done, b))
                count += 1
        header = {
            "format": FORMAT,
            "target": self.target.describe(),
            "taps": list(self.target.taps),
            "mid_layers": list(self.layers),
            "last_is_post_norm": True,
            "samples": count,
        }
        write_json(folder / "header.json", header)
        return count


def _sample(batch: DraftBatch, row: int) -> dict[str, Tensor]:
    keep = batch.view.valid[row]
    visual = batch.view.visual[row][keep]
    embeds = batch.view.inputs_embeds[row][keep]
    parts = {
        "token_ids": batch.view.input_ids[row][keep],
        "loss_mask": batch.loss_mask[row][keep].to(torch.uint8),
        "visual": visual.to(torch.uint8),
        "image_index": batch.view.image_index[row][keep],
        "visual_embeds": embeds[visual],
        "last": batch.feats.last[row][keep],
    }
    parts |= {f"tap_{i}": x[row][keep] for i, x in batch.feats.taps.items()}
    if batch.mid is not None:
        parts["mid"] = batch.mid[row][keep]
    if batch.view.visual_score is not None:
        parts["visual_score"] = batch.view.visual_score[row][keep]
    return {k: v.detach().cpu().contiguous().clone() for k, v in parts.items()}


class OfflineStore:
    """Reads what :meth:`OnlineHarvester.dump` wrote; text embeddings are looked up again by ``target``.

    Raises:
        ValueError: not such a folder, or features of another target.
    """

    def __init__(self, folder: str | Path, target: VLMTarget) -> None:
        self.folder, self.target = Path(folder), target
        header = self.folder / "header.json"
        if not header.exists():
            raise ValueError(f"{folder} has no header.json; OnlineHarvester.dump writes such folders")
        self.header = read_object(header)
        if not {"target", "taps", "samples"} <= self.header.keys():
            raise ValueError(f"{header} is no header of stored features: it lacks target, taps or samples")
        if self.header["target"] != target.describe():
            raise ValueError(
                f"the stored features are of {self.header['target']}, not of {target.describe()}"
            )
        missing = set(target.taps) - set(self.header["taps"])
        if missing:
            raise ValueError(
                f"the stored features lack layers {sorted(missing)}; stored: {self.header['taps']}"
            )

    def __len__(self) -> int:
        return int(self.header["samples"])

    def batch(self, numbers: Iterable[int]) -> DraftBatch:
        """Samples by number as one left-padded batch."""
        parts = [read_weights(self.folder / f"sample-{i:06d}.safetensors")[0] for i in numbers]
        width = max(len(p["token_ids"]) for p in parts)

        def stack(name: str, fill: float = 0) -> Tensor:
            rows = []
            for p in parts:
                x = p[name]
                head = x.new_full((width - len(x), *x.shape[1:]), fill)
                rows.append(torch.cat([head, x]))
            return torch.stack(rows)

        for p in parts:
            p["valid"] = torch.ones(len(p["token_ids"]), dtype=torch.bool)
            embeds = self.target.embed(p["token_ids"].to(self.target.device)).detach().cpu()
            p["embeds"] = embeds.index_copy(
                0, p["visual"].nonzero()[:, 0], p["visual_embeds"].to(embeds.dtype)
            )
        view = PromptView.build(
            stack("token_ids"),
            stack("embeds"),
            stack("visual").bool(),
            stack("image_index", -1),
            stack("valid"),
        )
        if "visual_score" in parts[0]:
            view.visual_score = stack("visual_score")
        feats = TargetFeatures(stack("last"), {i: stack(f"tap_{i}") for i in self.target.taps})
        mid = stack("mid") if "mid" in parts[0] else None
        return DraftBatch(view, feats, stack("loss_mask").bool(), mid)
