"""Teacher-forced attention of LPD (arXiv 2507.01957) without most of what its mask forbids.

Two thirds of the training mask are empty: nothing sees the queries of another group, and a query sees no later context.
The rows are cut into parts of similar reach, and each part is multiplied with the columns that some row of it may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visacc.models.attention import mask_bias

#: rows of a part; fewer save more products and cost more calls
PART_ROWS = 64


def training_mask(group_sizes: Sequence[int], prefix: int = 1) -> Tensor:
    """bool [L, L], True = row may attend to column; L = prefix + (N - g_K) context rows + N query rows.

    Context group a sees context groups b <= a; the queries of group i see the context groups before i and each other.
    Nothing else sees a query.
    """
    sizes = torch.tensor(group_sizes)
    numbers = torch.arange(1, len(sizes) + 1)
    context = torch.cat([torch.zeros(prefix, dtype=torch.long), numbers[:-1].repeat_interleave(sizes[:-1])])
    query = numbers.repeat_interleave(sizes)
    group = torch.cat([2 * context, 2 * query - 1])
    is_context = torch.arange(len(group)) < len(context)
    row, column = group[:, None], group[None, :]
    return (row == column) | ((column < row) & is_context[None, :])


@dataclass(frozen=True)
class Part:
    """Consecutive rows, the column spans that they may see, and the mask of these columns, bool [rows, columns]."""

    rows: slice
    spans: tuple[tuple[int, int], ...]
    mask: Tensor

    def columns_of(self, x: Tensor) -> Tensor:
        """x [R, H, L, hd] -> its rows within the spans [R, H, columns, hd]."""
        found = [x[:, :, start:stop] for start, stop in self.spans]
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def split_mask(mask: Tensor, context: int, device: torch.device) -> list[Part]:
    """Cut a training mask bool [L, L] on the CPU, whose first ``context`` rows are no queries, into parts."""
    parts = []
    for first, last in ((0, context), (context, len(mask))):
        for start in range(first, last, PART_ROWS):
            rows = mask[start : min(start + PART_ROWS, last)]
            spans = []
            for low, high in ((0, context), (context, len(mask))):
                seen = rows[:, low:high].any(dim=0).nonzero().flatten()
                if len(seen):
                    spans.append((low + int(seen[0]), low + int(seen[-1]) + 1))
            columns = torch.cat([rows[:, low:high] for low, high in spans], dim=1)
            parts.append(Part(slice(start, start + len(rows)), tuple(spans), columns.to(device)))
    return parts


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [R, H, n, hd] to k, v [R, H, m, hd] under mask bool [n, m].

    On a CPU, PyTorch's fused operator is slower in both directions than two products with a softmax in between.
    """
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with torch.autocast(q.device.type, enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask_bias(mask[None], q.dtype)
        return scores.softmax(dim=-1) @ v
