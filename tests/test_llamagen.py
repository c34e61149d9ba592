"""LlamaGen's own guarantees: the window forward on ragged batches and trees, training passes, the adapter."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from visacc.models.base import Proposal
from visacc.models.llamagen import GPT, GPTConfig, LlamaGen, VQConfig, VQModel

PREFIX, CODES, GRID = 6, 40, 5


def make_gpt(seed: int = 0, **overrides: object) -> GPT:
    torch.manual_seed(seed)
    options: dict[str, object] = {
        "dim": 32,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": CODES,
        "block_size": GRID**2,
        "multiple_of": 16,
        "model_type": "t2i",
        "caption_dim": 12,
        "cls_token_num": PREFIX,
        "uncond_rows": PREFIX,
    }
    gpt = GPT(GPTConfig(**(options | overrides)))  # type: ignore[arg-type]
    for name, parameter in gpt.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return gpt.eval().requires_grad_(False)


def make_vq(codes: int = CODES) -> VQModel:
    torch.manual_seed(1)
    return VQModel(
        VQConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, codebook_size=codes)
    ).eval()


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    mask = torch.arange(PREFIX) >= PREFIX - torch.tensor([2, 6, 4, 5])[:, None]
    features = torch.randn(4, PREFIX, 12, generator=generator) * mask[..., None]
    return features[:batch], mask[:batch]


def chain(model: LlamaGen, rows: list[int], lengths: list[int], tokens: Tensor, window: int, guidance: bool):
    """State in which row i has committed lengths[i] slots, all fed in one ragged window."""
    features, mask = prompts(4)
    cond = model.condition(features[rows], mask[rows])
    state, _ = model.prefill(cond, guidance=guidance, window=window)
    longest = max(lengths)
    if longest:
        order = torch.arange(longest).expand(len(rows), -1)
        state.limit = state.prefix + longest
        model.forward(state, Proposal(tokens[rows, :longest], order, order < torch.tensor(lengths)[:, None]))
        model.commit(state, torch.tensor(lengths))
    return state


@pytest.fixture(scope="module")
def model() -> LlamaGen:
    return LlamaGen(make_gpt(), make_vq(), name="tiny")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, CODES, (4, GRID**2), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("guidance", [False, True])
def test_window_equals_single_steps_and_teacher_forcing(model, tokens, guidance):
    """Rows at different lengths, N tokens in one pass == N passes of one token == the uncached forward."""
    rows, lengths, size = [0, 1, 2], [3, 9, 0], 4
    state = chain(model, rows, lengths, tokens, size, guidance)
    positions = torch.tensor(lengths)[:, None] + torch.arange(size)
    fed = tokens[rows].gather(1, positions)
    live = torch.ones_like(fed, dtype=torch.bool)
    state.limit = state.prefix + max(lengths) + size
    whole = model.forward(state, Proposal(fed, positions, live), hidden=True)

    state = chain(model, rows, lengths, tokens, size, guidance)
    for i in range(size):
        state.limit = state.prefix + max(lengths) + i + 1
        at = slice(i, i + 1)
        step = model.forward(state, Proposal(fed[:, at], positions[:, at], live[:, at]), hidden=True)
        model.commit(state, torch.ones(3, dtype=torch.int64))
        torch.testing.assert_close(step.logits, whole.logits[:, at], rtol=0, atol=1e-5)
        torch.testing.assert_close(step.hidden, whole.hidden[:, at], rtol=0, atol=1e-5)
        assert (step.uncond is None) == (not guidance)
        if guidance:
            torch.testing.assert_close(step.uncond, whole.uncond[:, at], rtol=0, atol=1e-5)

    features, mask = prompts(3)
    reference = model.gpt(tokens[rows], features, mask)
    index = (positions + 1)[..., None].expand(-1, -1, CODES)
    torch.testing.assert_close(whole.logits, reference.gather(1, index), rtol=0, atol=1e-5)
    if guidance:
        null = model.gpt(tokens[rows], model.gpt.null_condition(3), mask)
        torch.testing.assert_close(whole.uncond, null.gather(1, index), rtol=0, atol=1e-5)


def test_rows_do_not_depend_on_their_batch(model, tokens):
    lengths, size = [7, 2, 0, 11], 3
    positions = torch.tensor(lengths)[:, None] + torch.arange(size)
    fed = tokens.gather(1, positions)
    live = torch.ones_like(fed, dtype=torch.bool)
    state = chain(model, [0, 1, 2, 3], lengths, tokens, size, True)
    state.limit = state.kv.shape[4]  # reading all slots is the same as reading just enough of them
    together = model.forward(state, Proposal(fed, positions, live))
    for row in range(4):
        alone = chain(model, [row], lengths[row : row + 1], tokens, size, True)
        alone.limit = alone.prefix + lengths[row] + size
        at = slice(row, row + 1)
        single = model.forward(alone, Proposal(fed[at], positions[at], live[at]))
        torch.testing.assert_close(single.logits, together.logits[at], rtol=0, atol=1e-5)
        torch.testing.assert_close(single.uncond, together.uncond[at], rtol=0, atol=1e-5)


def test_tree_paths_equal_chains(model, tokens):
    """Every path of a tree gives the logits of that path fed alone; keeping one leaves the chain's cache."""
    lengths = [4, 6]
    parents = torch.tensor([-1, 0, 0, 1, 2, 2])  # two children of the root, three grandchildren
    depth = torch.tensor([0, 1, 1, 2, 2, 2])
    visible = torch.eye(6, dtype=torch.bool)
    for node in range(1, 6):
        visible[node] |= visible[parents[node]]
    nodes = torch.tensor([[5, 9, 31, 12, 3, 27], [38, 1, 2, 3, 4, 5]])
    positions = torch.tensor(lengths)[:, None] + depth
    state = chain(model, [0, 1], lengths, tokens, 6, True)
    state.limit = state.prefix + max(lengths) + 6
    tree = Proposal(nodes, positions, torch.ones_like(nodes).bool(), visible=visible.expand(2, -1, -1))
    out = model.forward(state, tree)
    for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5]):
        single = chain(model, [0, 1], lengths, tokens, 6, True)
        single.limit = single.prefix + max(lengths) + 3
        fed = Proposal(nodes[:, path], positions[:, path], torch.ones(2, 3).bool())
        expected = model.forward(single, fed)
        torch.testing.assert_close(out.logits[:, path], expected.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(out.uncond[:, path], expected.uncond, rtol=0, atol=1e-5)
    # row 0 keeps the path 0-2-5, row 1 keeps 0-2
    keep = torch.tensor([3, 2])
    model.commit(state, keep, torch.tensor([[0, 2, 5], [0, 2, 4]]))
    chained = chain(model, [0, 1], lengths, tokens, 6, True)
    chained.limit = chained.prefix + max(lengths) + 3
    path = torch.tensor([[0, 2, 5], [0, 2, 4]])
    fed = nodes.gather(1, path)
    model.forward(chained, Proposal(fed, positions.gather(1, path), torch.ones(2, 3).bool()))
    model.commit(chained, keep)
    assert torch.equal(state.lengths, chained.lengths)
    following = Proposal(torch.tensor([[8], [9]]), state.lengths[:, None], torch.ones(2, 1).bool())
    for each in (state, chained):
        each.limit = each.prefix + 12
    after, expected = model.forward(state, following), model.forward(chained, following)
    torch.testing.assert_close(after.logits, expected.logits, rtol=0, atol=1e-5)


def test_grouped_heads_and_unusual_head_size(tokens):
    """n_kv_head < n_head (broken in the official cache) and a head size that is no power of two."""
    gpt = make_gpt(dim=80, n_head=4, n_kv_head=2)
    model = LlamaGen(gpt, make_vq())
    features, mask = prompts(2)
    state = chain(model, [0, 1], [0, 0], tokens, 10, False)
    assert state.kv.shape[3] == 2
    order = torch.arange(10).expand(2, -1)
    state.limit = state.prefix + 10
    out = model.forward(state, Proposal(tokens[:2, :10], order, torch.ones_like(order).bool()))
    expected = gpt(tokens[:2], features, mask)[:, 1:11]
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-4)


