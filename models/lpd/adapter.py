"""LPD behind the adapter interface: a set of places is asked for, a set of codes comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from visacc.cache import addresses, window_mask
from visacc.models.base import (
    Conditioning,
    DecodeState,
    ImageModel,
    LayerStack,
    Layout,
    ModelOutput,
    Proposal,
)
from visacc.models.llamagen.vq import VQModel
from visacc.models.lpd.model import LPD


class LPDModel(ImageModel):
    """An LPD transformer and its tokenizer.

    Args:
        net: the transformer.
        vq: tokenizer; without one only codes can be generated.
        name: shown in messages.
        read_caption: text -> word ids [text_len], for models with captions.
        class_names: names of the classes, accepted as prompts besides their numbers.
    """

    provides = frozenset({"grid", "set_query"})
    only_decoders = ("lpd",)
    defaults: ClassVar[dict[str, Any]] = {"guidance_scale": 4.8}
    pixel_rule = "round"  # as the published evaluation writes its files

    def __init__(
        self,
        net: LPD,
        vq: VQModel | None = None,
        *,
        name: str = "lpd",
        read_caption: Callable[[str], Tensor] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        self.net, self.vq, self.name = net.eval(), vq, name
        self._read_caption, self._class_names = read_caption, list(class_names)
        if vq is not None and vq.config.codebook_size != net.config.vocab:
            raise ValueError(
                f"{name} has {net.config.vocab} codes, its tokenizer {vq.config.codebook_size}: another tokenizer"
            )
        grid = net.config.grid
        self.layout = Layout((1, grid, grid), net.config.vocab)

    @property
    def module(self) -> nn.Module:
        return self.net

    @property
    def codebook(self) -> Tensor | None:
        if self.vq is None:
            return None
        return nn.functional.normalize(self.vq.quantize.embedding.weight.detach().float(), dim=-1)

    def _prompt(self, prompt: Any) -> tuple[int, Tensor | None]:
        classes = self.net.config.classes
        if prompt is None:
            return -1, None
        if isinstance(prompt, str):
            if prompt in self._class_names:
                return self._class_names.index(prompt), None
            if self._read_caption is None:
                hint = (
                    f" or one of its class names ({', '.join(self._class_names[:5])}, ...)"
                    if self._class_names
                    else ""
                )
                raise ValueError(f"{self.name} takes a class label 0..{classes - 1}{hint}, not {prompt!r}")
            return -1, self._read_caption(prompt)
        if isinstance(prompt, bool) or not isinstance(prompt, int) or not 0 <= prompt < classes:
            raise ValueError(f"{self.name} has classes 0..{classes - 1}, got {prompt!r}")
        return prompt, None

    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        """Class labels, class names, captions (models with a text side) or ``None`` (unconditional)."""
        labels, words = zip(*(self._prompt(p) for p in prompts), strict=True)
        data: dict[str, Any] = {"labels": torch.tensor(labels, device=self.device)}
        other = list(negative) if negative else [None] * len(labels)
        null_labels, null_words = zip(*(self._prompt(p) for p in other), strict=True)
        data["null_labels"] = torch.tensor(null_labels, device=self.device)
        if self.net.config.text_len:
            empty = torch.zeros(self.net.config.text_len, dtype=torch.long)
            for key, rows in (("words", words), ("null_words", null_words)):
                data[key] = torch.stack([empty if w is None else w for w in rows]).to(self.device)
        return Conditioning(len(labels), data)

    def dummy_conditioning(self, batch: int) -> Conditioning:
        return self.encode([0] * batch)

    def prefill(self, cond: Conditioning, *, guidance: bool, window: int) -> tuple[DecodeState, ModelOutput]:
        raise ValueError(f"{self.name} answers queries for places; decode it with decoder 'lpd'")

    def open(
        self, cond: Conditioning, opening: Proposal, *, guidance: bool, window: int
    ) -> tuple[DecodeState, ModelOutput]:
        """Prefix rows and the first nodes in one forward (so that K steps are K forwards)."""
        cfg, data = self.net.config, cond.data
        branches = 2 if guidance else 1
        labels, words = data["labels"], data.get("words")
        if guidance:
            labels = torch.cat([labels, data["null_labels"]])
            words = None if words is None else torch.cat([words, data["null_words"]])
        rows, prefix = cond.batch * branches, cfg.prefix
        state = DecodeState(
            batch=cond.batch,
            branches=branches,
            kv=self.net.empty_cache(rows, prefix + cfg.tokens + window),
            lengths=torch.zeros(cond.batch, dtype=torch.long, device=self.device),
            prefix=prefix,
            prefix_mask=torch.ones(rows, prefix, dtype=torch.bool, device=self.device),
            limit=prefix + opening.size,
        )
        nodes = window_mask(state, opening)
        head = nodes.new_zeros(rows, prefix, state.limit)
        head[:, :, :prefix] = True
        x = torch.cat([self.net.prefix_rows(labels, words), self._rows(state, opening)], dim=1)
        slots = torch.arange(prefix, device=self.device).expand(rows, -1)
        slots = torch.cat([slots, self._slots(state, opening)], dim=1)
        outputs = opening.outputs
        wanted = prefix + (torch.arange(opening.size, device=self.device) if outputs is None else outputs)
        logits = self.net.forward_window(
            x, slots, torch.cat([head, nodes], dim=1), state.kv, state.limit, wanted
        )
        return state, _split(state, logits)

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        logits = self.net.forward_window(
            self._rows(state, proposal),
            self._slots(state, proposal),
            window_mask(state, proposal),
            state.kv,
            state.limit,
            proposal.outputs,
        )
        return _split(state, logits)

    def stack(self) -> LayerStack:
        return LayerStack(self.net, self.net.layers, "forward_window", "window")

    def _rows(self, state: DecodeState, proposal: Proposal) -> Tensor:
        """Input rows [R, N, D]: known codes first, then queries."""
        if proposal.special is None or proposal.outputs is None:
            raise ValueError(f"{self.name} answers queries for places; decode it with decoder 'lpd'")
        cut = proposal.size - proposal.outputs.numel()
        x = self.net.query_rows(proposal.positions[:, cut:])
        if cut:
            known = self.net.context_rows(proposal.tokens[:, :cut], proposal.positions[:, :cut])
            x = torch.cat([known, x], dim=1)
        return x.repeat(state.branches, 1, 1)

    def _slots(self, state: DecodeState, proposal: Proposal) -> Tensor:
        return (state.prefix + addresses(state, proposal)).repeat(state.branches, 1)

    def check_pixels(self) -> None:
        if self.vq is None:
            raise ValueError(f"{self.name} was loaded without a tokenizer: ask for output_type='codes'")

    def decode(self, codes: Tensor) -> Tensor:
        self.check_pixels()
        assert self.vq is not None
        if codes.shape[1] != 1:
            raise ValueError(f"expected codes [B, 1, h, w], got {tuple(codes.shape)}")
        return (self.vq.decode_codes(codes[:, 0]).float() / 2 + 0.5).clamp(0, 1)


def _split(state: DecodeState, logits: Tensor) -> ModelOutput:
    if state.branches == 1:
        return ModelOutput(logits)
    cond, uncond = logits.chunk(2)
    return ModelOutput(cond, uncond)
