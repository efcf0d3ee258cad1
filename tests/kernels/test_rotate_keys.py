"""Keys rotated in place against keys that were written at the new position, in every place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotate_keys import reference
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.kernels.rotation import rotate, rotation
from kernels.formulas import EPS
from kernels.places import Place, Run, half_dtypes

THETA = 1e6
L, BLOCKS, SIZE = 3, 5, 4
HEADS = (2, 16)
"""Hkv and D."""


def raw_keys(heads: tuple[int, int] = HEADS) -> Tensor:
    return torch.randn(L, BLOCKS * SIZE, *heads, generator=torch.Generator().manual_seed(0))


def written(raw: Tensor, first_position: int) -> Tensor:
    """A cache whose slot s holds the key of position `first_position + s`, [L, BLOCKS, SIZE, Hkv, D]."""
    by = rotation(torch.arange(BLOCKS * SIZE) + first_position, raw.shape[-1], THETA)
    return torch.stack([rotate(layer, by) for layer in raw]).view(L, BLOCKS, SIZE, *raw.shape[2:])


def rotated(place: Place, keys: Tensor, slots: Tensor, by_positions: int) -> Tensor:
    """The keys, which stay as they are, after the operator."""
    there = keys.to(place.device, copy=True)
    if place is Place.INTERPRETED:
        from antiphon.kernels.rotate_keys import kernel

        kernel.rotate_keys(there, slots, by_positions, THETA)
    else:
        rotate_keys(there, slots.to(place.device), by_positions, THETA)
    return there.cpu()


def tolerance(num_rotations: int, first_position: int) -> float:
    """Five roundings per rotation of a pair, whose length never grows; angles round with their size."""
    largest = raw_keys().view(L, -1, HEADS[0], 2, HEADS[1] // 2).norm(dim=-2).max().item()
    return largest * (num_rotations + 2) * (5 * EPS + abs(first_position) * 2.0**-50)


def check_positions(place: Place, num_keys: int, by_positions: int, heads: tuple[int, int]) -> None:
    raw = raw_keys(heads)
    first = written(raw, 900)
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(1))[:num_keys]
    keys = rotated(place, first, slots, by_positions)
    torch.testing.assert_close(
        keys.flatten(1, 2)[:, slots],
        written(raw, 900 + by_positions).flatten(1, 2)[:, slots],
        rtol=0,
        # The largest pair of wider heads may be longer.
        atol=2 * tolerance(1, by_positions),
    )
    others = torch.ones(BLOCKS * SIZE, dtype=torch.bool).index_fill(0, slots, value=False)
    assert torch.equal(keys.flatten(1, 2)[:, others], first.flatten(1, 2)[:, others])


@pytest.mark.parametrize("num_keys", [0, 1, 7, BLOCKS * SIZE])
@pytest.mark.parametrize("by_positions", [-1, 13, -500, -(10**9)])
def test_rotated_keys_are_those_written_at_the_new_position(at: Run, num_keys: int, by_positions: int) -> None:
    at(check_positions, num_keys, by_positions, HEADS)


@pytest.mark.parametrize("heads", [(8, 128), (3, 24), (1, 2)], ids=["thinker", "odd", "smallest"])
def test_heads_of_other_sizes_are_rotated_too(at: Run, heads: tuple[int, int]) -> None:
    at(check_positions, 7, -19, heads)


def check_many(place: Place) -> None:
    raw = raw_keys()
    keys, slots = written(raw, 4000), torch.arange(BLOCKS * SIZE)
    num_rotations = 20 if place is Place.INTERPRETED else 200
    for _ in range(num_rotations):
        keys = rotated(place, keys, slots, -19)
    want = written(raw, 4000 - 19 * num_rotations)
    torch.testing.assert_close(keys, want, rtol=0, atol=tolerance(num_rotations, 4000))


def test_many_rotations_add_up(at: Run) -> None:
    at(check_many)


def compare_rounding(place: Place, dtype: torch.dtype) -> None:
    keys = written(raw_keys((8, 128)), 0).to(dtype)
    wide, slots = keys.float(), torch.arange(BLOCKS * SIZE)
    got = rotated(place, keys, slots, -33)
    reference.rotate_keys(wide, slots, -33, THETA)
    want = wide.to(dtype)
    # A product and its sum may be one rounding or two, which moves a number across the edge of the last one.
    assert (got == want).double().mean() > 0.99
    torch.testing.assert_close(got, want, rtol=1.01 * torch.finfo(dtype).eps, atol=4 * EPS)


def check_rounding(place: Place) -> None:
    for dtype in half_dtypes(place):
        compare_rounding(place, dtype)


def test_a_rotation_rounds_once(at: Run) -> None:
    at(check_rounding)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cache of more than 2^31 keys")
def test_keys_beyond_two_to_the_31st_element_are_rotated_where_they_are() -> None:
    keys = torch.zeros(2, 1025, 2**13, 1, 128, dtype=torch.bfloat16, device="cuda")
    assert keys.numel() > 2**31
    last = keys.flatten(1, 2).shape[1] - 1
    keys.flatten(1, 2)[:, [0, last]] = 1
    rotate_keys(keys, torch.tensor([0, last], device="cuda"), 5, THETA)
    by = rotation(torch.tensor([5]), 128, THETA)
    want = rotate(torch.ones(1, 1, 128), by).bfloat16()[0].cuda()
    for layer in keys.flatten(1, 2):
        for slot in (0, last):
            # A product and its sum may be one rounding or two.
            torch.testing.assert_close(layer[slot], want, rtol=1.01 * torch.finfo(torch.bfloat16).eps, atol=4 * EPS)
    assert keys.count_nonzero() <= 4 * 128


def test_operands_of_a_wrong_rank_or_in_pieces_are_refused() -> None:
    keys = written(raw_keys(), 0)
    with pytest.raises(ShapeError, match="rotate_keys wants keys"):
        rotate_keys(keys[0], torch.arange(2), 1, THETA)
    with pytest.raises(ShapeError, match="rotate_keys wants keys"):
        rotate_keys(keys, torch.zeros(2, 2, dtype=torch.int64), 1, THETA)
    with pytest.raises(ShapeError, match="contiguous"):
        rotate_keys(keys, torch.arange(4)[::2], 1, THETA)
