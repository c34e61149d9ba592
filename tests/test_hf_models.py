"""Adapters of transformers image generators on tiny random checkpoints with tokenizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hf_tiny
import pytest
import torch
from library_versions import of_later_transformers, parameters
from torch import Tensor

from visacc.engine import decode
from visacc.models.base import DecodeState, Layout, ModelOutput, Proposal
from visacc.models.hf import GlmImage, HFImageModel, load_hf
from visacc.models.hf.attention import as_mask, check_implementation
from visacc.models.hf.glm_image import PreviewLayout, preview_grid
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.registry import make_decoder
from visacc.sampling import SamplingParams

FAMILIES = sorted(hf_tiny.BUILDERS)
PROMPTS = ["a red circle", "two"]
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    for name, build in hf_tiny.BUILDERS.items():
        build(root / name)
    return {name: root / name for name in hf_tiny.BUILDERS}


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, HFImageModel]:
    return {name: load_hf(folder) for name, folder in folders.items()}


def guided(model: HFImageModel) -> bool:
    return not isinstance(model, GlmImage)


def chain(tokens: Tensor, start: int) -> Proposal:
    slots = (start + torch.arange(tokens.shape[1])).expand_as(tokens)
    return Proposal(tokens, slots, torch.ones_like(slots, dtype=torch.bool))


def start(model: HFImageModel, prompts: list[Any] | None = None) -> tuple[DecodeState, Tensor]:
    cond = model.encode(prompts or PROMPTS)
    state, output = model.prefill(cond, guidance=guided(model), window=24)
    return state, rows(output)


def rows(output: ModelOutput) -> Tensor:
    return output.logits if output.uncond is None else torch.cat([output.logits, output.uncond])


def feed(model: HFImageModel, state: DecodeState, proposal: Proposal) -> Tensor:
    state.limit = state.prefix + int(state.lengths.max()) + proposal.size
    return rows(model.forward(state, proposal))


def codes_for(model: HFImageModel, count: int) -> Tensor:
    g = torch.Generator().manual_seed(11)
    codes = torch.randint(0, model.layout.vocab, (len(PROMPTS), count), generator=g)
    forced = model.layout.forced_ids
    return codes if forced is None else torch.where(forced[:count] < 0, codes, 0)


def allowed_by(model: SharedVocabularyModel, prompt: int) -> Any:
    forced, images = model.layout.forced, model.code_ids.tolist()

    def allowed(_batch: int, ids: Tensor) -> list[int]:
        slot = len(ids) - prompt
        return images if forced is None or forced[slot] < 0 else [forced[slot]]

    return allowed


@torch.no_grad()
def library_greedy(model: HFImageModel, scale: float) -> Tensor:
    """What transformers' own generate() writes for the same prompts."""
    cond = model.encode(PROMPTS)
    ids, mask = cond.data["ids"], cond.data["mask"].long()
    inner: Any = model.module
    if model.family == "janus":
        return inner.generate(
            ids, attention_mask=mask, generation_mode="image", do_sample=False, guidance_scale=scale
        )
    options: dict[str, Any] = {"max_new_tokens": model.layout.total, "do_sample": False, "eos_token_id": None}
    if model.family == "glm-image":
        inputs = model.processor.apply_chat_template(  # type: ignore[attr-defined]
            [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in PROMPTS],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"target_h": 96, "target_w": 64, "padding": True},
        )
        assert torch.equal(inputs["input_ids"][:, -12:], ids[:, -12:])
        options |= {k: inputs[k] for k in ("image_grid_thw", "images_per_sample")}
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
    else:
        options["guidance_scale"] = scale
        options["negative_prompt_ids"] = cond.data["uncond_ids"]
        options["negative_prompt_attention_mask"] = cond.data["uncond_mask"].long()
    if model.family in ("chameleon", "lumina-mgpt"):
        inner.model.vocabulary_mapping.image_tokens = []  # transformers blanks the image logits otherwise
    assert isinstance(model, SharedVocabularyModel)
    rule = allowed_by(model, ids.shape[1])
    found = inner.generate(ids, attention_mask=mask, prefix_allowed_tokens_fn=rule, **options)
    if model.family in ("chameleon", "lumina-mgpt"):
        del inner.model.vocabulary_mapping.image_tokens
    return found[:, ids.shape[1] :]


