"""Where speech lies on a listener's timeline."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from antiphon.core.playback import PlaybackClock
from antiphon.units import OUTPUT_RATE_HZ


def test_speech_that_comes_early_plays_right_after_the_speech_before_it() -> None:
    clock = PlaybackClock()
    assert clock.place(1.0, 24_000) == 24_000
    assert clock.place(1.5, 100) == 48_000
    assert clock.end_s == 48_100 / OUTPUT_RATE_HZ


def test_speech_that_comes_late_plays_when_it_comes() -> None:
    clock = PlaybackClock()
    clock.place(1.0, 10)
    assert clock.place(3.25, 10) == 78_000


def test_speech_of_no_samples_takes_no_time() -> None:
    clock = PlaybackClock()
    clock.place(0.0, 24_000)
    clock.place(0.5, 0)
    assert clock.end_s == 1.0


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 60_000)), max_size=20))
def test_speech_never_overlaps_never_waits_without_need_and_never_plays_before_it_exists(
    pieces: list[tuple[int, int]],
) -> None:
    clock, now_ms, end = PlaybackClock(), 0, 0
    for waited_ms, num_samples in pieces:
        now_ms += waited_ms
        start = clock.place(now_ms / 1000, num_samples)
        assert start == max(end, now_ms * OUTPUT_RATE_HZ // 1000)
        end = start + num_samples
        assert clock.end_s == end / OUTPUT_RATE_HZ


def test_cutting_voids_what_would_have_played_later_and_nothing_else() -> None:
    clock = PlaybackClock()
    clock.place(1.0, 36_000)
    assert clock.cut(2.0) == 12_000
    assert clock.end_s == 2.0
    assert clock.cut(2.5) == 0
    assert clock.end_s == 2.0
    assert clock.place(3.0, 10) == 72_000
