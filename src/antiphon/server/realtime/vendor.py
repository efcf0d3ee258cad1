"""What only vendors' clients say and are told: vLLM-Omni's events, in what Antiphon understands by them.

An official client may stop at an event that it does not know, so none of this reaches one that did not ask.
Shown by tests/server/test_vendor_events.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from antiphon.core.events import SessionOpened, SettingsChanged, UnitDecided, UnitFinished, WindowSlid
from antiphon.server.events.client import (
    BargeIn,
    ClientEvent,
    EventAck,
    Heartbeat,
    InputCancel,
    PlaybackAck,
    SessionClose,
    SessionResume,
    TurnSignal,
)
from antiphon.server.events.ids import Ids
from antiphon.server.events.server import ServerEvent
from antiphon.server.events.vendor import (
    CallChanged,
    CallOpened,
    HeartbeatAck,
    ListenMetadata,
    ListenResponse,
    PlaybackAcknowledged,
    PlaybackRecord,
    ResponseListen,
    SessionClosed,
    UnitCosts,
    UnitReport,
)
from antiphon.server.events.vendor import WindowSlid as WindowSlidEvent
from antiphon.server.realtime.answering import Answering
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.settings import Choices

Events = Iterator[ServerEvent]

Reported = SessionOpened | UnitDecided | UnitFinished | SettingsChanged
"""What a client that asks for reports is told of its call."""

BARGE_IN_SIGNALS = ("barge_in", "interrupt", "cancel")


class VendorSide:
    """Owns the epoch, which counts interruptions. end: the client closed the session.

    num_received: messages of the client that were taken.
    """

    def __init__(self, ids: Ids, session_id: str, answering: Answering) -> None:
        self._ids = ids
        self._session_id = session_id
        self._answering = answering
        self.epoch = 0
        self.num_received = 0
        self.end: str | None = None

    def decided(self, decided: UnitDecided) -> Events:
        """What the model did with a second, if it listened."""
        if decided.is_listen:
            metadata = ListenMetadata(unit=decided.unit)
            yield ResponseListen(
                event_id=self._ids.event(),
                session_id=self._session_id,
                epoch=self.epoch,
                response=ListenResponse(metadata=metadata),
            )

    def slid(self, slid: WindowSlid) -> Events:
        yield WindowSlidEvent(
            event_id=self._ids.event(),
            session_id=self._session_id,
            unit=slid.unit,
            dropped_units=len(slid.dropped_units),
            dropped_tokens=slid.num_dropped_tokens,
            context_tokens=slid.num_context_tokens,
            previous_tokens=len(slid.previous_ids),
        )

    def report(self, happening: Reported) -> ServerEvent:
        """For who wants to see the call from inside."""
        event_id = self._ids.event()
        match happening:
            case SessionOpened() as opened:
                return CallOpened(
                    event_id=event_id,
                    session_id=self._session_id,
                    prompt_tokens=opened.num_prompt_tokens,
                    max_context_tokens=opened.max_context_tokens,
                    is_prompt_shared=opened.is_prompt_hit,
                    opening_ms=round(opened.prompt_ms),
                )
            case UnitDecided() as decided:
                return UnitReport(
                    event_id=event_id,
                    session_id=self._session_id,
                    unit=decided.unit,
                    is_listen=decided.is_listen,
                    context_tokens=decided.num_context_tokens,
                    context_blocks=decided.num_context_blocks,
                    retained_units=decided.num_retained_units,
                )
            case UnitFinished() as finished:
                return UnitCosts(
                    event_id=event_id,
                    session_id=self._session_id,
                    unit=finished.unit,
                    thinker_ms=round(finished.thinker_ms),
                    talker_ms=round(finished.talker_ms),
                    code2wav_ms=round(finished.code2wav_ms),
                )
            case SettingsChanged() as changed:
                return CallChanged(
                    event_id=event_id,
                    session_id=self._session_id,
                    context_tokens=changed.num_context_tokens,
                    max_context_tokens=changed.max_context_tokens,
                    took_ms=round(changed.took_ms),
                )
            case never:
                assert_never(never)

    def is_drop(self, event: ClientEvent) -> bool:
        """Whether it drops what was not heard yet."""
        return isinstance(event, InputCancel)

    def is_barge_in(self, event: ClientEvent) -> bool:
        """Whether it stops the present answer."""
        return isinstance(event, BargeIn) or (isinstance(event, TurnSignal) and event.event in BARGE_IN_SIGNALS)

    def obey(self, event: ClientEvent, choices: Choices, now_s: float) -> Events:
        """Events that only vendors' clients send. Raises: RequestError."""
        match event:
            case Heartbeat():
                yield HeartbeatAck(
                    event_id=self._ids.event(),
                    session_id=self._session_id,
                    received_client_events=self.num_received,
                )
            case PlaybackAck():
                yield from self._acknowledge(event, choices, now_s)
            case SessionClose(reason=reason):
                self.end = "completed"
                yield SessionClosed(
                    event_id=self._ids.event(), session_id=self._session_id, epoch=self.epoch, reason=reason or "closed"
                )
            case SessionResume() | EventAck():
                raise RequestError(
                    "unsupported_session_resume",
                    "connect with ?vendor_events=1 for a session that can be resumed, with ?resume=1 to resume it",
                    "type",
                )
            case TurnSignal(event=signal):
                known = ", ".join(BARGE_IN_SIGNALS)
                raise RequestError("unknown_turn_signal", f"no signal is {signal!r}; known are {known}", "event")
            case other:
                raise AssertionError(f"{other.type} is no vendor's, or the session's own matter")

    def _acknowledge(self, ack: PlaybackAck, choices: Choices, now_s: float) -> Events:
        playback = self._answering.playback(ack.item_id, ack.response_id)
        playback.check_sent(ack.played_ms, "played_ms")
        playback.played_ms = max(playback.played_ms, ack.played_ms)
        if ack.truncate:
            yield from self._answering.truncate(playback.item_id, 0, ack.played_ms, now_s)
        committed_ms = playback.sent_ms if playback.is_over and choices.counts_unplayed else playback.played_ms
        yield PlaybackAcknowledged(
            event_id=self._ids.event(),
            event=PlaybackRecord(
                response_id=playback.response_id,
                item_id=playback.item_id,
                generated_ms=playback.made_ms,
                sent_ms=playback.sent_ms,
                played_ms=playback.played_ms,
                committed_ms=committed_ms,
                history_committed=playback.is_over,
            ),
        )
