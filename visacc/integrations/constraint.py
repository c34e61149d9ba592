"""From transformers' logits processors to what the engine understands: a layout, guidance, sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visacc.models.base import Layout


@dataclass
class Requests:
    """What a list of logits processors asks for.

    Attributes:
        sampling: arguments of :class:`visacc.sampling.SamplingParams`.
        uncond_ids, uncond_mask: prompts of the unconditional branch [B or 1, Q], where guidance is on; ``None``
            ids stand for the last prompt token.
        allowed: the prefix constraint ``f(batch index, ids) -> list of ids``.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    uncond_ids: Tensor | None = None
    uncond_mask: Tensor | None = None
    allowed: Callable[[int, Tensor], Sequence[int]] | None = None


def read_processors(processors: Sequence[Any], image_ids: set[int]) -> Requests:
    """Take a prepared list of processors apart. Nothing in it is changed or called.

    Raises:
        ValueError: a processor whose effect on several positions at once is not known here.
    """
    found = Requests()
    for processor in processors:
        kind = type(processor).__name__
        if kind == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
            found.sampling["guidance_scale"] = float(processor.guidance_scale)
            found.uncond_ids = processor.unconditional_context["input_ids"]
            found.uncond_mask = processor.unconditional_context["attention_mask"]
        elif kind == "PrefixConstrainedLogitsProcessor":
            if processor._num_beams != 1:
                raise ValueError("parallel decoding has no beams; use num_beams=1")
            found.allowed = processor._prefix_allowed_tokens_fn
        elif kind == "TemperatureLogitsWarper":
            found.sampling["temperature"] = float(processor.temperature)
        elif kind == "TopKLogitsWarper":
            found.sampling["top_k"] = int(processor.top_k)
        elif kind == "TopPLogitsWarper":
            found.sampling["top_p"] = float(processor.top_p)
        elif kind == "SuppressTokensLogitsProcessor":
            if image_ids & set(processor.suppress_tokens.tolist()):
                raise ValueError(
                    "suppress_tokens removes image codes, which parallel decoding cannot do; drop it"
                )
        elif kind not in ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"):
            # the two above only keep the end token away, which the layout does anyway
            raise ValueError(
                f"logits processor {kind} works on one position at a time and cannot be used with a parallel"
                " decoder; supported: guidance, prefix constraint, temperature, top-k, top-p"
            )
    return found


def probe_layout(
    allowed: Callable[[int, Tensor], Sequence[int]],
    prompts: Tensor,
    image_ids: Tensor,
    end_ids: set[int],
    limit: int,
    grid: tuple[int, int] | None = None,
) -> Layout:
    """The layout that a prefix constraint describes, found by asking it slot by slot.

    Args:
        prompts: int64 [B, P].
        image_ids: int64 [V], id of every code.
        end_ids: the layout ends behind a forced id of these.
        limit: at most so many slots.
        grid: (rows, columns), where it cannot be told from the row ends.

    Raises:
        ValueError: prompts with different layouts, or a constraint that allows some image codes only.
    """
    layouts = {_probe_row(allowed, row, ids, image_ids, end_ids, limit) for row, ids in enumerate(prompts)}
    if len(layouts) != 1:
        raise ValueError(
            "prefix_allowed_tokens_fn describes pictures of different sizes; decode them one by one"
        )
    forced = layouts.pop()
    count = sum(f < 0 for f in forced)
    if count == 0:
        raise ValueError("prefix_allowed_tokens_fn allows no image codes behind these prompts")
    cells = grid or rows_of(forced)
    if cells[0] * cells[1] != count:
        raise ValueError(
            f"a grid of {cells[0]}x{cells[1]} has {cells[0] * cells[1]} codes, the constraint {count}"
        )
    return Layout((1, *cells), len(image_ids), forced if count < len(forced) else None)


def _probe_row(
    allowed: Callable[[int, Tensor], Sequence[int]],
    row: int,
    prompt: Tensor,
    image_ids: Tensor,
    end_ids: set[int],
    limit: int,
) -> tuple[int, ...]:
    images, known = set(image_ids.tolist()), None
    prefix = torch.cat([prompt, image_ids[:1].to(prompt).expand(limit)])
    forced: list[int] = []
    for slot in range(limit):
        choice = allowed(row, prefix[: len(prompt) + slot])
        if len(choice) == 1:
            token = int(choice[0])
            forced.append(token)
            prefix[len(prompt) + slot] = token
            if token in end_ids:
                break
            continue
        if choice is not known and set(map(int, choice)) != images:
            raise ValueError(
                f"prefix_allowed_tokens_fn allows {len(choice)} ids at generated token {slot}; a parallel decoder"
                f" needs one id (a structure token) or all {len(images)} image codes there"
            )
        known = choice
        forced.append(-1)
    return tuple(forced)


def rows_of(forced: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) from equal runs of image slots between forced ones; one row where the runs differ."""
    runs, length = [], 0
    for f in (*forced, 0):
        if f < 0:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return (len(runs), runs[0]) if len(set(runs)) == 1 else (1, sum(runs))


def check_constraint(
    allowed: Callable[[int, Tensor], Sequence[int]], prompts: Tensor, tokens: Tensor, layout: Layout
) -> None:
    """Make sure the constraint depended on positions only: ask it again with what was generated.

    Raises:
        ValueError: it asks for other structure tokens now.
    """
    forced = layout.forced or (-1,) * layout.total
    for row, ids in enumerate(torch.cat([prompts, tokens], 1)):
        for slot, wanted in enumerate(forced):
            choice = allowed(row, ids[: prompts.shape[1] + slot])
            now = int(choice[0]) if len(choice) == 1 else -1
            if now != wanted:
                raise ValueError(
                    "prefix_allowed_tokens_fn depends on the codes drawn before, not only on how many there are;"
                    " parallel decoding needs a structure that is known in advance"
                )
