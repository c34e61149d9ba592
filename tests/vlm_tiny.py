"""Tiny random vision-language models of every supported family, with two-prompt batches (left padding)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

VOCAB = 96
IMAGE = 90
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Tiny:
    """A model and a processor-like batch of two prompts, the second one shorter."""

    name: str
    model: Any
    inputs: dict[str, Tensor]

    def full_logits(self, row: int, ids: Tensor) -> Tensor:
        """Logits [n, V] behind each of the ``ids`` appended to prompt ``row``, by an uncached full
        forward.
        """
        start = int((self.inputs["attention_mask"][row] == 0).sum())
        prompt = self.inputs["input_ids"][row : row + 1, start:]
        both = torch.cat([prompt, ids[None]], dim=1)
        given: dict[str, Any] = {"input_ids": both, "attention_mask": torch.ones_like(both)}
        given.update(self.images(row))
        if "token_type_ids" in self.inputs:
            given["token_type_ids"] = (both == IMAGE).long()
        if "mm_token_type_ids" in self.inputs:
            given["mm_token_type_ids"] = (both == IMAGE).long()
        with torch.no_grad():
            return self.model(**given, use_cache=False).logits[0, prompt.shape[1] - 1 :].float()

    def images(self, row: int) -> dict[str, Tensor]:
        result = {}
        for key in ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask"):
            if key in self.inputs:
                value = self.inputs[key]
                half = value.shape[0] // 2
                result[key] = value[row * half : (row + 1) * half]
        return result


def prompts(tokens: int, *, lead: int = 3, extra: int = 4) -> tuple[Tensor, Tensor]:
    """Two left-padded prompts: text, image placeholders, text."""
    g = torch.Generator().manual_seed(7)

    def text(n: int) -> Tensor:
        return torch.randint(3, 80, (n,), generator=g)

    image = torch.full((tokens,), IMAGE)
    long = torch.cat([text(lead), image, text(extra)])
    short = torch.cat([text(lead - 1), image, text(extra - 2)])
    pad = len(long) - len(short)
    ids = torch.stack([long, torch.cat([torch.zeros(pad, dtype=torch.int64), short])])
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    return ids, mask


def scaled(model: Any) -> Any:
    """Weights scaled so that the logits have a spread of about one."""
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=g) * p[0].numel() ** -0.5)
            elif "norm" not in name or name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=g) * 0.05)
    return model.eval()


def clip(size: int = 16) -> Any:
    return tf.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=8,
        projection_dim=24,
    )


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def llava(layers: int = 3) -> Tiny:
    text = tf.LlamaConfig(**{**TEXT, "num_hidden_layers": layers})
    config = tf.LlavaConfig(vision_config=clip(), text_config=text, image_token_index=IMAGE)
    ids, mask = prompts(4)
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels(2, 3, 16, 16)}
    return Tiny("llava", scaled(tf.LlavaForConditionalGeneration(config)), inputs)


def llava_next() -> Tiny:
    config = tf.LlavaNextConfig(
        vision_config=clip(),
        text_config=tf.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32]],
    )
    # two tiles of 2x2 patches as a 2x4 grid: 8 features, 2 newlines and the 4 of the overview
    ids, mask = prompts(14)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels(2, 3, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 32], [16, 32]]),
    }
    return Tiny("llava_next", scaled(tf.LlavaNextForConditionalGeneration(config)), inputs)


def pixtral(window: int | None = None) -> Tiny:
    vision = tf.PixtralVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=12,
        image_size=32,
        patch_size=8,
    )
    text = tf.MistralConfig(**TEXT, sliding_window=window)
    config = tf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    ids, mask = prompts(6)
    # a break token after the first row of three patches, as Pixtral's processor writes it
    for row in range(2):
        at = int((ids[row] == IMAGE).nonzero()[0])
        tail = ids[row, at + 3 : -1].clone()
        ids[row, at + 3] = 89
        ids[row, at + 4 :] = tail
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels(2, 3, 16, 24),
        "image_sizes": torch.tensor([[16, 24], [16, 24]]),
    }
    name = "pixtral" if window is None else "pixtral_window"
    return Tiny(name, scaled(tf.LlavaForConditionalGeneration(config)), inputs)


def qwen(version: str) -> Tiny:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope}
    text.pop("head_dim")
    ids, mask = prompts(4)
    common = {
        "text_config": text,
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }
    if version == "2":
        vision = {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        }
        model = tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(vision_config=vision, **common))
    else:
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        }
        model = tf.Qwen2_5_VLForConditionalGeneration(tf.Qwen2_5_VLConfig(vision_config=vision, **common))
    # 4x4 patches of 4 pixels, merged 2x2: 4 tokens per image
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels(32, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    return Tiny(f"qwen{version}", scaled(model), inputs)


def idefics3(smol: bool = False) -> Tiny:
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    text = tf.LlamaConfig(**TEXT)
    kind = (tf.SmolVLMConfig, tf.SmolVLMForConditionalGeneration)
    if not smol:
        kind = (tf.Idefics3Config, tf.Idefics3ForConditionalGeneration)
    config = kind[0](
        vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )
    ids, mask = prompts(4)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels(2, 1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(2, 1, 32, 32, dtype=torch.int64),
    }
    return Tiny("smolvlm" if smol else "idefics3", scaled(kind[1](config)), inputs)


def gemma3() -> Tiny:
    text = tf.Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
    )
    vision = tf.SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    config = tf.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, mm_tokens_per_image=4
    )
    ids, mask = prompts(4)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels(2, 3, 32, 32),
        "token_type_ids": (ids == IMAGE).long(),
    }
    return Tiny("gemma3", scaled(tf.Gemma3ForConditionalGeneration(config)), inputs)


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "pixtral": pixtral,
    "pixtral_window": lambda: pixtral(window=7),
    "qwen2": lambda: qwen("2"),
    "qwen2.5": lambda: qwen("2.5"),
    "idefics3": idefics3,
    "smolvlm": lambda: idefics3(smol=True),
    "gemma3": gemma3,
}


def save_untrained_captioner(folder: Path) -> None:
    """Model and processor of the embedded captioner's shape with random weights, sharp enough to have likeliest words."""
    from visacc.models.vlm.captioner import build_model, build_processor

    torch.manual_seed(3)
    model = build_model()
    for p in model.parameters():
        if p.ndim > 1:
            p.data.mul_(3)
    model.save_pretrained(folder)
    build_processor().save_pretrained(folder)
