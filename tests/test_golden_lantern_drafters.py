"""Drafters of LANTERN and EAGLE against the published programs: networks, trees, whole greedy runs, tables."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from golden import leaf_paths
from lantern_cases import GOLDEN, Recorder, Setting, anole, causal, check_drafted, facts, folder, llm_drafting
from safetensors.torch import load_file

from visacc.decoders.ar import AR
from visacc.decoders.eagle import Eagle
from visacc.decoders.eagle_relaxed import LanternDecoder, LanternPPDecoder
from visacc.drafters.checkpoint import load_drafter, released_config
from visacc.drafters.draft import Drafting
from visacc.drafters.neighbours import nearest_codes
from visacc.drafters.trees import parse_tree
from visacc.engine import decode
from visacc.speculate.trees import DynamicTree
from visacc.train.drafter import DrafterTraining, optimizer
from visacc.train.loss import DraftBatch, LossSpec, draft_loss
from visacc.verify import TreeShape

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("_no_grad")]


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


# ---- LlamaGen ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    with torch.no_grad():
        return Setting(tmp_path_factory.mktemp("llamagen"))


def test_the_embedding_is_the_files_own(setting):
    own = setting.network.embed_tokens.weight
    assert not torch.equal(own, setting.model.gpt.tok_embeddings.weight)
    assert torch.equal(own, setting.model.gpt.output.weight)


def test_prompt_pass_and_increments(setting):
    """Prefill, three more rows on the cache, four siblings, three grandchildren; also the cached keys and values."""
    g, net = setting.golden, setting.network
    rows, width = g["fwd.input_ids"].shape
    drafting = Drafting.start(
        net,
        g["fwd.hidden_in"][:, :120],
        g["fwd.input_ids"][:, :120],
        branches=rows,
        room=64,
        finish=lambda features, slots: features[: len(slots)],
        to_ids=lambda codes, slots: codes,
    )
    rest = width - 120
    drafting.follow(g["fwd.hidden_in"][:, 120:], g["fwd.input_ids"][:1, 120:], torch.tensor([rest]))
    whole = net(
        g["fwd.input_ids"], g["fwd.hidden_in"], torch.arange(width).expand(rows, -1), causal(width, rows)
    )
    torch.testing.assert_close(whole, g["fwd.hidden_out"], atol=5e-6, rtol=0)
    for i, name in enumerate("kv"):
        cached = drafting.cache.kv[0, i, :, :, :width]
        torch.testing.assert_close(cached, g[f"fwd.{name}0"], atol=5e-6, rtol=0)
    torch.testing.assert_close(drafting.feature[0], g["fwd.hidden_out"][:, -1].flatten(), atol=5e-6, rtol=0)
    drafting.follow(g["inc.hidden_in"], g["inc.input_ids"][:1], torch.tensor([g["inc.input_ids"].shape[1]]))
    torch.testing.assert_close(drafting.feature[0], g["inc.hidden_out"][:, -1].flatten(), atol=5e-6, rtol=0)

    session = drafting.session()
    ids1, ids2, parent2 = g["tree.ids1"][:1], g["tree.ids2"][:1], g["tree.parent2"][None]
    n = ids1.shape[1]
    none = torch.full((1, n), -1)
    out1, _ = session.run(ids1, drafting.feature[:, None].expand(-1, n, -1), none, 1)
    want = g["tree.hidden_out1"].transpose(0, 1).flatten(1)[None]
    torch.testing.assert_close(out1, want, atol=5e-6, rtol=0)
    out2, _ = session.run(ids2, out1[:, g["tree.parent2"]], parent2, 2)
    want = g["tree.hidden_out2"].transpose(0, 1).flatten(1)[None]
    torch.testing.assert_close(out2, want, atol=5e-6, rtol=0)
    assert torch.equal(session.seen[0, n:], g["tree.mask2"][0, 0] == 0) or torch.equal(
        session.seen[0, n:], g["tree.mask2"][0, 0] > 0.5
    )


@pytest.mark.parametrize(("rule", "name"), [("float", "fp32mask"), ("half", "bf16mask")])
def test_features_of_padded_prompt_slots(setting, rule, name):
    _, output = setting.model.prefill(setting.cond, guidance=True, window=1, hidden=True, padding=rule)
    torch.testing.assert_close(output.hidden, setting.golden[f"prefix.hidden_{name}"], atol=1e-5, rtol=0)


def test_plain_greedy(setting):
    tokens = decode(setting.model, AR(), setting.cond, setting.greedy, [0]).sequence[0]
    want = setting.golden["ar_greedy.tokens"]
    assert torch.equal(tokens[: len(want)], want)


RUNS = [
    "greedy_dynamic",
    "greedy_static",
    "greedy_static57",
    "bf16mask_greedy_dynamic",
    "bf16mask_greedy_static57",
]
RELAXED = ["lantern_greedy_dynamic", "lanternpp_greedy_static"]


@pytest.mark.parametrize("name", RUNS + RELAXED)
def test_greedy_run(setting, name, tmp_path, monkeypatch):
    """Tokens, accepted drafts of every step, and the recorded trees with masks, positions and logits."""
    monkeypatch.setenv("VISACC_CACHE", str(tmp_path))
    params, entry = setting.meta["params"], setting.meta[name]
    static = entry["tree"] or ("naive_extend_57" if entry["static"] else None)
    tree = static or DynamicTree(depth=params["depth"], top_k=10, budget=params["total"] - 1)
    padding = "half" if name.startswith("bf16") else "float"
    kind, options = Eagle, {}
    if name in RELAXED:
        multiplicative = entry["delta"] > 1
        kind = LanternPPDecoder if multiplicative else LanternDecoder
        options = {"k": entry["k"], ("lam" if multiplicative else "delta"): entry["delta"]}
    decoder = type("Recorded", (Recorder, kind), {})(
        drafter=setting.network, tree=tree, padding=padding, **options
    )
    decoder.steps, decoder.first_leaf = [], name == "lantern_greedy_dynamic"
    want = setting.golden[f"{name}.tokens"]
    result = decode(
        setting.model,
        decoder,
        setting.cond,
        setting.greedy,
        [0],
        callback=lambda info: bool((info.committed <= len(want) + 1).any()),
    )
    assert torch.equal(result.sequence[0, : len(want)], want)
    accepted = entry["accepted_draft_tokens_per_step"]
    assert result.stats.accepted[1 : len(accepted) + 1, 0].tolist() == accepted
    for i in params["rec_steps"]:
        if decoder.first_leaf:
            break
        step, prefix = decoder.steps[i], f"{name}.step{i}."
        for key in ("tree_tokens", "positions", "mask", "context_len"):
            assert torch.equal(step[key], setting.golden[prefix + key]), key
        torch.testing.assert_close(
            step["cfg_logits"], setting.golden[prefix + "cfg_logits"], atol=1e-4, rtol=0
        )
        leaves = leaf_paths(TreeShape(tuple(step["parent"])))
        assert sorted(leaves) == sorted(setting.golden[prefix + "retrieve"].tolist())


# ---- language-model and Chameleon drafters ----------------------------------------------------------------
def test_eagle1(tmp_path):
    g = load_file(GOLDEN / "eagle/golden.safetensors")
    net = load_drafter(folder(tmp_path, "eagle/eagle1.safetensors", "eagle/eagle1_config.json"))
    assert net.config.family == "eagle"
    assert net.config.kv_heads < net.config.num_heads
    ids, hidden = g["eagle1.fwd.input_ids"], g["eagle1.fwd.hidden_in"]
    out = net(ids, hidden, torch.arange(ids.shape[1])[None], causal(ids.shape[1]))
    torch.testing.assert_close(out, g["eagle1.fwd.hidden_out"], atol=5e-6, rtol=0)
    params, context = facts("eagle/meta.json")["params"], g["eagle1.draft.context_ids"]
    head = load_file(GOLDEN / "eagle/target.safetensors")["lm_head.weight"]
    drafting = llm_drafting(net, hidden, context, head)
    for key in "kv":
        cached = drafting.cache.kv[0, "kv".index(key), :, :, : ids.shape[1]]
        torch.testing.assert_close(cached, g[f"eagle1.fwd.{key}"], atol=5e-6, rtol=0)
    siblings = g["eagle1.tree.ids"]
    n = siblings.shape[1]
    feature = drafting.feature[:, None].expand(-1, n, -1)
    out, _ = drafting.session().run(siblings, feature, torch.full((1, n), -1), 1)
    torch.testing.assert_close(out, g["eagle1.tree.hidden_out"], atol=5e-6, rtol=0)
    tree = DynamicTree(params["depth"], params["topk"], params["total"] - 1)
    grown = tree.grow(drafting.session(), context[:, -1], drafting.feature, drafting.root_row())
    check_drafted(grown, g, "eagle1.draft.", len(context[0]) - 1)


def test_eagle3_goes_to_the_other_loader(tmp_path):
    with pytest.raises(ValueError, match=r"EAGLE-3.*visacc.speculate"):
        load_drafter(folder(tmp_path, "eagle/eagle3.safetensors", "eagle/eagle3_config.json"))


@pytest.mark.parametrize("family", ["anole", "lumina"])
def test_chameleon_forward(family, tmp_path):
    g = load_file(GOLDEN / "chameleon/golden.safetensors")
    net = load_drafter(folder(tmp_path, f"chameleon/{family}.safetensors", f"chameleon/{family}_config.json"))
    valid, positions = g[f"{family}.fwd.mask"].bool(), g[f"{family}.fwd.positions"].clamp(min=0)
    ids, hidden = g["anole.fwd.input_ids"], g["anole.fwd.hidden_in"]
    n = ids.shape[1]
    mask = causal(n, 2) & valid[:, None] | torch.eye(n, dtype=torch.bool)
    out = net(ids, hidden, positions, mask)
    want = g[f"{family}.fwd.hidden_out"]
    torch.testing.assert_close(out[valid], want[valid], atol=5e-6, rtol=0)
    if family == "lumina":
        assert (
            net.config.norm_shards
            == load_file(GOLDEN / "chameleon/lumina.safetensors")["layers.0.self_attn.q_norm.weight"].shape[0]
        )


def test_anole_prompt_and_dynamic_trees(tmp_path):
    g, params, drafting = anole(tmp_path)
    valid, n = g["anole.fwd.mask"].bool(), g["anole.fwd.mask"].shape[1]
    for i, name in enumerate("kv"):
        cached = drafting.cache.kv[0, i, :, :, :n].transpose(1, 2)
        torch.testing.assert_close(
            cached[valid], g[f"anole.fwd.{name}"].transpose(1, 2)[valid], atol=5e-6, rtol=0
        )
    tree = DynamicTree(params["depth"], 10, params["total"] - 1)

    def grown(context):
        root = context[:1, -1]
        return tree.grow(drafting.session(), root, drafting.feature, drafting.root_row()), context

    drafted, context = grown(g["anole.dyn.context_ids"])
    check_drafted(drafted, g, "anole.dyn.", context.shape[1] - 1)
    later = g["anole.dyn2.context_ids"]
    drafting.follow(g["anole.dyn2.hidden_in"], later[:1, context.shape[1] :], torch.tensor([3]))
    drafted, _ = grown(later)
    check_drafted(drafted, g, "anole.dyn2.", later.shape[1] - 1)


def test_anole_static_candidates(tmp_path):
    """The ten candidates of every expanded node, likeliest first; and a recorded sampled pass against its own laws."""
    g, _, drafting = anole(tmp_path)
    wide = parse_tree("mc_sim_7b_63")
    rows = []

    def likeliest(scores, count, place):
        rows.append(scores[0].topk(10).indices)
        return scores.topk(count).indices, torch.ones(*scores.shape[:2], count, dtype=torch.bool), None

    root = g["anole.fwd.input_ids"][:1, -1]
    wide.grow(drafting.session(), root, drafting.feature, drafting.root_row(), likeliest)
    assert torch.equal(torch.cat(rows), g["anole.static_greedy.row_tokens"])

    laws, tokens = g["anole.static_sample.q"], g["anole.static_sample.row_tokens"]
    places = []

    def recorded(scores, count, place):
        first = len(places)
        places.extend(range(scores.shape[1]))
        law = scores[0].softmax(-1)
        torch.testing.assert_close(law, laws[first : len(places)], atol=2e-6, rtol=0)
        ids = tokens[first : len(places)]
        mass = law.gather(1, ids)
        left = 1 - torch.cat([torch.zeros_like(mass[:, :1]), mass.cumsum(1)[:, :-1]], dim=1)
        want = g["anole.static_sample.row_cond_prob"][first : len(places)]
        torch.testing.assert_close(mass / left, want, atol=2e-5, rtol=1e-4)
        return ids[None, :, :count], torch.ones(1, len(ids), count, dtype=torch.bool), law[None]

    tree = wide.grow(drafting.session(), root, drafting.feature, drafting.root_row(), recorded)
    torch.testing.assert_close(tree.q_rows[0], laws, atol=2e-6, rtol=0)


# ---- released tables --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("file", "metric"), [("neighbours_l2normalised.npy", "normalised"), (None, "given")])
def test_neighbour_tables(file, metric):
    """Order among near-ties depends on the machine, so distances are compared."""
    book = torch.from_numpy(np.load(GOLDEN / "codebook/codebook.npy"))
    path = GOLDEN / (f"codebook/{file}" if file else f"codebook/top_{len(book) - 1}_indices.npy")
    recorded = torch.from_numpy(np.load(path).astype(np.int32))
    table = nearest_codes(book, len(book) - 1, metric)
    rows = torch.nn.functional.normalize(book, dim=1) if metric == "normalised" else book
    distance = torch.cdist(rows.double(), rows.double())
    ours, theirs = (distance.gather(1, t.long()) for t in (table.neighbours, recorded))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(table.distances.double(), ours, atol=1e-5, rtol=0)
    assert (table.neighbours.sort(1).values[:, 1:] != table.neighbours.sort(1).values[:, :-1]).all()
    assert (table.neighbours != torch.arange(len(book))[:, None]).all()


def test_released_configurations():
    raw = facts("llamagen/drafter_config.json")
    config = released_config(raw, load_file(GOLDEN / "llamagen/drafter.safetensors"), GOLDEN.roots[0])
    assert (config.family, config.prefix, config.grid) == ("llamagen", 120, 16)
    with pytest.raises(ValueError, match="input_type"):
        released_config(raw | {"input_type": "v2i"}, {"fc.weight": torch.zeros(1)}, GOLDEN.roots[0])


# ---- training ---------------------------------------------------------------------------------------------
def test_published_training_step(setting):
    """Loss terms, clipped gradient and one AdamW step on two stored samples, with the published alignment and mask."""
    g, meta = load_file(GOLDEN / "train/golden.safetensors"), facts("train/meta.json")
    hidden = torch.stack([g[f"raw.{i}.hidden_state"] for i in range(2)])
    codes = torch.stack([g[f"raw.{i}.input_ids"] for i in range(2)])
    ids = torch.nn.functional.pad(codes, (119, 1))
    mask = torch.stack([g[f"raw.{i}.loss_mask"] for i in range(2)])
    mask[:, -1] = 0
    batch = DraftBatch(ids, hidden, mask)
    assert torch.equal(batch.ids, g["batch.input_ids"])
    assert torch.equal(batch.mask, g["batch.loss_mask"])
    torch.testing.assert_close(batch.targets[:, -2:], g["batch.target_last_two"])
    with torch.enable_grad():
        net = copy.deepcopy(setting.network).train().requires_grad_(True)
        settings = DrafterTraining(lr=meta["lr"], betas=tuple(meta["betas"]), clip=meta["grad_clip_value"])
        optim = optimizer(net, settings)
        spec = LossSpec(law=meta["p_w"], noise=0.0)
        loss, parts = draft_loss(net, setting.model.head, batch, spec)
        loss.backward()
    assert float(loss) == pytest.approx(meta["loss"]["loss"], rel=1e-5)
    assert float(parts["feature"]) == pytest.approx(meta["loss"]["vloss"], rel=1e-5)
    assert float(parts["law"]) == pytest.approx(meta["loss"]["ploss"], rel=1e-5)
    torch.nn.utils.clip_grad_value_(net.parameters(), settings.clip)
    torch.testing.assert_close(net.fc.bias.grad, g["grad.fc.bias_clipped"], atol=1e-6, rtol=1e-4)
    before = net.embed_tokens.weight.clone()
    optim.step()
    torch.testing.assert_close(net.fc.weight.detach(), g["after_step.fc.weight"], atol=1e-6, rtol=0)
    torch.testing.assert_close(net.fc.bias.detach(), g["after_step.fc.bias"], atol=1e-6, rtol=0)
    assert torch.equal(net.embed_tokens.weight, before)
