"""Cosmos autoregressive video models behind the adapter interface: frames (and a text) in, the rest of the clip out.

Plain next-token prediction of fixed length, so every next-token decoder runs on it. There is no guidance and no special
token that could be generated; a later window simply overwrites the cache slots of rejected drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.cache import addresses, window_mask
from visacc.models.base import Conditioning, DecodeState, Layout, ModelOutput, Proposal
from visacc.models.cosmos.released import TOP_P
from visacc.models.cosmos.transformer import Cosmos
from visacc.models.video_prompt import VideoModel, VideoTokenizer, as_prompts

TEXT_TOKENS = 512


class CosmosModel(VideoModel):
    """A Cosmos transformer and its tokenizer.

    Args:
        net: the transformer.
        tokenizer: discrete video tokenizer; without one only codes can be generated, from codes.
        given_frames: latent frames every prompt brings, 1 (one image) or 2 (nine frames of the published tokenizer).
        read_texts: texts -> features [B, M, context_dim], for Video2World models.
        name: shown in messages.
    """

    provides = frozenset({"grid", "tree_mask", "row_causal"})
    pixel_rule = "floor"

    def __init__(
        self,
        net: Cosmos,
        tokenizer: VideoTokenizer | None = None,
        *,
        given_frames: int = 2,
        read_texts: Callable[[list[str]], Tensor] | None = None,
        name: str = "cosmos-ar",
    ) -> None:
        cfg = net.config
        if given_frames not in (1, 2) or given_frames >= cfg.grid[0]:
            raise ValueError(
                f"{name} continues 1 or 2 latent frames (1 or 9 input frames), not {given_frames}"
            )
        self.net, self.tokenizer, self.name = net.eval(), tokenizer, name
        self._check_tokenizer(cfg.vocab)
        self.given_frames, self.grid, self._read_texts = given_frames, cfg.grid, read_texts
        self.defaults = {"top_p": TOP_P[cfg.text]}  # type: ignore[misc]
        self.layout = Layout((cfg.grid[0] - given_frames, *cfg.grid[1:]), cfg.vocab)

    @property
    def module(self) -> nn.Module:
        return self.net

    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        """:class:`VideoPrompt` objects with frames, and with a text for Video2World models."""
        if negative and any(negative):
            raise ValueError(f"{self.name} has no guidance and takes no negative prompt")
        items, cfg = as_prompts(prompts), self.net.config
        texts = [item.text for item in items]
        context = None
        if cfg.text:
            if not all(texts):
                raise ValueError(f"{self.name} needs a text with every clip")
            if self._read_texts is None:
                raise ValueError(f"{self.name} was loaded without its text encoder (T5-11B)")
            context = self._read_texts([text for text in texts if text])
        elif any(texts):
            raise ValueError(f"{self.name} has no text input; the Video2World models have")
        given = self.given_codes(items)
        return self.conditioning(given, context)

    def conditioning(self, given: Tensor, context: Tensor | None = None) -> Conditioning:
        """Conditioning from codes int64 [B, K] and text features [B, M, context_dim]."""
        if given.shape[1] != self.given_tokens:
            raise ValueError(f"{self.name} continues {self.given_tokens} codes, got {given.shape[1]}")
        return Conditioning(len(given), {"given": given, "context": context}, has_uncond=False)

    def dummy_conditioning(self, batch: int) -> Conditioning:
        cfg = self.net.config
        context = torch.zeros(batch, TEXT_TOKENS, cfg.context_dim, device=self.device) if cfg.text else None
        return self.conditioning(
            torch.zeros(batch, self.given_tokens, dtype=torch.long, device=self.device), context
        )

    def prefill(self, cond: Conditioning, *, guidance: bool, window: int) -> tuple[DecodeState, ModelOutput]:
        cfg, ids = self.net.config, cond.data["given"]
        if cfg.text:
            ids = F.pad(ids, (1, 0), value=cfg.vocab)
        batch, prefix = ids.shape
        context = cond.data["context"]
        state = DecodeState(
            batch=batch,
            branches=1,
            kv=self.net.empty_cache(batch, prefix + self.layout.total + window),
            lengths=torch.zeros(batch, dtype=torch.long, device=self.device),
            prefix=prefix,
            prefix_mask=torch.ones(batch, prefix, dtype=torch.bool, device=self.device),
            limit=prefix,
            extra={} if context is None else {"context": self.net.context_kv(context)},
        )
        slots = torch.arange(prefix, device=self.device)
        mask = (slots[:, None] >= slots).expand(batch, -1, -1)
        logits = self.net.forward_window(
            ids,
            slots.expand(batch, -1),
            mask,
            state.kv,
            prefix,
            state.extra.get("context"),
            slice(prefix - 1, None),
        )
        return state, ModelOutput(logits)

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        slots = state.prefix + addresses(state, proposal)
        logits = self.net.forward_window(
            proposal.tokens,
            slots,
            window_mask(state, proposal),
            state.kv,
            state.limit,
            state.extra.get("context"),
            proposal.outputs,
        )
        return ModelOutput(logits)


def fit_frames(frames: Tensor, size: tuple[int, int] = (640, 1024)) -> Tensor:
    """Frames [T, 3, H, W] scaled to cover ``size`` and centre-cropped, as the original does."""
    height, width = frames.shape[2:]
    scale = max(size[0] / height, size[1] / width)
    grown = (-int(-height * scale // 1), -int(-width * scale // 1))
    frames = F.interpolate(frames, size=grown, mode="bilinear", align_corners=False, antialias=True)
    top, left = (grown[0] - size[0]) // 2, (grown[1] - size[1]) // 2
    return frames[:, :, top : top + size[0], left : left + size[1]].clamp(0, 1)


def t5_reader(folder: str | Path, device: torch.device | str = "cpu") -> Callable[[list[str]], Tensor]:
    """Text features [B, 512, 1024] of the T5-11B encoder in ``folder`` (or hub id); padded rows are zero.

    The original attends to those zero rows as well, so the whole tensor is the context.
    """
    from transformers import AutoTokenizer, T5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    encoder: Any = T5EncoderModel.from_pretrained(str(folder), dtype=torch.bfloat16)
    encoder = encoder.to(device).eval()

    @torch.no_grad()
    def read(texts: list[str]) -> Tensor:
        batch = tokenizer(
            texts, padding="max_length", truncation=True, max_length=TEXT_TOKENS, return_tensors="pt"
        )
        mask = batch["attention_mask"].to(device)
        hidden = encoder(input_ids=batch["input_ids"].to(device), attention_mask=mask).last_hidden_state
        return hidden * mask[..., None]

    return read
