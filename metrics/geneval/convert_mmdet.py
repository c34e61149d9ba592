"""mmdet 2.x Mask2Former-Swin checkpoints -> transformers, tensor by tensor (transformers 5 names).

The only rearrangements: fused qkv projections are split, and the patch-merging inputs are permuted (mmdet is
channel-major, transformers group-major with another order of the four neighbours).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.metrics.geneval.logic import CLASSES
from visacc.reading import naming
from visacc.weights import check_state
from visacc.writing import whole_files

CHECKPOINT = "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth"
URL = (
    "https://download.openmmlab.com/mmdetection/v2.0/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/"
    + CHECKPOINT
)
_E, _D, _T = (
    "model.pixel_level_module.encoder.",
    "model.pixel_level_module.decoder.",
    "model.transformer_module.",
)

_BLOCK, _HF_BLOCK = r"backbone\.stages\.(\d+)\.blocks\.(\d+)\.", _E + r"swin.encoder.layers.\1.blocks.\2."
_PIX = r"panoptic_head\.pixel_decoder\."
_PIX_LAYER, _HF_PIX_LAYER = _PIX + r"encoder\.layers\.(\d+)\.", _D + r"encoder.layers.\1."
_DEC_LAYER, _HF_DEC_LAYER = (
    r"panoptic_head\.transformer_decoder\.layers\.(\d+)\.",
    _T + r"decoder.layers.\1.",
)
_TABLE = r"relative_position_bias_table"

# (mmdet pattern, transformers replacement); the first match wins
_RULES: tuple[tuple[str, str], ...] = (
    (r"backbone\.patch_embed\.projection\.(.*)", _E + r"swin.embeddings.patch_embeddings.projection.\1"),
    (r"backbone\.patch_embed\.norm\.(.*)", _E + r"swin.embeddings.norm.\1"),
    (_BLOCK + r"norm1\.(.*)", _HF_BLOCK + r"layernorm_before.\3"),
    (_BLOCK + r"norm2\.(.*)", _HF_BLOCK + r"layernorm_after.\3"),
    (_BLOCK + r"attn\.w_msa\.proj\.(.*)", _HF_BLOCK + r"attention.o_proj.\3"),
    (_BLOCK + r"attn\.w_msa\." + _TABLE, _HF_BLOCK + r"attention.relative_position_bias." + _TABLE),
    (_BLOCK + r"ffn\.layers\.0\.0\.(.*)", _HF_BLOCK + r"mlp.fc1.\3"),
    (_BLOCK + r"ffn\.layers\.1\.(.*)", _HF_BLOCK + r"mlp.fc2.\3"),
    (
        r"backbone\.stages\.(\d+)\.downsample\.(norm|reduction)\.(.*)",
        _E + r"swin.encoder.layers.\1.downsample.\2.\3",
    ),
    (_PIX + r"input_convs\.(\d+)\.conv\.(.*)", _D + r"input_projections.\1.0.\2"),
    (_PIX + r"input_convs\.(\d+)\.gn\.(.*)", _D + r"input_projections.\1.1.\2"),
    (_PIX_LAYER + r"attentions\.0\.(.*)", _HF_PIX_LAYER + r"self_attn.\2"),
    (_PIX_LAYER + r"ffns\.0\.layers\.0\.0\.(.*)", _HF_PIX_LAYER + r"fc1.\2"),
    (_PIX_LAYER + r"ffns\.0\.layers\.1\.(.*)", _HF_PIX_LAYER + r"fc2.\2"),
    (_PIX_LAYER + r"norms\.0\.(.*)", _HF_PIX_LAYER + r"self_attn_layer_norm.\2"),
    (_PIX_LAYER + r"norms\.1\.(.*)", _HF_PIX_LAYER + r"final_layer_norm.\2"),
    (_PIX + r"level_encoding\.weight", _D + r"level_embed"),
    (_PIX + r"lateral_convs\.0\.conv\.(.*)", _D + r"adapter_1.0.\1"),
    (_PIX + r"lateral_convs\.0\.gn\.(.*)", _D + r"adapter_1.1.\1"),
    (_PIX + r"output_convs\.0\.conv\.(.*)", _D + r"layer_1.0.\1"),
    (_PIX + r"output_convs\.0\.gn\.(.*)", _D + r"layer_1.1.\1"),
    (_PIX + r"mask_feature\.(.*)", _D + r"mask_projection.\1"),
    (_DEC_LAYER + r"attentions\.0\.attn\.(.*)", _HF_DEC_LAYER + r"cross_attn.\2"),
    (_DEC_LAYER + r"attentions\.1\.attn\.out_proj\.(.*)", _HF_DEC_LAYER + r"self_attn.out_proj.\2"),
    (_DEC_LAYER + r"norms\.0\.(.*)", _HF_DEC_LAYER + r"cross_attn_layer_norm.\2"),
    (_DEC_LAYER + r"norms\.1\.(.*)", _HF_DEC_LAYER + r"self_attn_layer_norm.\2"),
    (_DEC_LAYER + r"norms\.2\.(.*)", _HF_DEC_LAYER + r"final_layer_norm.\2"),
    (_DEC_LAYER + r"ffns\.0\.layers\.0\.0\.(.*)", _HF_DEC_LAYER + r"fc1.\2"),
    (_DEC_LAYER + r"ffns\.0\.layers\.1\.(.*)", _HF_DEC_LAYER + r"fc2.\2"),
    (r"panoptic_head\.transformer_decoder\.post_norm\.(.*)", _T + r"decoder.layernorm.\1"),
    (r"panoptic_head\.query_embed\.(.*)", _T + r"queries_embedder.\1"),
    (r"panoptic_head\.query_feat\.(.*)", _T + r"queries_features.\1"),
    (r"panoptic_head\.level_embed\.(.*)", _T + r"level_embed.\1"),
    (r"panoptic_head\.cls_embed\.(.*)", r"class_predictor.\1"),
)
_RULES_COMPILED = tuple((re.compile(p), r) for p, r in _RULES)
_NORM = re.compile(r"backbone\.norm(\d+)\.(.*)")
_QKV = re.compile(_BLOCK + r"attn\.w_msa\.qkv\.(weight|bias)")
_IN_PROJ = re.compile(_DEC_LAYER + r"attentions\.1\.attn\.in_proj_(weight|bias)")
_MASK_MLP = re.compile(r"panoptic_head\.mask_embed\.([024])\.(.*)")
_DROP = re.compile(r".*(relative_position_index|loss_cls\.class_weight|num_batches_tracked)$")


def permute_merging(t: Tensor) -> Tensor:
    """Last dimension of a patch-merging tensor: index c*4 + g (g over 00, 01, 10, 11) -> g'*C + c (00, 10,
    01, 11).
    """
    groups = t.reshape(*t.shape[:-1], -1, 4)[..., [0, 2, 1, 3]]
    return groups.transpose(-1, -2).reshape(t.shape).contiguous()


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict for `Mask2FormerForUniversalSegmentation`; an unknown tensor is an error."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        if _DROP.match(key):
            continue
        if match := _QKV.fullmatch(key):
            base = f"{_E}swin.encoder.layers.{match[1]}.blocks.{match[2]}.attention."
            for name, part in zip("qkv", value.chunk(3), strict=True):
                out[f"{base}{name}_proj.{match[3]}"] = part.clone()
        elif match := _IN_PROJ.fullmatch(key):
            base = f"{_T}decoder.layers.{match[1]}.self_attn."
            for name, part in zip("qkv", value.chunk(3), strict=True):
                out[f"{base}{name}_proj.{match[2]}"] = part.clone()
        elif match := _NORM.fullmatch(key):
            out[f"{_E}hidden_states_norms.stage{int(match[1]) + 1}.{match[2]}"] = value
        elif match := _MASK_MLP.fullmatch(key):
            out[f"{_T}decoder.mask_predictor.mask_embedder.{int(match[1]) // 2}.0.{match[2]}"] = value
        else:
            target = next((p.sub(r, key) for p, r in _RULES_COMPILED if p.fullmatch(key)), None)
            if target is None:
                raise ValueError(
                    f"tensor {key!r} is not part of an mmdet Mask2Former-Swin: wrong checkpoint?"
                )
            out[target] = permute_merging(value) if ".downsample." in key else value
    return out


def config(
    *,
    embed: int = 96,
    depths: tuple[int, ...] = (2, 2, 18, 2),
    heads: tuple[int, ...] = (3, 6, 12, 24),
    features: int = 256,
    encoder_ff: int = 1024,
    decoder_ff: int = 2048,
    encoder_layers: int = 6,
    decoder_layers: int = 9,
    queries: int = 100,
    classes: int = len(CLASSES),
    attention_heads: int = 8,
) -> Any:
    """transformers config of the GenEval detector; arguments for other sizes of the same family."""
    from transformers import Mask2FormerConfig, SwinConfig

    backbone: dict[str, Any] = {"out_features": [f"stage{i + 1}" for i in range(len(depths))]}
    labels: dict[str, Any] = {"num_labels": classes}
    swin = SwinConfig(
        embed_dim=embed,
        depths=list(depths),
        num_heads=list(heads),
        window_size=7,
        mlp_ratio=4.0,
        **backbone,
    )
    return Mask2FormerConfig(
        backbone_config=swin,
        feature_size=features,
        mask_feature_size=features,
        hidden_dim=features,
        encoder_feedforward_dim=encoder_ff,
        dim_feedforward=decoder_ff,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers + 1,  # transformers counts the initial prediction as a layer
        num_attention_heads=attention_heads,
        num_queries=queries,
        **labels,
    )


_UNUSED = re.compile(r".*(swin\.layernorm\.(weight|bias)|criterion\.empty_weight|relative_position_index)$")


def build(state: Mapping[str, Tensor], **sizes: Any) -> Any:
    """A transformers model holding an mmdet checkpoint; every used parameter must be there."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(
            f"the converter writes transformers 5 parameter names, found {transformers.__version__}"
        )
    model = transformers.Mask2FormerForUniversalSegmentation(config(**sizes))
    with naming("the detector's checkpoint"):
        converted = convert(state)
    unused = [name for name in model.state_dict() if _UNUSED.match(name)]
    check_state("the checkpoint", model, converted, "GenEval's detector", optional=unused)
    model.load_state_dict(converted, strict=False)
    return model.eval()


def convert_checkpoint(source: str | Path, target: str | Path) -> None:
    """Write an mmdet checkpoint file as a transformers folder, independent of any library's parameter
    names.
    """
    from visacc.metrics.extractors.base import load_state

    with whole_files(Path(target)) as folder:
        build(load_state(source)).save_pretrained(folder)


@torch.inference_mode()
def logits(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Class logits [B, Q, C+1] and mask logits [B, Q, h/4, w/4] of normalised pixels [B, 3, h, w]."""
    result = model(pixel_values=pixels, pixel_mask=torch.ones_like(pixels[:, 0], dtype=torch.long))
    return result.class_queries_logits, result.masks_queries_logits
