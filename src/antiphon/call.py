"""What the engine knows of a call: its phase, its counters, and every second and chunk of it that is on its way.

Written by the engine's thread only. Shown by tests/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from antiphon.config import SessionConfig
from antiphon.core.events import Event, InputRefused, SessionOpened
from antiphon.core.messages import Address, Handoff, Spoken
from antiphon.core.playback import PlaybackClock
from antiphon.errors import AntiphonError, InputError
from antiphon.happenings import Happening, Speech, StageTimes, decision_events, finish_event, speech_events
from antiphon.stages.thinker.rebuild import Retained
from antiphon.stages.thinker.state import PromptReady, UnitOutcome
from antiphon.units import UNIT_S, UNIT_SAMPLES


@dataclass(frozen=True, slots=True, eq=False)
class UnitResult:
    """Everything that one second of a call came to."""

    outcome: UnitOutcome
    speech: tuple[Speech, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MovedCall:
    """All that a call needs to go on in another engine; an answer that is being spoken ends with the move.

    num_units: decided so far. turn: of the next answer. queued_to_samples: where its listener's queue ends.
    """

    session: SessionConfig
    retained: Retained
    num_units: int
    turn: int
    queued_to_samples: int

    def under(self, session: SessionConfig, reference: Tensor) -> MovedCall:
        """The same past under other settings; the seed stays. reference: as of `Engine.begin`."""
        settings = replace(self.retained.session, reference=reference)
        session = replace(session, seed=self.session.seed)
        return replace(self, session=session, retained=replace(self.retained, session=settings))


TellMoved = Callable[[MovedCall | AntiphonError], None]


class CallPhase(Enum):
    """OPENING → OPEN → ENDED, or from OPENING to ENDED at once."""

    OPENING = "opening"
    """Not all stages are ready; the prompt is being computed."""
    OPEN = "open"
    """It hears, and speaks if a turn is open."""
    ENDED = "ended"
    """Closed or failed; nothing more will happen."""


@dataclass(slots=True, eq=False)
class Second:
    """A second of a call on its way through the stages; over when it has an error, or an outcome and nothing unspoken.

    since_s: when it came where it is, on the engine's clock.
    num_unspoken: handoffs and chunks of it that are not answered yet.
    is_ending: of what was spoken last the turn's end follows.
    """

    since_s: float
    times: StageTimes = field(default_factory=StageTimes)
    num_unspoken: int = 0
    is_ending: bool = False
    outcome: UnitOutcome | None = None
    error: AntiphonError | None = None
    speech: list[Speech] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.error is not None or (self.outcome is not None and not self.num_unspoken)

    def lap_ms(self, now_s: float) -> float:
        """Milliseconds since the last lap."""
        lap_s, self.since_s = now_s - self.since_s, now_s
        return 1000 * lap_s

    def result(self) -> UnitResult | AntiphonError:
        if self.error is not None:
            return self.error
        assert self.outcome is not None, "the second is still being decided"
        return UnitResult(self.outcome, tuple(self.speech), tuple(self.events))


@dataclass(slots=True, eq=False)
class Record:
    """One session of either kind. key: its name in messages, never used again.

    num_stages: that know it, the thinker first. num_ready: of them, those that are ready for it.
    prompt: what the thinker said then. error: what the session ended with.
    """

    session_id: str
    key: str
    listener: Callable[[Happening], None]
    opened_s: float
    num_stages: int
    phase: CallPhase = CallPhase.OPENING
    num_ready: int = 0
    prompt: PromptReady | None = None
    opened: SessionOpened | None = None
    error: AntiphonError | None = None

    @property
    def now_s(self) -> float:
        """On the session's own clock."""
        return 0.0

    def end(self, error: AntiphonError) -> None:
        """Nothing of the session will be answered any more."""
        self.phase, self.error = CallPhase.ENDED, error


