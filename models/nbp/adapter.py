"""NBP behind the adapter interface: next-block video models, and their next-token twins (block size 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from visacc.cache import addresses, window_mask
from visacc.models.base import Conditioning, DecodeState, Layout, ModelOutput, Proposal
from visacc.models.nbp.gpt import NBP, block_mask, input_ids
from visacc.models.video_prompt import VideoModel, VideoTokenizer, as_prompts


class NBPModel(VideoModel):
    """An NBP transformer and its tokenizer.

    Args:
        net: the transformer.
        tokenizer: without one only codes can be generated.
        given_frames: latent frames that every prompt brings (continuation); the layout holds the generated rest.
        read_text: text -> ids [cond_tokens], for models with text.
        joint_ids: let the model draw any id of its joint vocabulary, as the original program does, instead of video codes
            only; codes are then joint ids.
        name: shown in messages.
    """

    provides = frozenset({"grid", "blocks"})
    defaults: ClassVar[dict[str, Any]] = {"top_k": 16000, "top_p": 0.9}

    def __init__(
        self,
        net: NBP,
        tokenizer: VideoTokenizer | None = None,
        *,
        given_frames: int = 0,
        read_text: Callable[[str], Tensor] | None = None,
        joint_ids: bool = False,
        name: str = "nbp",
        defaults: dict[str, Any] | None = None,
    ) -> None:
        cfg = net.config
        if not 0 <= given_frames < cfg.grid[0]:
            raise ValueError(
                f"{name} has {cfg.grid[0]} latent frames; given_frames must be below that, not {given_frames}"
            )
        if not cfg.hybrid and given_frames == 0:
            raise ValueError(
                f"{name} has no begin-of-video token: it continues given frames (given_frames >= 1)"
            )
        self.net, self.tokenizer, self.name = net.eval(), tokenizer, name
        self._check_tokenizer(cfg.video_vocab)
        self.given_frames, self.grid, self._read_text = given_frames, cfg.grid, read_text
        self._shift = 0 if joint_ids else cfg.video_shift
        self._joint = joint_ids
        self.block = cfg.block
        if defaults is not None:
            self.defaults = defaults  # type: ignore[misc]
        self.only_decoders = ("nbp",) if cfg.block > 1 else ()
        self.provides = frozenset(
            {"grid", "blocks"} if cfg.block > 1 else {"grid", "blocks", "tree_mask", "row_causal"}
        )
        frames, rows, columns = cfg.grid
        self.layout = Layout(
            (frames - given_frames, rows, columns), cfg.vocab if joint_ids else cfg.video_vocab
        )

    @property
    def module(self) -> nn.Module:
        return self.net

    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        """Texts or :class:`VideoPrompt` objects; class models take their class text, continuation models frames."""
        if negative and any(n for n in negative):
            raise ValueError(f"{self.name} has a fixed null condition and takes no negative prompt")
        items = as_prompts(prompts)
        data: dict[str, Any] = {}
        if self.net.config.hybrid:
            data["no_text"] = torch.tensor([not item.text for item in items], device=self.device)
            data["text"] = torch.stack([self._text(item.text) for item in items]).to(self.device)
        elif any(item.text for item in items):
            raise ValueError(f"{self.name} has no text condition; give frames only")
        data["given"] = self.given_codes(items)
        return self.conditioning(data, len(items))

    def conditioning(self, data: dict[str, Any], batch: int) -> Conditioning:
        """Conditioning from ready tensors: ``text`` int64 [B, c], ``no_text`` bool [B], ``given`` codes int64 [B, K]."""
        guided = self.net.config.hybrid and self.net.config.cond_drop > 0
        return Conditioning(batch, data, has_uncond=guided)

    def dummy_conditioning(self, batch: int) -> Conditioning:
        cfg = self.net.config
        data: dict[str, Any] = {
            "given": torch.zeros(batch, self.given_tokens, dtype=torch.long, device=self.device)
        }
        if cfg.hybrid:
            data["text"] = torch.zeros(batch, cfg.cond_tokens, dtype=torch.long, device=self.device)
        return self.conditioning(data, batch)

    def _text(self, text: str | None) -> Tensor:
        cfg = self.net.config
        if not text:
            if cfg.cond_drop == 0:
                raise ValueError(f"{self.name} was trained with a text for every video: give one")
            return torch.zeros(cfg.cond_tokens, dtype=torch.long)
        if self._read_text is None:
            raise ValueError(f"{self.name} was loaded without a text tokenizer")
        return self._read_text(text)

    def prefill(self, cond: Conditioning, *, guidance: bool, window: int) -> tuple[DecodeState, ModelOutput]:
        cfg, data = self.net.config, cond.data
        branches = 2 if guidance else 1
        given, text, uncond = data["given"], data.get("text"), data.get("no_text")
        ids = input_ids(cfg, given, text, given.shape[1])
        if cfg.hybrid:
            uncond = (
                torch.zeros(cond.batch, dtype=torch.bool, device=ids.device) if uncond is None else uncond
            )
            if guidance:
                uncond = torch.cat([uncond, torch.ones_like(uncond)])
        ids = ids.repeat(branches, 1)
        rows, prefix = ids.shape
        capacity = prefix + self.layout.total + cfg.block + window
        state = DecodeState(
            batch=cond.batch,
            branches=branches,
            kv=self.net.empty_cache(rows, capacity),
            lengths=torch.zeros(cond.batch, dtype=torch.long, device=self.device),
            prefix=prefix,
            prefix_mask=torch.ones(rows, prefix, dtype=torch.bool, device=self.device),
            limit=prefix,
        )
        mask = block_mask(cfg, prefix, text).to(self.device)
        mask = mask.repeat(branches, 1, 1) if len(mask) > 1 else mask.expand(rows, -1, -1)
        slots = torch.arange(prefix, device=self.device).expand(rows, -1)
        x = self.net.embed(ids, uncond=uncond)
        last = slice(prefix - (cfg.block if given.shape[1] else 1), None)
        return state, self._output(state, self.net.forward_window(x, slots, mask, state.kv, prefix, last))

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        ids = proposal.tokens + self._shift
        if proposal.special is not None:
            ids = torch.where(proposal.special >= 0, proposal.special, ids)
        slots = state.prefix + addresses(state, proposal)
        if state.branches > 1:
            ids, slots = ids.repeat(state.branches, 1), slots.repeat(state.branches, 1)
        x = nn.functional.embedding(ids, self.net.tok_emb.weight)
        x = x + self.net.pos_emb[0, slots.clamp(max=self.net.config.positions - 1)]
        mask = None if proposal.full else window_mask(state, proposal)  # no prompt of these models is padded
        logits = self.net.forward_window(x, slots, mask, state.kv, state.limit, proposal.outputs)
        return self._output(state, logits)

    def _output(self, state: DecodeState, logits: Tensor) -> ModelOutput:
        if not self._joint:
            logits = logits[..., self._shift :]
        if state.branches == 1:
            return ModelOutput(logits)
        cond, uncond = logits.chunk(2)
        return ModelOutput(cond, uncond)

    def video_codes(self, codes: Tensor) -> Tensor:
        """Joint ids to video codes as the original program does: shifted, clamped to the video range."""
        cfg = self.net.config
        return (codes - cfg.video_shift).clamp(0, cfg.video_vocab - 1) if self._joint else codes
