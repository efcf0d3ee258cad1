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
        self._num_left = 0  # samples that have gone to the call

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def num_missing_samples(self) -> int:
        """Until the second that was begun is complete; of a whole one if none was."""
        return UNIT_SAMPLES - (self._num_left + self._num_waiting) % UNIT_SAMPLES

    def check_room(self, num_samples: int) -> None:
        """Raises: RequestError if too much would wait."""
        if self._num_waiting + num_samples > self._max_samples:
            raise RequestError(
                "input_backpressure",
                f"{self._num_waiting / INPUT_RATE_HZ:.0f} s of audio wait to be heard; the limit is "
                f"{self._max_samples / INPUT_RATE_HZ:.0f} s: send it no faster than it is spoken",
            )

    def put(self, samples: Samples, wish: Wish) -> None:
        """wish: of every second that some of it ends up in.

        Raises: RequestError if too much would wait; nothing is taken then.
        """
        self.check_room(len(samples))
        while len(samples):
            part, samples = np.split(samples, [self.num_missing_samples])
            # Who is free has no wish, so that an earlier one for the same second stands.
            if wish is not Wish.FREE:
                self._waiting.append(wish)
            self._waiting.append(part)
            self._num_waiting += len(part)

    def put_wish(self, wish: Wish) -> None:
        """Of the second in which the next sound ends up."""
        self._waiting.append(wish)

    def clear(self) -> None:
        """The sound that waits will not be heard, what has gone to the call will; wishes stay."""
        self._waiting = deque(waiting for waiting in self._waiting if isinstance(waiting, Wish))
        self._num_waiting = 0

    def decided(self) -> None:
        """A second was decided on, or lost."""
        self._num_ahead -= UNIT_SAMPLES

    @property
    def is_ready(self) -> bool:
        """The call shall get something now."""
        return bool(self._waiting) and self._num_ahead < MAX_AHEAD_SAMPLES

    def ready(self) -> Iterator[Samples | Wish]:
        """What the call shall get now, in order."""
        while self.is_ready:
            head = self._waiting.popleft()
            if isinstance(head, np.ndarray):
                room = MAX_AHEAD_SAMPLES - self._num_ahead
                head, rest = head[:room], head[room:]
                if len(rest):
                    self._waiting.appendleft(rest)
                self._num_waiting -= len(head)
                self._num_ahead += len(head)
                self._num_left += len(head)
            yield head