GENERATE_OF_LATER = {
    "glm-image": "its processor takes one prompt at a time",
    "janus": "its generate() takes no attention mask",
}


@pytest.mark.parametrize("family", parameters(FAMILIES, GENERATE_OF_LATER))
def test_greedy_tokens_are_those_of_generate(family: str, models: dict[str, HFImageModel]) -> None:
    model = models[family]
    scale = 3.0 if guided(model) else 1.0
    wanted = library_greedy(model, scale)
    sampling = SamplingParams(scale, temperature=0)
    found = decode(model, make_decoder("mc-sjd", window=16), model.encode(PROMPTS), sampling, [1, 2]).sequence
    if isinstance(model, SharedVocabularyModel):
        found = model.sequence_ids(found)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_one_forward_single_steps_and_rejection(family: str, models: dict[str, HFImageModel]) -> None:
    model, count = models[family], 14
    codes = codes_for(model, count)
    state, first = start(model)
    single = [first]
    for i in range(count):
        single.append(feed(model, state, chain(codes[:, i : i + 1], i)))
        model.commit(state, torch.ones(2, dtype=torch.long))
    steps = torch.cat(single[1:], 1)
    state, again = start(model)
    assert torch.equal(again, first)
    feed(model, state, chain((codes + 3) % model.layout.vocab, 0))  # all rejected
    chunk = feed(model, state, chain(codes, 0))
    assert (chunk - steps).abs().max() < TOLERANCE
    # rows that accept 9 and 4 tokens go on from there
    state, _ = start(model)
    feed(model, state, chain(codes[:, :9], 0))
    keep = torch.tensor([9, 4])
    model.commit(state, keep)
    slots = keep[:, None] + torch.arange(5)
    live = torch.ones_like(slots, dtype=torch.bool)
    ragged = feed(model, state, Proposal(codes.gather(1, slots), slots, live))
    for row in range(ragged.shape[0]):
        assert (ragged[row] - steps[row, slots[row % 2]]).abs().max() < TOLERANCE


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "visacc_tree"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_tree_is_its_branches(
    family: str, implementation: str, folders: dict[str, Path], models: dict[str, HFImageModel]
) -> None:
    plain = models[family]
    model = (
        plain if implementation == "sdpa" else load_hf(folders[family], attn_implementation=implementation)
    )
    parents = [-1, 0, 0, 1, 2, 3]
    visible = torch.eye(6, dtype=torch.bool)
    depth: list[int] = []
    for node, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        if parent >= 0:
            visible[node] |= visible[parent]
    tokens = codes_for(plain, 12)[:, 6:]
    slots = torch.tensor(depth).expand(2, -1)
    state, _ = start(model)
    live = torch.ones_like(slots, dtype=torch.bool)
    tree = feed(model, state, Proposal(tokens, slots, live, visible=visible.expand(2, -1, -1)))
    for leaf in (4, 5):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        state, _ = start(plain)
        branch = feed(plain, state, chain(tokens[:, path], 0))
        assert (tree[:, path] - branch).abs().max() < TOLERANCE
    assert tree[:, 4].sub(tree[:, 5]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_two_batches_in_turns(family: str, models: dict[str, HFImageModel]) -> None:
    """States live beside each other on one model (GLM-Image's class keeps positions on the model)."""
    model, codes = models[family], codes_for(models[family], 8)
    alone, _ = start(model, ["something longer than the others"])
    wanted = feed(model, alone, chain(codes[:1], 0))
    one, _ = start(model, ["something longer than the others"])
    two, _ = start(model, ["b"])
    feed(model, two, chain(codes[1:], 0))
    assert torch.equal(feed(model, one, chain(codes[:1], 0)), wanted)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_no_guidance_runs_one_branch(family: str, models: dict[str, HFImageModel]) -> None:
    model = models[family]
    state, output = model.prefill(model.encode(PROMPTS), guidance=False, window=4)
    assert (state.branches, state.kv.shape[2], output.uncond) == (1, 2, None)
    if guided(model):
        both, _ = start(model)
        assert both.kv.shape[2] == 4
        assert (rows(output) - start(model)[1][:2]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_features_and_head(family: str, models: dict[str, HFImageModel]) -> None:
    model = models[family]
    state, output = model.prefill(model.encode(PROMPTS), guidance=guided(model), window=8, hidden=True)
    assert output.hidden is not None
    assert output.hidden.shape[:2] == (state.kv.shape[2], state.prefix)
    assert torch.equal(model.head(output.hidden[:, -1:]), rows(output))
    proposal = chain(codes_for(model, 6), 0)
    proposal.outputs = torch.tensor([1, 4])
    state.limit = state.prefix + 6
    picked = model.forward(state, proposal, hidden=True)
    assert picked.logits.shape[1] == 2
    assert picked.hidden is not None
    assert picked.hidden.shape[1] == 6
    assert (model.head(picked.hidden[:, [1, 4]]) - rows(picked)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "janus"])
@torch.inference_mode()
def test_sliced_head_is_the_whole_head(family: str, models: dict[str, HFImageModel]) -> None:
    model = models[family]
    assert isinstance(model, SharedVocabularyModel)
    whole = copy.copy(model)
    whole.slice_head = False
    hidden = torch.randn(2, 3, 32)
    assert (model.head(hidden) - whole.head(hidden)).abs().max() < 1e-6
    before = model.head(hidden)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert (model.head(hidden) - 2 * before).abs().max() < TOLERANCE  # a changed weight is seen
    with torch.no_grad():
        model.lm_head.weight.div_(2)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm-image"])
def test_bfloat16(family: str, folders: dict[str, Path]) -> None:
    model = load_hf(folders[family], dtype=torch.bfloat16)
    cond = model.encode(PROMPTS)
    result = decode(model, make_decoder("sjd", window=4), cond, SamplingParams(2.0), [1, 2])
    assert model.dtype == torch.bfloat16
    pixels = model.decode(result.codes)
    assert pixels.dtype == torch.float32
    assert bool(((pixels >= 0) & (pixels <= 1)).all())
    # the pixel decoder's arithmetic is float32 on the (rounded) weights
    assert torch.equal(pixels, load_hf(folders[family], dtype=torch.bfloat16).decode(result.codes))
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon"])
def test_device_map_and_offload(
    family: str, folders: dict[str, Path], models: dict[str, HFImageModel]
) -> None:
    accelerate = pytest.importorskip("accelerate")
    mapped = load_hf(folders[family], device_map={"": "cpu"})
    sampling = SamplingParams(2.0, temperature=0)
    plain = decode(models[family], make_decoder("sjd"), models[family].encode(PROMPTS), sampling, [1, 2])
    pixels = models[family].decode(plain.codes)
    for offload in (False, True):
        if offload:
            accelerate.cpu_offload(mapped.module, execution_device=torch.device("cpu"))
            assert next(mapped.module.parameters()).is_meta
        assert mapped.device.type == "cpu"
        found = decode(mapped, make_decoder("sjd"), mapped.encode(PROMPTS), sampling, [1, 2])
        assert torch.equal(found.sequence, plain.sequence)
        assert torch.equal(mapped.decode(found.codes), pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_moved_after_loading(family: str, folders: dict[str, Path], models: dict[str, HFImageModel]) -> None:
    """`.to()` on the module of a loaded adapter that has drawn before: nothing of the old place is kept."""
    model, scale = load_hf(folders[family]), 1.0 if family == "glm-image" else 2.0
    sampling = SamplingParams(scale, temperature=0)

    def draw() -> torch.Tensor:
        return decode(model, make_decoder("sjd"), model.encode(PROMPTS), sampling, [1, 2]).sequence

    first = draw()
    model.module.to(torch.float64)
    assert model.dtype == torch.float64
    assert torch.equal(draw(), first)
    with torch.no_grad():
        for p in model.module.parameters():
            p.mul_(1.5)
    model.module.to(torch.float32)
    changed = draw()
    fresh = load_hf(folders[family])
    with torch.no_grad():
        for p in fresh.module.parameters():
            p.copy_(p.double() * 1.5)
    model = fresh
    assert torch.equal(changed, draw())


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_slots_or_tokens(family: str, folders: dict[str, Path]) -> None:
    """Numbering the slots instead of the tokens is the same function up to rounding."""
    slot, codes = load_hf(folders[family], positions="slot"), None
    token = load_hf(folders[family])
    with torch.inference_mode():
        codes = codes_for(slot, 5)
        got = [feed(m, start(m)[0], chain(codes, 0)) for m in (slot, token)]
    assert 0 <= (got[0] - got[1]).abs().max() < 5e-5


def test_masks() -> None:
    visible = torch.tensor([[[True, False], [True, True]]])
    assert as_mask(visible, "sdpa", torch.float32).dtype == torch.bool
    eager = as_mask(visible, "eager", torch.bfloat16)
    assert eager.dtype == torch.bfloat16
    assert eager[0, 0].tolist() == [[0.0, torch.finfo(torch.bfloat16).min], [0.0, 0.0]]
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
            check_implementation(name)


# -- GLM-Image's two grids ----------------------------------------------------------------------------------


def test_preview_layout() -> None:
    layout = PreviewLayout((1, 4, 6), 10, preview=(2, 3))
    assert (layout.n_image, layout.total) == (24, 30)
    sequence = torch.arange(30)[None]
    assert torch.equal(layout.to_grid(sequence)[0, 0].flatten(), torch.arange(6, 30))
    left = layout.neighbour(dx=-1)
    assert left[:7].tolist() == [-1, 0, 1, -1, 3, 4, -1]
    assert left[7] == 6
    above = layout.neighbour(dt=-1)
    assert above[:6].eq(-1).all()
    assert above[6:12].tolist() == [0, 0, 1, 1, 2, 2]
    assert above[-6:].tolist() == [3, 3, 4, 4, 5, 5]
    plain = Layout((1, 2, 3), 10)
    assert torch.equal(layout.neighbour(dy=-1)[:6], plain.neighbour(dy=-1))


@of_later_transformers("GLM-Image's get_rope_index knows no images_per_sample")
def test_preview_sizes_and_positions(models: dict[str, HFImageModel]) -> None:
    assert preview_grid((32, 32)) == (16, 16)
    assert preview_grid((36, 24)) == (19, 13)
    model = models["glm-image"]
    assert isinstance(model, GlmImage)
    layout = model.layout
    assert isinstance(layout, PreviewLayout)
    cond = model.encode(PROMPTS)
    grids = torch.tensor([[1, *layout.grid[1:]], [1, *layout.preview]]).repeat(2, 1)
    inner: Any = model.module
    inner.model.get_rope_index(
        cond.data["ids"],
        image_grid_thw=grids,
        images_per_sample=torch.tensor([2, 2]),
        attention_mask=cond.data["mask"].long(),
    )
    table = inner.model._cached_decode_position_ids  # [B, 3, total + 1]
    own = layout.position_table + cond.data["mask"].sum(1)[:, None, None]
    assert torch.equal(table[:, :, :-1], own)


def test_glm_image_draws_no_pixels(models: dict[str, HFImageModel]) -> None:
    with pytest.raises(ValueError, match="output_type='codes'"):
        models["glm-image"].decode(torch.zeros(1, 1, 3, 2, dtype=torch.long))
