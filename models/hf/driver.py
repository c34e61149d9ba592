"""The shared driver: one transformers causal language model that draws, run with our cache, masks and
positions.

A family (Janus, Emu3, ...) adds what is its own: the prompt, the unconditional row, how a code becomes an
input vector, the output head, the structure tokens of the layout and the pixel decoder. The model itself is
used as it is: nothing is patched, every forward gets an explicit 4-D mask, explicit positions and our cache
object.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visacc.cache import addresses, allocate, window_mask
from visacc.kernels import pack_bits
from visacc.models.base import (
    Conditioning,
    DecodeState,
    ImageModel,
    LayerStack,
    Layout,
    ModelOutput,
    Proposal,
)
from visacc.models.compiling import compiled, kept, refuse_hooks
from visacc.models.hf import attention
from visacc.models.hf.cache import cache_keyword, cache_shape, slot_cache
from visacc.models.hf.prompts import as_list, is_ids, left_pad, stack_branches


class HFImageModel(ImageModel):
    """Base of the transformers adapters.

    Args:
        model: the transformers model, already in the wanted dtype and on its device(s); put into eval mode.
        layout: slots of the requested picture.
        tokenizer: turns text prompts into ids; without it prompts must be given as ids.
        positions: ``"cumsum"`` numbers the real tokens of each row (the same picture alone and in any batch);
            ``"slot"`` numbers the slots from the left edge of the padded row (what transformers' Janus loop
            does). Both are the same function (RoPE is relative) up to rounding.
        slice_head: compute the logits of the image codes only. Quantised heads are never sliced.

    A prompt may be given as token ids instead of text: then it is the complete conditional prefix, headers
    included.
    """

    provides: frozenset[str] = frozenset({"grid", "tree_mask", "hidden", "codebook"})
    family: str = ""
    pixel_rule = "floor"  # the programs of Janus, Chameleon, Lumina-mGPT, Emu3 and Emu3.5 agree on this

    def __init__(
        self,
        model: Any,
        layout: Layout,
        *,
        tokenizer: Any = None,
        positions: str = "cumsum",
        slice_head: bool = True,
    ) -> None:
        if positions not in ("cumsum", "slot"):
            raise ValueError(f"positions must be 'cumsum' or 'slot', got {positions!r}")
        self.model, self.layout, self.tokenizer = model.eval(), layout, tokenizer
        self.positions, self.slice_head = positions, slice_head
        self.name = f"{self.family} ({type(model).__name__})"
        self.settings: dict[str, Any] = {}
        self._float_copy: tuple[Any, nn.Module] | None = None
        self._compiled: Any = None
        attention.check_implementation(self.attention_implementation)
        self.feature_size = self.text_config.hidden_size
        self._cache_key = cache_keyword(type(self.text_model).forward)

    def _lacks_codebook(self) -> None:
        """No trained code vectors here: decoders that need them must refuse."""
        self.provides = self.provides - {"codebook"}

    # -- what a family defines ---------------------------------------------------------------------

    @property
    @abstractmethod
    def text_model(self) -> Any:
        """The decoder stack: ids or embeddings in, last hidden state out."""

    @property
    @abstractmethod
    def pad(self) -> int:
        """Id used for padding (its value never matters, only that it is in the vocabulary)."""

    @abstractmethod
    def prompt_ids(self, text: str) -> list[int]:
        """Complete conditional prefix of a text prompt."""

    @abstractmethod
    def uncond_ids(self, prompt: list[int], negative: str | None) -> list[int]:
        """Complete unconditional prefix that goes with the conditional prefix ``prompt``."""

    @abstractmethod
    def embed_codes(self, codes: Tensor, slots: Tensor) -> Tensor:
        """Codes [rows, N] at slots [rows, N] -> input vectors [rows, N, D] (forced slots: of the forced
        id)."""

    @abstractmethod
    def code_logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states [rows, N, D] -> logits [rows, N, V] in code space, model dtype."""

    @abstractmethod
    def pixels(self, codes: Tensor) -> Tensor:
        """Codes [B, H, W] -> the pixel decoder's output [B, 3, H', W'], nominally in [-1, 1], not clipped."""

    # -- facts -------------------------------------------------------------------------------------

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The family's sampling defaults, with what the checkpoint states on top."""
        return self.settings

    @property
    def module(self) -> nn.Module:
        return self.model

    @property
    def text_config(self) -> Any:
        return self.text_model.config

    @property
    def attention_implementation(self) -> str | None:
        return self.text_config._attn_implementation

    @property
    def device(self) -> torch.device:
        """Device the prompt goes to: that of the embedding, or where accelerate runs it when it is
        offloaded."""
        embedding = self.model.get_input_embeddings()
        hook = getattr(embedding, "_hf_hook", None)
        execution = getattr(hook, "execution_device", None)
        return embedding.weight.device if execution is None else torch.device(execution)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def context_length(self) -> int | None:
        return getattr(self.text_config, "max_position_embeddings", None)

    @property
    def vocab_limit(self) -> int:
        """Number of ids the input embedding knows."""
        return self.model.get_input_embeddings().weight.shape[0]

    # -- prompts -----------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[Any], negative: Sequence[Any] | None = None) -> Conditioning:
        """Prompts as text or as complete id prefixes (see the class); ``negative`` likewise, one per prompt.

        Raises:
            ValueError: text without a tokenizer, unknown ids, or a prompt that leaves no room for the
                picture.
        """
        if negative is not None and len(negative) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many negative prompts, got {len(negative)}")
        rows = [self._ids(p) for p in prompts]
        negatives = [None] * len(prompts) if negative is None else negative
        free = [self._uncond(row, n) for row, n in zip(rows, negatives, strict=True)]
        for row in (*rows, *free):
            self._check_ids(row)
        ids, mask = left_pad(rows, self.pad)
        uncond_ids, uncond_mask = left_pad(free, self.pad)
        data = {"ids": ids, "mask": mask, "uncond_ids": uncond_ids, "uncond_mask": uncond_mask}
        return Conditioning(len(rows), {k: v.to(self.device) for k, v in data.items()})

    def _ids(self, prompt: Any) -> list[int]:
        if is_ids(prompt):
            return as_list(prompt)
        if not isinstance(prompt, str):
            raise ValueError(
                f"{self.name} takes text prompts (or lists of token ids), got {prompt!r} of type"
                f" {type(prompt).__name__}"
            )
        return self.prompt_ids(prompt)

    def _uncond(self, prompt: list[int], negative: Any) -> list[int]:
        if negative is not None and is_ids(negative):
            return as_list(negative)
        if negative is not None and not isinstance(negative, str):
            raise ValueError(f"a negative prompt must be text (or a list of token ids), got {negative!r}")
        return self.uncond_ids(prompt, negative)

    def _check_ids(self, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.vocab_limit:
            raise ValueError(f"prompt ids must lie in 0..{self.vocab_limit - 1}, got {min(ids)}..{max(ids)}")
        room = self.context_length
        if room is not None and len(ids) + self.layout.total > room:
            left = room - self.layout.total
            advice = f"shorten the prompt to {left} tokens" if left > 0 else "ask for a smaller picture"
            raise ValueError(
                f"a prompt of {len(ids)} tokens and a picture of {self.layout.total} do not fit into the"
                " context of"
                f" {self.name}, {room} tokens: {advice}"
            )

    def dummy_conditioning(self, batch: int) -> Conditioning:
        return self.encode([[self.pad] * 8] * batch)

    def text_ids(self, text: str) -> list[int]:
        """Ids of plain text without special tokens around it."""
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} was loaded without a tokenizer, so it takes prompts as token ids only; put the"
                " tokenizer"
                " files (tokenizer.json, tokenizer_config.json) beside the weights, or pass tokenizer="
            )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # -- forwards ----------------------------------------------------------------------------------

    def prefill(
        self, cond: Conditioning, *, guidance: bool, window: int, hidden: bool = False
    ) -> tuple[DecodeState, ModelOutput]:
        """Run the prompts. With guidance the rows are all conditional ones, then all unconditional ones."""
        branches = [(cond.data["ids"], cond.data["mask"])]
        if guidance:
            branches.append((cond.data["uncond_ids"], cond.data["uncond_mask"]))
        ids, mask = stack_branches(branches, self.pad)
        rows, prompt = ids.shape
        layers, heads, dim = cache_shape(self.text_config)
        capacity = prompt + self.layout.total + window
        kv = allocate(layers, rows, heads, capacity, dim, dtype=self.dtype, device=self.device)
        state = DecodeState(
            batch=cond.batch,
            branches=len(branches),
            kv=kv,
            lengths=torch.zeros(cond.batch, dtype=torch.long, device=self.device),
            prefix=prompt,
            prefix_mask=mask,
            limit=prompt,
        )
        own = mask.long().sum(1)
        state.extra["prompt_ids"] = ids
        state.extra["base"] = own if self.positions == "cumsum" else torch.full_like(own, prompt)
        order = torch.arange(prompt, device=mask.device)
        numbers = (
            (mask.long().cumsum(1) - 1).clamp(min=0) if self.positions == "cumsum" else order.expand(rows, -1)
        )
        # every query sees itself, so that padding rows are no empty softmax
        visible = (mask[:, None] & (order[:, None] >= order)) | torch.eye(
            prompt, dtype=torch.bool, device=mask.device
        )
        features = self._run(
            state,
            self.model.get_input_embeddings()(ids),
            attention.as_mask(visible, self.attention_implementation, self.dtype),
            self.prompt_positions(numbers),
            slots=None,
            limit=prompt,
        )
        return state, self._output(state, features[:, -1:], features if hidden else None)

    def stack(self) -> LayerStack:
        refuse_hooks(self.model, self.name, "sharded")
        return LayerStack(self.text_model, self.text_model.layers)

    def compile(self) -> None:
        refuse_hooks(self.model, self.name, "compiled")
        if self.attention_implementation == attention.TREE:
            raise ValueError(
                f"attn_implementation={attention.TREE!r} brings its own kernels and cannot be compiled; load {self.name}"
                " with attn_implementation='sdpa'"
            )
        self._compiled = compiled(self.text_model, self.device, whole=False)
        self.static_shapes = True

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        """One forward of all nodes of all rows: codes in, logits [B, N, V] per branch out."""
        if proposal.special is not None:
            raise ValueError(f"{self.name} has no special input vectors; its decoder must propose codes only")
        codes, slots = proposal.tokens, proposal.positions
        at = state.prefix + addresses(state, proposal)
        if state.branches > 1:
            codes, slots, at = (t.repeat(state.branches, 1) for t in (codes, slots, at))
        extra: dict[str, Any] = {}
        compact = proposal.address is None and proposal.context is None
        if self.attention_implementation == attention.TREE and compact:
            extra["visacc_shape"] = self._shape(state, proposal)
            mask = state.prefix_mask.new_ones(
                1, 1, 1, 1
            )  # any 4-D mask keeps transformers from building its own
        else:
            mask = attention.as_mask(window_mask(state, proposal), self.attention_implementation, self.dtype)
        features = self._run(
            state,
            self.embed_codes(codes, slots),
            mask,
            self.slot_positions(state, slots),
            slots=at,
            limit=state.limit,
            **extra,
        )
        return self._output(state, proposal.take(features), features if hidden else None)

    def _run(
        self,
        state: DecodeState,
        embeddings: Tensor,
        mask: Tensor,
        positions: Tensor,
        *,
        slots: Tensor | None,
        limit: int,
        **extra: Any,
    ) -> Tensor:
        """Last hidden states [rows, N, D]; K/V of the new tokens land in the cache."""
        static = self._compiled is not None and limit == state.kv.shape[4]
        result = (self._compiled if static else self.text_model)(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_key: slot_cache(state.kv, slots, limit, static=static)},
            **extra,
        )
        features: Tensor = result.last_hidden_state
        return kept(features) if static else features

    def head(self, hidden: Tensor) -> Tensor:
        """Features [..., D] of the last layer -> logits float32 [..., V] in code space."""
        return self.code_logits(hidden).to(self.device, torch.float32)

    def _output(self, state: DecodeState, features: Tensor, hidden: Tensor | None) -> ModelOutput:
        logits = self.head(features)
        uncond = logits[state.batch :] if state.branches > 1 else None
        return ModelOutput(logits[: state.batch], uncond, hidden)

    def _shape(self, state: DecodeState, proposal: Proposal) -> attention.TreeShape:
        visible, end = proposal.visible, state.prefix + state.lengths
        depth = proposal.positions - proposal.positions[:, :1]
        if state.branches > 1:
            end, depth = end.repeat(state.branches), depth.repeat(state.branches, 1)
            visible = None if visible is None else visible.repeat(state.branches, 1, 1)
        start = state.prefix - state.prefix_mask.long().sum(1)
        return attention.TreeShape(start, end, None if visible is None else pack_bits(visible), depth)

    def prompt_positions(self, numbers: Tensor) -> Tensor:
        """Position ids of the prompt from the token numbers [rows, P] of each row."""
        return numbers

    def slot_positions(self, state: DecodeState, slots: Tensor) -> Tensor:
        """Position ids of generated slots [rows, N]."""
        return state.extra["base"][:, None] + slots

    def to(self, *args: Any, **kwargs: Any) -> HFImageModel:
        """Move the model, as ``nn.Module.to``."""
        self.model.to(*args, **kwargs)
        return self

    # -- pixels ------------------------------------------------------------------------------------

    def float_module(self, module: nn.Module) -> Any:
        """The module in float32: itself where it is, else a copy kept for later calls.

        Pixel decoders run in float32 whatever the language model runs in: bfloat16 moves pixels by grey
        levels.
        """
        tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        if any(t.is_meta for t in tensors) or all(t.dtype == torch.float32 for t in tensors):
            return module
        key = (id(module), tensors[0].device)
        if self._float_copy is None or self._float_copy[0] != key:
            self._float_copy = (key, copy.deepcopy(module).float())
        return self._float_copy[1]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, 1, H, W] -> pixels [B, 3, H', W'] in [0, 1]."""
        return ((self.pixels(codes[:, 0]).float() + 1) / 2).clamp(0, 1)
