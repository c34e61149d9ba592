"""Row-parallel Jacobi decoding: what a draft sees, that every slot is decided once, and the exact limit."""

from __future__ import annotations

import pytest
import torch
from laws import ALPHA, LAYOUTS, chi_square
from tiny import tiny_llamagen
from toy import TableModel

from visacc.decoders import AR
from visacc.decoders.pjd import PJD
from visacc.engine import decode
from visacc.sampling import SamplingParams


class Watched(TableModel):
    """Records which committed or drafted slots each node saw."""

    def logits(self, branch, context, positions):
        self.seen.append((context < self.layout.vocab, positions))
        return super().logits(branch, context, positions)


@pytest.mark.exact
@pytest.mark.parametrize("window", [1, 2, 5])
def test_law_is_exact_without_overlap(window):
    model = TableModel(4, 6, width=3, seed=1)
    sampling = SamplingParams(guidance_scale=2.0, top_k=3, temperature=0.8)
    decoder = PJD(3, window)
    decoder.check(model)
    assert decoder.lossless
    assert chi_square(model, decoder, sampling, 20_000) > ALPHA


@pytest.mark.exact
def test_overlapping_rows_are_lossy():
    model = TableModel(4, 6, width=3, seed=1, std=1.5)
    decoder = PJD(1, 2)
    decoder.check(model)
    assert not decoder.lossless
    assert chi_square(model, decoder, SamplingParams(), 20_000) < ALPHA


def test_drafts_see_no_drafts_of_other_rows():
    model = Watched(3, 9, width=3, seed=2)
    model.seen = []
    frontiers = [torch.tensor([1, 0, 0])]

    def note(info):
        frontiers.append(info.run.filled[0].view(3, 3).sum(1))

    decode(model, PJD(1, 3), model.encode([""]), SamplingParams(), [5], callback=note)
    overlaps = 0
    for (seen, positions), done in zip(model.seen, frontiers[1:], strict=False):
        for node, slot in enumerate(positions[0].tolist()):
            row = slot // 3
            for other in seen[0, node, :9].nonzero()[:, 0].tolist():
                r, c = divmod(other, 3)
                # a row that starts has the slot before it filled by a stand-in
                stand_in = other == 3 * row + 2 or c == 2
                assert other <= slot
                assert r == row or c < done[r] or stand_in
            if row and not bool(done[row - 1] == 3):
                overlaps += 1
                assert seen[0, node, : 3 * (row - 1) + 1].any()
    assert overlaps > 0


def test_steps_fall_with_the_context_and_every_slot_is_filled_once():
    model = tiny_llamagen()
    cond, seeds = model.encode([1, 2, 3]), [1, 2, 3]
    steps = []
    for context in (6, 4, 2):
        result = decode(model, PJD(context, 4), cond, SamplingParams(guidance_scale=2.0), seeds)
        assert not result.stats.unfinished
        assert bool((result.stats.step_of > 0).all())
        assert int(result.stats.steps.max()) < 36
        steps.append(result.stats.nfe)
    assert steps[0] > steps[1] > steps[2]


def test_a_sample_does_not_depend_on_its_batch():
    model = tiny_llamagen()
    sampling = SamplingParams(guidance_scale=2.0, top_k=20)
    together = decode(model, PJD(2, 4), model.encode([3, 1, 4]), sampling, [3, 1, 4]).codes
    for i, label in enumerate([3, 1, 4]):
        alone = decode(model, PJD(2, 4), model.encode([label]), sampling, [[3, 1, 4][i]]).codes
        assert torch.equal(alone[0], together[i])


def test_greedy_without_overlap_is_greedy_ar():
    model = tiny_llamagen()
    sampling = SamplingParams(temperature=0)
    ar = decode(model, AR(), model.encode([1, 2]), sampling, [0, 1])
    fast = decode(model, PJD(6, 4), model.encode([1, 2]), sampling, [2, 3])
    assert torch.equal(ar.codes, fast.codes)


def test_bad_options():
    with pytest.raises(ValueError, match="context must be"):
        PJD(0)
    with pytest.raises(ValueError, match="window must be"):
        PJD(4, 0)
    with pytest.raises(ValueError, match="forced slots"):
        PJD(1).check(TableModel(4, 6, width=2, forced=LAYOUTS["forced"]))
