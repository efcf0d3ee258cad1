"""What every speech model is to the detector of turns. Which one a server has: `choice.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.server.audio import Samples

WINDOW_SAMPLES = 512
"""What silero is trained on at INPUT_RATE_HZ, and so what every model here takes at once."""


class SpeechModel(Protocol):
    """Hears one caller, window after window. Belongs to one `TurnDetector`."""

    def probability(self, window: Samples) -> float:
        """That it is speech, in the light of the windows before. window: [WINDOW_SAMPLES] float32; not kept."""
        ...


NewSpeechModel = Callable[[], SpeechModel]
"""A model for another caller; what is large is shared with the others."""
