"""Parity with the decision code of the SCD release (arXiv 2510.24211), through the real Jacobi decoder.

The release keeps the old law for drafts that pass behind the first rejection (its Lumina and Janus samplers); ours
records the new law everywhere, and the test insists on the difference.
"""

from __future__ import annotations

import json

import pytest
import torch
from golden import golden_dir
from safetensors import safe_open
from torch import Tensor
from toy import TableModel

from visacc.decoders import MCSJD
from visacc.engine import Run
from visacc.kernels import draw, race
from visacc.kernels.reference.chain import residual_weights
from visacc.models.base import Layout
from visacc.sampling import SamplingParams

pytestmark = pytest.mark.golden

MAXIMAL = ("lumina_mc", "janus_maximal", "cosmos_mc")


@pytest.fixture(scope="module")
def golden():
    root = golden_dir("frontier")
    with safe_open(root / "scd_coupling.safetensors", "pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - not a dict
    cases = json.loads((root / "scd_coupling.json").read_text())["cases"]
    return tensors, cases


def case(golden, name: str) -> tuple[dict[str, Tensor], int]:
    tensors, cases = golden
    found = {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{name}.")}
    return found, cases[name]["first_misaligned"][0]


def words(u: Tensor) -> Tensor:
    return (u.double() * 2**32).long()


class Replay:
    """The recorded random numbers in the place of the sample's streams."""

    def __init__(self, u: Tensor, residual: Tensor, bonus: Tensor, noise: Tensor) -> None:
        self.u, self.residual, self.bonus, self.noise = u, residual, bonus, noise

    def uniform(self, purpose, slots, iteration):
        return self.u

    def integer(self, purpose, slots, iteration):
        from visacc.kernels import rng

        if purpose == rng.DRAW:
            return self.bonus.expand(slots.shape)
        return self.residual if purpose == rng.RESIDUAL else torch.zeros_like(slots)

    def decisions(self, slots, iteration):
        spare = torch.zeros(1, 1)
        return (
            torch.cat([self.u, spare], dim=1),
            torch.cat([self.residual, spare.long()], dim=1),
            self.bonus.expand(slots.shape),
        )

    def prepare(self, bound):
        pass

    def exponential(self, slots):
        return self.noise[:, : slots.shape[1]]


def step(data: dict[str, Tensor], u: Tensor, residual: Tensor, coupling: str):
    """One judged pass of the real decoder; returns the verdict and the decoder with its next window."""
    p, q, drafts = data["advanced_prob"], data["draft_prob"][:, 1:], data["draft_tokens"][:, 1:]
    size, vocab = p.shape[1:]
    model = TableModel(2, 2)
    model.layout = Layout((1, 1, 2 * size + 4), vocab)
    # the word that makes our draw return the recorded bonus token: the middle of its interval
    last, token = p[0, -1].double(), int(data["advanced_tokens"][0, -1])
    bonus = words((last[:token].sum() + last[token] / 2) / last.sum())
    table = data.get("random_table")
    noise = torch.ones(1, size, vocab)
    if table is not None:
        noise = -torch.log(table + 1e-9) + 1e-9
    run = Run(
        model,
        model.layout,
        SamplingParams(),
        Replay(u, residual, bonus, noise),
        sequence=torch.zeros(1, model.layout.total, dtype=torch.int64),
        filled=torch.zeros(1, model.layout.total, dtype=torch.bool),
        count=torch.ones(1, dtype=torch.int64),
        samples=torch.zeros(1, dtype=torch.int64),
        low=1,
        high=1,
    )
    decoder = MCSJD(size, coupling)
    decoder.begin(run, p[:, 0])
    decoder.state.update(drafts=drafts, q=q, onehot=torch.zeros_like(drafts, dtype=torch.bool))
    proposal = decoder.propose(run)
    return decoder.judge(run, proposal, p, None), decoder


def acceptance(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Uniform of every draft's test, and whether the release's rule passes it: [1, L-1] each."""
    drafts = data["draft_tokens"][:, 1:, None]
    uniforms = data["uniforms"]
    u = uniforms[:, 1:].gather(2, drafts)[..., 0] if uniforms.ndim == 3 else uniforms
    p = data["advanced_prob"][:, :-1].gather(2, drafts)[..., 0]
    q = data["draft_prob"][:, 1:].gather(2, drafts)[..., 0]
    return u, u < (p / q).clamp(max=1)


def residual_words(data: dict[str, Tensor], passed: Tensor) -> Tensor:
    """The uniform of each slot's residual draw as a 32-bit word; slots without one get 0."""
    u = data["multinomial_u"].flatten()
    if len(u) == passed.shape[1]:
        return words(u)[None]
    result = torch.zeros(passed.shape, dtype=torch.int64)
    where = (~passed[0]).nonzero()[:, 0][: len(u)]
    result[0, where] = words(u)
    return result


@pytest.mark.parametrize("name", [*MAXIMAL, "lumina_gs"])
def test_tokens_and_progress_equal_the_release(golden, name):
    data, first = case(golden, name)
    u, passed = acceptance(data)
    coupling = "gumbel" if name == "lumina_gs" else "maximal"
    verdict, decoder = step(data, u, residual_words(data, passed), coupling)
    assert int(verdict.keep.sum()) == first
    assert int(verdict.accepted) == int(passed.long().cumprod(1).sum())
    want = data["out_tokens"]
    assert torch.equal(verdict.tokens[:, :first], want[:, :first])
    size = want.shape[1]
    assert torch.equal(decoder.state["drafts"][:, : size - first], want[:, first:])


@pytest.mark.parametrize("name", [*MAXIMAL, "lumina_gs"])
def test_residual_laws_equal_the_release(golden, name):
    data, _ = case(golden, name)
    _, passed = acceptance(data)
    p, q = data["advanced_prob"][0, :-1], data["draft_prob"][0, 1:]
    every = torch.ones(len(p), dtype=torch.bool)
    ours = residual_weights(p, q, data["draft_tokens"][0, 1:], None, every)
    ours = ours / ours.sum(1, keepdim=True)
    theirs = data["multinomial_probs"].view(-1, p.shape[1])
    theirs = theirs / theirs.sum(1, keepdim=True)
    which = every if len(theirs) == len(p) else ~passed[0]
    # the Cosmos program adds 1e-10 to every entry
    assert torch.allclose(ours[which][: len(theirs)], theirs, atol=1e-6, rtol=1e-4)
    U = words(data["multinomial_u"].flatten())
    drawn = draw(ours[which][: len(theirs)], U)
    kept = passed[0][which][: len(theirs)]
    want = data["out_tokens"][0, :-1][which][: len(theirs)]
    assert torch.equal(drawn[~kept], want[~kept])


def test_gumbel_draws_equal_the_release(golden):
    data, _ = case(golden, "lumina_gs")
    noise = -torch.log(data["random_table"] + 1e-9) + 1e-9
    assert torch.equal(race(data["advanced_prob"], noise), data["gumbel_tokens"])


@pytest.mark.parametrize("name", MAXIMAL)
def test_recorded_laws_and_the_stale_law_fault(golden, name):
    """Ours is the new law in every slot; Cosmos agrees, Lumina and Janus keep the old law of kept drafts."""
    data, first = case(golden, name)
    u, passed = acceptance(data)
    _, decoder = step(data, u, residual_words(data, passed), "maximal")
    size = data["out_tokens"].shape[1]
    ours = decoder.state["q"][0, : size - first]
    assert torch.equal(ours, data["advanced_prob"][0, first:])
    theirs = data["out_scores"][0, first:]
    kept = torch.cat([passed[0, first:], torch.tensor([False])])
    assert torch.allclose(ours[~kept], theirs[~kept], atol=1e-6)
    assert bool(kept.any())
    if name == "cosmos_mc":
        assert torch.allclose(ours, theirs, atol=1e-6)
    else:
        stale = data["draft_prob"][0, 1:][first:][kept[:-1]]
        assert torch.equal(theirs[kept], stale)
        assert not torch.allclose(ours[kept], theirs[kept], atol=1e-3)


def test_the_independent_draw_fault_of_cosmos(golden):
    """Without coupling the release puts an independent draw where the first draft fails; ours is the residual draw."""
    data, first = case(golden, "cosmos_nomc")
    u, passed = acceptance(data)
    verdict, _ = step(data, u, residual_words(data, passed), "maximal")
    assert int(verdict.keep.sum()) == first
    at = first - 1
    assert int(data["out_tokens"][0, at]) == int(data["advanced_tokens"][0, at])
    residual = residual_weights(
        data["advanced_prob"][0, at : at + 1],
        data["draft_prob"][0, at + 1 : at + 2],
        data["draft_tokens"][0, at + 1 : at + 2],
        None,
        torch.ones(1, dtype=torch.bool),
    )
    assert float(residual[0, int(verdict.tokens[0, at])]) > 0
