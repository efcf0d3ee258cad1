"""What a client has sent and its call has not heard yet: a client may send faster than speech, a call hears in order.

Shown by tests/server/test_feeding.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from antiphon.core.duplex import Wish
from antiphon.server.audio import Samples
from antiphon.server.realtime.conversation import RequestError
from antiphon.units import INPUT_RATE_HZ, UNIT_SAMPLES

MAX_AHEAD_SAMPLES = 2 * UNIT_SAMPLES
"""Sound that may be with the engine and not be decided on: the next second, while one is being decided on."""


class Feeder:
    """Owns the sound that waits, with what is wished of the seconds in it. max_samples: more may not wait."""

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._waiting: deque[Samples | Wish] = deque()
        self._num_waiting = 0
        self._num_ahead = 0
        self._num_open = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def num_missing_samples(self) -> int:
        """Until the second that was begun is complete; of a whole one if none was."""
        return UNIT_SAMPLES - self._num_open

    def put(self, samples: Samples) -> None:
        """Raises: RequestError if too much would wait; nothing is taken then."""
        if self._num_waiting + len(samples) > self._max_samples:
            raise RequestError(
                "input_backpressure",
                f"{self._num_waiting / INPUT_RATE_HZ:.0f} s of audio wait to be heard; the limit is "
                f"{self._max_samples / INPUT_RATE_HZ:.0f} s: send it no faster than it is spoken",
            )
        self._waiting.append(samples)
        self._num_waiting += len(samples)
        self._num_open = (self._num_open + len(samples)) % UNIT_SAMPLES

    def put_wish(self, wish: Wish) -> None:
        """Of the second in which the next sound ends up."""
        self._waiting.append(wish)

    def decided(self) -> None:
        """A second was decided on, or lost."""
        self._num_ahead -= UNIT_SAMPLES

    def ready(self) -> Iterator[Samples | Wish]:
        """What the call shall get now, in order."""
        while self._waiting and self._num_ahead < MAX_AHEAD_SAMPLES:
            head = self._waiting.popleft()
            if isinstance(head, np.ndarray):
                room = MAX_AHEAD_SAMPLES - self._num_ahead
                head, rest = head[:room], head[room:]
                if len(rest):
                    self._waiting.appendleft(rest)
                self._num_waiting -= len(head)
                self._num_ahead += len(head)
            yield head
