"""The embedded captioner: a tiny LLaVA (CLIP tower, two-layer projector, Llama) made of transformers' own
classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from visacc.models.assets_io import without_bars
from visacc.models.shapes.world import SIZE
from visacc.models.vlm.scenes import words

ASSETS = Path(__file__).parent / "assets" / "captioner"
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PATCH = 16
CHAT = (
    "{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id per word; anything else is ``<unk>``; every text begins with ``<s>``."""
    vocab = {word: i for i, word in enumerate((*SPECIALS, *words()))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> LlavaProcessor:
    half = [0.5, 0.5, 0.5]
    images = CLIPImageProcessor(
        size={"height": SIZE, "width": SIZE}, do_center_crop=False, image_mean=half, image_std=half
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=CHAT,
    )


def build_config() -> LlavaConfig:
    """0.4 M parameters: 3 vision layers of width 64 on 16x16 patches, 6 text layers of width 64."""
    size = -(-(len(SPECIALS) + len(words())) // 8) * 8
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
        projection_dim=64,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=SPECIALS.index("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(SIZE // PATCH) ** 2,
        tie_word_embeddings=False,
    )


def build_model() -> LlavaForConditionalGeneration:
    """The captioner with random weights."""
    model = LlavaForConditionalGeneration(build_config())
    model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = 1
    model.generation_config.eos_token_id = 2
    return model


def chat(prompt: str) -> str:
    """The text the processor takes for one image and a prompt (what the chat template gives)."""
    return f"user : <image> {prompt} assistant :"


def load_captioner(folder: str | Path = ASSETS) -> tuple[Any, Any]:
    """The trained captioner and its processor, in float32."""
    folder = Path(folder)
    if not (folder / "model.safetensors").exists():
        raise ValueError(f"no captioner weights in {folder}; scripts/train_captioner.py makes them")
    with without_bars():
        model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model, LlavaProcessor.from_pretrained(folder)
