"""The rules of ``model.generate``: laws, stop strings, streamers, ragged batches; against transformers itself."""

from __future__ import annotations

import functools
from threading import Thread
from typing import Any

import pytest
import torch
import transformers as tf
import vlm_tiny
from test_vlm_generate import GREEDY, drafter, tiny
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from visacc.speculate.api import speculate
from visacc.speculate.params import Laws, TextParams

VOCAB = vlm_tiny.VOCAB


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 1.1, "repetition_penalty": 1.2, "min_new_tokens": 4},
    ],
)
def test_laws_are_those_of_transformers(options: dict[str, Any]) -> None:
    """The law behind every token of a text equals what transformers' own processors make of the logits."""
    g = torch.Generator().manual_seed(4)
    prompt = torch.randint(3, VOCAB, (2, 6), generator=g)
    text = torch.randint(3, VOCAB, (2, 5), generator=g)
    logits = torch.randn(2, 5, VOCAB, generator=g) * 2
    params = TextParams(max_new_tokens=8, eos=(2,), **options)
    config = tf.GenerationConfig(
        do_sample=True, eos_token_id=2, pad_token_id=0, max_new_tokens=8, **{"top_k": 0, **options}
    )
    model = tiny("llava").model
    model._prepare_special_tokens(config, True, device="cpu")
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=6, encoder_input_ids=prompt, device="cpu"
    )
    laws = Laws(params, prompt, VOCAB)
    # a chain: node i is text[i], its law is for generated token i + 1
    seen = torch.ones(5, 5).tril().bool().expand(2, -1, -1)
    ours = laws(logits, text, seen, torch.arange(1, 6).expand(2, -1))
    for i in range(5):
        ids = torch.cat([prompt, text[:, : i + 1]], dim=1)
        theirs = processors(ids, logits[:, i].clone()).softmax(-1)
        torch.testing.assert_close(ours[:, i], theirs, atol=1e-6, rtol=1e-5)


def ragged(name: str) -> dict[str, Tensor]:
    """A batch of a row with two pictures and a shorter one without any."""
    case = tiny(name)
    ids = case.inputs["input_ids"]
    long = torch.cat([ids[0], ids[1][case.inputs["attention_mask"][1].bool()]])
    text = torch.tensor([5, 9, 30, 12, 44])
    rows = torch.zeros(2, len(long), dtype=torch.int64)
    mask = torch.zeros_like(rows)
    rows[0], mask[0] = long, 1
    rows[1, -len(text) :], mask[1, -len(text) :] = text, 1
    inputs: dict[str, Tensor] = {"input_ids": rows, "attention_mask": mask}
    inputs |= {k: v for k, v in case.inputs.items() if k not in ("input_ids", "attention_mask")}
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in inputs:
            inputs[key] = (rows == vlm_tiny.IMAGE).long()
    if name in ("idefics3", "smolvlm"):  # pictures of a row lie along axis 1, rows without any hold zeros
        pixels = torch.stack([inputs["pixel_values"][:, 0], torch.zeros_like(inputs["pixel_values"][:, 0])])
        inputs["pixel_values"] = pixels
        inputs["pixel_attention_mask"] = torch.ones(2, 2, *pixels.shape[-2:], dtype=torch.int64)
    return inputs


def letters() -> Any:
    """A tokenizer with one character per token."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(33 + i): i for i in range(3, VOCAB)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def test_stop_strings_need_a_tokenizer() -> None:
    case = tiny("llava")
    with pytest.raises(ValueError, match=r"pass tokenizer=processor\.tokenizer"):
        speculate(case.model, "ngram").generate(**case.inputs, **GREEDY, stop_strings=["a"])


@functools.cache
def alone(name: str) -> Tensor:
    """What ``generate`` says to the two-picture row on its own."""
    inputs = ragged(name)
    row = {k: v[:1] for k, v in inputs.items() if k in ("input_ids", "attention_mask") or "type_ids" in k}
    pixels = {k: v for k, v in inputs.items() if k not in row}
    if name in ("idefics3", "smolvlm"):
        pixels = {k: v[:1] for k, v in pixels.items()}
    return tiny(name).model.generate(**row, **pixels, **GREEDY)[0, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", list(vlm_tiny.FAMILIES))
def test_ragged_batches(name: str) -> None:
    """Several pictures in one row, none in the other: the text of ``generate`` for every family."""
    case, inputs = tiny(name), ragged(name)
    width = inputs["input_ids"].shape[1]
    text = inputs["attention_mask"][1].bool()
    bare = {"input_ids": inputs["input_ids"][1:, text], "attention_mask": inputs["attention_mask"][1:, text]}
    if "token_type_ids" in inputs:
        bare["token_type_ids"] = torch.zeros_like(bare["input_ids"])
    words = case.model.generate(**bare, **GREEDY)[0, int(text.sum()) :]
    for method in ("ngram", "msd", "dream", "vispec"):
        speculator = speculate(case.model, drafter(method))
        out = speculator.generate(**inputs, **GREEDY)[:, width:]
        assert torch.equal(out[0, : len(alone(name))], alone(name)), method
        assert torch.equal(out[1, : len(words)], words), method


def test_stop_strings_of_generate() -> None:
    """``stop_strings`` with a tokenizer, as ``generate`` takes them."""
    tokenizer = letters()
    case = tiny("llava")
    row = {k: v[:1] for k, v in case.inputs.items() if k not in case.images(0)} | case.images(0)
    width = row["input_ids"].shape[1]
    text = tokenizer.decode(case.model.generate(**row, **GREEDY)[0, width:])
    at = next(i for i in range(4, len(text)) if text.index(text[i - 1 : i + 1]) == i - 1)
    options = {**GREEDY, "stop_strings": [text[at - 1 : at + 1]], "tokenizer": tokenizer}
    expected = case.model.generate(**row, **options)
    assert expected.shape[1] == width + at + 1
    config = tf.GenerationConfig(
        **case.model.generation_config.to_dict() | {k: v for k, v in options.items() if k != "tokenizer"}
    )
    for method in ("ngram", "msd", "flash"):
        made = speculate(case.model, drafter(method))
        assert torch.equal(made.generate(**row, generation_config=config, tokenizer=tokenizer), expected), (
            method
        )
        assert torch.equal(speculate(case.model, drafter(method)).generate(**row, **options), expected), (
            method
        )


def test_text_streamer() -> None:
    """transformers' ``TextIteratorStreamer`` receives the text in order, in pieces."""
    tokenizer = letters()
    case = tiny("llava")
    row = {k: v[:1] for k, v in case.inputs.items() if k not in case.images(0)} | case.images(0)
    streamer = tf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    speculator = speculate(case.model, drafter("msd"))
    worker = Thread(target=speculator.generate, kwargs={**row, **GREEDY, "streamer": streamer})
    worker.start()
    pieces = list(streamer)
    worker.join()
    ids = case.model.generate(**row, **GREEDY)[0, row["input_ids"].shape[1] :]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces) > 2
