"""Drafters against the official modules (golden folder ``vlm``): rows, block outputs, trees of two rounds."""

from __future__ import annotations

import json

import pytest
import torch
from golden import golden_dir
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from visacc.speculate.checkpoints import infer_config, load_drafter, load_tensors
from visacc.speculate.drafter import Drafter, DraftState, prompt_attention
from visacc.speculate.losses import entropy_choice, kl_over_vocab, smooth_l1, soft_ce
from visacc.speculate.rows import PrefillRows, kept_visual
from visacc.speculate.trees import Chain, DynamicTree, Grown, StaticTree
from visacc.speculate.views import AcceptedStep, PromptView, TargetFeatures

pytestmark = pytest.mark.golden
GOLDEN = golden_dir("vlm")
TOLERANCE = 1e-5


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to 1e-5 of the largest value (at least 1)."""
    assert ours.shape == theirs.shape
    return bool((ours - theirs).abs().max() <= TOLERANCE * max(1.0, float(theirs.abs().max())))


class Case:
    """One golden folder, with the target's embedding and head bound to the drafter."""

    def __init__(self, name: str, method: str, **overrides: object) -> None:
        files = {
            f: GOLDEN / f"{name}/{f}" for f in ("inputs.safetensors", "outputs.safetensors", "config.json")
        }
        self.inputs, self.outputs = (
            load_file(files["inputs.safetensors"]),
            load_file(files["outputs.safetensors"]),
        )
        with safe_open(files["outputs.safetensors"], "pt") as handle:
            self.meta = {k: int(v) for k, v in handle.metadata().items()}
        self.drafter = load_drafter(files["config.json"].parent, method, **overrides)
        weights = load_file(GOLDEN / f"{name}/model.safetensors")
        table = self.inputs.get("embed_tokens.weight", weights.get("embed_tokens.weight"))
        head = self.inputs["lm_head.weight"]
        self.drafter.bind(
            lambda ids: F.embedding(ids, table),
            lambda h: h @ head.T,
            hidden_size=head.shape[1],
            vocab_size=head.shape[0],
        )
        self.visual = self.image_positions()

    def image_positions(self) -> Tensor:
        n, at = self.inputs["inputs_embeds"].shape[1], self.meta.get("image_at")
        visual = torch.zeros(1, n, dtype=torch.bool)
        ids = self.inputs["input_ids"][0]
        if at is None:
            at = int((ids == (-200 if (ids == -200).any() else 121)).nonzero()[0])
        visual[:, at : at + self.meta["num_image_tokens"]] = True
        return visual

    def view(self) -> PromptView:
        embeds = self.inputs["inputs_embeds"]
        ids = torch.zeros(embeds.shape[:2], dtype=torch.int64)
        return PromptView.build(ids, embeds, self.visual)

    def prefill(self) -> DraftState:
        feats = TargetFeatures(self.inputs["hidden_states"])
        with torch.no_grad():
            return self.drafter.prefill(self.view(), feats, self.inputs["sample_token"][0], room=128)

    def rows(self):  # type: ignore[no-untyped-def]
        feats = TargetFeatures(self.inputs["hidden_states"])
        with torch.no_grad():
            root = self.drafter.embed(self.inputs["sample_token"][0])
            return self.drafter.rows.prefill(self.view(), feats, root)

    def accept(self, state: DraftState, grown: Grown, nodes: Tensor) -> None:
        """Round 2 of the golden files: the kept nodes with the recorded target features."""
        tokens = grown.tokens[0, nodes][None]
        feats = TargetFeatures(self.inputs["r2_accept_hidden"])
        n = torch.tensor([len(nodes)])
        with torch.no_grad():
            self.drafter.observe(
                state, AcceptedStep(nodes[None], n, tokens, feats, self.inputs["r2_sample_token"][0])
            )


def tree_mask(parent: Tensor) -> Tensor:
    """bool [T, T] ancestors-or-self from parents int64 [T]."""
    size = len(parent)
    mask = torch.eye(size, dtype=torch.bool)
    for i in range(1, size):
        mask[i] |= mask[parent[i]]
    return mask


def grow(drafter: Drafter, state: DraftState, policy) -> Grown:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        return policy.grow(drafter.session(state), state.root, state.feature, state.logits)


