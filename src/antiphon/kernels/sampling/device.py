"""What the kernels of sampling share, in Triton: order-preserving keys, a search over them, counter-based noise.

`draws.py` and `reference.py` define what is computed here. Shown by tests/kernels/test_sampling_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(x):
    """The finaliser of SplitMix64. x: uint64."""
    x = x + _GOLDEN_GAMMA
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def unit(bits):
    """The uniform number of uint64 bits, float32."""
    return ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def noise(state, ids):
    """Gumbel noise of some ids, float32. state: uint64, the mixed seed and counter."""
    return -tl.log(-tl.log(unit(mix(state + (ids + 1).to(tl.uint64) * _GOLDEN_GAMMA))))


@triton.jit
def key_of(scores):
    """uint32 in the order of float32; both zeros are one, as they are to a sort."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def read(scores, groups, at, num, temperature, GROUP: tl.constexpr):
    """Entries `at` of a list of `num` scores, cooled: (score, its key, its id); behind the list -inf and key 0.

    GROUP: 0, the list is `scores` itself; or the list is the ids of these `groups` of so many, one after the other.
    """
    is_there = at < num
    ids = at if GROUP == 0 else tl.load(groups + at // GROUP, mask=is_there, other=0) * GROUP + at % GROUP
    cooled = tl.div_rn(tl.load(scores + ids, mask=is_there, other=float("-inf")), temperature)
    return cooled, tl.where(is_there, key_of(cooled), 0), ids


@triton.jit
def threshold(  # noqa: PLR0913 - Triton knows no dataclasses
    scores, groups, num, temperature, top, floor, wanted,
    IS_MASS: tl.constexpr, IS_STRICT: tl.constexpr, GROUP: tl.constexpr, NUM_DIGITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key such that scores from it on come to at least `wanted`; 0 if none does. And what is above it.

    Sixteen bounds at a time, from the highest digit of a key on. A score counts 1, or IS_MASS exp(score - top), and
    nothing if its key is below `floor`. IS_STRICT: to more than `wanted`. NUM_DIGITS < 8: the key rounded down. Sums
    have one order, so that none of them grows when a score leaves it.
    """
    digits = tl.arange(0, 16)
    found = tl.zeros((), tl.uint32)
    above = tl.zeros((), tl.float32)
    for level in range(NUM_DIGITS):
        shift = 28 - 4 * level
        bounds = found + (digits << shift).to(tl.uint32, bitcast=True)
        amounts = tl.zeros((16,), tl.float32)
        for start in range(0, num, TILE):
            at = start + tl.arange(0, TILE)
            cooled, key, ids = read(scores, groups, at, num, temperature, GROUP)
            weight = tl.exp(cooled - top) if IS_MASS else tl.full((TILE,), 1.0, tl.float32)
            weight = tl.where((at < num) & (key >= floor), weight, 0.0)
            amounts += tl.sum(tl.where(key[:, None] >= bounds[None, :], weight[:, None], 0.0), 0)
        is_enough = amounts > wanted if IS_STRICT else amounts >= wanted
        digit = tl.maximum(tl.sum(is_enough.to(tl.int32), 0) - 1, 0)
        # Bound 16 is the one after the digit that was found before.
        above = tl.where(digit < 15, tl.sum(tl.where(digits == digit + 1, amounts, 0.0), 0), above)
        found += (digit << shift).to(tl.uint32, bitcast=True)
    return found, above
