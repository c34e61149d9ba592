"""Golden drafters of LANTERN and EAGLE, behind their recorded prompts."""

from __future__ import annotations

import json

import numpy as np
import torch
from golden import as_released, golden_dir, leaf_paths
from safetensors.torch import load_file

from visacc.drafters.checkpoint import load_drafter
from visacc.drafters.draft import Drafting
from visacc.models.llamagen import LlamaGen, VQConfig, VQModel
from visacc.models.llamagen.converted import load_converted
from visacc.sampling import SamplingParams
from visacc.verify import DraftTree, TreeShape

GOLDEN = golden_dir("lantern")


def folder(tmp, weights, config):
    return as_released(tmp, GOLDEN / weights, GOLDEN / config)


def causal(n, rows=1):
    return torch.ones(n, n, dtype=torch.bool).tril().expand(rows, -1, -1)


def facts(name):
    return json.loads((GOLDEN / name).read_text())


class Setting:
    def __init__(self, tmp):
        self.golden = load_file(GOLDEN / "llamagen/golden.safetensors")
        self.meta = facts("llamagen/meta.json")
        gpt = load_converted(
            folder(tmp / "target", "llamagen/target.safetensors", "llamagen/target_config.json")
        )
        vq = VQModel(VQConfig(ch=32, ch_mult=(1,), codebook_size=gpt.config.vocab_size))
        vq.quantize.embedding.weight.copy_(torch.from_numpy(np.load(GOLDEN / "llamagen/codebook.npy")))
        self.model = RawCodebook(gpt, vq)
        self.network = load_drafter(
            folder(tmp / "drafter", "llamagen/drafter.safetensors", "llamagen/drafter_config.json")
        )
        self.cond = self.model.condition(self.golden["cond_idx"][:1], self.golden["attention_mask"][:1])
        self.greedy = SamplingParams(guidance_scale=self.meta["params"]["cfg"], temperature=0)


class RawCodebook(LlamaGen):
    """The published tables compare stored rows, not the unit vectors that the tokenizer compares."""

    @property
    def codebook(self):
        return self.vq.quantize.embedding.weight


def published_ties(tree, depth):
    """The tree with slots renumbered so that, at equal depth, the lowest slot lies on the first leaf row.

    Relaxed greedy acceptance can accept two siblings. The published dynamic tree then follows the first leaf row, the
    library the draft with the better score.
    """
    parent = tree.parent[0].tolist()
    slots = range(len(parent))
    leaf = [s if s not in parent else len(parent) for s in slots]
    for s in reversed(slots[1:]):
        leaf[parent[s]] = min(leaf[parent[s]], leaf[s])
    order = torch.tensor(sorted(slots, key=lambda s: (int(depth[0, s]), leaf[s])))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    up = tree.parent[:, order]
    parents = torch.where(up < 0, up, place[up.clamp(min=0)])
    sizes = {"max_children": tree.max_children, "max_depth": tree.max_depth}
    return DraftTree(tree.tokens[:, order], parents, tree.live[:, order], **sizes), depth[:, order]


class Recorder:
    """Mixed into a decoder: what the recorded steps proposed."""

    first_leaf = False

    def _grow(self, run):
        tree, depth = super()._grow(run)
        return published_ties(tree, depth) if self.first_leaf else (tree, depth)

    def judge(self, run, proposal, law, output):
        tree = self._tree
        self.steps.append(
            {
                "tree_tokens": proposal.tokens[0],
                "positions": proposal.positions[0] + 120,
                "mask": tree.index.ancestors[0].to(torch.uint8),
                "parent": tree.parent[0].tolist(),
                "cfg_logits": output.uncond[0]
                + run.sampling.guidance_scale * (output.logits - output.uncond)[0],
                "context_len": torch.tensor(120 + int(run.count) - 1),
            }
        )
        return super().judge(run, proposal, law, output)


def llm_drafting(net, hidden, context, head, **options):
    """Read a prompt whose last token is the root."""
    return Drafting.start(
        net,
        hidden,
        context[:, 1:],
        branches=1,
        room=200,
        finish=lambda features, slots: features @ head.T,
        to_ids=lambda codes, slots: codes,
        **options,
    )


def check_drafted(grown, golden, prefix, base):
    assert torch.equal(grown.tokens, golden[prefix + "tokens"])
    assert torch.equal(grown.depth[0] + base, golden[prefix + "positions"]) or torch.equal(
        grown.depth[0], golden[prefix + "positions"]
    )
    shape = TreeShape(tuple(grown.parent[0].tolist()))
    ancestors = shape.tensors("cpu").index.ancestors[0]
    assert torch.equal(ancestors.to(torch.uint8), golden[prefix + "mask"])
    assert sorted(leaf_paths(shape)) == sorted(golden[prefix + "retrieve"].tolist())


def anole(tmp):
    """The Anole drafter behind the recorded prompt: two rows, the unconditional one left-padded."""
    g, params = load_file(GOLDEN / "chameleon/golden.safetensors"), facts("chameleon/meta.json")["params"]
    net = load_drafter(folder(tmp, "chameleon/anole.safetensors", "chameleon/anole_config.json"))
    image = torch.arange(len(g["lm_head"]))
    image = (image >= 4) & (image < 4 + params["NC"])

    def finish(features, slots):
        cond, uncond = features @ g["lm_head"].T
        return (uncond + params["cfg"] * (cond - uncond)).masked_fill(~image, -torch.inf)[None]

    drafting = Drafting.start(
        net,
        g["anole.fwd.hidden_in"],
        g["anole.fwd.input_ids"],
        branches=2,
        room=200,
        finish=finish,
        to_ids=lambda codes, slots: codes,
        valid=g["anole.fwd.mask"].bool(),
    )
    return g, params, drafting
