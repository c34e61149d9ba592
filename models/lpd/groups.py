"""How many tokens each LPD step fills: the published tables, and a cosine ramp for any other number of steps.

The published models were trained on exactly these lists (9 for 256 tokens, 14 for 1024).
"""

from __future__ import annotations

import math

_TABLES: dict[int, dict[int, str]] = {
    256: {
        8: "1 15 24 32 40 45 49 50",
        12: "1 7 11 15 19 22 25 28 30 32 33 33",
        16: "1 4 6 8 11 13 15 17 19 20 22 23 24x3 25",
        20: "1 2 4 5 7 8 10 11 12 14 15 16 17 18x2 19x2 20x3",
        24: "1..11 11 12 13 14x3 15x2 16x3 17x2",
        32: "1x2 2x2 3x2 4 5x2 6x2 7x2 8x2 9x2 10x3 11x4 12x8",
        64: "1x10 2x7 3x7 4x9 5x11 6x20",
        128: "1x41 2x46 3x41",
        256: "1x256",
    },
    1024: {
        32: "1 4 6 9 11 13 16 18 20 23 25 27 29 31 33 35 36 38 40 41 42 44 45 46 47 48x2 49x2 50x3",
        40: "1 2 4 6 7 9 10 12 13 15 16 18 19 20 22 23 24 26..34 35x2 36 37x2 38x2 39x3 40x4",
        48: "1..22 23x2 24 25 26x2 27 28x2 29x2 30x2 31x2 32x3 33x7 34",
        56: "1x2 2 3 4x2 5 6 7 8x2 9 10 11x2 12 13 14x2 15 16x2 17 18x2 19x2 20 21x2 22x2 23x2 24x2 25x3 26x3 27x5"
        " 28x6 29x3",
        64: "1x2 2x2 3x2 4 5x2 6x2 7 8x2 9x2 10x2 11 12x2 13x2 14x2 15x2 16x2 17x2 18x3 19x2 20x3 21x3 22x3 23x5"
        " 24x6 25x8",
        80: "1x4 2x2 3x3 4x2 5x3 6x3 7x2 8x3 9x3 10x3 11x3 12x3 13x3 14x4 15x4 16x4 17x6 18x6 19x7 20x12",
        96: "1x5 2x4 3x4 4x4 5x3 6x4 7x4 8x5 9x4 10x4 11x6 12x5 13x6 14x7 15x8 16x13 17x10",
        128: "1x10 2x6 3x7 4x7 5x7 6x7 7x8 8x9 9x9 10x11 11x14 12x26 13x7",
        160: "1x15 2x11 3x10 4x12 5x12 6x13 7x14 8x17 9x23 10x33",
        192: "1x22 2x15 3x16 4x16 5x19 6x21 7x27 8x55 10x1",
        224: "1x32 2x21 3x21 4x24 5x27 6x37 7x62",
        256: "1x39 2x28 3x31 4x34 5x44 6x80",
        512: "1x162 2x188 3x162",
        1024: "1x1024",
    },
}


def _expand(text: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for item in text.split():
        if ".." in item:
            first, last = map(int, item.split(".."))
            sizes += range(first, last + 1)
        elif "x" in item:
            size, times = map(int, item.split("x"))
            sizes += [size] * times
        else:
            sizes.append(int(item))
    return tuple(sizes)


def training_lists(tokens: int) -> list[tuple[int, ...]]:
    """The group-size lists a model of that many tokens is trained on."""
    steps = _TABLES.get(tokens)
    if steps:
        return [_expand(text) for text in steps.values()]
    counts = sorted({max(2, round(tokens * part)) for part in (0.05, 0.08, 0.125, 0.25, 0.5, 1.0)})
    return [lpd_group_sizes(tokens, count) for count in counts]


def lpd_group_sizes(tokens: int, steps: int, *, free_start: bool = False) -> tuple[int, ...]:
    """Tokens per step for any number of steps: the published list where there is one, else a cosine ramp.

    Args:
        tokens: tokens to generate.
        steps: number of steps, 1..tokens.
        free_start: the first step may take several tokens (something is already known: in- and outpainting).
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= tokens:
        raise ValueError(f"steps must be an integer from 1 to the number of tokens ({tokens}), got {steps!r}")
    if not free_start and steps in _TABLES.get(tokens, {}):
        return _expand(_TABLES[tokens][steps])
    if not free_start and steps == 1 and tokens > 1:
        raise ValueError(f"{tokens} tokens need at least 2 steps: the first step always fills one cell")
    ideal = [
        tokens * (math.cos(math.pi * k / (2 * steps)) - math.cos(math.pi * (k + 1) / (2 * steps)))
        for k in range(steps)
    ]
    sizes = [max(1, round(x)) for x in ideal]
    first = 0 if free_start else 1
    if not free_start:
        sizes[0] = 1
    while (missing := tokens - sum(sizes)) != 0:
        unit = 1 if missing > 0 else -1
        able = [k for k in range(first, steps) if sizes[k] + unit >= 1]
        best = min(able, key=lambda k: abs(sizes[k] + unit - ideal[k]) - abs(sizes[k] - ideal[k]))
        sizes[best] += unit
    return (*sizes[:first], *sorted(sizes[first:]))
