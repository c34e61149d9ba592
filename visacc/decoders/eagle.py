"""Drafted token trees: a small network drafts several continuations, one target forward verifies them all.

| decoder | acceptance | source |
|---|---|---|
| eagle | exact (several lossless rules) | EAGLE, arXiv 2401.15077, 2406.16858 |
| lantern, lantern++ | relaxed, see :mod:`visacc.decoders.eagle_relaxed` | arXiv 2410.03355, 2502.06352 |

The drafter predicts the target's next feature from its features and the tokens (:mod:`visacc.drafters`); guided models
draft with both branches and one set of tokens, so the draft law is guided and filtered like the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visacc.decoders.base import Decoder, Verdict
from visacc.drafters import EagleNetwork
from visacc.drafters.bind import check_target, find_drafter
from visacc.drafters.draft import Drafting
from visacc.drafters.trees import StaticTree, parse_tree
from visacc.kernels import race_topk, rng
from visacc.kernels.reference.logits import guided as guide
from visacc.models.base import DecodeState, ImageModel, Layout, ModelOutput, Proposal
from visacc.sampling import SamplingParams, probs
from visacc.speculate.trees import DynamicTree
from visacc.verify import DraftTree, Greedy, GumbelExact, Rule, Traversal, verify
from visacc.verify.policies import DEFAULT_IMAGE_TREE
from visacc.verify.rules import EXACT

if TYPE_CHECKING:
    from visacc.engine import Run

EXACT_RULES: dict[str, Rule] = {"exact": EXACT, "traversal": Traversal(), "gumbel-exact": GumbelExact()}
Tree = str | Sequence[Sequence[int]] | DynamicTree
DYNAMIC = DynamicTree(depth=4, top_k=10, budget=58)
"""EAGLE-2's tree as LANTERN uses it: 58 drafts, at most five deep."""


