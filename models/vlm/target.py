"""Vision-language targets: the prompt by the model's own forward, token trees by its text model.

Nothing of the model is patched. Positions and masks are always explicit (transformers' defaults are silently
wrong for trees), features come from hooks that exist only while a forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visacc.cache import move_slots, window_mask
from visacc.models.base import DecodeState, Proposal
from visacc.models.vlm.families import complete_inputs, family_of, image_numbers, visual_mask
from visacc.models.vlm.received import received
from visacc.models.vlm.slots import SlotCache
from visacc.speculate.views import PromptView, TargetFeatures


@dataclass
class Prefilled:
    """Outcome of a prefill: the decode state, what drafters see, and float32 logits [B, V] of the first
    token.
    """

    state: DecodeState
    view: PromptView
    feats: TargetFeatures
    logits: Tensor


class VLMTarget:
    """Adapter around one transformers vision-language model.

    Args:
        model: a ``...ForConditionalGeneration`` of a supported family.
        taps: layers whose inputs drafters want (``hidden_states[i]``).
        score: also measure the attention every prompt position receives in the last layer (``PromptView.visual_score``).
    """

    def __init__(self, model: Any, taps: tuple[int, ...] = (), *, score: bool = False) -> None:
        self.family = family_of(model.config)
        self.model, self.config = model, model.config
        self.text: Any = model.get_decoder()
        self.text_config = self.config.get_text_config()
        self.layers = self.text.layers
        bad = [i for i in taps if not 0 <= i < len(self.layers)]
        if bad:
            raise ValueError(f"taps {bad} are no layers of a text model with {len(self.layers)} layers")
        self.taps, self.score = taps, score
        self.head: nn.Module = model.get_output_embeddings()
        self._embedding: nn.Module = model.get_input_embeddings()
        named = inspect.signature(self.text.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    # ------------------------------------------------------------------ facts

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device  # type: ignore[return-value, union-attr]

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])  # type: ignore[union-attr, index]

    @property
    def context(self) -> int:
        """Longest sequence the text model has positions for."""
        return int(getattr(self.text_config, "max_position_embeddings", 0) or 2**31)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings as they enter the first layer (Gemma's scale included)."""
        return self._embedding(tokens)

    def logits(self, features: Tensor) -> Tensor:
        """Post-norm features [..., D] -> logits [..., V] in the model's dtype."""
        logits = self.head(features)
        cap = getattr(self.text_config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def describe(self) -> dict[str, Any]:
        """What a drafter records about its target."""
        return {
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "layers": len(self.layers),
        }

    # ------------------------------------------------------------------ forwards

    def prefill(self, inputs: Mapping[str, Any], *, room: int) -> Prefilled:
        """Run the prompts through the model's own forward: features of every position, logits of the last one.

        Args:
            inputs: what the processor returns (left-padded).
            room: cache slots to keep behind the prompt (new tokens plus the largest tree).

        Raises:
            ValueError: inputs the family cannot take, image features that do not fit the placeholders, a
                prompt that leaves no room in the model's context.
        """
        done = complete_inputs(self.family, self.config, inputs)
        done = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in done.items()}
        ids, mask = done["input_ids"], done["attention_mask"].bool()
        batch, width = ids.shape
        longest = int(mask.sum(1).max())
        if longest >= self.context:
            raise ValueError(
                f"the prompt has {longest} positions (images expanded) but the model's context is {self.context}"
            )
        text_pos = (mask.long().cumsum(1) - 1).clamp(min=0)
        rope_pos, delta = self._mrope(done, text_pos)
        positions = text_pos if rope_pos is None else torch.cat([text_pos[None], rope_pos])
        cache = SlotCache(len(self.layers), width + room)
        self._check_images(done)
        done.pop("position_ids", None)
        with self._watch() as seen, self._received(mask) as scores:
            self.model(
                **done,
                position_ids=positions,
                **{self._cache_argument: cache},
                use_cache=True,
                logits_to_keep=1,
            )
        feats = TargetFeatures(seen["last"], {i: seen[i] for i in self.taps})
        visual = visual_mask(self.config, ids) & mask
        view = PromptView.build(
            ids, seen["embeds"], visual, image_numbers(self.config, done, visual), mask, rope_pos
        )
        view.visual_score = scores[0] if scores else None
        assert cache.kv is not None
        state = DecodeState(
            batch,
            1,
            cache.kv,
            torch.zeros(batch, dtype=torch.int64, device=ids.device),
            width,
            mask,
            width,
            {"next_pos": mask.sum(1) + delta, "pad": width - mask.sum(1)},
        )
        return Prefilled(state, view, feats, self.logits(feats.last[:, -1]).float())

    def step(self, state: DecodeState, proposal: Proposal) -> tuple[Tensor, TargetFeatures]:
        """One forward of a tree: logits float32 [B, T, V] and features [B, T, D] of its nodes.

        ``proposal.positions`` holds node depths (root 0); ``visible`` says which nodes are ancestors-or-self.
        ``state.limit`` must cover the addresses the nodes are written to.
        """
        cache = SlotCache(len(self.layers), state.kv.shape[4])
        cache.kv, cache.limit = state.kv, state.limit
        start = state.prefix + state.lengths[:, None]
        cache.address = start + torch.arange(proposal.size, device=start.device)
        # rows that are finished may point beyond what is read
        cache.address = cache.address.clamp(max=state.limit - 1)
        embeds = self.embed(proposal.tokens)
        depth = proposal.positions
        positions = state.extra["next_pos"][:, None] + state.lengths[:, None] + depth
        with self._watch() as seen:
            self.text(
                inputs_embeds=embeds,
                attention_mask=self._masks(state, proposal, embeds.dtype),
                position_ids=positions,
                **{self._cache_argument: cache},
                use_cache=True,
            )
        feats = TargetFeatures(seen["last"], {i: seen[i] for i in self.taps})
        return self.logits(feats.last).float(), feats

    def commit(self, state: DecodeState, path: Tensor, n: Tensor) -> None:
        """Keep the K/V of the first ``n`` [B] nodes of ``path`` int64 [B, A], in order."""
        move_slots(state, n, path)
        state.lengths = state.lengths + n

    # ------------------------------------------------------------------ details

    def _mrope(self, done: Mapping[str, Any], text_pos: Tensor) -> tuple[Tensor | None, Tensor]:
        """Grid positions int64 [3, B, N] and the request's rope delta int64 [B] (``None``, 0 without
        M-RoPE).
        """
        zero = torch.zeros(text_pos.shape[0], dtype=torch.int64, device=text_pos.device)
        if not self.family.mrope:
            return None, zero
        given = done.get("position_ids")
        mask = done["attention_mask"].bool()
        if given is not None:  # transformers' generate computes them and then drops the grids
            return given[-3:], _rope_delta(given[-3:], mask)
        if done.get("image_grid_thw") is None and done.get("video_grid_thw") is None:
            return text_pos.expand(3, -1, -1).clone(), zero
        index = self.model.model.get_rope_index
        named = inspect.signature(index).parameters
        pos, _ = index(**{k: v for k, v in done.items() if k in named})
        return pos, _rope_delta(pos, mask)

    def _check_images(self, done: Mapping[str, Any]) -> None:
        visual = bool(visual_mask(self.config, done["input_ids"]).any())
        named = ("pixel_values", "pixel_values_videos")
        pixels = any(done.get(name) is not None for name in named) or bool(done.get("mm_encoder_outputs"))
        if visual and not pixels:
            raise ValueError("the prompt contains image placeholders but no pixel_values were given")
        if pixels and not visual:
            raise ValueError("pixel_values were given but the prompt contains no image placeholder")

    def _masks(self, state: DecodeState, proposal: Proposal, dtype: torch.dtype) -> Any:
        """Additive masks [B, 1, T, limit], one or by layer type."""
        seen = window_mask(state, proposal)
        window = getattr(self.text_config, "sliding_window", None)
        types = getattr(self.text_config, "layer_types", None)
        if not self.family.masks_by_layer:
            if window is not None:
                seen = seen & self._near(state, proposal, window)
            return _additive(seen, dtype)
        kinds = set(types or ["full_attention"])
        masks = {"full_attention": _additive(seen, dtype)}
        if "sliding_attention" in kinds:
            assert window is not None
            masks["sliding_attention"] = _additive(seen & self._near(state, proposal, window), dtype)
        return masks

    @staticmethod
    def _near(state: DecodeState, proposal: Proposal, window: int) -> Tensor:
        """bool [B, T, limit]: keys within the window, counted in tokens along the path, not in slots."""
        slot = torch.arange(state.limit, device=state.device)
        start = (state.prefix + state.lengths)[:, None]
        index = start + proposal.positions  # path index of each node, in slot units
        nodes = (start + torch.arange(proposal.size, device=start.device)).clamp(max=state.limit - 1)
        key = slot.expand(state.batch, -1).scatter(1, nodes, index)
        return key[:, None] > index[..., None] - window

    def _received(self, mask: Tensor) -> AbstractContextManager[list[Tensor]]:
        return received(self.layers[-1].self_attn, mask) if self.score else nullcontext([])

    @contextmanager
    def _watch(self) -> Iterator[dict[Any, Tensor]]:
        """Collect merged embeddings, tapped layer inputs and the last hidden state of one forward."""
        seen: dict[Any, Tensor] = {}

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["embeds"] = kwargs["inputs_embeds"].detach()

        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            seen["last"] = out.last_hidden_state.detach()

        def tap(i: int) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[i] = (args[0] if args else kwargs["hidden_states"]).detach()

            return hook

        handles = [
            self.text.register_forward_pre_hook(before, with_kwargs=True),
            self.text.register_forward_hook(after, with_kwargs=True),
            *(self.layers[i].register_forward_pre_hook(tap(i), with_kwargs=True) for i in self.taps),
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


def _rope_delta(positions: Tensor, mask: Tensor) -> Tensor:
    """int64 [B]: next position minus the number of tokens, from grid positions [3, B, N].

    transformers' own number counts the padding in some releases (5.0) and not in others.
    """
    return torch.where(mask, positions.amax(0), -1).amax(1) + 1 - mask.sum(1)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [B, T, S] -> 0 / most negative [B, 1, T, S]: right for eager and sdpa alike."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
