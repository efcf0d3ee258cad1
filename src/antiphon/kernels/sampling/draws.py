"""Counter-based random numbers: a row's draws depend on its seed and its counter only, never on the batch.

A 64-bit mixing function (the finaliser of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014) in wrapping int64 arithmetic, so that every device gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """One number per row.

    seeds, counters: [R] int64.
    Returns [R] float32, in the open interval (0, 1).
    """
    return _to_unit(_mix(_mix(seeds) ^ counters))


def gumbel(seeds: Tensor, counters: Tensor, num_columns: int) -> Tensor:
    """Noise whose argmax with log-probabilities added is a draw from them.

    seeds, counters: [R] int64. Returns [R, num_columns] float32.
    """
    return -torch.log(-torch.log(uniforms(seeds, counters, num_columns)))


def uniforms(seeds: Tensor, counters: Tensor, num_columns: int) -> Tensor:
    """Several numbers per row.

    seeds, counters: [R] int64. Returns [R, num_columns] float32, in the open interval (0, 1).
    """
    columns = torch.arange(1, num_columns + 1, device=seeds.device) * _GOLDEN_GAMMA
    return _to_unit(_mix(_mix(_mix(seeds) ^ counters)[:, None] + columns))


def generator_seed(seed: int, counter: int) -> int:
    """A seed for torch's generators, which are faster where a draw is a whole tensor. All of its bits count."""
    return int(_mix(_mix(torch.tensor(seed)) ^ counter))


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN_GAMMA
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift; int64's own is arithmetic."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _to_unit(bits: Tensor) -> Tensor:
    # 23 bits and a half: exact in float32, never 0 and never 1.
    return (_shift_right(bits, 41).float() + 0.5) * 2.0**-23
