"""The three rotations of a step against exact angles, in every place."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
import torch

from antiphon.errors import ShapeError
from antiphon.kernels.step_rotations.op import step_rotations
from kernels.formulas import EPS, exact_angle
from kernels.places import Place, Run


def check_columns(place: Place, num_tokens: int, head_dim: int, theta: float) -> None:
    """Three columns as a step has them: rows of one tensor, far apart in position."""
    from antiphon.kernels.step_rotations import kernel

    operator = kernel.step_rotations if place is Place.INTERPRETED else step_rotations
    here = torch.arange(num_tokens) + 8000
    columns = torch.stack([here, here + 10**9 + 7, -here])
    anchor, ring, key = columns.to(place.device)
    got = operator(anchor, ring, key, head_dim, theta)
    for rotation, positions in zip(got, columns.tolist(), strict=True):
        assert rotation.cos.shape == rotation.sin.shape == (num_tokens, head_dim // 2)
        assert rotation.cos.is_contiguous()
        assert rotation.sin.is_contiguous()
        for token in {0, num_tokens // 2, num_tokens - 1} if num_tokens else ():
            for pair in range(head_dim // 2):
                position = positions[token]
                angle = exact_angle(position, pair, head_dim, theta)
                # As in test_rotation.py.
                wound = abs(position) * float(Decimal(theta) ** (Decimal(-2 * pair) / head_dim))
                tolerance = wound * (2 + math.log(theta)) * 2.0**-52 + EPS / 2
                assert abs(rotation.cos[token, pair].item() - math.cos(angle)) <= tolerance
                assert abs(rotation.sin[token, pair].item() - math.sin(angle)) <= tolerance


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 37])
@pytest.mark.parametrize(("head_dim", "theta"), [(2, 1e4), (24, 1e6), (128, 1e6)])
def test_each_column_of_positions_gets_its_own_angles(at: Run, num_tokens: int, head_dim: int, theta: float) -> None:
    at(check_columns, num_tokens, head_dim, theta)


def test_columns_of_two_lengths_and_odd_heads_are_refused() -> None:
    positions = torch.arange(4)
    for ring, head_dim in ((positions[:3], 8), (positions, 7)):
        with pytest.raises(ShapeError, match="step_rotations wants"):
            step_rotations(positions, ring, positions, head_dim, 1e4)