class Eagle(Decoder):
    """Exact decoding with a drafted tree.

    Args:
        drafter: folder of a drafter, or the network; ``None`` takes the one that lies with the model.
        tree: a published tree by name, ``chain-N``, ``WxD``, a list of paths of child ranks, or ``dynamic`` (EAGLE-2, also
            as an object; for greedy decoding: its likeliest candidates hardly ever pass when sampling from flat image
            laws). ``None`` takes the drafter's own.
        rule: ``exact`` (ratio test with sampled siblings), ``traversal`` (also lossless, accepts at least as much),
            ``gumbel-exact`` (token for token what plain decoding draws with the seed). Greedy sampling parameters
            use equality with the arg-max whatever the rule.
        padding: what padded prompt slots see when the drafter's features are made, see
            :func:`visacc.models.llamagen.gpt.padded_prefix_mask`; ``None`` takes what the drafter was trained with.

    Raises:
        ValueError: unknown tree or rule.
    """

    name = "eagle"
    summary = "a trained drafter proposes a token tree, verified exactly"
    lossless = True
    requires = frozenset({"hidden", "tree_mask"})
    needs_hidden = True

    def __init__(
        self,
        drafter: str | Path | EagleNetwork | None = None,
        tree: Tree | None = None,
        rule: str = "exact",
        padding: str | None = None,
    ) -> None:
        super().__init__()
        if rule not in EXACT_RULES:
            raise ValueError(f"unknown rule {rule!r}; choose one of {', '.join(EXACT_RULES)}")
        if tree is not None:
            _policy(tree)
        self.drafter, self.tree, self.rule_name, self.padding = drafter, tree, rule, padding
        self.network: EagleNetwork | None = None
        self._model: ImageModel | None = None
        self._policy: StaticTree | DynamicTree | None = None

    def options(self) -> dict[str, Any]:
        drafter = "object" if isinstance(self.drafter, EagleNetwork) else self.drafter
        tree = self.tree if isinstance(self.tree, str) or self.tree is None else str(self.tree)
        shown = {"drafter": None if drafter is None else str(drafter), "tree": tree}
        return shown | ({"rule": self.rule_name} if self.lossless else {})

    def check(self, model: ImageModel) -> None:
        super().check(model)
        if self._model is not model:
            network = find_drafter(self.drafter, model)
            check_target(network, model)
            self._model, self.network = model, network
            self._policy = _policy(self.tree or network.config.tree or DEFAULT_IMAGE_TREE)
            self._check_width(model)

    def _check_width(self, model: ImageModel) -> None:
        policy = self._policy
        widest = (
            policy.top_k if isinstance(policy, DynamicTree) else policy.shape.max_children if policy else 0
        )
        if widest > model.layout.vocab:
            raise ValueError(
                f"the tree has {widest} children at a node, {model.name} only {model.layout.vocab} codes"
            )

    @property
    def policy(self) -> StaticTree | DynamicTree:
        if self._policy is None:
            raise RuntimeError("the decoder has not been checked against a model yet (Eagle.check)")
        return self._policy

    @property
    def levels(self) -> int:
        return self.policy.levels if isinstance(self.policy, DynamicTree) else self.policy.depth

    def max_nodes(self, layout: Layout) -> int:
        return self.policy.slots

    def prefill_options(self) -> dict[str, Any]:
        assert self.network is not None
        padding = self.padding or self.network.config.target.get("padding", "")
        if not padding:
            return {"hidden": True}
        return {"hidden": True, "padding": padding}

    # ---- drafting -------------------------------------------------------------------------------------------
    def prompted(self, run: Run, state: DecodeState, output: ModelOutput) -> None:
        assert output.hidden is not None
        self._prompt, self._branches = output.hidden, state.branches

    def begin(self, run: Run, law: Tensor) -> Tensor:
        first = super().begin(run, law)
        network = self.network
        assert network is not None
        features = self._prompt
        wanted = network.config.prefix
        if wanted and features.shape[1] != wanted:
            raise ValueError(
                f"the drafter was made for prompts of {wanted} slots, {run.model.name} has {features.shape[1]}"
            )
        # prompt slots have no code: the drafter reads code 0 there, and the features
        ids = torch.zeros(features.shape[:2], dtype=torch.int64, device=run.device)
        ids[:, -1] = first.repeat(self._branches)
        self._drafting = Drafting.start(
            network,
            features,
            ids,
            branches=self._branches,
            room=run.total + self.levels * 10 + self.policy.slots,
            finish=self._finish(run),
            to_ids=lambda codes, slots: codes,
        )
        del self._prompt
        return first

    def _finish(self, run: Run) -> Any:
        """Draft laws; where nothing is drawn from them, scores whose order and log-softmax are those of the laws."""
        sampling, layout = run.sampling, run.layout
        dynamic, greedy = isinstance(self.policy, DynamicTree), run.sampling.temperature == 0

        def finish(features: Tensor, slots: Tensor) -> Tensor:
            logits = run.model.head(features)
            batch = slots.shape[0]
            uncond = logits[batch:] if self._branches == 2 else None
            output = ModelOutput(logits[:batch], uncond)
            if greedy:
                return guided_logits(output, slots, sampling)
            law = probs(output, slots, layout, sampling)
            return law.log() if dynamic else law

        return finish

    def _draw(self, run: Run) -> Any:
        if run.sampling.temperature == 0:
            return _likeliest
        assert isinstance(self.policy, StaticTree)
        matched, depth = self.rule_name == "gumbel-exact", self.policy.expanded
        depths = torch.tensor(depth, device=run.device)
        slots = (self._drafting.root_slot[:, None] + 1 + depths).clamp(max=run.total - 1)
        if matched:  # the noise that the target will use: the likeliest winners of its race
            run.noise.prepare(run.high + (run.since_check + 1) * (self.levels + 1))
            noise = run.noise.exponential(slots)
        else:  # noise of the node's own, drawn for the whole tree at once
            ids = torch.arange(run.layout.vocab, device=run.device)
            node = rng.NODE_STRIDE * torch.arange(len(depth), device=run.device)
            # slots repeat only in later steps, at a smaller depth: slot and depth name the draw for good
            where = slots + (depths << 20)
            noise = rng.exponential(
                run.noise.seeds[:, None, None], ids, where[..., None], 0, (rng.DRAFT + node)[:, None]
            )

        def draw(law: Tensor, count: int, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
            batch, nodes, vocab = law.shape
            own = noise[:, place : place + nodes].reshape(-1, vocab)
            chosen, good = race_topk(law.reshape(-1, vocab), own, count)
            shape = (batch, nodes, count)
            return chosen.view(shape), good.view(shape), None if matched else law

        return draw

    def _grow(self, run: Run) -> tuple[DraftTree, Tensor]:
        """The tree and the depth int64 [B, T] of its slots."""
        d = self._drafting
        if run.since_check == 0:
            # the host has just looked, so the true bound on the drafter's columns is known
            d.cache.bound = min(d.cache.bound, self._columns + run.high)
        root, first = run.last_tokens(), d.root_row()
        if isinstance(self.policy, DynamicTree):
            grown = self.policy.grow(d.session(), root, d.feature, first)
            tree = DraftTree(
                grown.tokens,
                grown.parent,
                grown.live,
                max_children=self.policy.top_k,
                max_depth=self.policy.levels,
            )
            return tree, grown.depth
        tree = self.policy.grow(d.session(), root, d.feature, first, self._draw(run))
        depth = self.policy.shape.tensors(run.device).depth
        return tree, depth.expand(tree.tokens.shape)

    @property
    def _columns(self) -> int:
        assert self.network is not None
        return max(self.network.config.prefix, 1)

    def propose(self, run: Run) -> Proposal:
        tree, depth = self._grow(run)
        positions = (run.count - 1)[:, None] + depth
        # the last slot is never fed, so no draft is tested for it
        tree.live = tree.live & ((positions < run.total - 1) | (depth == 0))
        self._tree = tree
        return Proposal(
            tree.tokens, positions.clamp(max=run.total - 1), tree.live, visible=tree.index.ancestors
        )

    # ---- verifying ------------------------------------------------------------------------------------------
    def acceptance(self, run: Run) -> Rule:
        return Greedy() if run.sampling.temperature == 0 else EXACT_RULES[self.rule_name]

    def judge(self, run: Run, proposal: Proposal, law: Tensor, output: ModelOutput) -> Verdict:
        tree, rule = self._tree, self.acceptance(run)
        slots = proposal.positions + 1
        inside = slots.clamp(max=run.total - 1)
        node = rng.NODE_STRIDE * torch.arange(tree.tokens.shape[1], device=run.device)
        if isinstance(rule, Greedy) and rule.relaxed is not None:
            plain = replace(run.sampling, temperature=1.0, top_k=0, top_p=1.0)
            law = probs(output, slots, run.layout, plain)
        noise = None
        if isinstance(rule, GumbelExact):
            run.noise.prepare(run.high + (run.since_check + 1) * (self.levels + 1) + 1)
            noise = run.noise.exponential(inside)
        step = verify(
            tree,
            law,
            rule,
            u=None if rule.matches else run.noise.uniform(rng.ACCEPT + node, inside, run.step),  # type: ignore[arg-type]
            U=None if rule.matches else run.noise.integer(rng.RESIDUAL + node, inside, run.step),  # type: ignore[arg-type]
            noise=noise,
        )
        order = torch.arange(step.path.shape[1], device=run.device)
        following = torch.cat([step.tokens[:, 1:], step.next_root[:, None]], dim=1)
        following = torch.where(order < (step.n - 1)[:, None], following, step.next_root[:, None])
        places = run.count[:, None] + order
        keep = (order < step.n[:, None]) & (places < run.total)
        path = step.path.long().clamp(min=0)
        assert output.hidden is not None
        at = path.repeat(self._branches, 1)[..., None].expand(-1, -1, output.hidden.shape[2])
        self._taken = (output.hidden.gather(1, at), following)
        gained = keep.sum(1)
        accepted = torch.minimum(step.n - 1, gained)
        return Verdict(following, places, keep, accepted, cache_keep=gained, path=path)

    def advance(self, run: Run, verdict: Verdict) -> None:
        self._drafting.follow(*self._taken, verdict.cached())

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._drafting.select(rows)


def _policy(tree: Tree) -> StaticTree | DynamicTree:
    if isinstance(tree, DynamicTree):
        return tree
    return DYNAMIC if tree == "dynamic" else parse_tree(tree)


def _likeliest(scores: Tensor, count: int, place: int) -> tuple[Tensor, Tensor, None]:
    top = scores.topk(count, dim=-1)
    return top.indices, top.values > -torch.inf, None


def guided_logits(output: ModelOutput, slots: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits after guidance and before any other processing, float32 [B, N, V]."""
    if output.uncond is None:
        return output.logits.float()
    vocab = output.logits.shape[-1]
    scale = torch.full_like(slots, 1.0, dtype=torch.float32) * sampling.guidance_scale
    if sampling.guidance_interval >= 0:
        scale = torch.where(slots <= sampling.guidance_interval + 1, scale, 1.0)
    flat = guide(output.logits.reshape(-1, vocab), output.uncond.reshape(-1, vocab), scale.flatten())
    return flat.view(output.logits.shape)
