"""Sizes that batches may have: what is a grid, how a crowd is split, and when a grid is of no use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.batch_grid import BatchGrid, LengthGrid
from antiphon.errors import ConfigError

grids = st.sets(st.integers(2, 40), max_size=6).map(lambda sizes: BatchGrid((1, *sorted(sizes))))


@given(grids, st.integers(0, 200))
def test_any_number_is_split_into_the_fewest_batches(grid: BatchGrid, number: int) -> None:
    batches = grid.split(number)
    assert sum(batches) == number
    assert len(batches) == -(-number // grid.largest)
    assert all(0 < batch <= grid.largest for batch in batches)
    assert batches == sorted(batches, reverse=True)


@pytest.mark.parametrize("sizes", [(), (2, 4), (1, 4, 2), (1, 2, 2), (0, 1)])
def test_sizes_that_are_no_grid_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must ascend from 1"):
        BatchGrid(sizes)


def test_a_grid_that_saves_nothing_says_so() -> None:
    assert "(1,) let 8 sessions share nothing" in BatchGrid((1,)).doubt(8)
    assert "(1, 16) let 8 sessions share nothing" in BatchGrid((1, 16)).doubt(8)
    assert BatchGrid((1, 2, 16)).doubt(8) == ""
    assert BatchGrid((1, 2)).doubt(1) == ""


@pytest.mark.parametrize("sizes", [(), (0, 4), (4, 1), (2, 2)])
def test_lengths_that_do_not_ascend_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must ascend from above 0"):
        LengthGrid(sizes)


def test_lengths_that_hold_nothing_usual_or_more_than_there_is_say_so() -> None:
    assert "(10,) hold no row of 25" in LengthGrid((10,)).doubt(25, 28)
    assert "[30, 40] are prepared for nothing" in LengthGrid((25, 28, 30, 40)).doubt(25, 28)
    assert LengthGrid((10, 25, 28)).doubt(25, 28) == ""
    assert LengthGrid((30,)).doubt(25, 28) == ""
