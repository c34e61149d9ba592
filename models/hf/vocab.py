"""Image codes inside a language model's vocabulary. The map is read from names, never assumed to be "id
minus offset"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageVocab:
    """Model ids of the image codes: ``ids[c]`` is the id of code ``c``."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("two image codes share one vocabulary id")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def contiguous(self) -> bool:
        """Whether code c has id ``ids[0] + c``."""
        return self.ids == tuple(range(self.ids[0], self.ids[0] + len(self.ids)))

    def tensor(self) -> Tensor:
        """int64 [V]: id of every code."""
        return torch.tensor(self.ids, dtype=torch.long)

    def codes(self, ids: Tensor) -> Tensor:
        """Model ids -> codes, -1 where an id is no image code."""
        table = torch.full((max(max(self.ids), int(ids.max())) + 1,), -1, dtype=torch.long)
        table[self.tensor()] = torch.arange(len(self.ids))
        return table.to(ids.device)[ids]


def from_names(names: Mapping[int, int], what: str) -> ImageVocab:
    """Vocabulary from ``{code: id}``; every code 0..V-1 must be there."""
    if sorted(names) != list(range(len(names))) or not names:
        raise ValueError(
            f"{what} does not name the image codes 0..V-1 without gaps (it names {len(names)} codes)"
        )
    return ImageVocab(tuple(names[c] for c in range(len(names))))


def emu3_vocab(vocabulary_map: Mapping[str, int]) -> ImageVocab:
    """Codes named ``<|visual token 000123|>``."""
    found = ((re.fullmatch(r"<\|visual token (\d+)\|>", name), i) for name, i in vocabulary_map.items())
    return from_names({int(m[1]): i for m, i in found if m}, "vocabulary_map")


def chameleon_vocab(vocabulary_map: Mapping[str, int]) -> ImageVocab:
    """Codes named ``IMGIMG`` + digits written as letters A..J + ``Z``."""
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    found = ((re.fullmatch(r"IMGIMG([A-J]+)Z", name), i) for name, i in vocabulary_map.items())
    return from_names({int(m[1].translate(digits)): i for m, i in found if m}, "vocabulary_map")


def token_id(vocabulary_map: Mapping[str, int], name: str, tokenizer: object | None = None) -> int:
    """Id of a named token, from the map or else the tokenizer.

    Raises:
        ValueError: neither knows it.
    """
    if name in vocabulary_map:
        return vocabulary_map[name]
    known = tokenizer.get_vocab() if tokenizer is not None and hasattr(tokenizer, "get_vocab") else {}
    if name in known:
        return known[name]
    raise ValueError(
        f"the checkpoint's vocabulary has no token {name!r}; it does not look like a model of this family"
    )
