"""Row builders: how (embedding, feature) pairs become the rows a drafter's backbone reads.

Shift-by-one methods (EAGLE, MSD, FLASH, ViSpec, EAGLE-3): row j is made of h_j and e_{j+1}, sits at position
j and predicts h_{j+1}. A row is *visual* when token j+1 is. DREAM does not shift: row j is e_j and reads
h_i, i < j, through cross-attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visacc.speculate.blocks import RMSNorm
from visacc.speculate.config import DrafterConfig
from visacc.speculate.views import PromptView, TargetFeatures


@dataclass
class PrefillRows:
    """Rows of a prompt, left-padded.

    Attributes:
        x: [B, R, W] backbone input. pos: int64 [B, R] (or [3, B, R]). valid: bool [B, R].
        next_pos: int64 [B] position of the next appended row (of the children of the root).
        cross, cross_valid: [B, C, D], bool [B, C] keys of the cross-attention; row R-1-i sees keys up to
            C-1-i.
        extra: per-request tensors kept for later rows (ViSpec's global image vector).
    """

    x: Tensor
    pos: Tensor
    valid: Tensor
    next_pos: Tensor
    cross: Tensor | None = None
    cross_valid: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Shifted:
    """Prompt tensors aligned to rows: what row j knows about token j+1 (the root for the last row)."""

    embed: Tensor
    visual: Tensor
    image: Tensor

    @classmethod
    def of(cls, view: PromptView, root_embed: Tensor) -> Shifted:
        def shift(x: Tensor, last: Tensor) -> Tensor:
            return torch.cat([x[:, 1:], last], dim=1)

        none = torch.zeros_like(view.visual[:, :1])
        return cls(
            shift(view.inputs_embeds, root_embed[:, None]),
            shift(view.visual, none),
            shift(view.image_index, none.long() - 1),
        )


class EagleRows(nn.Module):
    """Every row fc([e_{j+1}; h_j]), image rows included (EAGLE-2; the released FLASH inference)."""

    cross = False

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)

    def feature(self, feats: TargetFeatures) -> Tensor:
        """The target's feature as the drafter uses it, [B, L, D]."""
        return feats.last

    def fuse(self, embed: Tensor, feature: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """Text rows [B, n, W] from embeddings and features [B, n, D]."""
        return self.fc(torch.cat([embed, feature], dim=-1))

    def prefill(self, view: PromptView, feats: TargetFeatures, root_embed: Tensor) -> PrefillRows:
        near = Shifted.of(view, root_embed)
        return PrefillRows(
            self.fuse(near.embed, self.feature(feats), {}), view.seq_pos, view.valid, view.lengths
        )


class MsdRows(EagleRows):
    """MSD (arXiv 2505.14260): visual rows are the raw image embedding, text rows fc([e; h])."""

    def prefill(self, view: PromptView, feats: TargetFeatures, root_embed: Tensor) -> PrefillRows:
        near = Shifted.of(view, root_embed)
        x = torch.where(near.visual[..., None], near.embed, self.fuse(near.embed, feats.last, {}))
        return PrefillRows(x, view.seq_pos, view.valid, view.lengths)


def image_rank(image: Tensor) -> tuple[Tensor, Tensor]:
    """Per visual row its distance from the last row of its image, and the image's size; int64 [B, R] each.

    ``image`` int64 [B, R] holds image numbers, -1 elsewhere (where both results are 0). Images need not be
    contiguous.
    """
    count = int(image.max()) + 1 if image.numel() else 0
    left, size = torch.zeros_like(image), torch.zeros_like(image)
    for i in range(count):
        own = image == i
        behind = own.long().flip(1).cumsum(1).flip(1) - 1
        left = torch.where(own, behind, left)
        size = torch.where(own, own.sum(1, keepdim=True), size)
    return left, size


def replace_images(
    x: Tensor, pos: Tensor, valid: Tensor, image: Tensor, latents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put ``latents`` [B, I, M, D] in place of each image's rows and drop the rest.

    The latents take the positions of the last M rows of their image (the first ``size`` latents if it is
    smaller). Returns rows, positions and validity, packed to the right.
    """
    left, size = image_rank(image)
    width = latents.shape[2]
    kept = torch.where(image >= 0, left < width, True) & valid
    index = (torch.minimum(size, torch.full_like(size, width)) - 1 - left).clamp(0, max(width - 1, 0))
    if width and latents.shape[1]:
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        x = torch.where((image >= 0)[..., None], latents[rows, image.clamp(min=0), index].to(x.dtype), x)
    return pack(kept, x, pos)


def pack(kept: Tensor, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the kept rows [B, R] to the right in order and cut the width to the longest; looks at the host
    once.
    """
    width = max(int(kept.sum(1).max()), 1)
    order = kept.long().argsort(dim=1, stable=True)[:, -width:]
    moved = x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
    return moved, pos.gather(1, order), kept.gather(1, order)


class FlashRows(EagleRows):
    """FLASH (arXiv 2505.12728): ``latents`` rows Z = softmax(A F^T) F per image replace its visual rows.

    F are the target features at the image's positions. ``latents = 0`` is the released inference: plain
    EAGLE rows.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c)
        if c.latents:
            self.A = nn.Parameter(torch.randn(c.latents, c.hidden_size) * c.hidden_size**-0.5)

    def compress(self, features: Tensor, own: Tensor | None = None) -> Tensor:
        """[B, n, D] features (of which only ``own`` bool [B, n] belong to the image) -> [B, M, D]."""
        score = self.A.to(features.dtype) @ features.transpose(1, 2)
        if own is not None:
            # rows without this image attend evenly to nothing that is ever used
            score = score.masked_fill(~own[:, None], torch.finfo(score.dtype).min)
        return score.softmax(-1) @ features

    def prefill(self, view: PromptView, feats: TargetFeatures, root_embed: Tensor) -> PrefillRows:
        rows = super().prefill(view, feats, root_embed)
        count = int(view.image_index.max()) + 1
        if self.c.latents and count:
            z = [self.compress(feats.last, view.image_index == i) for i in range(count)]
            image = Shifted.of(view, root_embed).image
            rows.x, rows.pos, rows.valid = replace_images(
                rows.x, rows.pos, rows.valid, image, torch.stack(z, dim=1)
            )
        return rows


class ImageAdaptor(nn.Module):
    """ViSpec's attention pooling of an image's input embeddings into ``num_q`` rows."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(c.num_q, c.num_heads, c.head_dim) * 0.02)
        self.k_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.head_dim = c.head_dim

    def forward(self, embeds: Tensor, own: Tensor) -> Tensor:
        """[B, N, D] and which rows belong to the image, bool [B, N] -> [B, num_q, D]."""
        k = self.k_proj(embeds).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(embeds).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q = self.q.transpose(0, 1)[None].expand(embeds.shape[0], -1, -1, -1).to(k.dtype)
        mask = own | ~own.any(1, keepdim=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return self.o_proj(y.transpose(1, 2).flatten(2))


class ViSpecRows(EagleRows):
    """ViSpec (arXiv 2509.15235): num_q - 1 pooled rows per image, and a global image vector g in every later
    row.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__(c)
        self.imadpt = ImageAdaptor(c)
        self.img_fc = nn.Linear(2 * c.hidden_size, c.hidden_size)
        with torch.no_grad():
            eye = torch.eye(c.hidden_size)
            self.img_fc.weight.copy_(torch.cat([eye, torch.zeros_like(eye)], dim=1))
            self.img_fc.bias.zero_()

    def fuse(self, embed: Tensor, feature: Tensor, extra: dict[str, Tensor]) -> Tensor:
        g = extra["g"]
        g = g[:, None].expand_as(feature) if g.ndim == 2 else g
        return super().fuse(embed, self.img_fc(torch.cat([feature, g], dim=-1)), extra)

    def prefill(self, view: PromptView, feats: TargetFeatures, root_embed: Tensor) -> PrefillRows:
        near = Shifted.of(view, root_embed)
        count = int(view.image_index.max()) + 1
        size = view.inputs_embeds.shape[2]
        g = feats.last.new_zeros(view.batch, near.embed.shape[1], size)
        if not count:
            x = self.fuse(near.embed, feats.last, {"g": g})
            return PrefillRows(x, view.seq_pos, view.valid, view.lengths, extra={"g": g[:, -1]})
        pooled = torch.stack(
            [self.imadpt(view.inputs_embeds, view.image_index == i) for i in range(count)], dim=1
        )
        latest = near.image.cummax(1).values
        rows = torch.arange(view.batch, device=latest.device)[:, None]
        g = torch.where((latest >= 0)[..., None], pooled[rows, latest.clamp(min=0), -1].to(g.dtype), g)
        x = self.fuse(near.embed, feats.last, {"g": g})
        x, pos, valid = replace_images(x, view.seq_pos, view.valid, near.image, pooled[:, :, :-1])
        return PrefillRows(x, pos, valid, view.lengths, extra={"g": g[:, -1]})


class Eagle3Rows(nn.Module):
    """EAGLE-3 rows: [e_{j+1}; g_j] with g = fc(three target layers); later rows reuse the drafter's own
    state as g.
    """

    cross = False

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        width = c.target_hidden_size or c.hidden_size
        self.fc = nn.Linear(3 * width, c.hidden_size, bias=False)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, c.eps) for _ in range(3))

    def feature(self, feats: TargetFeatures) -> Tensor:
        missing = [i for i in self.c.taps if i not in feats.taps]
        if missing:
            raise ValueError(f"eagle3 reads the inputs of target layers {self.c.taps}, missing {missing}")
        states = [feats.taps[i] for i in self.c.taps]
        if self.c.fc_norm:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        return self.fc(torch.cat(states, dim=-1))

    def fuse(self, embed: Tensor, feature: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return torch.cat([embed, feature], dim=-1)

    def prefill(self, view: PromptView, feats: TargetFeatures, root_embed: Tensor) -> PrefillRows:
        near = Shifted.of(view, root_embed)
        pos, next_pos = view.seq_pos, view.lengths
        if self.c.mrope_sections:
            if view.rope_pos is None:
                raise ValueError("this EAGLE-3 drafter uses M-RoPE positions, which the target does not have")
            pos = view.rope_pos
            next_pos = torch.where(view.valid, pos.amax(0), -1).amax(1) + 1
        return PrefillRows(self.fuse(near.embed, self.feature(feats), {}), pos, view.valid, next_pos)


class DreamRows(nn.Module):
    """DREAM (arXiv 2505.19201): rows are plain embeddings, features are read by cross-attention."""

    cross = True

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c

    def feature(self, feats: TargetFeatures) -> Tensor:
        return feats.last

    def fuse(self, embed: Tensor, feature: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return embed

    def prefill(self, view: PromptView, feats: TargetFeatures, root_embed: Tensor) -> PrefillRows:
        x = torch.cat([view.inputs_embeds, root_embed[:, None]], dim=1)
        pos = torch.cat([view.seq_pos, view.lengths[:, None]], dim=1)
        valid = torch.cat([view.valid, torch.ones_like(view.valid[:, :1])], dim=1)
        cross, cross_valid = feats.last, view.valid
        if self.c.prune < 1:
            if view.visual_score is None:
                raise ValueError(
                    "visual token pruning needs the attention each image token receives (visual_score)"
                )
            kept = kept_visual(view.visual_score, view.visual, self.c.prune) & view.valid
            kept_rows = torch.cat([kept, torch.ones_like(kept[:, :1])], dim=1)
            cross, _, cross_valid = pack(kept, cross, view.seq_pos)
            x, pos, valid = pack(kept_rows, x, pos)
        return PrefillRows(x, pos, valid, view.lengths + 1, cross, cross_valid)


def kept_visual(score: Tensor, visual: Tensor, ratio: float) -> Tensor:
    """bool [B, N]: text, and the max(1, int(n ratio)) best-scored of the n visual tokens of every row."""
    n = visual.sum(1, keepdim=True)
    quota = (n * ratio).long().clamp(min=1)
    masked = score.float().masked_fill(~visual, -torch.inf)
    rank = masked.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return ~visual | (rank < quota)


ROWS = {
    "eagle": EagleRows,
    "msd": MsdRows,
    "dream": DreamRows,
    "flash": FlashRows,
    "vispec": ViSpecRows,
    "eagle3": Eagle3Rows,
}