def test_bfloat16_keeps_float32_rotation_and_logits(tokens):
    gpt, half = make_gpt(), make_gpt().bfloat16()
    features, mask = prompts(2)
    assert half.rope(torch.device("cpu")).dtype == torch.complex64
    expected, logits = gpt(tokens[:2], features, mask), half(tokens[:2], features.bfloat16(), mask)
    assert logits.dtype == torch.float32
    assert (expected - logits).abs().mean() < 0.05 * expected.std()
    model = LlamaGen(half, make_vq())
    state, out = model.prefill(model.condition(features, mask), guidance=True, window=1)
    assert state.kv.dtype == torch.bfloat16
    assert out.logits.dtype == torch.float32
    assert (out.logits[:, 0] - expected[:, 0]).abs().mean() < 0.05 * expected.std()


# ---- training ---------------------------------------------------------------------------------------------
def test_condition_dropout_keeps_the_mask(tokens):
    gpt = make_gpt()
    features, mask = prompts(4)
    drop = torch.tensor([True, False, True, False])
    mixed = gpt(tokens, features, mask, drop=drop)
    null = gpt(tokens, gpt.null_condition(4), mask)
    assert torch.equal(mixed[drop], null[drop])
    assert torch.equal(mixed[~drop], gpt(tokens, features, mask)[~drop])
    classes = make_gpt(model_type="c2i", num_classes=3, cls_token_num=1)
    labels = torch.tensor([0, 1, 2, 0])
    dropped = classes(tokens, labels, drop=torch.ones(4, dtype=torch.bool))
    assert torch.equal(dropped, classes(tokens, torch.full((4,), 3)))


