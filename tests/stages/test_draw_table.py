"""The device's memory of draws against plain lists, under random sessions that come, draw and go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from antiphon.stages.draw_table import DrawPlace, DrawSlot, DrawTable, Newest

CPU = torch.device("cpu")


@dataclass(slots=True)
class Plain:
    """A session as lists. pending: its newest draw and whether the history remembers it."""

    slot: DrawSlot
    window: int
    history: deque[int] = field(init=False)
    pending: tuple[int, bool] = (0, False)
    is_new: bool = True

    def __post_init__(self) -> None:
        self.history = deque(maxlen=self.window)

    def follow(self, newest: Newest) -> None:
        last, is_recorded = self.pending
        if newest is Newest.FORGOTTEN:
            self.history.clear()
        elif newest is Newest.TAKEN and is_recorded:
            self.history.append(last)


Move = tuple[int, Newest, int, bool]
"""Which session draws, after what, and what it draws."""

mostly_taken = st.sampled_from([*[Newest.TAKEN] * 6, Newest.VOID, Newest.FORGOTTEN])
moves = st.tuples(st.integers(0, 3), mostly_taken, st.integers(0, 9), st.sampled_from([True, True, False]))
step = st.lists(moves, min_size=1, max_size=4, unique_by=lambda move: move[0])
steps = st.lists(
    st.one_of(
        st.integers(1, 5),  # a session with this window comes
        step,
        step,
        step,
        st.tuples(st.integers(0, 5)),  # a session goes
    ),
    min_size=10,
    max_size=40,
)


@given(steps=steps, is_failing=st.booleans())
def test_a_table_remembers_what_lists_would(*, steps: list[int | list[Move] | tuple[int]], is_failing: bool) -> None:
    table = DrawTable(CPU)
    sessions = [Plain(table.take(window), window) for window in (2, 5)]
    for step in steps:
        match step:
            case int(window):
                sessions.append(Plain(table.take(window), window))
            case tuple((number,)):
                for gone in sessions[number : number + 1]:
                    table.give_back(gone.slot)
                    table.give_back(gone.slot)
                    sessions.remove(gone)
            case list(drawing):
                there = [(sessions[one[0]], *one[1:]) for one in drawing if one[0] < len(sessions)]
                draw(table, there, is_failing=is_failing)
        assert table.num_held == len(sessions)


def draw(table: DrawTable, drawing: list[tuple[Plain, Newest, int, bool]], *, is_failing: bool) -> None:
    """One step, checked; if draws fail at first, they are made again."""
    if not drawing:
        return
    # A slot's first draw comes after nothing.
    after = [Newest.FORGOTTEN if session.is_new else newest for session, newest, _, _ in drawing]
    places = [DrawPlace(one[0].slot, newest, one[0].window) for one, newest in zip(drawing, after, strict=True)]
    past = table.past(torch.tensor(table.columns(places)))
    if is_failing:
        past = table.past(torch.tensor(table.columns(places)))
    for (session, _, _, _), newest, history, last in zip(drawing, after, past.history, past.last, strict=True):
        session.follow(newest)
        assert sorted(history[history >= 0].tolist()) == sorted(session.history)
        assert session.is_new or int(last) == session.pending[0]
    ids = torch.tensor([token for _, _, token, _ in drawing])
    table.record(past, ids, torch.tensor([is_recorded for _, _, _, is_recorded in drawing]), ids + 100)
    for session, _, token, is_recorded in drawing:
        session.pending, session.is_new = (token, is_recorded), False
    assert torch.equal(table.fed([session.slot for session, _, _, _ in drawing]), ids + 100)


def test_a_slot_is_used_again_and_the_table_does_not_grow_for_it() -> None:
    table = DrawTable(CPU)
    slots = [table.take(4) for _ in range(5)]
    assert len({slot.row for slot in slots}) == 5
    table.give_back(slots[2])
    again = table.take(4)
    assert {again.row, *(slot.row for slot in slots)} <= set(range(8))
    assert len({again.row, *(slot.row for slot in slots if slot is not slots[2])}) == 5


def test_whoever_gave_a_slot_back_can_do_nothing_to_its_successor() -> None:
    table = DrawTable(CPU)
    old = table.take(3)
    table.give_back(old)
    new = table.take(3)
    assert new.row == old.row
    table.give_back(old)
    assert table.num_held == 1
    with pytest.raises(AssertionError, match="was given back"):
        table.fed([old])
    with pytest.raises(AssertionError, match="was given back"):
        table.columns([DrawPlace(old, Newest.VOID, 3)])


def test_a_slot_draws_once_in_a_step() -> None:
    table = DrawTable(CPU)
    place = DrawPlace(table.take(3), Newest.FORGOTTEN, 3)
    with pytest.raises(AssertionError, match="draws twice"):
        table.columns([place, place])
