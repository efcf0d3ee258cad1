"""When a caller's turns begin and end, from the sound alone. No clock, no socket, no sound is kept.

Time is the sound itself: positions are samples since the call's first. Any split of the sound gives the same events.
Shown by tests/server/vad/test_detector.py.

      p >= threshold                   lasted min_speech_duration_ms
QUIET ──────────────> RISING ─────────────────────────────────────> SPEECH <──────────────┐
  │ ^                   │                  Started                    │                   │ p >= threshold
  │ └───────────────────┘                                             └────────────────> FALLING
  │   p < threshold - HYSTERESIS                          p < threshold - HYSTERESIS      │
  └ <───────────────────────── lasted silence_duration_ms: Stopped ───────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

import numpy as np

from antiphon.server.audio import Samples
from antiphon.server.vad.config import TurnConfig
from antiphon.server.vad.speech import WINDOW_SAMPLES, SpeechModel
from antiphon.units import INPUT_RATE_HZ

SAMPLES_PER_MS = INPUT_RATE_HZ // 1000

HYSTERESIS = 0.15
MIN_LOWER_THRESHOLD = 0.01
"""Silero's own (`VADIterator` and `get_speech_timestamps` in silero_vad/utils_vad.py): a turn that has begun goes on
until the probability is this much below the threshold."""


@dataclass(frozen=True, slots=True)
class Started:
    """A turn has begun. audio_start_ms: with the padding; not before the end of what was committed or cleared."""

    audio_start_ms: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The turn is over. audio_end_ms: with the silence after it, as the specification says."""

    audio_end_ms: int


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """Nobody spoke for so long. audio_start_ms: since when speech was expected."""

    audio_start_ms: int
    audio_end_ms: int


TurnEvent = Started | Stopped | IdleTimeout


class _State(Enum):
    QUIET = "quiet"
    RISING = "rising"
    """It may be speech, but has not lasted yet."""
    SPEECH = "speech"
    FALLING = "falling"
    """The turn goes on, but nothing is said at the moment."""


class TurnDetector:
    """Owns what was heard of one caller. start_samples: what the caller had sent before anybody listened for turns."""

    def __init__(self, config: TurnConfig, model: SpeechModel, start_samples: int = 0) -> None:
        self._model = model
        self._threshold = config.threshold
        self._lower_threshold = max(config.threshold - HYSTERESIS, MIN_LOWER_THRESHOLD)
        self._padding_samples = config.prefix_padding_ms * SAMPLES_PER_MS
        self._silence_samples = config.silence_duration_ms * SAMPLES_PER_MS
        self._min_speech_samples = config.min_speech_duration_ms * SAMPLES_PER_MS
        self._idle_ms = config.idle_timeout_ms
        self._rest = np.zeros(0, np.float32)
        self._heard_samples = start_samples  # up to the end of the last window
        self._free_samples = start_samples  # sound before here belongs to no later turn
        self._state = _State.QUIET
        self._since_samples = start_samples
        self._expected_samples: int | None = None

    @property
    def is_speech(self) -> bool:
        """Whether a turn is open: `Started` was told and `Stopped` was not."""
        return self._state in (_State.SPEECH, _State.FALLING)

    @property
    def num_samples(self) -> int:
        """All that the caller has sent."""
        return self._heard_samples + len(self._rest)

    def feed(self, samples: Samples) -> list[TurnEvent]:
        """Hear what came. samples: [n] float32 at INPUT_RATE_HZ, any n; what is less than a window waits."""
        sound = np.concatenate([self._rest, samples])
        end = len(sound) - len(sound) % WINDOW_SAMPLES
        found = [self._hear(sound[start : start + WINDOW_SAMPLES]) for start in range(0, end, WINDOW_SAMPLES)]
        self._rest = sound[end:].copy()
        return [event for event in found if event is not None]

    def cut(self) -> None:
        """The client committed or cleared what it sent: an open turn ends untold; who speaks on begins another one."""
        self._free_samples = self.num_samples
        self._enter(_State.QUIET)

    def expect_speech(self, in_ms: float = 0.0) -> None:
        """Count the time that nobody speaks, from so much sound from now: when the last answer has been played.

        It ends with the next turn, or with `IdleTimeout`, which comes once.
        """
        self._expected_samples = self.num_samples + round(in_ms * SAMPLES_PER_MS)

    def expect_no_speech(self) -> None:
        """The model is about to answer: do not count."""
        self._expected_samples = None

    def _hear(self, window: Samples) -> TurnEvent | None:
        probability = self._model.probability(window)
        is_loud = probability >= self._threshold
        is_low = not is_loud and probability < self._lower_threshold
        self._turn(is_loud=is_loud, is_low=is_low)
        self._heard_samples += WINDOW_SAMPLES
        return self._told(is_low=is_low)

    def _turn(self, *, is_loud: bool, is_low: bool) -> None:
        """To where the window that begins here leads."""
        match self._state:
            case _State.QUIET:
                if is_loud:
                    self._enter(_State.RISING)
            case _State.RISING:
                if is_low:
                    self._enter(_State.QUIET)
            case _State.SPEECH:
                if is_low:
                    self._enter(_State.FALLING)
            case _State.FALLING:
                if is_loud:
                    self._enter(_State.SPEECH)
            case never:
                assert_never(never)

    def _told(self, *, is_low: bool) -> TurnEvent | None:
        """What has lasted long enough now, at the end of the window."""
        lasted_samples = self._heard_samples - self._since_samples
        match self._state:
            case _State.RISING if lasted_samples >= self._min_speech_samples:
                start = max(self._since_samples - self._padding_samples, self._free_samples)
                self._enter(_State.SPEECH)
                self._expected_samples = None
                return Started(_ms(start))
            case _State.FALLING if is_low and lasted_samples >= self._silence_samples:
                self._enter(_State.QUIET)
                self._free_samples = self._heard_samples
                return Stopped(_ms(self._heard_samples))
            case _State.QUIET:
                return self._idle()
        return None

    def _idle(self) -> IdleTimeout | None:
        expected = self._expected_samples
        if expected is None or self._idle_ms is None or self._heard_samples - expected < self._idle_ms * SAMPLES_PER_MS:
            return None
        self._expected_samples = None
        start = max(expected, self._free_samples)
        self._free_samples = self._heard_samples
        return IdleTimeout(_ms(start), _ms(self._heard_samples))

    def _enter(self, state: _State) -> None:
        self._state = state
        self._since_samples = self._heard_samples


def _ms(samples: int) -> int:
    return samples // SAMPLES_PER_MS
