"""Speech is what is louder than the room: a speech model without a model file.

    floor       = the lowest level of the last HISTORY_S, from MIN_FLOOR_DB up
    probability = 1 / (1 + e ** -((level - floor - MARGIN_DB) / SLOPE_DB))

A window's level is its variance, in dB of full scale, so that a constant offset is silence. The floor falls at once and
rises when HISTORY_S are over: nobody speaks so long without a gap, and a fan that starts is taken for speech so long.
It cannot tell speech from other sounds that come and go. Shown by tests/server/vad/test_energy.py.
"""

from __future__ import annotations

import math
from collections import deque

from antiphon.server.audio import Samples
from antiphon.server.vad.speech import WINDOW_SAMPLES
from antiphon.units import INPUT_RATE_HZ

HISTORY_S = 3.0
MIN_FLOOR_DB = -60.0
"""What counts as silence in any room, or a hiss would be speech after the perfect silence that a noise gate makes. With
the margin it is vLLM-Omni's `overlap_silence_rms` of 0.003."""
FIRST_FLOOR_DB = -50.0
"""Until the room has been heard: above the noise of most microphones, and far below speech of usual level."""
MARGIN_DB = 9.0
"""Where the probability is a half: noise does not vary by so much, and speech exceeds it in most of its windows."""
SLOPE_DB = 2.0

NUM_REMEMBERED = round(HISTORY_S * INPUT_RATE_HZ / WINDOW_SAMPLES)


class EnergyModel:
    """One caller's room."""

    def __init__(self) -> None:
        self._levels_db = deque([FIRST_FLOOR_DB] * NUM_REMEMBERED, maxlen=NUM_REMEMBERED)

    def probability(self, window: Samples) -> float:
        """That it is speech. window: [WINDOW_SAMPLES] float32."""
        # Digital silence has no level; what is below the lowest floor need not be told apart.
        level_db = 10 * math.log10(max(float(window.var()), 1e-12))
        self._levels_db.append(level_db)
        floor_db = max(min(self._levels_db), MIN_FLOOR_DB)
        return 1 / (1 + math.exp(-(level_db - floor_db - MARGIN_DB) / SLOPE_DB))
