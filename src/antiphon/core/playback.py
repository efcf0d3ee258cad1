"""Where a call's output lies on the input's clock, for a listener who plays every sample once and in order.

Shown by tests/core/test_playback.py.
"""

from __future__ import annotations

from antiphon.units import OUTPUT_RATE_HZ


class PlaybackClock:
    """The one writer of a listener's timeline. Times in seconds of input, positions in output samples."""

    def __init__(self, end_samples: int = 0) -> None:
        """end_samples: so far something is queued already."""
        self._end_samples = end_samples

    def place(self, now_s: float, num_samples: int) -> int:
        """Queue speech that becomes available at `now_s`; returns the output sample at which it starts."""
        start_samples = max(self._end_samples, round(now_s * OUTPUT_RATE_HZ))
        self._end_samples = start_samples + num_samples
        return start_samples

    def cut(self, now_s: float) -> int:
        """Stop at `now_s`: what would have played later is void. Returns how many samples that is."""
        now_samples = round(now_s * OUTPUT_RATE_HZ)
        num_void = max(0, self._end_samples - now_samples)
        self._end_samples -= num_void
        return num_void

    @property
    def end_samples(self) -> int:
        return self._end_samples

    @property
    def end_s(self) -> float:
        return self._end_samples / OUTPUT_RATE_HZ