def check_tree(grown: Grown, out: dict[str, Tensor], prefix: str) -> None:
    assert torch.equal(grown.tokens, out[f"{prefix}_draft_tokens"])
    assert torch.equal(grown.depth[0], out[f"{prefix}_tree_pos"])
    assert torch.equal(tree_mask(grown.parent[0]), out[f"{prefix}_tree_mask"][0, 0].bool())
    assert bool(grown.live.all())


def policy_of(case: Case) -> DynamicTree:
    m = case.meta
    return DynamicTree(m["depth"], m["top_k"], m["total_tokens_arg"] - 1)


@pytest.mark.parametrize("name", ["msd_llava", "msd_qwen2vl"])
@pytest.mark.parametrize("method", ["msd", "eagle"])
def test_msd(name: str, method: str) -> None:
    case = Case(name, method)
    out = {k.removeprefix(f"{method}."): v for k, v in case.outputs.items() if k.startswith(f"{method}.")}
    rows = case.rows()
    if "layer_in" in out:
        assert close(rows.x, out["layer_in"])
    with torch.no_grad():
        features, _ = case.drafter.teach(rows)
    assert close(features, out["prefill_out"])
    state = case.prefill()
    assert close(state.feature, out["prefill_out"][:, -1])
    if "stable_k" in out:
        assert close(state.kv.kv[0, 0, :, :, : rows.x.shape[1]], out["stable_k"])
        assert close(state.kv.kv[0, 1, :, :, : rows.x.shape[1]], out["stable_v"])
    first = grow(case.drafter, state, policy_of(case))
    check_tree(first, out, "r1")
    case.accept(state, first, out["acc_nodes"])
    assert close(state.feature, out["r2_extend_out"][:, -1])
    check_tree(grow(case.drafter, state, policy_of(case)), out, "r2")


def test_dream_blocks_and_caches() -> None:
    case = Case("dream", "dream", official_cross_mask=True)
    out, rows = case.outputs, case.rows()
    drafter = case.drafter
    with torch.no_grad():
        features, mid = drafter.teach(rows)
        how = prompt_attention(rows, uniform_blind=True)
        first = drafter.backbone.layers[0](rows.x, how, 0)
    assert close(first, out["prefill_l0_out"])
    assert mid is not None
    assert close(mid, out["prefill_l1_out"])
    assert close(features, out["prefill_out"])
    state = case.prefill()
    width = rows.x.shape[1]
    for ours, theirs in ((0, 0), (1, 2)):
        for i, kind in enumerate("kv"):
            assert close(state.kv.kv[ours, i, :, :, :width], out[f"prefill_kv{theirs}_{kind}"])
    assert state.cross_kv is not None
    for i, kind in enumerate("kv"):
        assert close(state.cross_kv.kv[0, i, :, :, : width - 1], out[f"prefill_kv1_{kind}"])


def test_dream_official_trees() -> None:
    case = Case("dream", "dream", official_cross_mask=True)
    state = case.prefill()
    first = grow(case.drafter, state, policy_of(case))
    check_tree(first, case.outputs, "r1")
    case.accept(state, first, case.outputs["acc_nodes"])
    check_tree(grow(case.drafter, state, policy_of(case)), case.outputs, "r2")


