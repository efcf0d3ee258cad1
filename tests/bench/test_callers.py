"""From what a caller was told, in order, to the times of its units and to what was heard of its turns."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue

from antiphon.bench.callers import NEVER, Caller, Said, turns_heard, unit_times
from antiphon.bench.load import Stages
from antiphon.bench.pacing import Heard, timetable
from antiphon.core.events import SessionOpened, UnitDecided
from bench.test_duplex import PLAN

NUM_FILL_UNITS = 7
TABLE = tuple(timetable(1, 4, PLAN.arrival, start_s=100.0))


def caller(units: list[int], heard: list[tuple[int, float, int, int]]) -> Caller:
    """units: of the call, by those of the timetable. heard: unit, time, turn and samples."""
    found = Caller(0, 0, SimpleQueue(), Said((), (), ""), num_fill_units=NUM_FILL_UNITS)
    found.units.extend(units)
    for unit, at_s, turn, num_samples in heard:
        found.heard.add(unit, at_s)
        found.heard_turns.append(turn)
        found.heard_samples.append(num_samples)
    return found


def finish(one: Caller, unit: int, at_s: float) -> None:
    one.finished.add(unit, at_s)
    one.stages_ms.extend((1.0, 2.0, float(unit)))


def test_a_fill_ends_before_a_unit_that_would_make_the_window_slide() -> None:
    """Else it would begin anew, and never end where every unit leaps over what is left."""
    one = Caller(490, 500, SimpleQueue(), Said((), (), ""), is_filling=True)
    one.happened(SessionOpened("a", 234, 600, False, 1.0))
    for unit, (num_tokens, goes_on) in enumerate(((312, True), (390, True), (468, False))):
        one.happened(UnitDecided(unit, 0.0, True, (), (), num_tokens, num_tokens // 16, unit))
        assert one.is_filling is goes_on
    assert one.fill_steps.qsize() == 3


def test_the_first_pcm_of_a_unit_is_its_first_piece_with_sound() -> None:
    one = caller([7, 8, 9, 10], [(7, 101.2, 0, 0), (8, 102.3, 0, 480), (8, 102.9, 0, 480)])
    one.decided.add(6, 99.0)  # of the fill
    one.decided.add(8, 102.1)
    finish(one, 8, 103.0)
    times = list(unit_times(one, TABLE))
    assert [one.first_pcm_s for one in times] == [None, 102.3, None, None]
    assert [one.decided_s for one in times] == [None, 102.1, None, None]
    assert [one.finished_s for one in times] == [None, 103.0, None, None]
    assert [one.stages for one in times] == [None, Stages(1.0, 2.0, 8.0), None, None]
    assert [one.complete_s for one in times] == [101, 102, 103, 104]


def test_a_unit_that_was_not_taken_moves_the_numbers_of_those_after_it() -> None:
    one = caller([7, NEVER, 8], [])
    finish(one, 7, 101.5)
    finish(one, 8, 103.5)
    assert [times.finished_s for times in unit_times(one, TABLE)] == [101.5, None, 103.5, None]


def test_of_a_turn_that_began_in_the_warm_up_only_the_rest_is_heard() -> None:
    plan = replace(PLAN, num_warm_up_units=2, num_units=2)
    one = caller([7, 8, 9, 10], [(8, 102.1, 5, 100), (9, 103.1, 5, 100), (10, 104.1, 6, 200)])
    old, new = turns_heard(one, TABLE, plan)
    assert (old.unit, old.first_complete_s, old.pieces) == (2, None, (Heard(103.1, 100),))
    assert (new.unit, new.first_complete_s, new.pieces) == (3, 104.0, (Heard(104.1, 200),))


def test_speech_of_a_unit_that_nobody_sent_is_left_out() -> None:
    one = caller([7], [(9, 103.0, 0, 100)])
    assert list(turns_heard(one, TABLE, replace(PLAN, num_warm_up_units=0))) == []
