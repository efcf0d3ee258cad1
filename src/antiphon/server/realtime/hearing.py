"""The sound of a client on its way to its call: decoded, watched for speech, counted, and who may answer it when.

Shown by tests/server/test_hearing.py and tests/server/test_realtime_vad.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from antiphon.core.duplex import Wish
from antiphon.server.audio import Decoder, Samples, WireFormat, decode_base64
from antiphon.server.events.session import ServerVad
from antiphon.server.realtime.answer import Taken
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.feeding import Feeder
from antiphon.server.vad.choice import SpeechModels
from antiphon.server.vad.config import turn_config
from antiphon.server.vad.detector import TurnDetector, TurnEvent
from antiphon.units import INPUT_RATE_HZ, UNIT_S

MIN_COMMIT_MS = 100
"""The official service refuses to commit less."""
WATCHED_SAMPLES = 2 * INPUT_RATE_HZ
"""Detecting turns in so much takes up to 10 ms."""


class Hearing:
    """Owns the sound between one client and its call. Clocks are the caller's.

    wish: of every second that is heard from now on.
    """

    def __init__(self, form: WireFormat, max_samples: int, models: SpeechModels, now_s: float) -> None:
        self.wish = Wish.FREE
        self._form = form
        self._decoder = Decoder(form)
        self._models = models
        self._feeder = Feeder(max_samples)
        self._vad: ServerVad | None = None
        self._detector: TurnDetector | None = None
        self._unwatched: deque[Samples] = deque()
        self._quiet_since_s = now_s
        self._num_samples = 0
        self._uncommitted_ms = 0.0
        self._unanswered_ms = 0.0
        self._num_unanswered_pictures = 0

    def change_format(self, form: WireFormat) -> None:
        """From the next sound on; what the present one's resampler holds goes with it."""
        if form != self._form:
            self._form, self._decoder = form, Decoder(form)

    def watch(self, vad: ServerVad | None) -> None:
        """Detect turns from now on, or do not."""
        if vad == self._vad:
            return
        self._vad = vad
        self._detector = None
        self._unwatched.clear()
        if vad is not None:
            self._detector = TurnDetector(turn_config(vad), self._models.new(), self._num_samples)

    def decode(self, audio: str) -> Samples:
        """audio: base64, in the client's format. Raises: AudioError."""
        return self._decoder.decode(decode_base64(audio))

    def rest(self) -> Samples:
        """What is still held of the sound, for when nothing follows it. Raises: AudioError if it ends in a sample."""
        return self._decoder.flush()

    def check_room(self, num_samples: int) -> None:
        """Raises: RequestError if so much more sound would be too much."""
        self._feeder.check_room(num_samples)

    def hear(self, samples: Samples, now_s: float) -> None:
        """The client's sound, in which turns are to be detected. Raises: RequestError."""
        self._feeder.put(samples, self.wish)
        self._quiet_since_s = now_s
        self._num_samples += len(samples)
        self._uncommitted_ms += _ms(samples)
        self._unanswered_ms += _ms(samples)
        if self._detector is not None:
            self._unwatched.extend(np.split(samples, range(WATCHED_SAMPLES, len(samples), WATCHED_SAMPLES)))

    @property
    def is_behind(self) -> bool:
        """Turns are still to be detected in what came."""
        return bool(self._unwatched)

    def detect(self) -> list[TurnEvent]:
        """Go on with a part of that, so that those who wait for the processor wait for no more."""
        if self._detector is None or not self._unwatched:
            return []
        return self._detector.feed(self._unwatched.popleft())

    def see(self) -> None:
        """A picture went to the call."""
        self._num_unanswered_pictures += 1

    def want(self, wish: Wish) -> None:
        """Of the second in which the next sound ends up."""
        self._feeder.put_wish(wish)

    def hear_silence(self, now_s: float) -> None:
        """What is left of the second that was begun, or a whole one; not the client's, so that nothing counts it."""
        self._feeder.put(np.zeros(self._feeder.num_missing_samples, np.float32), self.wish)
        self._quiet_since_s = now_s

    def silence_due_s(self) -> float:
        """When the call has heard nothing for a second."""
        return self._quiet_since_s + UNIT_S

    def is_silence_due(self, now_s: float) -> bool:
        return now_s >= self.silence_due_s() and self._feeder.is_empty

    def commit(self) -> None:
        """Raises: RequestError if there is hardly any sound since the last time."""
        if self._uncommitted_ms < MIN_COMMIT_MS:
            raise RequestError(
                "input_audio_buffer_commit_empty",
                f"the buffer holds {self._uncommitted_ms:.0f} ms of audio; at least {MIN_COMMIT_MS} are needed",
            )
        self.end_turn()
        if self._detector is not None:
            self._detector.cut()

    def end_turn(self) -> None:
        """What came until now is a turn."""
        self._uncommitted_ms = 0.0

    def clear(self) -> None:
        """What came and was not heard yet is forgotten."""
        self._decoder = Decoder(self._form)
        self._feeder.clear()
        self.end_turn()
        if self._detector is not None:
            self._detector.cut()

    def take(self) -> Taken:
        """What an answer that begins now answers; counted anew."""
        taken = Taken(round(self._unanswered_ms), self._num_unanswered_pictures)
        self._unanswered_ms, self._num_unanswered_pictures = 0.0, 0
        return taken

    def expect_speech(self, in_ms: float) -> None:
        """The last answer has been sent, and will have been played in so long."""
        if self._detector is not None:
            self._detector.expect_speech(in_ms)

    def expect_no_speech(self) -> None:
        """An answer is due."""
        if self._detector is not None:
            self._detector.expect_no_speech()

    def decided(self) -> None:
        """A second was decided on, or lost."""
        self._feeder.decided()

    @property
    def is_ready(self) -> bool:
        """The call shall get something now."""
        return self._feeder.is_ready

    def ready(self) -> Iterator[Samples | Wish]:
        """What the call shall get now, in order."""
        return self._feeder.ready()


def _ms(samples: Samples) -> float:
    return 1000 * len(samples) / INPUT_RATE_HZ
