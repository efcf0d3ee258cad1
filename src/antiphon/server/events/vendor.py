"""Events beside the official ones, for clients that asked: an official client may stop at one that it does not know.

Names and fields are vLLM-Omni's where it has the event; `session.window_slid` is ours. A class here that inherits an
official event has that event's name and more fields.
"""

from __future__ import annotations

from typing import Literal

from antiphon.server.events.server import AudioDelta, ServerEvent, SessionCreated
from antiphon.server.events.session import RateHz, Session
from antiphon.server.events.wire import Count, Maybe, Name, Row, Wire


class ResumableSessionCreated(SessionCreated):
    """attachment_generation: counts the sockets of a session. resume_token: for the next one; good once."""

    attachment_generation: Count
    resume_token: Name


class SessionResumed(ServerEvent):
    """received_client_events: so many messages of the client were taken; those behind them it sends again."""

    type: Literal["session.resumed"] = "session.resumed"
    session_id: Name
    session: Session
    attachment_generation: Count
    resume_token: Name
    received_client_events: Count


class SessionReplaced(ServerEvent):
    """The last event on a socket whose session another one took over."""

    type: Literal["session.replaced"] = "session.replaced"
    session_id: Name
    attachment_generation: Count


class SessionResyncRequired(ServerEvent):
    """What was missed is no longer kept; the client starts again."""

    type: Literal["session.resync_required"] = "session.resync_required"
    session_id: Name
    reason: Literal["journal_gap", "journal_overflow"]


class SessionClosed(ServerEvent):
    """reason: the client's, or the code of the error that ended the session."""

    type: Literal["session.closed"] = "session.closed"
    session_id: Name
    epoch: Count
    reason: str


class SessionExpired(ServerEvent):
    type: Literal["session.expired"] = "session.expired"
    session_id: Name
    reason: Literal["disconnect_grace_expired", "idle_ttl_expired"]


class HeartbeatAck(ServerEvent):
    """received_client_events: the client's messages that were taken, refused ones and this heartbeat among them."""

    type: Literal["session.heartbeat_ack"] = "session.heartbeat_ack"
    session_id: Name
    received_client_events: Count


class WindowSlid(ServerEvent):
    """The oldest units left the context, after this unit. previous_tokens: how many words are kept of them as text."""

    type: Literal["session.window_slid"] = "session.window_slid"
    session_id: Name
    unit: Count
    dropped_units: Count
    dropped_tokens: Count
    context_tokens: Count
    previous_tokens: Count


class CallOpened(ServerEvent):
    """The call has begun. is_prompt_shared: another call's copy of the prompt is used. opening_ms: it took."""

    type: Literal["session.opened"] = "session.opened"
    session_id: Name
    prompt_tokens: Count
    max_context_tokens: Count
    is_prompt_shared: bool
    opening_ms: Count


class UnitReport(ServerEvent):
    """What a second came to; the context's numbers are after its close and slide."""

    type: Literal["session.unit_decided"] = "session.unit_decided"
    session_id: Name
    unit: Count
    is_listen: bool
    context_tokens: Count
    context_blocks: Count
    retained_units: Count


class UnitCosts(ServerEvent):
    """Time that a second spent in each stage, waiting included."""

    type: Literal["session.unit_finished"] = "session.unit_finished"
    session_id: Name
    unit: Count
    thinker_ms: Count
    talker_ms: Count
    code2wav_ms: Count


class CallChanged(ServerEvent):
    """What the last `session.update` wanted of the call holds from now on. took_ms: that it took."""

    type: Literal["session.call_changed"] = "session.call_changed"
    session_id: Name
    context_tokens: Count
    max_context_tokens: Count
    took_ms: Count


class ListenMetadata(Wire):
    reason: Literal["model_listen"] = "model_listen"
    unit: Count


class ListenResponse(Wire):
    """What vLLM-Omni's clients look for the decision in; there is no response of this id."""

    object: Literal["realtime.response"] = "realtime.response"
    status: Literal["listening"] = "listening"
    metadata: ListenMetadata


class ResponseListen(ServerEvent):
    """The model listened for a unit."""

    type: Literal["response.listen"] = "response.listen"
    session_id: Name
    epoch: Count
    response: ListenResponse


class ResponseSpeak(ServerEvent):
    """The model decided to speak; once in a response, before its first delta."""

    type: Literal["response.speak"] = "response.speak"
    response_id: Name
    item_id: Name
    output_index: Count
    content_index: Count


class TextMark(Wire):
    """By `audio_end_ms` of the item's audio, so many characters of its transcript are said: what a caption shows."""

    text_chars: Count
    audio_end_ms: Count


class DeltaMetadata(Wire):
    """audio_duration_ms: of this piece."""

    session_id: Name
    epoch: Count
    end_of_turn: bool
    audio_duration_ms: Count
    audio_text_marks: Row[TextMark]


class TimedAudioDelta(AudioDelta):
    """format: vLLM-Omni's name of the encoding."""

    format: Literal["pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw"]
    sample_rate_hz: RateHz
    metadata: DeltaMetadata


class OutputCleared(ServerEvent):
    """An official name, which over a WebSocket only who sent `output_audio_buffer.clear` gets."""

    type: Literal["output_audio_buffer.cleared"] = "output_audio_buffer.cleared"
    response_id: Name


class PlaybackRecord(Wire):
    """What is known of an item's audio now. history_committed: its heard words are in the history for good."""

    response_id: Maybe[Name] = None
    item_id: Maybe[Name] = None
    generated_ms: Count
    sent_ms: Count
    played_ms: Count
    committed_ms: Count
    history_committed: bool


class PlaybackAcknowledged(ServerEvent):
    type: Literal["playback.acknowledged"] = "playback.acknowledged"
    event: PlaybackRecord


VENDOR_SERVER_EVENTS: tuple[type[ServerEvent], ...] = (
    ResumableSessionCreated,
    SessionResumed,
    SessionReplaced,
    SessionResyncRequired,
    SessionClosed,
    SessionExpired,
    HeartbeatAck,
    WindowSlid,
    CallOpened,
    UnitReport,
    UnitCosts,
    CallChanged,
    ResponseListen,
    ResponseSpeak,
    TimedAudioDelta,
    OutputCleared,
    PlaybackAcknowledged,
)