def test_gpt_learns(tokens):
    """Loss starts at log V (zero output head) and falls on one batch; gradients reach every weight."""
    torch.manual_seed(0)
    gpt = GPT(make_gpt().config).train()
    features, mask = prompts(4)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = gpt(tokens, features, mask, return_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(float(CODES)).log().item(), abs=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in gpt.parameters())


def test_decoding_in_inference_mode_does_not_spoil_training(tokens):
    gpt = make_gpt().requires_grad_(True)
    features, mask = prompts(4)
    model = LlamaGen(gpt, make_vq())
    with torch.inference_mode():
        model.prefill(model.condition(features, mask), guidance=True, window=1)
    gpt(tokens, features, mask, return_loss=True).backward()
    assert gpt.tok_embeddings.weight.grad.abs().sum() > 0


def test_vq_straight_through_gradients():
    vq = make_vq().train()
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    out = vq(images)
    assert out.recon.shape == images.shape
    assert torch.equal(out.codes, vq.encode(images))
    (out.recon - images).square().mean().backward(retain_graph=True)
    assert vq.encoder.conv_in.weight.grad.abs().sum() > 0
    assert vq.quantize.embedding.weight.grad is None  # the codebook learns from its own loss only
    (out.codebook_loss + out.commit_loss).backward()
    assert vq.quantize.embedding.weight.grad.abs().sum() > 0
    expected = vq.config.commit_loss_beta * out.codebook_loss.item()
    assert out.commit_loss.item() == pytest.approx(expected, rel=1e-5)


def test_vq_codes_ignore_the_length_of_code_vectors():
    vq = make_vq()
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    codes = vq.encode(images)
    pixels = vq.decode_codes(codes, (8, 8))
    with torch.no_grad():
        vq.quantize.embedding.weight.mul_(torch.rand(CODES, 1) * 5 + 0.5)
    assert torch.equal(vq.encode(images), codes)
    torch.testing.assert_close(vq.decode_codes(codes, (8, 8)), pixels)
    with pytest.raises(ValueError, match="divisible by 2"):
        vq.encode(images[..., :15])


# ---- configuration and prompts ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_head": 5}, "heads"),
        ({"dim": 24}, "4 divides"),
        ({"n_kv_head": 3}, "multiple of n_kv_head"),
        ({"block_size": 24}, "square"),
        ({"model_type": "i2i"}, "'c2i' or 't2i'"),
        ({"uncond_rows": 3}, "uncond_rows"),
    ],
)
def test_bad_configuration(options, message):
    with pytest.raises(ValueError, match=message):
        make_gpt(**options)


def test_prompts_are_checked(model):
    with pytest.raises(ValueError, match="without a text encoder"):
        model.encode(["a red circle"])
    with pytest.raises(ValueError, match="takes text prompts"):
        model.encode([3])
    with pytest.raises(ValueError, match=r"caption features must be \[B, \*\(6, 12\)\]"):
        model.prefill(model.condition(torch.zeros(1, 5, 12)), guidance=False, window=1)
    with pytest.raises(ValueError, match="40 codes and the tokenizer 64"):
        LlamaGen(make_gpt(), make_vq(64))
    classes = LlamaGen(
        make_gpt(model_type="c2i", num_classes=10, cls_token_num=1), make_vq(), name="tiny-c2i"
    )
    assert classes.encode([3, "7"]).data["cond"].tolist() == [3, 7]
    for bad in ("a red circle", 10, -1, True):
        with pytest.raises(ValueError, match=r"tiny-c2i is class-conditional: it takes class labels 0\.\.9"):
            classes.encode([bad])
    with pytest.raises(ValueError, match="negative"):
        classes.encode([3], ["4"])


def test_adapter_pixels_and_costs_probe(model):
    pixels = model.decode(torch.randint(0, CODES, (2, 1, GRID, GRID)))
    assert pixels.shape == (2, 3, 2 * GRID, 2 * GRID)
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    assert model.codebook.norm(dim=1).sub(1).abs().max() < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, out = model.prefill(model.dummy_conditioning(3), guidance=True, window=2)
    assert out.uncond is not None
    assert state.kv.shape[2] == 6
