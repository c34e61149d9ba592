"""Small parts of the transformers families: vocabularies, padding, sizes, the taming decoder."""

from __future__ import annotations

from pathlib import Path

import hf_tiny
import pytest
import torch

from visacc.models.hf.prompts import grid_of, left_pad, parse_size, stack_branches
from visacc.models.hf.taming import TamingDecoder, find_decoder
from visacc.models.hf.vocab import ImageVocab, chameleon_vocab, emu3_vocab


def test_vocabularies() -> None:
    shuffled = emu3_vocab({"<|visual token 000001|>": 7, "<|visual token 000000|>": 9, "<s>": 1})
    assert shuffled.ids == (9, 7)
    assert not shuffled.contiguous
    assert shuffled.codes(torch.tensor([7, 9, 1])).tolist() == [1, 0, -1]
    assert chameleon_vocab({"IMGIMGAZ": 4, "IMGIMGBZ": 5}).contiguous
    with pytest.raises(ValueError, match="without gaps"):
        emu3_vocab({"<|visual token 000002|>": 7})
    with pytest.raises(ValueError, match="share one"):
        ImageVocab((3, 3))


def test_padding_and_sizes() -> None:
    one, two = left_pad([[1, 2], [3]], 0), left_pad([[4, 5, 6], [7, 8]], 0)
    ids, mask = stack_branches([one, two], 0)
    assert ids.tolist() == [[0, 1, 2], [0, 0, 3], [4, 5, 6], [0, 7, 8]]
    assert mask.sum().item() == 8
    trimmed, _ = stack_branches([(one[0][1:], one[1][1:])], 0)
    assert trimmed.tolist() == [[3]]
    assert parse_size("512", (1, 1)) == (512, 512)
    assert parse_size("768×512", (1, 1)) == (768, 512)
    with pytest.raises(ValueError, match="nearest is 512x768"):
        grid_of((510, 770), (1, 1), 16, "X")


def test_taming_architecture_is_read_off_the_weights() -> None:
    decoder = hf_tiny.taming(20, 6, 3, levels=3)
    again = TamingDecoder.from_tensors(decoder.state_dict())
    assert again.config == decoder.config
    assert again.config.upsample == 4
    codes = torch.randint(0, 20, (2, 3, 5))
    assert torch.equal(again(codes), decoder(codes))
    assert again(codes).shape == (2, 3, 12, 20)
    with pytest.raises(ValueError, match=r"lack 'decoder.conv_in.weight'"):
        TamingDecoder.from_tensors({k: v for k, v in decoder.state_dict().items() if "conv_in" not in k})
    assert find_decoder(Path("/nonexistent")) == {}
