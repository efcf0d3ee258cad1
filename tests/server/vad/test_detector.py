"""When turns begin and end: every edge of the states, and against regular expressions over scripts of windows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.server.audio import Samples
from antiphon.server.events.session import ServerVad
from antiphon.server.vad.config import TurnConfig, turn_config
from antiphon.server.vad.detector import IdleTimeout, Started, Stopped, TurnDetector, TurnEvent
from antiphon.server.vad.energy import EnergyModel
from antiphon.server.vad.speech import WINDOW_SAMPLES
from antiphon.units import INPUT_RATE_HZ
from server.vad.scripted import LOW, ScriptedModel, script
from server.vad.sounds import noise, silence, syllables

WINDOW_MS = 32
CONFIG = TurnConfig(
    prefix_padding_ms=2 * WINDOW_MS, silence_duration_ms=4 * WINDOW_MS, min_speech_duration_ms=3 * WINDOW_MS
)
IDLE = replace(CONFIG, idle_timeout_ms=10 * WINDOW_MS)


def detector(config: TurnConfig = CONFIG) -> TurnDetector:
    return TurnDetector(config, ScriptedModel())


def found(text: str, config: TurnConfig = CONFIG) -> list[TurnEvent]:
    return detector(config).feed(script(text))


def started(window: int) -> Started:
    return Started(window * WINDOW_MS)


def stopped(window: int) -> Stopped:
    return Stopped(window * WINDOW_MS)


def split(samples: Samples, cuts: list[int]) -> Iterator[Samples]:
    bounds = [0, *sorted(cut % (len(samples) + 1) for cut in cuts), len(samples)]
    yield from (samples[start:end] for start, end in zip(bounds, bounds[1:], strict=False))


def test_defaults_are_the_specifications_and_a_client_changes_what_it_names() -> None:
    assert turn_config(ServerVad()) == TurnConfig(0.5, 300, 500, 96, None)
    asked = ServerVad(threshold=0, prefix_padding_ms=0, silence_duration_ms=1, idle_timeout_ms=6000)
    assert turn_config(asked) == TurnConfig(0.0, 0, 1, 96, 6000)
    assert turn_config(ServerVad(min_speech_duration_ms=7, threshold=None)) == TurnConfig(min_speech_duration_ms=7)


def test_a_turn_has_padding_before_it_and_its_silence_at_its_end() -> None:
    assert found("....LLLLL....") == [started(2), stopped(13)]


def test_it_is_told_with_the_window_that_decides() -> None:
    one = detector()
    assert one.feed(script("....LL")) == []
    assert not one.is_speech
    assert one.feed(script("L")) == [started(2)]
    assert one.is_speech
    assert one.feed(script("...")) == []
    assert one.feed(script(".")[:-1]) == []
    assert one.is_speech
    assert one.feed(script(".")[-1:]) == [stopped(11)]
    assert not one.is_speech


def test_padding_never_reaches_before_the_first_sound_or_into_the_last_turn() -> None:
    assert found(".LLL....LLL....") == [started(0), stopped(8), started(8), stopped(15)]


@pytest.mark.parametrize("text", ["LL.LL.LL.", "MMMMMM", "LM.", ".L.L.L.L"])
def test_what_does_not_last_or_never_reaches_the_threshold_is_no_turn(text: str) -> None:
    assert found(text) == []


def test_between_the_thresholds_a_turn_goes_on_but_none_begins() -> None:
    assert found("..MMLMMMMMMMMMMM") == [started(2)]


def test_only_speech_ends_a_silence_and_only_silence_a_turn() -> None:
    assert found("LLL...L...") == [started(0)]
    assert found("LLL..MMMMM") == [started(0)]
    assert found("LLL..MMMMM.") == [started(0), stopped(11)]
    assert found("LLL.M.LMM.M..") == [started(0), stopped(13)]


def test_durations_of_nothing_are_those_of_a_window() -> None:
    config = TurnConfig(prefix_padding_ms=0, silence_duration_ms=0, min_speech_duration_ms=0)
    assert found(".L.L", config) == [started(1), stopped(3), started(3)]


@pytest.mark.parametrize(("threshold", "events"), [(0.0, [started(0)]), (0.95, []), (0.9, [started(0), stopped(8)])])
def test_a_threshold_holds_for_itself_and_its_lower_one(threshold: float, events: list[TurnEvent]) -> None:
    model = ScriptedModel()
    samples = script("LLLL....").astype(np.float64).astype(np.float32)
    samples[samples > 0.5] = np.float32(0.9) + np.float32(1e-6)
    assert TurnDetector(replace(CONFIG, threshold=threshold), model).feed(samples) == events


def test_with_a_threshold_near_zero_a_turn_can_still_end() -> None:
    samples = script("LLLL....")
    samples[samples == np.float32(LOW)] = 0.0
    assert TurnDetector(replace(CONFIG, threshold=0.05), ScriptedModel()).feed(samples) == [started(0), stopped(8)]


def test_who_asks_later_has_positions_on_the_same_clock_and_none_before() -> None:
    late = TurnDetector(CONFIG, ScriptedModel(), start_samples=INPUT_RATE_HZ)
    assert late.num_samples == INPUT_RATE_HZ
    assert late.feed(script(".LLL....")) == [Started(1000), Stopped(1000 + 8 * WINDOW_MS)]


def test_after_a_commit_or_a_clear_who_speaks_on_begins_another_turn() -> None:
    one = detector()
    assert one.feed(script("LLLL")) == [started(0)]
    one.feed(script("L")[:16])
    one.cut()
    assert not one.is_speech
    assert one.feed(script("L")[16:]) == []
    assert one.feed(script("LLL....")) == [Started(4 * WINDOW_MS + 1), stopped(12)]


def test_nobody_is_waited_for_unless_speech_is_expected() -> None:
    assert found("." * 50, IDLE) == []
    one = detector(CONFIG)
    one.expect_speech()
    assert one.feed(script("." * 100)) == []


def test_silence_after_an_answer_is_told_once_with_where_it_was() -> None:
    one = detector(IDLE)
    one.feed(script("...."))
    one.expect_speech(in_ms=3 * WINDOW_MS)
    assert one.feed(script("." * 12)) == []
    assert one.feed(script(".")) == [IdleTimeout(7 * WINDOW_MS, 17 * WINDOW_MS)]
    assert one.feed(script("." * 50)) == []
    one.expect_speech()
    assert one.feed(script("." * 10)) == [IdleTimeout(67 * WINDOW_MS, 77 * WINDOW_MS)]
    assert one.feed(script("LLL")) == [started(77)], "the silence was an item of its own"


def test_speech_and_an_answer_end_the_wait() -> None:
    one = detector(IDLE)
    one.expect_speech()
    assert one.feed(script("." * 8 + "LLL....")) == [started(6), stopped(15)]
    assert one.feed(script("." * 50)) == []
    one.expect_speech()
    one.feed(script("." * 9))
    one.expect_no_speech()
    assert one.feed(script("." * 50)) == []


def test_sound_that_may_become_speech_is_waited_for() -> None:
    one = detector(IDLE)
    one.expect_speech()
    assert one.feed(script("." * 9 + "LLL")) == [started(7)]
    other = detector(IDLE)
    other.expect_speech()
    assert other.feed(script("." * 9 + "LL.")) == [IdleTimeout(0, 12 * WINDOW_MS)]


letters = st.text("LM.", max_size=80)
windows = st.integers(0, 6)


@settings(max_examples=300)
@given(text=letters, min_speech=st.integers(1, 5), silent=st.integers(1, 5), padding=windows)
def test_turns_are_what_a_regular_expression_finds(text: str, min_speech: int, silent: int, padding: int) -> None:
    config = TurnConfig(
        prefix_padding_ms=padding * WINDOW_MS,
        silence_duration_ms=silent * WINDOW_MS,
        min_speech_duration_ms=min_speech * WINDOW_MS,
    )
    begin = rf"L[LM]{{{min_speech - 1}}}"
    # A pause goes from a low window to the next loud one; it ends the turn in a low window that is late enough.
    pause = rf"\.[.M]{{0,{silent - 2}}}M*(?=L)|" if silent > 1 else ""
    end = rf"\.[.M]{{{silent - 2}}}M*\." if silent > 1 else r"\."
    expected: list[TurnEvent] = []
    last_end = 0
    for turn in re.finditer(rf"{begin}(?:{pause}[LM])*({end})?", text):
        expected.append(started(max(turn.start() - padding, last_end)))
        if turn[1]:
            last_end = turn.end()
            expected.append(stopped(last_end))
    assert found(text, config) == expected


CALL = np.concatenate([noise(1, -55), syllables(1.5), noise(1.5, -55), syllables(0.5), silence(1.2)])


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, len(CALL)), max_size=40), step=st.sampled_from((16, 160, 512, 700, 16_000)))
def test_any_split_of_the_sound_gives_the_same_turns(cuts: list[int], step: int) -> None:
    """Also what is asked in between, at the same places."""
    config = TurnConfig(idle_timeout_ms=5000, silence_duration_ms=200)
    start = 20_001

    def told(pieces: Iterator[Samples]) -> list[TurnEvent]:
        one = TurnDetector(config, EnergyModel())
        events = one.feed(CALL[:start])
        one.expect_speech(in_ms=100.5)
        for piece in pieces:
            events += one.feed(piece)
            assert one.num_samples >= start
        one.cut()
        one.expect_speech()
        for index in range(0, 6 * INPUT_RATE_HZ, 1600):
            events += one.feed(noise(0.1, -60, seed=index))
        return events

    whole = told(iter([CALL[start:]]))
    assert [type(event) for event in whole].count(IdleTimeout) == 1
    assert len(whole) == 5
    assert told(split(CALL[start:], cuts)) == whole
    assert told(CALL[index : index + step] for index in range(start, len(CALL), step)) == whole


@given(text=st.text("LM.", max_size=60), cuts=st.lists(st.integers(0, 60 * WINDOW_SAMPLES), max_size=20))
def test_events_alternate_and_their_positions_never_fall(text: str, cuts: list[int]) -> None:
    one = detector(IDLE)
    last_ms = 0
    was_speech = False
    for piece in split(script(text), cuts):
        one.expect_speech()
        for event in one.feed(piece):
            match event:
                case Started(start_ms):
                    assert not was_speech
                    assert last_ms <= start_ms
                    last_ms, was_speech = start_ms, True
                case Stopped(end_ms):
                    assert was_speech
                    assert last_ms < end_ms
                    last_ms, was_speech = end_ms, False
                case IdleTimeout(start_ms, end_ms):
                    assert not was_speech
                    assert last_ms <= start_ms < end_ms
                    last_ms = end_ms
            assert 1000 * one.num_samples >= last_ms * INPUT_RATE_HZ
        assert one.is_speech == was_speech
