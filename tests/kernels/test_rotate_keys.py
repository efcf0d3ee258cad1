"""Keys rotated in place against keys that were written at the new position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.kernels.rotation import rotate, rotation
from kernels.formulas import EPS

THETA = 1e6
L, BLOCKS, SIZE, HKV, D = 3, 5, 4, 2, 16


def raw_keys() -> Tensor:
    return torch.randn(L, BLOCKS * SIZE, HKV, D, generator=torch.Generator().manual_seed(0))


def written(raw: Tensor, first_position: int) -> Tensor:
    """A cache whose slot s holds the key of position `first_position + s`, [L, BLOCKS, SIZE, HKV, D]."""
    by = rotation(torch.arange(BLOCKS * SIZE) + first_position, D, THETA)
    return torch.stack([rotate(layer, by) for layer in raw]).view(L, BLOCKS, SIZE, HKV, D)


def tolerance(num_rotations: int, first_position: int) -> float:
    """Five roundings per rotation of a pair, whose length never grows; angles round with their size."""
    largest = raw_keys().view(L, -1, HKV, 2, D // 2).norm(dim=-2).max().item()
    return largest * (num_rotations + 2) * (5 * EPS + abs(first_position) * 2.0**-50)


@pytest.mark.parametrize("num_keys", [0, 1, 7, BLOCKS * SIZE])
@pytest.mark.parametrize("by_positions", [-1, 13, -500, -(10**9)])
def test_rotated_keys_are_those_written_at_the_new_position(num_keys: int, by_positions: int) -> None:
    raw = raw_keys()
    keys, first = written(raw, 900), written(raw, 900)
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(1))[:num_keys]
    rotate_keys(keys, slots, by_positions, THETA)
    want = written(raw, 900 + by_positions)
    torch.testing.assert_close(
        keys.flatten(1, 2)[:, slots],
        want.flatten(1, 2)[:, slots],
        rtol=0,
        atol=tolerance(1, by_positions),
    )
    others = torch.ones(BLOCKS * SIZE, dtype=torch.bool).index_fill(0, slots, value=False)
    assert torch.equal(keys.flatten(1, 2)[:, others], first.flatten(1, 2)[:, others])


def test_many_rotations_add_up() -> None:
    raw = raw_keys()
    keys, slots = written(raw, 4000), torch.arange(BLOCKS * SIZE)
    for _ in range(200):
        rotate_keys(keys, slots, -19, THETA)
    torch.testing.assert_close(keys, written(raw, 200), rtol=0, atol=tolerance(200, 4000))


def test_a_rotation_in_bfloat16_rounds_once() -> None:
    keys = written(raw_keys(), 0).bfloat16()
    wide, slots = keys.float(), torch.arange(BLOCKS * SIZE)
    rotate_keys(keys, slots, -33, THETA)
    rotate_keys(wide, slots, -33, THETA)
    assert torch.equal(keys, wide.bfloat16())


def test_operands_of_a_wrong_rank_are_refused() -> None:
    keys = written(raw_keys(), 0)
    with pytest.raises(ShapeError, match="rotate_keys wants keys"):
        rotate_keys(keys[0], torch.arange(2), 1, THETA)
    with pytest.raises(ShapeError, match="rotate_keys wants keys"):
        rotate_keys(keys, torch.zeros(2, 2, dtype=torch.int64), 1, THETA)
