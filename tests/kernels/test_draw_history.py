"""What draws come after and leave behind: against lists, everywhere that it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.draw_history.contract import NewDraws, Remembered
from antiphon.kernels.draw_history.op import draw_history, record_draws
from kernels.places import Place, Run

NUM_SLOTS = 7


def empty(width: int, device: torch.device) -> Remembered:
    numbers = torch.zeros(3, NUM_SLOTS, dtype=torch.int64, device=device)
    is_recorded = torch.zeros(NUM_SLOTS, dtype=torch.bool, device=device)
    ring = torch.full((NUM_SLOTS, width), 99, dtype=torch.int64, device=device)
    return Remembered(numbers[0], numbers[1], is_recorded, numbers[2], ring)


def look(place: Place, remembered: Remembered, places: Tensor) -> tuple[Tensor, Tensor]:
    if place is Place.INTERPRETED:
        from antiphon.kernels.draw_history import kernel

        return kernel.draw_history(remembered, places)
    return draw_history(remembered, places)


def record(place: Place, remembered: Remembered, places: Tensor, draws: NewDraws) -> None:
    if place is Place.INTERPRETED:
        from antiphon.kernels.draw_history import kernel

        kernel.record_draws(remembered, places, draws)
    else:
        record_draws(remembered, places, draws)


def what_lists_would_remember(place: Place, width: int) -> None:
    """Random slots draw in each step, some after a void draw, some anew; each has a window of its own."""
    rng = torch.Generator().manual_seed(width)
    remembered = empty(width, place.device)
    windows = [1 + slot % width for slot in range(NUM_SLOTS)]
    histories: list[list[int]] = [[] for _ in windows]
    pending = [(0, False)] * NUM_SLOTS
    for step in range(40):
        slots = torch.randperm(NUM_SLOTS, generator=rng)[: step % NUM_SLOTS]
        num = len(slots)
        is_taken = torch.rand(num, generator=rng) < 0.8
        is_anew = torch.rand(num, generator=rng) < 0.1
        ids, recorded = torch.randint(50, (num,), generator=rng), torch.rand(num, generator=rng) < 0.7
        # Rows of a larger tensor, as a step has them.
        columns = torch.zeros(6, num, dtype=torch.int64)
        columns[:4] = torch.stack([slots, torch.tensor(windows)[slots], is_taken & ~is_anew, is_anew])
        places = columns.to(place.device)[:4]
        history, newest = look(place, remembered, places)
        assert newest.tolist() == [pending[slot][0] for slot in slots]
        for row, slot in enumerate(slots.tolist()):
            last, is_recorded = pending[slot]
            if is_anew[row]:
                histories[slot] = []
            elif is_taken[row] and is_recorded:
                histories[slot].append(last)
            held = sorted(number for number in history[row].tolist() if number != -1)
            assert held == sorted(histories[slot][-windows[slot] :])
        there = (one.to(place.device) for one in (ids, recorded, ids + 100))
        record(place, remembered, places, NewDraws(*there))
        for row, slot in enumerate(slots.tolist()):
            pending[slot] = int(ids[row]), bool(recorded[row])
            assert int(remembered.fed[slot]) == int(ids[row]) + 100


def looking_changes_nothing(place: Place) -> None:
    remembered = empty(4, place.device)
    remembered.is_recorded[:] = True
    places = torch.tensor([[1, 2], [4, 4], [1, 1], [0, 0]], device=place.device)
    before = [one.clone() for one in (remembered.ring, remembered.num_recorded, remembered.last)]
    look(place, remembered, places)
    for one, other in zip(before, (remembered.ring, remembered.num_recorded, remembered.last), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("width", [1, 5, 16, 33])
def test_it_is_what_lists_would_remember(width: int, at: Run) -> None:
    at(what_lists_would_remember, width)


def test_looking_changes_nothing(at: Run) -> None:
    at(looking_changes_nothing)


def test_tensors_that_do_not_fit_are_refused() -> None:
    remembered, places = empty(4, torch.device("cpu")), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="each of the four contiguous"):
        draw_history(remembered, places[:3])
    with pytest.raises(ShapeError, match="each of the four contiguous"):
        draw_history(remembered, torch.zeros(2, 4, dtype=torch.int64).T)
    draws = NewDraws(places[0], torch.ones(2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="contiguous numbers"):
        record_draws(remembered, places, draws)
