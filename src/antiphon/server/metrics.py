"""What a server counts, for Prometheus: calls, units, speech, windows, caches, refusals, bytes.

One object owns every collector; there is no global registry. A call's `CallWatch` turns its happenings into numbers;
how the engine stands is read from its counts when somebody asks. Table: docs/operations.md.
Shown by tests/server/test_metrics.py.
"""

from __future__ import annotations

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from antiphon.core.clock import Clock
from antiphon.core.events import (
    ChangeRefused,
    InputRefused,
    SessionEnded,
    SessionOpened,
    SettingsChanged,
    SpeechLost,
    SpeechQueued,
    TurnEnded,
    TurnInterrupted,
    TurnStarted,
    UnitDecided,
    UnitFinished,
    WindowSlid,
)
from antiphon.counts import EngineCounts
from antiphon.happenings import Happening
from antiphon.server.chat_watch import ChatCollectors, ChatWatch
from antiphon.server.engine_metrics import EngineCollector
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ

LATENCY_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Fine below the second that a unit may take."""


class CallState(Enum):
    OPENING = "opening"
    LISTENING = "listening"
    SPEAKING = "speaking"
    """A turn is open; its sound may still be on its way or be played already."""


class Direction(Enum):
    IN = "in"
    OUT = "out"


class Metrics:
    """Owns the registry and all collectors of one server. For one event loop."""

    def __init__(self, clock: Clock) -> None:
        """clock: when speech comes, against when a listener needs it."""
        self.clock = clock
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.calls = self._gauge("antiphon_calls", "Calls now.", "state")
        self.calls_ended = self._counter("antiphon_calls_ended", "Calls that are over, by why.", "code")
        self.prompt_s = self._histogram("antiphon_opening_seconds", "From a call's start until it hears.")
        self.change_s = self._histogram("antiphon_change_seconds", "From a change's start until it is in force.")
        self.units = self._counter("antiphon_units", "Seconds that were decided on.", "decision")
        self.unit_s = self._histogram(
            "antiphon_unit_seconds", "Time that a unit spent in a stage, waiting included.", "stage"
        )
        self.first_audio_s = self._histogram(
            "antiphon_first_audio_seconds", "From the end of the second in which an answer began to its first sound."
        )
        self.lateness_s = self._histogram(
            "antiphon_speech_lateness_seconds",
            "How much later speech came than a listener who plays it at once had needed it; 0 if it did not.",
        )
        self.deadline_misses = self._counter("antiphon_deadline_misses", "Speech that came late for such a listener.")
        self.underrun_ms = self._counter("antiphon_underrun_milliseconds", "How long such listeners heard nothing.")
        self.turns = self._counter("antiphon_turns", "Answers that began.")
        self.interruptions = self._counter("antiphon_interruptions", "Answers that were stopped from outside.")
        self.void_s = self._counter("antiphon_void_speech_seconds", "Speech that interruptions made void.")
        self.spoken_s = self._counter("antiphon_speech_seconds", "Speech that was made.")
        self.chats = ChatCollectors(
            clock,
            self._gauge("antiphon_chats", "Chats now."),
            self._counter("antiphon_chats_ended", "Chats that are over, by why.", "code"),
            self._counter("antiphon_chat_prompt_tokens", "Tokens that chats said to the model."),
            self._counter("antiphon_chat_answer_tokens", "Tokens of text that the model answered in chats."),
            self._histogram("antiphon_chat_first_token_seconds", "From a chat's start to the first of its answer."),
            self.spoken_s,
        )
        self.slides = self._counter("antiphon_slides", "Slides of windows.")
        self.dropped_units = self._counter("antiphon_dropped_units", "Units that left windows.")
        self.dropped_tokens = self._counter("antiphon_dropped_tokens", "Tokens that left windows.")
        self.lost_input_s = self._counter("antiphon_lost_input_seconds", "Sound that callers sent and nobody hears.")
        self.errors = self._counter("antiphon_errors", "What went wrong in calls, and errors told to clients.", "code")
        self.refusals = self._counter("antiphon_refusals", "Callers who did not come in.", "code")
        self.websocket_bytes = self._counter("antiphon_websocket_bytes", "Payload of messages.", "direction")
        for state in CallState:
            self.calls.labels(state.value)

    def watch(self) -> CallWatch:
        """For a call that begins now."""
        return CallWatch(self)

    def watch_chat(self) -> ChatWatch:
        """For a chat that begins now."""
        return ChatWatch(self.chats)

    def count_refusal(self, code: str) -> None:
        self.refusals.labels(code).inc()

    def count_error(self, code: str) -> None:
        """code: of an error that a client is told and no happening tells."""
        self.errors.labels(code).inc()

    def count_bytes(self, direction: Direction, num_bytes: int) -> None:
        self.websocket_bytes.labels(direction.value).inc(num_bytes)

    def render(self, counts: EngineCounts | None) -> bytes:
        """In the text format of Prometheus. counts: of the engine; None if it does not say."""
        self.engine.counts = counts
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(name, what, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)


class CallWatch:
    """Owns what has to be remembered of one call to count its happenings."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._state: CallState | None = CallState.OPENING
        self._metrics.calls.labels(CallState.OPENING.value).inc()
        # Of a turn without sound so far: when it began, on the input's clock.
        self._began_s: float | None = None
        # Unit of the present turn's first sound, and how long after the turn's beginning that unit was.
        self._first_unit = -1
        self._first_delay_s = 0.0
        # When a listener has heard all that there is of the present turn, on the metrics' clock.
        self._heard_until_s: float | None = None

    def observe(self, happening: Happening) -> None:
        """Take the next happening of the call. After its end nothing counts."""
        if self._state is None:
            return
        match happening:
            case SessionOpened(prompt_ms=took_ms):
                self._metrics.prompt_s.observe(took_ms / 1000)
                self._enter(CallState.LISTENING)
            case SessionEnded(code=code):
                self.end(code)
            case UnitDecided(is_listen=is_listen):
                self._metrics.units.labels("listen" if is_listen else "speak").inc()
            case UnitFinished():
                self._finish(happening)
            case WindowSlid(dropped_units=units, num_dropped_tokens=num_tokens):
                self._metrics.slides.inc()
                self._metrics.dropped_units.inc(len(units))
                self._metrics.dropped_tokens.inc(num_tokens)
            case InputRefused(code=code, num_samples=num_samples):
                self._metrics.errors.labels(code).inc()
                self._metrics.lost_input_s.inc(num_samples / INPUT_RATE_HZ)
            case SettingsChanged(took_ms=took_ms):
                self._metrics.change_s.observe(took_ms / 1000)
            case ChangeRefused(code=code):
                self._metrics.errors.labels(code).inc()
            case _:
                self._observe_speech(happening)

    def end(self, code: str) -> None:
        """The call is over, also if its last happening will not come."""
        if self._state is None:
            return
        self._metrics.calls.labels(self._state.value).dec()
        self._state = None
        self._metrics.calls_ended.labels(code).inc()

    def _observe_speech(self, happening: Happening) -> None:
        match happening:
            case TurnStarted(at_s=at_s):
                self._metrics.turns.inc()
                self._began_s, self._heard_until_s = at_s, None
                self._enter(CallState.SPEAKING)
            case SpeechQueued():
                self._queue(happening)
            case TurnEnded():
                self._enter(CallState.LISTENING)
            case TurnInterrupted(num_void_samples=num_samples):
                self._metrics.interruptions.inc()
                self._metrics.void_s.inc(num_samples / OUTPUT_RATE_HZ)
                self._enter(CallState.LISTENING)
            case SpeechLost():
                self._metrics.errors.labels("speech_lost").inc()
                self._enter(CallState.LISTENING)

    def _queue(self, speech: SpeechQueued) -> None:
        if self._began_s is not None:
            self._first_unit, self._first_delay_s = speech.unit, speech.at_s - self._began_s
            self._began_s = None
        now_s, sound_s = self._metrics.clock.now_s(), speech.num_samples / OUTPUT_RATE_HZ
        self._metrics.spoken_s.inc(sound_s)
        if self._heard_until_s is None:
            self._heard_until_s = now_s + sound_s
            return
        late_s = max(0.0, now_s - self._heard_until_s)
        self._metrics.lateness_s.observe(late_s)
        if late_s:
            self._metrics.deadline_misses.inc()
            self._metrics.underrun_ms.inc(1000 * late_s)
        self._heard_until_s += late_s + sound_s

    def _finish(self, unit: UnitFinished) -> None:
        stages = {"thinker": unit.thinker_ms, "talker": unit.talker_ms, "code2wav": unit.code2wav_ms}
        for stage, took_ms in stages.items():
            # A unit that only listens never was in the other stages.
            if took_ms or stage == "thinker":
                self._metrics.unit_s.labels(stage).observe(took_ms / 1000)
        if unit.unit == self._first_unit:
            self._metrics.first_audio_s.observe(self._first_delay_s + sum(stages.values()) / 1000)

    def _enter(self, state: CallState) -> None:
        assert self._state is not None, f"a call that is over enters {state}"
        self._metrics.calls.labels(self._state.value).dec()
        self._metrics.calls.labels(state.value).inc()
        self._state = state
