"""Counter-based random numbers: the bits are SplitMix64's, the values are uniform and Gumbel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from antiphon.kernels.sampling.draws import gumbel, uniform

MASK = (1 << 64) - 1
SEEDS = (0, 1, -1, 12345, 2**63 - 1, -(2**63))
COUNTERS = (0, 1, 2, 10**12, -5, 2**63 - 1)


def mixed(x: int) -> int:
    """One output of SplitMix64 from state x, in Python's unbounded integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmixed(x: int) -> int:
    """The state from which `mixed` gives x: every step of it can be undone."""
    x = x ^ (x >> 31) ^ (x >> 62)
    x = (x * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    return (x ^ (x >> 30) ^ (x >> 60)) - 0x9E3779B97F4A7C15 & MASK


def in_unit(bits: int) -> float:
    return ((bits >> 41) + 0.5) / 2**23


def all_pairs() -> tuple[Tensor, Tensor]:
    pairs = [(seed, counter) for seed in SEEDS for counter in COUNTERS]
    seeds, counters = torch.tensor(pairs).T
    return seeds, counters


def test_the_mixing_function_is_splitmix64() -> None:
    # The first outputs for state 0 that the generator's authors publish.
    assert [mixed(0), mixed(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_uniform_numbers_have_exactly_the_bits_of_their_seed_and_counter() -> None:
    seeds, counters = all_pairs()
    want = [
        in_unit(mixed(mixed(s & MASK) ^ (c & MASK))) for s, c in zip(seeds.tolist(), counters.tolist(), strict=True)
    ]
    assert uniform(seeds, counters).tolist() == want


def test_gumbel_noise_has_the_bits_of_its_seed_counter_and_column() -> None:
    seeds, counters = all_pairs()
    got = gumbel(seeds, counters, 5)
    for row, (seed, counter) in enumerate(zip(seeds.tolist(), counters.tolist(), strict=True)):
        state = mixed(mixed(seed & MASK) ^ (counter & MASK))
        for column in range(5):
            u = in_unit(mixed((state + (column + 1) * 0x9E3779B97F4A7C15) & MASK))
            # Two logarithms of float32; the outer one divides the inner one's error by it, which is small near u = 1.
            assert got[row, column].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("bits", [0, MASK, 2**63 - 1, 2**63])
def test_no_bits_give_zero_or_one(bits: int) -> None:
    counter = mixed(0) ^ unmixed(bits)
    signed = counter - (1 << 64) if counter >> 63 else counter
    number = uniform(torch.tensor([0]), torch.tensor([signed]))
    assert number.item() == in_unit(bits)
    assert 0 < number.item() < 1
    assert torch.isfinite(-torch.log(-torch.log(number)))


@pytest.mark.parametrize("varied", ["seeds", "counters"])
def test_numbers_are_uniform_whether_seeds_or_counters_are_counted_up(varied: str) -> None:
    num, num_bins = 64_000, 64
    same, counted = torch.full((num,), 7), torch.arange(num)
    numbers = uniform(counted, same) if varied == "seeds" else uniform(same, counted)
    assert numbers.min().item() > 0
    assert numbers.max().item() < 1
    counts = torch.histc(numbers.double(), bins=num_bins, min=0, max=1)
    chi_square = float(((counts - num / num_bins) ** 2).sum() * num_bins / num)
    # Mean 63, deviation sqrt(2 * 63); a correct generator is beyond five deviations once in a million.
    assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63)
    pairs = torch.corrcoef(torch.stack([numbers[1:].double(), numbers[:-1].double()]))
    assert abs(pairs[0, 1].item()) < 5 / math.sqrt(num)


def test_a_row_draws_the_same_alone_and_in_a_crowd() -> None:
    seeds, counters = all_pairs()
    everything = gumbel(seeds, counters, 7)
    for row in range(len(seeds)):
        assert torch.equal(gumbel(seeds[row : row + 1], counters[row : row + 1], 7)[0], everything[row])


def test_a_longer_vocabulary_does_not_change_the_noise_of_its_first_ids() -> None:
    seeds, counters = all_pairs()
    assert torch.equal(gumbel(seeds, counters, 9)[:, :4], gumbel(seeds, counters, 4))
