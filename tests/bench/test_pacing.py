"""When units are complete, what is late, and what a listener hears."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from antiphon.bench.pacing import Arrival, Due, Heard, lateness_s, play, timetable
from antiphon.units import OUTPUT_RATE_HZ


def test_staggered_units_are_spread_over_the_second() -> None:
    table = list(timetable(4, 2, Arrival.STAGGERED, start_s=100.0))
    assert [due.at_s for due in table] == [101, 101.25, 101.5, 101.75, 102, 102.25, 102.5, 102.75]
    assert table[5] == Due(102.25, session=1, unit=1)


def test_units_that_come_together_are_complete_at_the_same_time() -> None:
    table = list(timetable(3, 2, Arrival.TOGETHER, start_s=0.0))
    assert [due.at_s for due in table] == [1, 1, 1, 2, 2, 2]


@given(st.integers(1, 50), st.integers(1, 20), st.sampled_from(Arrival))
def test_a_timetable_has_every_unit_once_in_order_of_time_a_second_apart(
    num_sessions: int, num_units: int, arrival: Arrival
) -> None:
    table = list(timetable(num_sessions, num_units, arrival, start_s=5.0))
    assert [due.at_s for due in table] == sorted(due.at_s for due in table)
    assert {(due.session, due.unit) for due in table} == {(s, u) for s in range(num_sessions) for u in range(num_units)}
    own = [due.at_s for due in table if due.session == 0]
    assert own == [6.0 + unit for unit in range(num_units)]


def test_a_unit_has_the_second_until_the_next_one_is_complete() -> None:
    assert lateness_s(complete_s=10.0, finished_s=10.9) == 0
    assert lateness_s(complete_s=10.0, finished_s=11.0) == 0
    assert lateness_s(complete_s=10.0, finished_s=11.25) == 0.25


def seconds(*at_s: float) -> list[Heard]:
    """A second of sound at each of these times."""
    return [Heard(one, OUTPUT_RATE_HZ) for one in at_s]


def test_a_turn_that_comes_in_time_has_no_gap() -> None:
    heard = play(seconds(10.0, 11.0, 12.0), lead_s=0.0)
    assert (heard.num_underruns, heard.gap_s, heard.needed_lead_s) == (0, 0, 0)


def test_a_piece_that_comes_after_the_lead_is_used_up_is_an_underrun() -> None:
    turn = seconds(10.0, 11.25, 12.0)
    assert play(turn, lead_s=0.3).num_underruns == 0
    late = play(turn, lead_s=0.1)
    assert late.num_underruns == 1
    assert late.gap_s == pytest.approx(0.15)
    assert late.needed_lead_s == pytest.approx(0.25)


def test_after_a_gap_playing_goes_on_at_once_and_what_was_lost_is_not_lost_again() -> None:
    turn = seconds(0.0, 1.5, 2.5, 3.5)
    heard = play(turn, lead_s=0.0)
    assert heard.num_underruns == 1
    assert heard.gap_s == pytest.approx(0.5)


def test_pieces_without_sound_are_no_start_and_no_gap() -> None:
    heard = play([Heard(0.0, 0), *seconds(5.0, 6.0), Heard(9.0, 0)], lead_s=0.0)
    assert (heard.num_underruns, heard.needed_lead_s) == (0, 0)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 2 * OUTPUT_RATE_HZ)), min_size=1, max_size=12))
def test_the_needed_lead_is_enough_and_less_is_not(steps: list[tuple[float, int]]) -> None:
    at_s, turn = 0.0, []
    for step_s, num_samples in steps:
        at_s += step_s
        turn.append(Heard(at_s, num_samples))
    needed_s = play(turn, lead_s=0.0).needed_lead_s
    assert play(turn, needed_s + 1e-6).num_underruns == 0
    if needed_s > 1e-3:
        assert play(turn, needed_s - 1e-3).num_underruns >= 1
