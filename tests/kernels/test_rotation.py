"""Rotary angles at any position, and the rotation itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from antiphon.kernels.rotation import rotate, rotation
from kernels.formulas import EPS, exact_angle, turned


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [2, 24, 128])
@pytest.mark.parametrize("position", [0, 1, -1, 8191, 10**6 + 1, 10**9, 10**9 + 7, -(10**9)])
def test_angles_are_right_after_months(position: int, head_dim: int, theta: float) -> None:
    got = rotation(torch.tensor([position]), head_dim, theta)
    for pair in range(head_dim // 2):
        angle = exact_angle(position, pair, head_dim, theta)
        # A frequency is off by a few units of float64 (its exponent by one, which ln(theta) enlarges), the product
        # with the position by half of one; then one rounding to float32.
        wound = abs(position) * theta ** (-2 * pair / head_dim)
        tolerance = wound * (2 + math.log(theta)) * 2.0**-52 + EPS / 2
        assert abs(got.cos[0, pair].item() - math.cos(angle)) <= tolerance
        assert abs(got.sin[0, pair].item() - math.sin(angle)) <= tolerance


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(0, 2, 8), (1, 1, 2), (5, 3, 6), (7, 4, 64)])
def test_the_two_halves_of_a_head_turn_like_complex_numbers(num_tokens: int, num_heads: int, head_dim: int) -> None:
    x = random(num_tokens, num_heads, head_dim)
    positions = torch.arange(num_tokens) * 37 - 50
    largest = x.abs().max().item() if num_tokens else 0.0
    got = rotate(x, rotation(positions, head_dim, 1e4))
    # Rounded: two table entries, two products, one sum.
    torch.testing.assert_close(got.double(), turned(x, positions, 1e4), rtol=0, atol=5 * EPS * largest)


def test_scores_depend_on_distances_only_also_after_months() -> None:
    q, k = random(1, 1, 64, seed=1), random(1, 1, 64, seed=2)

    def score(shift: int) -> float:
        turned_q, turned_k = (rotate(x, rotation(torch.tensor([p + shift]), 64, 1e6)) for x, p in ((q, 900), (k, 5)))
        return float((turned_q.double() * turned_k.double()).sum())

    # Each angle of 10^9 rounds to float64 (half a unit, about EPS / 2); then five float32 roundings as above, twice.
    tolerance = 2 * 6 * EPS * q.norm().item() * k.norm().item()
    for shift in (1, 10**6, 10**9):
        assert abs(score(shift) - score(0)) <= tolerance


def test_a_rotation_in_bfloat16_rounds_once() -> None:
    x, by = random(9, 2, 16).bfloat16(), rotation(torch.arange(9), 16, 1e4)
    assert torch.equal(rotate(x, by), rotate(x.float(), by).bfloat16())


def test_a_strided_tensor_turns_like_its_copy() -> None:
    x, by = random(2, 8, 5).transpose(0, 2), rotation(torch.arange(5), 2, 1e4)
    assert not x.is_contiguous()
    assert torch.equal(rotate(x, by), rotate(x.contiguous(), by))
