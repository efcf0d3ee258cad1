"""When callers speak and when that is too late: absolute times that nothing can move. Pure arithmetic.

A unit is complete at a time that was fixed before the run, whether or not the ones before it are answered: an engine
that falls behind is late by as much, and nobody waits for it. Shown by tests/bench/test_pacing.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from antiphon.units import OUTPUT_RATE_HZ, UNIT_S


class Arrival(Enum):
    """When within a second the units of different sessions are complete."""

    STAGGERED = "staggered"
    """Evenly over it, as callers come."""
    TOGETHER = "together"
    """All at once: the worst case."""


@dataclass(frozen=True, slots=True)
class Due:
    """A session's unit, and when it is complete. unit: from 0 on."""

    at_s: float
    session: int
    unit: int


def timetable(num_sessions: int, num_units: int, arrival: Arrival, start_s: float) -> Iterator[Due]:
    """When every unit is complete, in order of time. start_s: when the clock starts."""
    for unit in range(num_units):
        for session in range(num_sessions):
            yield Due(start_s + (unit + 1) * UNIT_S + _phase_s(session, num_sessions, arrival), session, unit)


def _phase_s(session: int, num_sessions: int, arrival: Arrival) -> float:
    match arrival:
        case Arrival.STAGGERED:
            return session / num_sessions * UNIT_S
        case Arrival.TOGETHER:
            return 0.0
        case never:
            assert_never(never)


def lateness_s(complete_s: float, finished_s: float) -> float:
    """By how much a unit is late: it has the second until the next one is complete, and no more.

    finished_s: when nothing of it was on its way any more.
    """
    return max(0.0, finished_s - complete_s - UNIT_S)


@dataclass(frozen=True, slots=True)
class Heard:
    """Samples that came at a time."""

    at_s: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Playback:
    """How a turn was heard. num_underruns: times at which its listener had nothing to play. gap_s: for how long.

    needed_lead_s: of all leads without an underrun the smallest.
    """

    num_underruns: int
    gap_s: float
    needed_lead_s: float


def play(turn: Sequence[Heard], lead_s: float) -> Playback:
    """A listener that begins `lead_s` after a turn's first sound, and after a gap goes on at once.

    turn: what came of it, in order; at least one piece with samples.
    """
    heard = [one for one in turn if one.num_samples]
    assert heard, "a turn without sound is not played"
    num_underruns, gap_s, needed_lead_s = 0, 0.0, 0.0
    end_s, num_before = heard[0].at_s + lead_s, 0
    for one in heard:
        needed_lead_s = max(needed_lead_s, one.at_s - heard[0].at_s - num_before / OUTPUT_RATE_HZ)
        if one.at_s > end_s:
            num_underruns += 1
            gap_s += one.at_s - end_s
            end_s = one.at_s
        end_s += one.num_samples / OUTPUT_RATE_HZ
        num_before += one.num_samples
    return Playback(num_underruns, gap_s, needed_lead_s)