@pytest.mark.parametrize("official", [True, False])
def test_dream_chain(official: bool) -> None:
    """Without siblings both cross masks agree with the recorded chain."""
    case = Case("dream", "dream", official_cross_mask=official)
    length = case.meta["chain_total_tokens_arg"] - 1
    state = case.prefill()
    seen = []
    session = case.drafter.session(state)
    plain = session.run
    session.run = lambda *a: seen.append(plain(*a)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    with torch.no_grad():
        grown = Chain(length).grow(session, state.root, state.feature, state.logits)
    assert torch.equal(grown.tokens, case.outputs["chain_tokens"])
    features = torch.cat([state.feature[:, None], *[f for f, _ in seen]], dim=1)
    assert close(features, case.outputs["chain_features"][:, : features.shape[1]])


def test_dream_pruning() -> None:
    out = load_file(GOLDEN / "dream/outputs.safetensors")
    ids, size = out["prune.input_ids"], out["entropy.features"].shape[3]
    score = out["entropy.attentions"][-1].mean(1).mean(1)
    image = ids == ids.mode(1).values[:, None]
    kept = kept_visual(score, image, 0.7)
    assert torch.equal(ids[kept][None], out["prune.new_ids"])
    for name, layer in (("embeds", 0), ("features", -1)):
        full = out["entropy.features"][layer]
        assert close(full[kept].view(1, -1, size), out[f"prune.new_{name}"])


@pytest.mark.parametrize("rounds", [1, 2])
def test_flash_static_tree(rounds: int) -> None:
    case = Case("flash", "flash")
    tree = json.loads((GOLDEN / "flash/static_tree.json").read_text())
    policy = StaticTree(tuple(tuple(p) for p in tree["choices"]))
    assert set(policy.paths) == set(StaticTree().paths)
    out = case.outputs
    with torch.no_grad():
        features, _ = case.drafter.teach(case.rows())
    assert close(features, out["prefill_out"])
    state = case.prefill()
    grown = grow(case.drafter, state, policy)
    if rounds == 2:
        case.accept(state, grown, out["acc_nodes"])
        grown = grow(case.drafter, state, policy)
    assert torch.equal(grown.tokens, out[f"r{rounds}_tree"])
    assert torch.equal(grown.depth[0], out["tree.tree_position_ids"])
    assert torch.equal(tree_mask(grown.parent[0]), out["tree.tree_attn_mask"][0, 0].bool())
    top = state.logits.topk(10)
    assert torch.equal(top.indices[0], out[f"r{rounds}_ss_token"][0])
    assert close(top.values[0], out[f"r{rounds}_ss_score"][0])


def sar_drafter() -> tuple[Drafter, dict[str, Tensor]]:
    raw = json.loads((GOLDEN / "flash/sar_config.json").read_text())
    weights = load_file(GOLDEN / "flash/sar_model.safetensors")
    drafter = Drafter(infer_config(raw, weights, "flash"))
    load_tensors(drafter, weights)
    return drafter, load_file(GOLDEN / "flash/outputs.safetensors")


def block_diagonal(x: Tensor, pad: float = 0.0) -> Tensor:
    """FLASH's training layout: entry (j, i) of [B, L, K, D] -> row i L + i + j of [B, K L, D], gaps are
    ``pad``.

    Row r of block i then predicts the same position r for every offset i; predictions beyond L fall off.
    """
    batch, length, k, size = x.shape
    rows = [
        torch.cat([x.new_full((batch, min(i, length), size), pad), x[:, : max(length - i, 0), i]], dim=1)
        for i in range(k)
    ]
    return torch.cat(rows, dim=1)


def test_flash_semi_autoregressive_head() -> None:
    drafter, out = sar_drafter()
    assert drafter.ahead == out["sar.head_out"].shape[2]

    def run(x: Tensor) -> Tensor:
        view = PromptView.build(torch.zeros(x.shape[:2], dtype=torch.int64), x)
        rows = PrefillRows(x, view.seq_pos, view.valid, view.lengths)
        with torch.no_grad():
            return drafter.teach(rows)[0]

    assert close(run(out["sar.x"]), out["sar.head_out"])
    fused = drafter.rows.fuse(out["sar.inputs_embeds"], out["sar.hidden_states"], {})
    assert close(block_diagonal(run(fused)), out["sar.forward_out"])
    assert torch.equal(block_diagonal(out["sar.rearrange_in"], -1), out["sar.rearrange_out"])


def test_flash_compressor() -> None:
    drafter, out = sar_drafter()
    with torch.no_grad():
        assert close(drafter.rows.compress(out["compress.visual_features"]), out["compress.out"])


def test_vispec() -> None:
    case = Case("vispec", "vispec")
    out, rows = case.outputs, case.rows()
    assert torch.equal(rows.pos, out["layer_pos"])
    assert close(rows.x, out["layer_in"])
    assert close(rows.extra["g"], out["global_img"])
    state = case.prefill()
    assert int(state.kv.length) == int(out["kv_len"])
    assert int(state.next_pos) == int(out["real_len"])
    first = grow(case.drafter, state, policy_of(case))
    check_tree(first, out, "r1")
    case.accept(state, first, out["acc_nodes"])
    check_tree(grow(case.drafter, state, policy_of(case)), out, "r2")


def shifted_rows(case: Case, embeds: Tensor, hidden: Tensor, visual: Tensor) -> PrefillRows:
    """Rows from embeddings and visual flags that are shifted left by one already (the trainers' layout)."""
    first = torch.zeros_like(embeds[:, :1])
    view = PromptView.build(
        torch.zeros(embeds.shape[:2], dtype=torch.int64),
        torch.cat([first, embeds[:, :-1]], dim=1),
        torch.cat([torch.zeros_like(visual[:, :1]), visual[:, :-1]], dim=1),
    )
    with torch.no_grad():
        return case.drafter.rows.prefill(view, TargetFeatures(hidden), embeds[:, -1])


def check_losses(case: Case, predict: Tensor, target: Tensor, mask: Tensor) -> None:
    out, head = case.outputs, case.inputs["lm_head.weight"]
    vloss = smooth_l1(predict, target, mask)
    ploss = soft_ce(predict @ head.T, target @ head.T, mask)
    assert close(vloss, out["train.vloss"])
    assert close(ploss, out["train.ploss"])
    assert close(vloss + 0.1 * ploss, out["train.loss"])


@pytest.mark.parametrize("name", ["msd_llava", "msd_qwen2vl"])
def test_msd_training_losses(name: str) -> None:
    case = Case(name, "msd")
    given = {k.removeprefix("train."): v for k, v in case.outputs.items() if k.startswith("train.")}
    ids, hidden = given["input_ids"], given["hidden_states"]
    visual = ids == 121
    if name == "msd_llava":
        visual = torch.zeros_like(visual)
        # the collator pads ids on the left for the 575 positions that one placeholder stands for
        at = int((ids[0] == -200).nonzero()[0]) - 575
        visual[0, at : at + 576] = True
    rows = shifted_rows(case, given["inputs_embeds"], hidden, visual)
    with torch.no_grad():
        predict, _ = case.drafter.teach(rows)
    real = given["attention_mask"].bool()
    assert close(predict[real], given["predict"][real])
    check_losses(case, predict, given["target"], given["loss_mask"])


def test_flash_training_losses() -> None:
    case = Case("flash", "flash")
    embeds, hidden = case.inputs["inputs_embeds"], case.inputs["hidden_states"]
    none = torch.zeros_like(embeds[:, :1])
    shifted, target = torch.cat([embeds[:, 1:], none], dim=1), torch.cat([hidden[:, 1:], none], dim=1)
    rows = shifted_rows(case, shifted, hidden, torch.zeros(embeds.shape[:2], dtype=torch.bool))
    with torch.no_grad():
        predict, _ = case.drafter.teach(rows)
    # the last row's embedding is padding and its mask is zero
    assert close(predict[:, :-1], case.outputs["train.predict"][:, :-1])
    check_losses(case, predict, target, case.outputs["train.loss_mask"])


def test_dream_training_losses() -> None:
    case = Case("dream", "dream")
    out, head = case.outputs, case.inputs["lm_head.weight"]
    embeds, hidden = case.inputs["inputs_embeds"], case.inputs["hidden_states"]
    view = PromptView.build(torch.zeros(1, embeds.shape[1] - 1, dtype=torch.int64), embeds[:, :-1])
    with torch.no_grad():
        rows = case.drafter.rows.prefill(view, TargetFeatures(hidden[:, :-1]), embeds[:, -1])
        predict, mid = case.drafter.teach(rows)
    assert mid is not None
    assert close(predict, out["train.predict"])
    assert close(mid, out["train.mid_predict"])
    mask = out["train.loss_mask"]
    vloss = smooth_l1(predict, hidden, mask, over_rows=True)
    kl = kl_over_vocab(predict @ head.T, hidden @ head.T, mask)
    middle = smooth_l1(mid, out["train.mid_target"], mask, over_rows=True)
    assert close(vloss, out["train.vloss"])
    assert close(kl, out["train.kl"])
    assert close(middle, out["train.mid_vloss"])
    assert close(0.2 * vloss + kl + middle, out["train.loss"])


def test_dream_entropy_choice() -> None:
    """The original chooses and stores in bfloat16."""
    out = load_file(GOLDEN / "dream/outputs.safetensors")
    features, attention = out["entropy.features"].to(torch.bfloat16), out["entropy.attentions"]
    layers = range(1, int(0.4 * len(attention)) - 1)
    weights = attention.to(torch.bfloat16)
    entropies = [-(weights[i] * (weights[i] + 1e-8).log()).sum(-1).mean(1) for i in layers]
    chosen = entropy_choice([features[i] for i in layers], entropies, tuple(layers))
    assert torch.equal(chosen.float(), out["entropy.selected"])
