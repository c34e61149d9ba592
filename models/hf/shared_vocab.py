"""Models whose image codes are ids of the language model's own vocabulary: the maps in and out, and the sliced head."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visacc.models.base import Layout
from visacc.models.hf.driver import HFImageModel


class SharedVocabularyModel(HFImageModel):
    """A model whose image codes are ids of its ordinary vocabulary (Emu3, Chameleon, GLM-Image).

    Args:
        ids: int64 [V], id of every code in any order (see :class:`visacc.models.hf.vocab.ImageVocab`).
    """

    def __init__(self, model: Any, layout: Layout, ids: Tensor, **kwargs: Any) -> None:
        super().__init__(model, layout, **kwargs)
        if len(ids) != layout.vocab:
            raise ValueError(f"the layout has {layout.vocab} codes, the vocabulary map {len(ids)}")
        self.code_ids = ids
        start = int(ids[0])
        consecutive = bool((ids == torch.arange(start, start + len(ids))).all())
        self._range = slice(start, start + len(ids)) if consecutive else None
        self._head_cache: tuple[Any, Tensor] | None = None
        self._tables: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def with_layout(self, layout: Layout) -> SharedVocabularyModel:
        """The same model drawing another layout."""
        other = copy.copy(self)
        other.layout, other._tables = layout, {}
        return other

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if device not in self._tables:
            forced = self.layout.forced_ids
            self._tables[device] = (self.code_ids.to(device), None if forced is None else forced.to(device))
        return self._tables[device]

    def to_ids(self, codes: Tensor, slots: Tensor) -> Tensor:
        """Model ids of codes [.., N] at slots [.., N]; a forced slot has its forced id whatever the code."""
        ids, forced = self._table(codes.device)
        found = ids[codes]
        if forced is None:
            return found
        grammar = forced[slots]
        return torch.where(grammar >= 0, grammar, found)

    def sequence_ids(self, sequence: Tensor) -> Tensor:
        """Generated codes [B, total] (code 0 in forced slots) -> the ids a language model would have
        written."""
        slots = torch.arange(self.layout.total, device=sequence.device)
        return self.to_ids(sequence, slots.expand_as(sequence))

    def embed_codes(self, codes: Tensor, slots: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(self.to_ids(codes, slots))

    def code_logits(self, hidden: Tensor) -> Tensor:
        head = self.lm_head
        if not self.slice_head or not _sliceable(head):
            return head(hidden)[..., self._columns(hidden.device)]
        assert isinstance(head, nn.Linear)
        weight = head.weight
        bias = None if head.bias is None else head.bias[self._columns(weight.device)]
        return F.linear(hidden.to(weight.device), self._head_rows(weight), bias)

    def _columns(self, device: torch.device) -> slice | Tensor:
        """Index of the image codes, in code order, among the vocabulary."""
        return self._table(device)[0] if self._range is None else self._range

    def _head_rows(self, weight: Tensor) -> Tensor:
        """Rows of the output head in code order: a view where the codes are consecutive ids, else a cached
        copy."""
        if self._range is not None:
            return weight[self._range]
        version = 0 if weight.is_inference() else weight._version
        key = (weight.data_ptr(), version, weight.dtype, weight.device)
        if self._head_cache is None or self._head_cache[0] != key:
            self._head_cache = (key, weight.detach()[self._columns(weight.device)])
        return self._head_cache[1]

    @property
    def lm_head(self) -> nn.Module:
        """Output projection from hidden states to vocabulary logits."""
        return self.model.lm_head


def _sliceable(head: nn.Module) -> bool:
    """An ordinary linear layer whose weight is at hand (not quantised, not offloaded)."""
    return (
        type(head) is nn.Linear
        and head.weight.is_floating_point()
        and not head.weight.is_meta
        and not hasattr(head, "_hf_hook")
    )
