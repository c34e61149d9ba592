"""Tiny random checkpoints of every transformers family, with tokenizers, as ``save_pretrained`` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from visacc.models.hf.taming import TamingConfig, TamingDecoder

CODES = 32
BYTES = sorted(ByteLevel.alphabet())
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tokenizer(specials: list[str], first: int = 0) -> PreTrainedTokenizerFast:
    """Special tokens from id ``first`` on, then one id per byte."""
    table = {name: first + i for i, name in enumerate([*specials, *BYTES])}
    inner = Tokenizer(BPE(vocab=table, merges=[]))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevelDecoder()
    found = PreTrainedTokenizerFast(tokenizer_object=inner)
    found.add_special_tokens({"additional_special_tokens": specials})
    return found


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> Any:
    """Weights that make the output depend strongly on the context."""
    g = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        if p.ndim > 1:
            fan_in = p[0].numel()
            p.copy_(torch.randn(p.shape, generator=g) * min(1.0, 1.3 / fan_in**0.5))
        else:
            centre = 1.0 if "norm" in name and "weight" in name else 0.0
            p.copy_(torch.randn(p.shape, generator=g) * 0.05 + centre)
    return model.eval()


def save(model: Any, folder: Path, words: Any = None, settings: dict[str, Any] | None = None) -> Path:
    if settings:
        model.generation_config.visacc = settings
    model.save_pretrained(folder)
    if words is not None:
        words.save_pretrained(folder)
    return folder


def janus(folder: Path, seed: int = 1) -> Path:
    words = tokenizer(["<pad>", "<bos>", "<eos>", "<begin_of_image>", "<image>", "<|User|>", "<|Assistant|>"])
    config = transformers.JanusConfig(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(words)},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
            "projection_dim": 32,
            "num_image_tokens": 16,
            "mlp_ratio": 2.0,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": CODES,
            "latent_channels": 32,
            "num_patches": 4,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_hidden_layers": 2,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        image_token_id=4,
    )
    model = randomise(transformers.JanusForConditionalGeneration(config), seed)
    settings = model.generation_config
    settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = 1, 2, 0
    settings.generation_kwargs = {"boi_token_id": 3}
    settings.guidance_scale, settings._from_model_config = 3.0, False
    return save(model, folder, words)


EMU3_TOKENS = [
    "<|endoftext|>",
    "<|extra_203|>",
    "<|extra_204|>",
    "<image>",
    "<|image start|>",
    "<|image end|>",
    "<|image token|>",
    "<|extra_200|>",
    "<|extra_201|>",
    "<|extra_100|>",
]


def emu3(folder: Path, seed: int = 2, grid: tuple[int, int] = (3, 4)) -> Path:
    words = tokenizer(EMU3_TOKENS)
    size = len(words)
    order = torch.randperm(CODES, generator=torch.Generator().manual_seed(seed)).tolist()
    names = {f"<|visual token {c:06d}|>": size + order[c] for c in range(CODES)}
    config = transformers.Emu3Config(
        text_config={
            **_TEXT,
            "vocab_size": size + CODES,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vq_config={
            "codebook_size": CODES,
            "embed_dim": 4,
            "latent_channels": 4,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [1],
            "hidden_size": 32,
            "num_attention_heads": 1,
        },
        vocabulary_map={**{k: v for k, v in words.get_vocab().items() if k.startswith("<")}, **names},
    )
    model = randomise(transformers.Emu3ForConditionalGeneration(config), seed)
    return save(model, folder, words, {"grid": grid})


CHAMELEON_TOKENS = [
    "<s>",
    "<pad>",
    "</s>",
    "<eoss>",
    "<racm3:break>",
    "<reserved08706>",
    "<image>",
    "<reserved08799>",
    "<reserved08801>",
    "<reserved08802>",
    "<reserved08803>",
]


def chameleon(
    folder: Path, seed: int = 3, *, family: str = "chameleon", grid: tuple[int, int] = (4, 4)
) -> Path:
    words = tokenizer(CHAMELEON_TOKENS)
    size = len(words)
    order = torch.randperm(CODES, generator=torch.Generator().manual_seed(seed)).tolist()
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    names = {f"IMGIMG{str(c).translate(letters)}Z": size + order[c] for c in range(CODES)}
    config = transformers.ChameleonConfig(
        **_TEXT,
        vocab_size=size + CODES,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        swin_norm=family != "chameleon",
        vocabulary_map={**{k: v for k, v in words.get_vocab().items() if k.startswith("<")}, **names},
        vq_config={
            "embed_dim": 8,
            "num_embeddings": CODES,
            "latent_channels": 32,
            "resolution": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
    )
    model = randomise(transformers.ChameleonForConditionalGeneration(config), seed)
    save(model, folder, words, {"family": family, "grid": grid})
    taming(CODES, 8, seed).save_pretrained(folder)
    return folder


def taming(codes: int, embed: int, seed: int, levels: int = 2) -> TamingDecoder:
    decoder = TamingDecoder(TamingConfig(codes, embed, 32, (32,) * levels, 2, attention=(levels - 1,)))
    randomise(decoder, seed)
    return decoder


def emu35(folder: Path, seed: int = 4, grid: tuple[int, int] = (3, 4)) -> Path:
    words = tokenizer(EMU3_TOKENS)
    ids = {name: words.get_vocab()[name] for name in EMU3_TOKENS}
    config = transformers.Qwen3Config(
        **_TEXT, head_dim=8, vocab_size=len(words) + CODES, pad_token_id=0, tie_word_embeddings=False
    )
    model = randomise(transformers.Qwen3ForCausalLM(config), seed)
    settings = {"family": "emu3.5", "first_code": len(words), "codes": CODES, "ids": ids, "grid": grid}
    save(model, folder, words, settings)
    taming(CODES, 16, seed).save_pretrained(folder / "vision_tokenizer")
    return folder


GLM_TEMPLATE = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"


def glm_image(folder: Path, seed: int = 5, grid: tuple[int, int] = (3, 2)) -> Path:
    vision = CODES + 8
    specials = ["<|image|>", "<sop>", "<eop>", "<bos>", "<pad>"]
    words = tokenizer(specials, first=vision)
    words = PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer,
        bos_token="<bos>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<|image|>",
            "grid_bos_token": "<sop>",
            "grid_eos_token": "<eop>",
        },
    )
    ids = words.get_vocab()
    config = transformers.GlmImageConfig(
        text_config={
            **_TEXT,
            "vocab_size": vision + len(words),
            "vision_vocab_size": vision,
            "pad_token_id": ids["<pad>"],
            "eos_token_id": CODES + 1,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "partial_rotary_factor": 1.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 32,
            "image_size": 64,
        },
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 16},
        image_token_id=ids["<|image|>"],
        image_start_token_id=CODES,
        image_end_token_id=CODES + 1,
    )
    model = randomise(transformers.GlmImageForConditionalGeneration(config), seed)
    model.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    save(model, folder, None, {"grid": grid})
    pictures = transformers.GlmImageImageProcessor()
    transformers.GlmImageProcessor(pictures, words, chat_template=GLM_TEMPLATE).save_pretrained(folder)
    return folder


BUILDERS = {
    "janus": janus,
    "emu3": emu3,
    "chameleon": chameleon,
    "lumina-mgpt": lambda folder: chameleon(folder, 6, family="lumina-mgpt", grid=(4, 6)),
    "emu3.5": emu35,
    "glm-image": glm_image,
}
