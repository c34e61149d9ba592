"""Counter-based random numbers: Philox4x32-10, keyed by sample.

Every random number of a decode is a pure function of the sample's seed and a counter
``(c0, c1, c2, c3)``, so a sample is unaffected by its place in the batch, by the window size or by other
samples joining and leaving::

    c0  vocabulary id, or 0 for one number per position
    c1  absolute image-token position (never a window slot)
    c2  sample-local iteration, 0 for noise that must persist across iterations (Gumbel)
    c3  purpose tag (`PURPOSE`); trees add 256 * node

The words equal ``tl.philox`` bit for bit (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
All words are uint32 values held in int64 tensors.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from visacc.kernels.dispatch import choose, launcher

ACCEPT, RESIDUAL, DRAW, INIT, DRAFT, GUMBEL = 1, 2, 3, 4, 5, 6
PURPOSE = SimpleNamespace(ACCEPT=ACCEPT, RESIDUAL=RESIDUAL, DRAW=DRAW, INIT=INIT, DRAFT=DRAFT, GUMBEL=GUMBEL)
"""Purpose tags for counter c3. Purposes never share a stream: noise that drew a draft must not test it."""

NODE_STRIDE = 256
"""Tree nodes of one position are told apart by adding ``NODE_STRIDE * node`` to the purpose tag."""

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Counter = Tensor | int


def philox(
    seed: Counter, c0: Counter, c1: Counter, c2: Counter, c3: Counter
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 words for every element of the broadcast arguments.

    seed: int64, one per sample (both halves form the key). c0..c3: integers below 2**32.
    Returns four int64 tensors of the broadcast shape, each holding a uint32 word.
    """
    device = next((a.device for a in (seed, c0, c1, c2, c3) if isinstance(a, Tensor)), torch.device("cpu"))
    key, *given = (_as_words(a, device) for a in (seed, c0, c1, c2, c3))
    if choose(None, (key,)) == "triton":
        return launcher("rng").philox(key, *given)
    w0, w1, w2, w3, _ = torch.broadcast_tensors(*given, key)
    shape = w0.shape
    key = key.reshape((1,) * (len(shape) - key.ndim) + key.shape)
    # Even and odd words live in two stacked tensors, so one multiplication serves both halves of the state.
    # The odd pair is stored swapped, (c3, c1), and so are the keys: the order in which a round combines them.
    even, odd = torch.stack((w0, w2)), torch.stack((w3, w1))
    keys = torch.stack((key >> 32, key)).bitwise_and_(_MASK)
    state = (even, odd, keys, *_constants(device, even.ndim))
    if device.type == "cpu":  # NumPy's call overhead is a third of torch's, and a step makes ~70 tiny calls
        even, odd = map(torch.from_numpy, _rounds(_reversed_view, *(t.numpy() for t in state)))
    else:
        even, odd = _rounds(torch.flipud, *state)
    return even[1], odd[1], even[0], odd[0]


def _as_words(a: Counter, device: torch.device) -> Tensor:
    # torch.full rather than torch.tensor: a fill on the device instead of a blocking copy from the host.
    return a.to(device, torch.int64) if isinstance(a, Tensor) else torch.full((), a, device=device)


@lru_cache(maxsize=64)
def _constants(device: torch.device, ndim: int) -> tuple[Tensor, Tensor]:
    """Multipliers and (swapped) key increments as columns [2, 1, ...]; made once per device."""
    column = (2,) + (1,) * (ndim - 1)
    return (
        torch.tensor(_MULTIPLIER, device=device).view(column),
        torch.tensor(_WEYL[::-1], device=device).view(column),
    )


def _reversed_view(a: Any) -> Any:
    return a[::-1]


def _rounds(swap: Any, even: Any, odd: Any, keys: Any, multiplier: Any, weyl: Any) -> tuple[Any, Any]:
    """Ten rounds on int64 arrays (NumPy or torch): even = (c0, c2), odd = (c3, c1), keys = (k1, k0)."""
    for r in range(_ROUNDS):
        if r:
            keys = (keys + weyl) & _MASK
        # int64 products of 32-bit numbers wrap around 2**64 without losing bits, so the arithmetic shift
        # followed by the mask is the exact high word.
        product = even * multiplier
        high = product >> 32
        high &= _MASK
        high ^= odd
        high ^= keys
        product &= _MASK
        odd = product
        even = swap(high)
    return swap(even), odd


def uniform(seed: Counter, c0: Counter, c1: Counter, c2: Counter, c3: Counter) -> Tensor:
    """Uniform float32 in [0, 1) on the grid of 2**-24: the upper 24 bits of word 1."""
    return to_uniform(philox(seed, c0, c1, c2, c3)[1])


def integer(seed: Counter, c0: Counter, c1: Counter, c2: Counter, c3: Counter) -> Tensor:
    """Uniform integer in [0, 2**32) as int64 (word 0): the input of `draw`."""
    return philox(seed, c0, c1, c2, c3)[0]


def exponential(seed: Counter, c0: Counter, c1: Counter, c2: Counter, c3: Counter) -> Tensor:
    """Standard exponential float32, strictly positive and finite (word 0): the input of `race`."""
    return to_exponential(philox(seed, c0, c1, c2, c3)[0])


def to_uniform(word: Tensor) -> Tensor:
    """uint32 word (int64) -> float32 in [0, 1); exact, so identical on every backend."""
    return (word >> 8).to(torch.float32).mul_(2.0**-24)


def to_exponential(word: Tensor) -> Tensor:
    """uint32 word (int64) -> E = -log1p(-(word + 1/2) 2**-32), float32.

    The clamp keeps the largest words (which round to 1) finite; they lose every race either way.
    """
    x = word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return x.neg_().log1p_().neg_()
