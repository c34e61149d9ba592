"""EAGLE-2 and EAGLE-3 with a language-model target: networks, drafted trees and whole greedy runs."""

from __future__ import annotations

import pytest
import torch
from golden import leaf_paths
from lantern_cases import GOLDEN, facts, folder
from safetensors.torch import load_file

from visacc.drafters.checkpoint import load_drafter
from visacc.drafters.draft import Drafting
from visacc.speculate.checkpoints import load_drafter as load_text_drafter
from visacc.speculate.trees import DynamicTree
from visacc.speculate.views import AcceptedStep, PromptView, TargetFeatures
from visacc.verify import GREEDY, DraftTree, TreeShape, verify

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("_no_grad")]


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


class Target:
    """The llama target; reads whole sequences, a tree behind them."""

    def __init__(self, tmp):
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(
            folder(tmp / "target", "eagle/target.safetensors", "eagle/target_config.json"),
            dtype=torch.float32,
            attn_implementation="sdpa",
        ).eval()
        layers = self.model.config.num_hidden_layers
        self.taps = (2, layers // 2, layers - 3)

    def __call__(self, ids, positions, seen):
        """Logits [1, L, V], features after the final norm, and the inputs of the tapped layers."""
        bias = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)
        out = self.model.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=bias,
            output_hidden_states=True,
            use_cache=False,
        )
        taps = {i: out.hidden_states[i] for i in self.taps}
        return self.model.lm_head(out.last_hidden_state), TargetFeatures(out.last_hidden_state, taps)

    def read(self, ids):
        n = ids.shape[1]
        return self(ids, torch.arange(n)[None], torch.ones(n, n, dtype=torch.bool).tril())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "eagle/golden.safetensors")


@pytest.fixture(scope="module")
def meta():
    return facts("eagle/meta.json")


class One:
    """EAGLE-1/2 networks as the image decoders drive them."""

    def __init__(self, tmp, target):
        self.network = load_drafter(
            folder(tmp / "one", "eagle/eagle1.safetensors", "eagle/eagle1_config.json")
        )
        self.target = target

    def start(self, ids, feats, root):
        self.drafting = Drafting.start(
            self.network,
            feats.last,
            torch.cat([ids[:, 1:], root[:, None]], dim=1),
            branches=1,
            room=200,
            finish=lambda features, slots: self.target.model.lm_head(features),
            to_ids=lambda codes, slots: codes,
        )

    def grow(self, tree, root):
        return tree.grow(self.drafting.session(), root, self.drafting.feature, self.drafting.root_row())

    def follow(self, feats, tokens, following, n):
        self.drafting.follow(feats.last, following, n)


class Three:
    """EAGLE-3 networks as the text speculator drives them."""

    def __init__(self, tmp, target):
        path = folder(tmp / "three", "eagle/eagle3.safetensors", "eagle/eagle3_config.json")
        self.drafter = load_text_drafter(path, method="eagle3", taps=target.taps)
        model = target.model
        size, vocab = model.config.hidden_size, model.config.vocab_size
        self.embed = model.model.embed_tokens
        self.drafter.bind(self.embed, model.lm_head, hidden_size=size, vocab_size=vocab)

    def start(self, ids, feats, root):
        self.state = self.drafter.prefill(PromptView.build(ids, self.embed(ids)), feats, root, room=200)

    def grow(self, tree, root):
        s = self.state
        return tree.grow(self.drafter.session(s), root, s.feature, s.logits)

    def follow(self, feats, tokens, following, n):
        path = torch.zeros_like(tokens)
        self.drafter.observe(
            self.state, AcceptedStep(path, n, tokens, feats, following.gather(1, n[:, None] - 1)[:, 0])
        )


KINDS = {"eagle1": One, "eagle3": Three}


