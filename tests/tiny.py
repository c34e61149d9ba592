"""Tiny random LlamaGen models for tests of the engine, the pipeline and the command line."""

from __future__ import annotations

from pathlib import Path

import torch

from visacc.models.llamagen import GPT, GPTConfig, LlamaGen, VQConfig, VQModel, save_model


def tiny_llamagen(*, grid: int = 6, vocab: int = 32, classes: int = 10, seed: int = 0) -> LlamaGen:
    """A class-conditional LlamaGen with lively random logits (2 layers, 32 wide)."""
    torch.manual_seed(seed)
    config = GPTConfig(
        dim=32, n_layer=2, n_head=2, vocab_size=vocab, block_size=grid**2, multiple_of=32, num_classes=classes
    )
    gpt = GPT(config).eval()
    for p in gpt.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.2)
    vq = VQModel(VQConfig(ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=vocab)).eval()
    return LlamaGen(gpt, vq, name="tiny")


def save_tiny(folder: Path, **options: int) -> Path:
    """The same model as a folder that ``visacc.load`` reads."""
    model = tiny_llamagen(**options)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "gpt.safetensors", model.gpt)
    save_model(folder / "vq.safetensors", model.vq)
    return folder
