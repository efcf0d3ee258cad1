"""The official events that a server sends over a WebSocket, field by field as the specification has them.

Every field that a client might miss is always there; `tests/server/test_server_events.py` reads each event with the
official client's types. Vendors' events are in `vendor.py`. Left out: MCP, DTMF, and what only WebRTC and SIP have.
"""

from __future__ import annotations

from typing import Literal

from antiphon.server.events.items import ContentPart, Item
from antiphon.server.events.session import AudioFormat, MaxTokens, Modalities, Session, Voice
from antiphon.server.events.wire import Count, Maybe, Metadata, Name, Row, Wire


class ServerEvent(Wire):
    """`to_json` is what goes on the wire; the specification has no number there, so only who asked gets one."""

    event_id: Name

    def to_json(self) -> str:
        return self.model_dump_json()

    def to_numbered_json(self, server_event_seq: int) -> str:
        """For clients that resume: they tell the last number that they got."""
        return f'{self.model_dump_json()[:-1]},"server_event_seq":{server_event_seq}}}'


class SessionCreated(ServerEvent):
    type: Literal["session.created"] = "session.created"
    session: Session


class SessionUpdated(ServerEvent):
    type: Literal["session.updated"] = "session.updated"
    session: Session


class Conversation(Wire):
    id: Name
    object: Literal["realtime.conversation"] = "realtime.conversation"


class ConversationCreated(ServerEvent):
    type: Literal["conversation.created"] = "conversation.created"
    conversation: Conversation


class ErrorDetails(Wire):
    """type: whose fault it is. event_id: of the client's event that caused it."""

    type: Literal["invalid_request_error", "server_error"]
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


class ErrorEvent(ServerEvent):
    type: Literal["error"] = "error"
    error: ErrorDetails


class RateLimit(Wire):
    name: Literal["requests", "tokens"]
    limit: Count
    remaining: Count
    reset_seconds: float


class RateLimitsUpdated(ServerEvent):
    type: Literal["rate_limits.updated"] = "rate_limits.updated"
    rate_limits: Row[RateLimit] = ()


class _ItemEvent(ServerEvent):
    previous_item_id: str | None
    item: Item


class ItemAdded(_ItemEvent):
    type: Literal["conversation.item.added"] = "conversation.item.added"


class ItemDone(_ItemEvent):
    type: Literal["conversation.item.done"] = "conversation.item.done"


class ItemCreated(_ItemEvent):
    """The name that came before `added`; Pipecat stops at it, so it is for who asks."""

    type: Literal["conversation.item.created"] = "conversation.item.created"


class ItemRetrieved(ServerEvent):
    type: Literal["conversation.item.retrieved"] = "conversation.item.retrieved"
    item: Item


class ItemDeleted(ServerEvent):
    type: Literal["conversation.item.deleted"] = "conversation.item.deleted"
    item_id: Name


class ItemTruncated(ServerEvent):
    type: Literal["conversation.item.truncated"] = "conversation.item.truncated"
    item_id: Name
    content_index: Count
    audio_end_ms: Count


class _TranscriptionEvent(ServerEvent):
    item_id: Name
    content_index: Count


class TranscriptionDelta(_TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.delta"] = (
        "conversation.item.input_audio_transcription.delta"
    )
    delta: str


class TranscriptionSeconds(Wire):
    type: Literal["duration"] = "duration"
    seconds: float


class TranscriptionCompleted(_TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.completed"] = (
        "conversation.item.input_audio_transcription.completed"
    )
    transcript: str
    usage: TranscriptionSeconds


class TranscriptionError(Wire):
    type: str
    code: str
    message: str
    param: str | None = None


class TranscriptionFailed(_TranscriptionEvent):
    type: Literal["conversation.item.input_audio_transcription.failed"] = (
        "conversation.item.input_audio_transcription.failed"
    )
    error: TranscriptionError


class AudioCommitted(ServerEvent):
    type: Literal["input_audio_buffer.committed"] = "input_audio_buffer.committed"
    previous_item_id: str | None
    item_id: Name


class AudioCleared(ServerEvent):
    type: Literal["input_audio_buffer.cleared"] = "input_audio_buffer.cleared"


class SpeechStarted(ServerEvent):
    """audio_start_ms: of all audio since the session began, padding included."""

    type: Literal["input_audio_buffer.speech_started"] = "input_audio_buffer.speech_started"
    audio_start_ms: Count
    item_id: Name


class SpeechStopped(ServerEvent):
    type: Literal["input_audio_buffer.speech_stopped"] = "input_audio_buffer.speech_stopped"
    audio_end_ms: Count
    item_id: Name


class TimeoutTriggered(ServerEvent):
    """Nobody spoke for `idle_timeout_ms`."""

    type: Literal["input_audio_buffer.timeout_triggered"] = "input_audio_buffer.timeout_triggered"
    audio_start_ms: Count
    audio_end_ms: Count
    item_id: Name


class CachedTokens(Wire):
    text_tokens: Count = 0
    audio_tokens: Count = 0
    image_tokens: Count = 0