@dataclass(slots=True, eq=False)
class CallRecord(Record):
    """One call.

    epoch: counts interruptions. turn: of the newest handoff. is_saying: that turn has not ended.
    num_turn_samples: queued of the turn that was spoken last.
    num_sent: units in this epoch. num_units: decided in the call.
    undecided, unspoken: seconds by (epoch, seq) of what of them is with the thinker; with talker or code2wav.
    moving: by (epoch, seq), who waits to hear what the call needs to go on elsewhere.
    """

    session: SessionConfig = field(kw_only=True)
    playback: PlaybackClock = field(default_factory=PlaybackClock)
    epoch: int = 0
    turn: int = 0
    is_saying: bool = False
    num_turn_samples: int = 0
    num_sent: int = 0
    num_units: int = 0
    undecided: dict[tuple[int, int], Second] = field(default_factory=dict)
    unspoken: dict[tuple[int, int], Second] = field(default_factory=dict)
    moving: dict[tuple[int, int], TellMoved] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        """On the call's input clock: what was decided so far."""
        return self.num_units * UNIT_S

    @property
    def is_answering(self) -> bool:
        """The model is at an answer, or a part of one has not been spoken yet."""
        return self.is_saying or bool(self.unspoken)

    def next_address(self) -> Address:
        """Of the next message to the thinker."""
        address = Address(self.key, self.epoch, self.turn, self.num_sent)
        self.num_sent += 1
        return address

    def send(self, now_s: float) -> tuple[Address, Second]:
        """A second leaves for the thinker."""
        address = self.next_address()
        second = self.undecided[address.epoch, address.seq] = Second(now_s)
        return address, second

    def answered(self, address: Address) -> Second | None:
        """The second that the thinker answers. Whatever was sent before it and not answered is lost."""
        number = (address.epoch, address.seq)
        second = self.undecided.pop(number, None)
        for lost in [sent for sent in self.undecided if sent < number]:
            self.lose(self.undecided.pop(lost), InputError("this second was lost on its way"))
        return second

    def decide(self, second: Second, outcome: UnitOutcome, now_s: float) -> tuple[Handoff[Tensor], ...]:
        """Tell what was decided. Returns what the talker shall say of it."""
        second.times = replace(second.times, thinker_ms=second.lap_ms(now_s))
        second.outcome = outcome
        self.num_units += 1
        # What was stopped before it was known is not told: nobody would hear its end.
        valid = outcome.only_of(self.epoch)
        for event in decision_events(valid):
            self._tell(second, event)
        for handoff in valid.handoffs:
            second.num_unspoken += 1
            self.unspoken[handoff.address.epoch, handoff.address.seq] = second
            self.turn, self.is_saying = handoff.address.turn, not handoff.ends_turn
        self._finish_if_over(second)
        return valid.handoffs

    def pronounce(self, address: Address, now_s: float) -> bool:
        """The talker is done with a handoff. Returns whether its chunk is still wanted."""
        second = self.unspoken.get((address.epoch, address.seq))
        if second is None:
            return False
        times = second.times
        second.times = replace(times, talker_ms=times.talker_ms + second.lap_ms(now_s))
        return True

    def speak(self, address: Address, spoken: Spoken[Tensor], now_s: float) -> None:
        """Queue sound for the listener, if it is still wanted, and tell it."""
        second = self.unspoken.get((address.epoch, address.seq))
        if second is None:
            return
        if not second.is_ending:
            times = second.times
            second.times = replace(times, code2wav_ms=times.code2wav_ms + second.lap_ms(now_s))
        second.is_ending = spoken.goes_on
        if not spoken.goes_on:
            del self.unspoken[address.epoch, address.seq]
            second.num_unspoken -= 1
        at_s = (spoken.chunk.unit + 1) * UNIT_S
        start_samples = self.playback.place(at_s, spoken.samples.numel())
        speech = Speech(spoken.chunk, at_s, start_samples, spoken.samples)
        second.speech.append(speech)
        is_first = spoken.chunk.is_first_of_turn
        self.num_turn_samples = spoken.samples.numel() + (0 if is_first else self.num_turn_samples)
        for event in speech_events(speech):
            self._tell(second, event)
        self.listener(speech)
        self._finish_if_over(second)

    def lose(self, second: Second, error: AntiphonError) -> None:
        """A second of the caller is not heard; the call goes on."""
        second.error = error
        self.listener(InputRefused(self.now_s, UNIT_SAMPLES, error.code, str(error)))

    def enter_next_epoch(self) -> None:
        """What is being said is void."""
        self.epoch += 1
        self.num_sent = 0
        self.is_saying = False
        unspoken, self.unspoken = self.unspoken, {}
        for second in unspoken.values():
            second.num_unspoken -= 1
            self._finish_if_over(second)

    def end(self, error: AntiphonError) -> None:
        """As `Record.end`, for everybody who waits for something of the call."""
        Record.end(self, error)
        for second in (*self.undecided.values(), *self.unspoken.values()):
            second.error = error
        for tell in self.moving.values():
            tell(error)
        for waiting in (self.undecided, self.unspoken, self.moving):
            waiting.clear()

    def _tell(self, second: Second, event: Event) -> None:
        second.events.append(event)
        self.listener(event)

    def _finish_if_over(self, second: Second) -> None:
        if second.outcome is not None and second.is_over:
            self._tell(second, finish_event(second.outcome, second.times))
