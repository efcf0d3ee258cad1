"""How fast speech leaves for a listener who plays it in real time: never far ahead, never in large pieces.

What left cannot be taken back, so the lead is what a listener may still hear after an interruption; what did not leave
is cut at once. Times come from whoever calls, so that tests need no clock. Shown by tests/server/test_pacing.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.units import OUTPUT_RATE_HZ

Samples = NDArray[np.float32]
SAMPLES_PER_MS = OUTPUT_RATE_HZ // 1000


@dataclass(frozen=True, slots=True)
class PacingConfig:
    """max_lead_s: speech that may have left and not be played yet. delta_s: the most in one piece."""

    max_lead_s: float = 1.0
    delta_s: float = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Speech that leaves now. samples: [n] float32, 24 kHz. is_last: nothing more of `owner` will come."""

    owner: str
    samples: Samples
    is_last: bool


@dataclass(slots=True, eq=False)
class _Queued:
    owner: str
    samples: Samples
    is_end: bool


class Pacer:
    """Owns the speech that waits for one listener, and the listener's clock as far as it can be known from here."""

    def __init__(self, config: PacingConfig) -> None:
        self._config = config
        self._queue: deque[_Queued] = deque()
        # When what left will have been played, on the caller's clock. In samples, so that lengths add up exactly.
        self._played_until = 0

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def queue(self, owner: str, samples: Samples) -> None:
        """Speech of `owner`, behind what waits."""
        self._queue.append(_Queued(owner, samples, is_end=False))

    def end(self, owner: str) -> None:
        """No more will come from `owner`; told by its last piece, which is empty if all the others have left."""
        self._queue.append(_Queued(owner, np.empty(0, np.float32), is_end=True))

    def due(self, now_s: float) -> list[Piece]:
        """What leaves now."""
        pieces: list[Piece] = []
        now, max_lead = round(now_s * OUTPUT_RATE_HZ), round(self._config.max_lead_s * OUTPUT_RATE_HZ)
        while self._queue and (self._queue[0].is_end or self._played_until - now < max_lead):
            head = self._queue[0]
            if head.is_end:
                self._queue.popleft()
                pieces.append(Piece(head.owner, head.samples, is_last=True))
                continue
            num_samples = _piece_samples(len(head.samples), round(self._config.delta_s * OUTPUT_RATE_HZ))
            samples, head.samples = head.samples[:num_samples], head.samples[num_samples:]
            if not len(head.samples):
                self._queue.popleft()
            self._played_until = max(self._played_until, now) + len(samples)
            is_last = bool(self._queue) and self._queue[0].is_end and self._queue[0].owner == head.owner
            if is_last:
                self._queue.popleft()
            pieces.append(Piece(head.owner, samples, is_last))
        return pieces

    def next_due_s(self, now_s: float) -> float:
        """When something may leave next; infinite if nothing waits."""
        if not self._queue:
            return float("inf")
        if self._queue[0].is_end:
            return now_s
        return max(now_s, self._played_until / OUTPUT_RATE_HZ - self._config.max_lead_s)

    def lead_s(self, now_s: float) -> float:
        """Speech that left and is not played yet."""
        return self._num_unplayed(now_s) / OUTPUT_RATE_HZ

    def cut(self, now_s: float) -> int:
        """Drop what did not leave, of all owners. Returns how many samples the listener has of it all to play still."""
        self._queue.clear()
        num_unplayed = self._num_unplayed(now_s)
        self._played_until -= num_unplayed
        return num_unplayed

    def _num_unplayed(self, now_s: float) -> int:
        return max(0, self._played_until - round(now_s * OUTPUT_RATE_HZ))


def _piece_samples(num_samples: int, max_samples: int) -> int:
    """Of so much, what leaves first: even pieces, so that none is tiny, of whole milliseconds, so that they add up."""
    num_pieces = max(1, -(-num_samples // max_samples))
    num_ms = -(-num_samples // (num_pieces * SAMPLES_PER_MS))
    return num_ms * SAMPLES_PER_MS