class InputTokens(Wire):
    cached_tokens: Count
    text_tokens: Count
    audio_tokens: Count
    image_tokens: Count
    cached_tokens_details: CachedTokens


class OutputTokens(Wire):
    text_tokens: Count
    audio_tokens: Count


class Usage(Wire):
    """Pipecat reads all of it, whatever a response came to. Use `count`."""

    total_tokens: Count
    input_tokens: Count
    output_tokens: Count
    input_token_details: InputTokens
    output_token_details: OutputTokens

    @staticmethod
    def count(taken: CachedTokens, cached: CachedTokens, given: OutputTokens) -> Usage:
        """taken: all input, by kind; cached: the part of it that was not computed again; given: the response."""
        num_taken = taken.text_tokens + taken.audio_tokens + taken.image_tokens
        num_given = given.text_tokens + given.audio_tokens
        details = InputTokens(
            cached_tokens=cached.text_tokens + cached.audio_tokens + cached.image_tokens,
            text_tokens=taken.text_tokens,
            audio_tokens=taken.audio_tokens,
            image_tokens=taken.image_tokens,
            cached_tokens_details=cached,
        )
        return Usage(
            total_tokens=num_taken + num_given,
            input_tokens=num_taken,
            output_tokens=num_given,
            input_token_details=details,
            output_token_details=given,
        )


class StatusError(Wire):
    """Pipecat reads the message of a failed response."""

    type: str
    code: str
    message: str


class StatusDetails(Wire):
    type: Literal["completed", "cancelled", "failed", "incomplete"]
    reason: Maybe[Literal["turn_detected", "client_cancelled", "max_output_tokens", "content_filter"]] = None
    error: Maybe[StatusError] = None


class ResponseAudioOutput(Wire):
    format: AudioFormat
    voice: Maybe[Voice] = None


class ResponseAudio(Wire):
    output: ResponseAudioOutput


class Response(Wire):
    """metadata: the client's, unchanged; LiveKit finds its own response by it."""

    object: Literal["realtime.response"] = "realtime.response"
    id: Name
    status: Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
    status_details: StatusDetails | None = None
    output: Row[Item] = ()
    conversation_id: str | None
    output_modalities: Modalities
    max_output_tokens: MaxTokens
    audio: Maybe[ResponseAudio] = None
    usage: Usage | None = None
    metadata: Metadata | None = None


class ResponseCreated(ServerEvent):
    type: Literal["response.created"] = "response.created"
    response: Response


class ResponseDone(ServerEvent):
    type: Literal["response.done"] = "response.done"
    response: Response


class _OutputEvent(ServerEvent):
    response_id: Name
    output_index: Count


class OutputItemAdded(_OutputEvent):
    type: Literal["response.output_item.added"] = "response.output_item.added"
    item: Item


class OutputItemDone(_OutputEvent):
    type: Literal["response.output_item.done"] = "response.output_item.done"
    item: Item


class _PartEvent(_OutputEvent):
    item_id: Name
    content_index: Count


class ContentPartAdded(_PartEvent):
    type: Literal["response.content_part.added"] = "response.content_part.added"
    part: ContentPart


class ContentPartDone(_PartEvent):
    type: Literal["response.content_part.done"] = "response.content_part.done"
    part: ContentPart


class TextDelta(_PartEvent):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str


class TextDone(_PartEvent):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str


class AudioDelta(_PartEvent):
    """delta: base64, in the session's output format."""

    type: Literal["response.output_audio.delta"] = "response.output_audio.delta"
    delta: str


class AudioDone(_PartEvent):
    type: Literal["response.output_audio.done"] = "response.output_audio.done"


class TranscriptDelta(_PartEvent):
    type: Literal["response.output_audio_transcript.delta"] = "response.output_audio_transcript.delta"
    delta: str


class TranscriptDone(_PartEvent):
    type: Literal["response.output_audio_transcript.done"] = "response.output_audio_transcript.done"
    transcript: str


class ArgumentsDelta(_OutputEvent):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: Name
    call_id: Name
    delta: str


class ArgumentsDone(_OutputEvent):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: Name
    call_id: Name
    name: Name
    arguments: str


OFFICIAL_SERVER_EVENTS: tuple[type[ServerEvent], ...] = (
    SessionCreated,
    SessionUpdated,
    ErrorEvent,
    RateLimitsUpdated,
    ConversationCreated,
    ItemAdded,
    ItemDone,
    ItemCreated,
    ItemRetrieved,
    ItemDeleted,
    ItemTruncated,
    TranscriptionDelta,
    TranscriptionCompleted,
    TranscriptionFailed,
    AudioCommitted,
    AudioCleared,
    SpeechStarted,
    SpeechStopped,
    TimeoutTriggered,
    ResponseCreated,
    ResponseDone,
    OutputItemAdded,
    OutputItemDone,
    ContentPartAdded,
    ContentPartDone,
    TextDelta,
    TextDone,
    AudioDelta,
    AudioDone,
    TranscriptDelta,
    TranscriptDone,
    ArgumentsDelta,
    ArgumentsDone,
)
