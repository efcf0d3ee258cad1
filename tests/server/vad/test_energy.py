"""What energy takes for speech: what rises above the room. And what it cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.server.audio import Samples
from antiphon.server.vad.config import TurnConfig
from antiphon.server.vad.detector import Started, Stopped, TurnDetector, TurnEvent
from antiphon.server.vad.energy import HISTORY_S, EnergyModel
from antiphon.units import INPUT_RATE_HZ
from server.vad.sounds import CALLER, VOICE, noise, recording, silence, syllables


def found(*sounds: Samples) -> list[TurnEvent]:
    return TurnDetector(TurnConfig(), EnergyModel()).feed(np.concatenate(sounds))


@pytest.mark.parametrize("level_db", [-90.0, -60.0, -48.0])
@pytest.mark.parametrize("loudness_db", [-36.0, -26.0, -12.0])
def test_syllables_in_a_room_are_a_turn(level_db: float, loudness_db: float) -> None:
    room = noise(7, level_db)
    room[2 * INPUT_RATE_HZ : 4 * INPUT_RATE_HZ] += syllables(2, loudness_db)
    start, stop = found(room)
    assert isinstance(start, Started)
    assert start.audio_start_ms == pytest.approx(2000 - 300, abs=64)
    assert isinstance(stop, Stopped)
    # The last gap between syllables may belong to the silence.
    assert stop.audio_end_ms == pytest.approx(4000 + 500, abs=100)


def test_a_caller_who_speaks_from_the_first_sample_is_heard() -> None:
    assert found(syllables(1.0), silence(1)) == [Started(0), Stopped(48 * 32)]


@pytest.mark.parametrize("level_db", [-90.0, -60.0, -45.0])
def test_steady_noise_is_no_speech(level_db: float) -> None:
    assert found(noise(20, level_db)) == []


def test_silence_an_offset_and_a_constant_are_no_speech() -> None:
    assert found(silence(2), silence(2) + np.float32(0.5), silence(2) - np.float32(1)) == []


def test_a_click_is_no_speech() -> None:
    click = silence(3)
    click[20_000:20_400] = 0.5
    assert found(click) == []


def test_noise_that_starts_is_taken_for_speech_only_until_it_is_known() -> None:
    start, stop = found(noise(5, -60), noise(10, -30))
    assert isinstance(start, Started)
    assert isinstance(stop, Stopped)
    assert stop.audio_end_ms == pytest.approx(5000 + 1000 * HISTORY_S + 500, abs=64)


def test_a_higher_threshold_asks_for_louder_speech() -> None:
    model = EnergyModel()
    for start in range(0, 4 * INPUT_RATE_HZ, 512):
        model.probability(noise(4, -50)[start : start + 512])
    louder = [model.probability(noise(0.032, level_db)) for level_db in (-50, -45, -41, -38, -30, 0)]
    assert louder == sorted(louder)
    assert louder[0] < 0.02
    assert louder[2] == pytest.approx(0.5, abs=0.2)
    assert louder[-1] > 0.99


def test_the_recordings_that_ship_are_heard() -> None:
    events = found(recording(CALLER))
    assert [type(event) for event in events] == [Started, Stopped] * 4
    ends = [event.audio_end_ms for event in events if isinstance(event, Stopped)]
    assert ends == pytest.approx([4850, 11650, 21050, 29200], abs=100)
    assert found(recording(VOICE)) == [Started(0)], "it has no pause of half a second"