@pytest.mark.parametrize("kind", list(KINDS))
def test_target_features(target, golden, kind):
    context = golden[f"{kind}.draft.context_ids"][:, :12]
    logits, feats = target.read(context)
    torch.testing.assert_close(feats.last, golden["target.hidden"], atol=2e-5, rtol=0)
    three = torch.cat([feats.taps[i] for i in target.taps], dim=-1)
    torch.testing.assert_close(three, golden["target.hidden3"], atol=2e-5, rtol=0)
    torch.testing.assert_close(logits, golden["target.logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_drafted_tree(target, golden, meta, kind, tmp_path):
    """Prompt pass, siblings and the dynamic tree."""
    drafter, params = KINDS[kind](tmp_path, target), meta["params"]
    ids = golden[f"{kind}.draft.context_ids"]
    _, feats = target.read(ids[:, :-1])
    drafter.start(ids[:, :-1], feats, ids[:, -1])
    if kind == "eagle3":
        out = drafter.state.feature
        kv = drafter.state.kv.kv
    else:
        out = drafter.drafting.feature
        kv = drafter.drafting.cache.kv
    torch.testing.assert_close(out, golden[f"{kind}.fwd.hidden_out"][:, -1], atol=2e-5, rtol=0)
    n = golden[f"{kind}.fwd.k"].shape[2]
    for i, name in enumerate("kv"):
        torch.testing.assert_close(kv[0, i, :, :, :n], golden[f"{kind}.fwd.{name}"], atol=2e-5, rtol=0)
    session = drafter.drafting.session() if kind == "eagle1" else drafter.drafter.session(drafter.state)
    siblings = golden[f"{kind}.tree.ids"]
    count = siblings.shape[1]
    above = torch.full((1, count), -1)
    got, _ = session.run(siblings, out[:, None].expand(-1, count, -1), above, 1)
    torch.testing.assert_close(got, golden[f"{kind}.tree.hidden_out"], atol=2e-5, rtol=0)
    grown = drafter.grow(DynamicTree(params["depth"], params["topk"], params["total"] - 1), ids[:, -1])
    assert torch.equal(grown.tokens, golden[f"{kind}.draft.tokens"])
    positions = golden[f"{kind}.draft.positions"]
    assert torch.equal(grown.depth[0] - grown.depth[0, 0], positions - positions[0])
    shape = TreeShape(tuple(grown.parent[0].tolist()))
    assert torch.equal(shape.tensors("cpu").index.ancestors[0].to(torch.uint8), golden[f"{kind}.draft.mask"])
    assert sorted(leaf_paths(shape)) == sorted(golden[f"{kind}.draft.retrieve"].tolist())


@pytest.mark.parametrize(("kind", "run"), [("eagle1", "eagle2_greedy"), ("eagle3", "eagle3_greedy")])
def test_greedy_run(target, golden, meta, kind, run, tmp_path):
    """All tokens, and the accepted drafts of every step."""
    drafter, params = KINDS[kind](tmp_path, target), meta["params"]
    policy = DynamicTree(params["depth"], params["topk"], params["total"] - 1)
    ids = golden["prompt"]
    logits, feats = target.read(ids)
    root = logits[:, -1].argmax(1)
    drafter.start(ids, feats, root)
    accepted = []
    for _ in meta[run]["accepted_draft_tokens_per_step"]:
        grown = drafter.grow(policy, root)
        tree = DraftTree(grown.tokens, grown.parent, grown.live)
        n, slots = ids.shape[1], grown.tokens.shape[1]
        seen = torch.ones(n + slots, n + slots, dtype=torch.bool).tril()
        seen[n:, n:] = tree.index.ancestors[0]
        positions = torch.cat([torch.arange(n), n + grown.depth[0]])[None]
        logits, feats = target(torch.cat([ids, grown.tokens], dim=1), positions, seen)
        step = verify(tree, logits[:, n:].softmax(-1), GREEDY)
        taken = int(step.n)
        accepted.append(taken - 1)
        path, tokens = step.path[:, :taken].long(), step.tokens[:, :taken]
        following = torch.cat([tokens[:, 1:], step.next_root[:, None]], dim=1)
        drafter.follow(feats.gather(n + path), tokens, following, step.n)
        ids, root = torch.cat([ids, tokens], dim=1), step.next_root
    want = golden[f"{run}.output_ids"]
    ids = torch.cat([ids, root[:, None]], dim=1)
    length = min(ids.shape[1], want.shape[1])
    assert length >= golden["prompt"].shape[1] + params["gen"]
    assert torch.equal(ids[:, :length], want[:, :length])
    assert accepted == meta[run]["accepted_draft_tokens_per_step"]
