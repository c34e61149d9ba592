"""Schedules of the plan decoders, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from visacc.decoders.plan import Feed, PackedPlan, Pass, pack
from visacc.models.base import Layout


def pass_of(plan: PackedPlan) -> Tensor:
    """int64 [total]: the pass that decides each slot."""
    result = torch.full((plan.total,), -1, dtype=torch.int64)
    which = torch.arange(plan.passes)[:, None].expand_as(plan.out_slot)
    real = plan.out_slot >= 0
    result[plan.out_slot[real]] = which[real]
    return result


def raster_plan(layout: Layout) -> PackedPlan:
    """Plain autoregressive decoding as a plan."""
    passes = [Pass([], {0: 0})]
    passes += [Pass([Feed(slot - 1, slot - 1)], {slot: 0}) for slot in range(1, layout.total)]
    return pack(layout.total, passes)
