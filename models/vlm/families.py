"""The supported vision-language families: where they keep what the adapter needs, and what they silently
need.

| family | positions of tree nodes | mask | builds by itself |
|---|---|---|---|
| LLaVA-1.5, LLaVA-NeXT (also Pixtral = LLaVA with a Pixtral tower) | text position | one | - |
| Qwen2-VL, Qwen2.5-VL | text position + the request's M-RoPE delta | by layer type | mm_token_type_ids |
| Idefics3, SmolVLM | text position | one | - |
| Gemma 3 | text position | by layer type (sliding window) | token_type_ids |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visacc.speculate.views import spans


@dataclass(frozen=True)
class Family:
    """Facts about one ``model_type``.

    Attributes:
        masks_by_layer: the text model takes a dictionary of masks keyed by layer type.
        mrope: rotary positions have three axes and a delta per request.
        type_ids: name of the input that marks visual tokens, without which the model is silently wrong.
    """

    name: str
    masks_by_layer: bool = False
    mrope: bool = False
    type_ids: str | None = None


FAMILIES = {
    "llava": Family("LLaVA / Pixtral"),
    "llava_next": Family("LLaVA-NeXT"),
    "qwen2_vl": Family("Qwen2-VL", masks_by_layer=True, mrope=True, type_ids="mm_token_type_ids"),
    "qwen2_5_vl": Family("Qwen2.5-VL", masks_by_layer=True, mrope=True, type_ids="mm_token_type_ids"),
    "idefics3": Family("Idefics3"),
    "smolvlm": Family("SmolVLM"),
    "gemma3": Family("Gemma 3", masks_by_layer=True, type_ids="token_type_ids"),
}
TEXT_MODELS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "gemma3_text",
)


def family_of(config: Any) -> Family:
    """The family of a transformers configuration.

    Raises:
        ValueError: a model, or a text model inside of it, that is not covered.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(
            f"models of type {kind!r} are not supported for speculative captioning; supported: "
            + ", ".join(f"{k} ({f.name})" for k, f in FAMILIES.items())
        )
    text = config.get_text_config()
    if text.model_type not in TEXT_MODELS:
        raise ValueError(
            f"{FAMILIES[kind].name} with a text model of type {text.model_type!r} is not supported; supported text"
            f" models: {', '.join(TEXT_MODELS)}"
        )
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"attention layers of type {sorted(other)} are not supported")
    return FAMILIES[kind]


def placeholder_ids(config: Any) -> tuple[int | None, int | None]:
    """Ids that stand for image and video features in ``input_ids``."""

    def find(*names: str) -> int | None:
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return int(value)
        return None

    return find("image_token_id", "image_token_index"), find("video_token_id", "video_token_index")


def visual_mask(config: Any, input_ids: Tensor) -> Tensor:
    """bool [B, N]: positions that hold an image or video feature."""
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for token in placeholder_ids(config):
        if token is not None:
            mask |= input_ids == token
    return mask


def image_numbers(config: Any, inputs: Mapping[str, Any], visual: Tensor) -> Tensor:
    """int64 [B, N]: running number of the image each visual token belongs to, -1 for text.

    An image is a contiguous run of placeholders (for Idefics3 and SmolVLM: a tile), except for Pixtral, which
    puts a break token after every row: there the tokens of each image are counted.
    """
    vision: Any = getattr(config, "vision_config", None)
    if getattr(vision, "model_type", "") != "pixtral" or not bool(visual.any()):
        return spans(visual)
    encoded = (inputs.get("mm_encoder_outputs") or {}).get("image")
    if encoded is not None:
        sizes = torch.tensor([len(x) for x in encoded.pooler_output])
    elif inputs.get("image_sizes") is not None:
        cell = vision.patch_size * int(getattr(config, "spatial_merge_size", 1))
        sizes = (torch.as_tensor(inputs["image_sizes"]).cpu() // cell).prod(1)
    else:
        raise ValueError("Pixtral prompts with images need image_sizes (the processor returns them)")
    token = visual.flatten().long().cumsum(0).view_as(visual) - 1  # running over the batch
    number = torch.searchsorted(sizes.cumsum(0).to(visual.device), token, right=True)
    first = torch.where(visual, number, len(sizes)).amin(1, keepdim=True)
    return torch.where(visual, number - first, -1)


def complete_inputs(family: Family, config: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a prefill with everything the family needs: attention mask and visual type ids.

    Raises:
        ValueError: no ``input_ids``, right padding, an empty prompt.
    """
    done = {k: v for k, v in inputs.items() if v is not None}
    ids = done.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise ValueError("input_ids [B, N] are required (inputs_embeds alone cannot tell text from image)")
    mask = done.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask {list(mask.shape)} does not fit input_ids {list(ids.shape)}; 2-D padding masks only"
        )
    if bool((mask[:, :-1] > mask[:, 1:]).any()):
        raise ValueError("prompts must be padded on the left (processor.tokenizer.padding_side = 'left')")
    if not bool(mask[:, -1:].all()):
        raise ValueError("a prompt of the batch is empty")
    done["attention_mask"] = mask
    name = family.type_ids
    if name is not None and done.get(name) is None:
        image, video = placeholder_ids(config)
        types = (ids == image).long() if image is not None else torch.zeros_like(ids)
        if family.mrope and video is not None:
            types = types + 2 * (ids == video).long()
        done[name] = types
    return done
