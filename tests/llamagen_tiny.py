"""Small LlamaGen parts with random weights: GPT, tokenizer, text encoder."""

from __future__ import annotations

from pathlib import Path

import torch

from visacc.models.llamagen import (
    GPT,
    GPTConfig,
    VQConfig,
    VQModel,
)

CODES, LENGTH, WIDTH = 48, 8, 16


def gpt_config(kind: str = "t2i", **overrides: object) -> GPTConfig:
    options: dict[str, object] = {
        "dim": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": CODES,
        "block_size": 16,
        "multiple_of": 16,
        "model_type": kind,
        "num_classes": 5,
        "caption_dim": WIDTH,
        "cls_token_num": LENGTH if kind == "t2i" else 1,
        "uncond_rows": LENGTH,
    }
    return GPTConfig(**(options | overrides))  # type: ignore[arg-type]


def make_gpt(kind: str = "t2i", **overrides: object) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(gpt_config(kind, **overrides))
    torch.nn.init.normal_(gpt.output.weight, std=0.3)
    return gpt.eval()


def make_vq() -> VQModel:
    torch.manual_seed(1)
    return VQModel(
        VQConfig(ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=8, codebook_size=CODES)
    ).eval()


def make_text(folder: Path) -> None:
    """A tiny T5 encoder with a word tokenizer, in the formats of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "circle", "square"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(2)
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    encoder = T5EncoderModel(T5Config(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
    tokenizer.save_pretrained(folder)
    encoder.save_pretrained(folder)
