"""Text side of the shapes model: a word-level tokenizer and a tiny T5 encoder, in transformers' own formats."""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from visacc.models.shapes.captions import vocabulary

SPECIALS = ("<pad>", "</s>", "<unk>")
MAX_WORDS = 20
D_MODEL = 96


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id per word of the world's vocabulary; anything else is <unk>; </s> ends every text."""
    vocab = {word: i for i, word in enumerate((*SPECIALS, *vocabulary()))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_WORDS,
        padding_side="right",
    )


def build_encoder() -> T5EncoderModel:
    """T5 encoder, 2 layers, width 96, randomly initialised."""
    size = -(-(len(SPECIALS) + len(vocabulary())) // 8) * 8
    config = T5Config(
        vocab_size=size,
        d_model=D_MODEL,
        d_kv=24,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=MAX_WORDS,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return T5EncoderModel(config)


def tokenize(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Word ids and mask int64 [B, MAX_WORDS], padded on the right."""
    out = tokenizer(
        captions, padding="max_length", truncation=True, max_length=MAX_WORDS, return_tensors="pt"
    )
    return out["input_ids"], out["attention_mask"]
