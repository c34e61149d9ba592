"""Drafter losses, teacher-forced (Section numbers of the papers' settings in the presets)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visacc.speculate.drafter import Drafter
from visacc.speculate.rows import PrefillRows
from visacc.speculate.views import PromptView, TargetFeatures


@dataclass
class DraftBatch:
    """A teacher-forced batch: prompts with their answers, left-padded.

    Attributes:
        view: [B, N] the full sequences. feats: the target's features at all of them, detached.
        loss_mask: bool [B, N], token belongs to an answer.
        mid: [B, N, D] target of an intermediate state (DREAM), or ``None``.
    """

    view: PromptView
    feats: TargetFeatures
    loss_mask: Tensor
    mid: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> DraftBatch:
        v = self.view
        view = replace(
            v,
            **{
                k: getattr(v, k).to(device)
                for k in ("input_ids", "visual", "image_index", "valid", "seq_pos")
            },
            inputs_embeds=v.inputs_embeds.to(device, dtype),
            rope_pos=None if v.rope_pos is None else v.rope_pos.to(device),
            visual_score=None if v.visual_score is None else v.visual_score.to(device),
        )
        feats = self.feats.map(lambda x: x.to(device, dtype))
        mid = None if self.mid is None else self.mid.to(device, dtype)
        return DraftBatch(view, feats, self.loss_mask.to(device), mid)


@dataclass(frozen=True)
class LossSpec:
    """Weights of the terms; 0 leaves one out.

    Attributes:
        smooth_l1: feature regression. soft_ce: cross-entropy with the target's law.
        l1_prob: L1 between laws; top10_rank: ListMLE over the target's ten likeliest tokens (ViSpec).
        mid_smooth_l1: DREAM's intermediate state.
        over_rows: regression terms divide by all rows instead of the masked ones (DREAM).
        over_vocab: soft_ce is divided by V and taken as a KL divergence (DREAM's original scale).
        again: further passes in which features are the drafter's own outputs (training-time test).
        noise: uniform feature noise +-noise/2 * 512 / N.
    """

    smooth_l1: float = 1.0
    soft_ce: float = 0.1
    l1_prob: float = 0.0
    top10_rank: float = 0.0
    mid_smooth_l1: float = 0.0
    over_rows: bool = False
    over_vocab: bool = False
    again: int = 0
    noise: float = 0.2


PRESETS = {
    "eagle": LossSpec(),
    "msd": LossSpec(),
    "flash": LossSpec(),
    "dream": LossSpec(smooth_l1=0.2, soft_ce=1.0, mid_smooth_l1=1.0, over_rows=True),
    "vispec": LossSpec(smooth_l1=0.0, soft_ce=0.0, l1_prob=10.0, top10_rank=0.1, again=1),
    "eagle3": LossSpec(smooth_l1=0.0, soft_ce=1.0, again=1, noise=0.0),
}


def masked_mean(x: Tensor, mask: Tensor, over_rows: bool = False) -> Tensor:
    """Sum of x [B, N] where ``mask``, divided by the mask's sum (or by B N)."""
    total = (x * mask).sum()
    return total / (mask.numel() if over_rows else mask.sum().clamp(min=1e-5))


def smooth_l1(predict: Tensor, target: Tensor, mask: Tensor, over_rows: bool = False) -> Tensor:
    """SmoothL1 of features [B, N, D], mean over D."""
    return masked_mean(F.smooth_l1_loss(predict, target, reduction="none").mean(-1), mask, over_rows)


def soft_ce(logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of the draft law with the target's, both from logits [B, N, V]."""
    return masked_mean(-(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1), mask)


def kl_over_vocab(logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """DREAM's original scale: KL(target, draft) averaged over the vocabulary."""
    kl = F.kl_div(logits.log_softmax(-1), target_logits.softmax(-1), reduction="none").mean(-1)
    return masked_mean(kl, mask)


def l1_prob(logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((logits.softmax(-1) - target_logits.softmax(-1)).abs().sum(-1), mask)


def top10_rank(logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """ListMLE: the draft should order the target's ten likeliest tokens as the target does."""
    order = target_logits.topk(min(10, target_logits.shape[-1]), dim=-1).indices
    ranked = logits.gather(-1, order)
    return masked_mean((ranked.flip(-1).logcumsumexp(-1).flip(-1) - ranked).sum(-1), mask)


def entropy_choice(features: list[Tensor], entropies: list[Tensor], layers: tuple[int, ...]) -> Tensor:
    """DREAM's supervision of the intermediate state: per token the input of the layer with the sharpest
    attention.

    Args:
        features: [B, N, D] inputs of the candidate ``layers``; entropies: [B, N] their attention entropies.

    Returns:
        [B, N, D].
    """
    if not len(features) == len(entropies) == len(layers):
        raise ValueError(
            f"{len(layers)} layers need as many features and entropies, got {len(features)}, {len(entropies)}"
        )
    best = torch.stack(entropies, dim=-1).argmin(-1)
    stacked = torch.stack(features, dim=2)
    return stacked.gather(2, best[..., None, None].expand(-1, -1, 1, stacked.shape[3]))[:, :, 0]


def attention_entropy(weights: Tensor) -> Tensor:
    """Mean over heads of -sum a log(a + 1e-8): attention [B, H, N, N] -> [B, N]."""
    return -(weights * (weights + 1e-8).log()).sum(-1).mean(1)


def candidate_layers(layers: int) -> tuple[int, ...]:
    """DREAM's candidates {1 .. L' - 2} with L' = int(0.4 layers); at least layer 1 for shallow targets."""
    return tuple(range(1, max(int(0.4 * layers) - 1, 2)))


class DraftLoss(nn.Module):
    """All terms of one batch; a module, so that DDP and FSDP can wrap it.

    Args:
        drafter: bound to its target. spec: which terms.
        head: post-norm features [..., D] -> logits (the target's, frozen).

    Attributes:
        touch_all: give every parameter a gradient, zero where a batch does not use it. Shards need it: all processes must
            exchange the same gradients, and one of them may have a batch without pictures.
    """

    def __init__(self, drafter: Drafter, spec: LossSpec, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drafter, self.spec = drafter, spec
        self._head = head
        self.touch_all = False

    def forward(self, batch: DraftBatch) -> dict[str, Tensor]:
        """Named weighted terms and their sum ``loss``; ``agreement`` is the share of equal arg-max tokens."""
        feats = self._noisy(batch)
        total: dict[str, Tensor] = {}
        for turn in range(1 + self.spec.again):
            rows, column, mask = self._rows(batch, feats)
            predict, mid = self.drafter.teach(rows)
            terms = self._terms(batch, column, mask, predict, mid)
            for name, value in terms.items():
                scale = 1.0 if name != "agreement" else float(turn == 0)
                total[name] = total.get(name, value.new_zeros(())) + scale * value
            if turn < self.spec.again:
                feats = self._own(batch, feats, column, predict)
        total["loss"] = torch.stack([v for k, v in total.items() if k != "agreement"]).sum()
        if self.touch_all:
            used = [p.flatten()[0] for p in self.drafter.parameters()]
            total["loss"] = total["loss"] + 0.0 * torch.stack(used).sum()
        return total

    def _noisy(self, batch: DraftBatch) -> TargetFeatures:
        scale = self.spec.noise * 512 / batch.view.input_ids.shape[1]
        if not self.training or not scale:
            return batch.feats
        return batch.feats.map(lambda x: x + (torch.rand_like(x) - 0.5) * scale)

    @property
    def _shift(self) -> int:
        return 0 if self.drafter.config.method == "dream" else 1

    def _rows(self, batch: DraftBatch, feats: TargetFeatures) -> tuple[PrefillRows, Tensor, Tensor]:
        """Rows of the sequence with its last token as the root, the column of the state each row predicts,
        and which rows count (those used while drafting answers)."""
        view, v = batch.view, batch.view
        known = replace(
            view,
            input_ids=v.input_ids[:, :-1],
            inputs_embeds=v.inputs_embeds[:, :-1],
            visual=v.visual[:, :-1],
            image_index=v.image_index[:, :-1],
            valid=v.valid[:, :-1],
            seq_pos=v.seq_pos[:, :-1],
            rope_pos=None if v.rope_pos is None else v.rope_pos[..., :-1],
            visual_score=None if v.visual_score is None else v.visual_score[:, :-1],
        )
        rows = self.drafter.rows.prefill(known, feats.map(lambda x: x[:, :-1]), v.inputs_embeds[:, -1])
        pad = v.valid.shape[1] - v.lengths
        pos = rows.pos if rows.pos.ndim == 2 else known.seq_pos
        column = (pos + pad[:, None] + self._shift).clamp(max=v.valid.shape[1] - 1)
        # a row counts if the newest token it has read is part of an answer: then it drafts what follows
        return rows, column, batch.loss_mask.gather(1, column) & rows.valid

    def _terms(
        self,
        batch: DraftBatch,
        column: Tensor,
        mask: Tensor,
        predict: Tensor,
        mid: Tensor | None,
    ) -> dict[str, Tensor]:
        if predict.ndim == 3:
            predict = predict[:, :, None]
        parts: dict[str, list[Tensor]] = {}
        width = batch.loss_mask.shape[1]
        for i in range(predict.shape[2]):
            # offset i of a row predicts the state i places further on
            inside = mask & (column + i < width)
            target = _take(batch.feats.last, (column + i).clamp(max=width - 1))
            for name, value in self._pair(predict[:, :, i], target, inside).items():
                parts.setdefault(name, []).append(value)
        terms = {name: torch.stack(values).mean() for name, values in parts.items()}
        if self.spec.mid_smooth_l1:
            if mid is None or batch.mid is None:
                raise ValueError(
                    "an intermediate loss needs a DREAM drafter and the intermediate target states"
                )
            goal = _take(batch.mid, column)
            value = smooth_l1(mid.float(), goal.float(), mask, self.spec.over_rows)
            terms["mid_smooth_l1"] = self.spec.mid_smooth_l1 * value
        return terms

    def _pair(self, predict: Tensor, target: Tensor, mask: Tensor) -> dict[str, Tensor]:
        s = self.spec
        terms = {}
        if s.smooth_l1:
            terms["smooth_l1"] = s.smooth_l1 * smooth_l1(predict.float(), target.float(), mask, s.over_rows)
        ours, theirs = self.drafter.logits(predict), self._head(target).float()
        keep = torch.isfinite(ours).all(dim=(0, 1))  # EAGLE-3: tokens outside of the drafter's vocabulary
        if not bool(keep.all()):
            ours, theirs = ours[..., keep], theirs[..., keep]
        if s.soft_ce:
            loss = kl_over_vocab if s.over_vocab else soft_ce
            terms["soft_ce"] = s.soft_ce * loss(ours, theirs, mask)
        if s.l1_prob:
            terms["l1_prob"] = s.l1_prob * l1_prob(ours, theirs, mask)
        if s.top10_rank:
            terms["top10_rank"] = s.top10_rank * top10_rank(ours, theirs, mask)
        terms["agreement"] = masked_mean((ours.argmax(-1) == theirs.argmax(-1)).float(), mask).detach()
        return terms

    def _own(
        self, batch: DraftBatch, feats: TargetFeatures, column: Tensor, predict: Tensor
    ) -> TargetFeatures:
        """Features of the next pass: the drafter's own predictions wherever an answer token stands."""
        if predict.ndim == 4:
            raise ValueError("further passes are for drafters that predict one token per row")
        if self.drafter.config.method == "eagle3":
            raise ValueError(
                "further passes are not available for eagle3 drafters (their inputs are three layers)"
            )
        own = feats.last.scatter(1, column[..., None].expand_as(predict), predict.to(feats.last.dtype))
        return TargetFeatures(torch.where(batch.loss_mask[..., None], own, feats.last), feats.taps)


def _take(x: Tensor, column: Tensor) -> Tensor:
    return x.gather(1, column[..., None].expand(-1, -1, x.shape[2]))
