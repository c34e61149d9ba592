"""``visacc_tree`` inside unmodified transformers text models: a tree in one forward equals every path alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visacc.kernels import pack_bits, tree_index
from visacc.kernels.hf_attention import TreeShape, placeholder, register_tree_attention
from visacc.models.hf.cache import cache_keyword, slot_cache

PARENT = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 5]
LENGTHS = [13, 9]
VOCAB, HIDDEN, LAYERS = 61, 32, 3
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama() -> tuple[nn.Module, list[str] | None]:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**COMMON)), None


def gemma3() -> tuple[nn.Module, list[str] | None]:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=6, layer_types=types)
    return Gemma3TextModel(config), types


def qwen() -> tuple[nn.Module, list[str] | None]:
    from transformers.models.qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    types = ["full_attention", "sliding_attention", "full_attention"]
    config = Qwen2_5_VLTextConfig(
        **COMMON,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=types,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )
    return Qwen2_5_VLTextModel(config), types


def embedded(model: nn.Module, ids: Tensor) -> Tensor:
    return model.get_input_embeddings()(ids)


def alone(model: nn.Module, ids: list[int]) -> Tensor:
    """Plain causal forward of one unpadded sequence with transformers' own masks: [len, hidden]."""
    x = embedded(model, torch.tensor([ids]))
    return model(
        inputs_embeds=x, position_ids=torch.arange(len(ids))[None], use_cache=False
    ).last_hidden_state[0]


def head_dim(model: nn.Module) -> int:
    return getattr(model.config, "head_dim", None) or HIDDEN // 4


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("build", [llama, gemma3, qwen], ids=["llama", "gemma3", "qwen2.5-vl"])
@torch.inference_mode()
def test_tree_equals_every_path(build: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two left-padded rows of unequal length, a ten-node tree, grouped heads, sliding layers: 1e-5."""
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("VISACC_KERNELS", backend)
    torch.manual_seed(0)
    model, types = build()
    model.eval()
    for p in model.parameters():
        if p.ndim == 2:
            p.mul_(4)  # make attention patterns matter
    N, prompt, capacity = len(PARENT), max(LENGTHS), 40
    context = torch.randint(0, VOCAB, (2, prompt))
    tokens = torch.randint(0, VOCAB, (2, N))
    start = torch.tensor([prompt - n for n in LENGTHS])
    parent = torch.tensor(PARENT).expand(2, N)
    index = tree_index(parent, torch.ones(2, N, dtype=torch.bool))
    kv = torch.zeros(LAYERS, 2, 2, 2, capacity, head_dim(model))
    model.set_attn_implementation(register_tree_attention())
    keyword = cache_keyword(type(model).forward)

    def run(ids: Tensor, first: Tensor, words: Tensor | None, depth: Tensor) -> Tensor:
        slots = first[:, None] + torch.arange(ids.shape[1])
        shape = TreeShape(start, first, words, depth)
        positions = (first - start)[:, None] + depth
        return model(
            inputs_embeds=embedded(model, ids),
            position_ids=positions.clamp(min=0),
            attention_mask=placeholder(types, "cpu"),
            use_cache=True,
            visacc_shape=shape,
            **{keyword: slot_cache(kv, slots, capacity)},
        ).last_hidden_state

    zero = torch.zeros(2, dtype=torch.long)
    order = torch.arange(prompt).expand(2, prompt)
    real = (order[:, None] <= order[..., None]) & (order >= start[:, None])[:, None]
    run(context, zero, pack_bits(real), order)  # the prompt as nodes from slot 0, padding invisible
    tree = run(tokens, zero + prompt, index.words, index.depth)

    spread = 0.0
    for row in range(2):
        text = context[row, start[row] :].tolist()
        for leaf in (4, 7, 8, 9):
            path = [leaf]
            while PARENT[path[0]] >= 0:
                path.insert(0, PARENT[path[0]])
            wanted = alone(model, text + tokens[row, path].tolist())[-len(path) :]
            torch.testing.assert_close(tree[row, path], wanted, atol=1e-5, rtol=1e-5)
        spread = max(spread, float((tree[row, 3] - tree[row, 4]).abs().max()))
    assert spread > 1e-2


@torch.inference_mode()
def test_prompts_stay_causal() -> None:
    """Without a shape the implementation is SDPA with transformers' own causal mask."""
    torch.manual_seed(1)
    model, _ = llama()
    ids = torch.randint(0, VOCAB, (2, 7))
    wanted = model(input_ids=ids).last_hidden_state
    model.set_attn_implementation(register_tree_attention())
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, wanted, atol=1e-6, rtol=1e-6)
