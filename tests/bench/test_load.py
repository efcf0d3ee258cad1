"""What is made of times that were observed: nothing that failed is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from antiphon.bench.load import LoadPlan, LoadRun, MemoryAt, Stages, Troubles, TurnHeard, UnitTimes
from antiphon.bench.pacing import Arrival, Heard
from antiphon.bench.results import Figure, Quantity
from antiphon.bench.script import Talk
from antiphon.units import OUTPUT_RATE_HZ

PLAN = LoadPlan(
    num_sessions=1,
    talk=Talk(0.5, 2, 8),
    arrival=Arrival.STAGGERED,
    num_warm_up_units=1,
    num_units=4,
    num_parts=2,
    lead_ms=300.0,
    max_late_ms=200.0,
    picture_side=0,
    voice_s=6.0,
)
CALM = Troubles(0, 0, 0, 0, 0, ())


def unit(number: int, took_s: float) -> UnitTimes:
    """One that speaks, and is decided after a tenth of the time."""
    complete_s = 100.0 + number
    end_s = complete_s + took_s
    return UnitTimes(0, number, complete_s, complete_s + 0.1 * took_s, end_s, end_s, Stages(10.0, 20.0, number))


def run(*units: UnitTimes, troubles: Troubles = CALM, turns: tuple[TurnHeard, ...] = ()) -> LoadRun:
    return LoadRun(PLAN, units, turns, (0.001, 0.002), (), troubles, num_slides=2, fill_s=1.5, context_tokens=(70, 80))


def figure(of: LoadRun, quantity: Quantity) -> Figure:
    (found,) = [one for one in of.figures() if one.quantity is quantity]
    return found


def counted(of: LoadRun, name: str) -> float:
    (found,) = [one.value for one in of.counts() if one.name == name]
    return found


def test_the_warm_up_is_not_measured_but_its_lateness_is_counted() -> None:
    calm = run(unit(0, 5.0), unit(1, 0.1), unit(2, 0.2), unit(3, 0.3), unit(4, 0.4))
    assert figure(calm, Quantity.FIRST_PCM).summary.max == pytest.approx(400)
    assert figure(calm, Quantity.DECIDED).summary.p50 == pytest.approx(20)
    assert counted(calm, "units late in the warm-up") == 1
    assert counted(calm, "units late by more than 200 ms") == 0
    assert not calm.failures


def test_the_parts_of_the_measured_time_are_its_repetitions() -> None:
    calm = run(unit(1, 0.1), unit(2, 0.1), unit(3, 0.3), unit(4, 0.3))
    assert figure(calm, Quantity.FIRST_PCM).repetition_p50s == pytest.approx((100, 300))


def test_each_stage_has_its_times_and_a_unit_that_listens_only_the_thinkers() -> None:
    silent = replace(unit(2, 0.1), first_pcm_s=None)
    found = [one for one in run(unit(1, 0.1), silent, unit(3, 0.1)).figures() if one.quantity is Quantity.STAGE_TIME]
    assert [(one.case.partition(":")[0], one.summary.num, round(one.summary.max)) for one in found] == [
        ("thinker, listening", 1, 10),
        ("thinker, speaking", 2, 10),
        ("talker", 2, 20),
        ("code2wav", 2, 3),
    ]


def test_a_unit_is_late_by_what_it_takes_beyond_its_second() -> None:
    late = run(unit(1, 0.5), unit(2, 1.1), unit(3, 1.3), unit(4, 1.15))
    assert figure(late, Quantity.LATENESS).summary.max == pytest.approx(300)
    assert counted(late, "units late by more than 200 ms") == 1
    assert late.failures == ("1 units were late",)


def test_a_unit_that_was_never_finished_is_counted_and_has_no_time() -> None:
    lost = run(unit(1, 0.1), UnitTimes(0, 2, 102.0, None, None, None, None))
    assert figure(lost, Quantity.LATENESS).summary.num == 1
    assert counted(lost, "units complete") == 2
    assert counted(lost, "units never finished") == 1
    assert lost.failures == ("1 units were never finished",)


def test_gaps_in_what_is_heard_are_underruns() -> None:
    pieces = tuple(Heard(101.0 + at_s, OUTPUT_RATE_HZ) for at_s in (0.2, 1.2, 2.9))
    gapped = run(unit(1, 0.2), turns=(TurnHeard(0, 1, 101.0, pieces), TurnHeard(0, 3, None, (Heard(104.0, 0),))))
    assert figure(gapped, Quantity.FIRST_AUDIO).summary.max == pytest.approx(200)
    assert figure(gapped, Quantity.NEEDED_LEAD).summary.max == pytest.approx(700)
    assert counted(gapped, "underruns with 300 ms of lead") == 1
    assert counted(gapped, "silence in underruns") == pytest.approx(400)
    assert counted(gapped, "turns heard") == 1
    assert counted(gapped, "speech a second") == pytest.approx(3 / 4)
    assert gapped.failures == ("1 underruns",)


def test_whoever_was_refused_or_lost_makes_the_load_a_failure() -> None:
    troubles = Troubles(1, 2, 3, 4, 5, ("why",))
    failed = run(unit(1, 0.1), troubles=troubles)
    assert [counted(failed, name) for name in ("sessions refused", "sessions lost", "units not taken")] == [1, 2, 3]
    assert [counted(failed, name) for name in ("inputs refused", "answers cut short")] == [4, 5]
    assert len(failed.failures) == 5


def test_a_load_in_which_nothing_was_decided_has_counts_and_no_times() -> None:
    silent = LoadRun(PLAN, (), (), (), (), replace(CALM, num_refused=1), 0, 0.0, ())
    assert not list(silent.figures())
    assert counted(silent, "sessions refused") == 1


def test_memory_grows_by_the_difference_of_the_first_and_the_last_tenth() -> None:
    memory = tuple(MemoryAt(float(at_s), 10**6 * at_s, 5 * 10**6, 9 * 10**6) for at_s in range(31))
    grown = replace(run(unit(1, 0.1)), memory=memory)
    assert counted(grown, "host memory grew by") == pytest.approx(27)
    assert counted(grown, "device memory held grew by") == 0
    assert counted(grown, "device memory reserved at most") == 9
    assert {series.name for series in grown.series()} == {"host memory", "device memory"}
