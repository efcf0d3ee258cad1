"""What a client may send: the official events, and vendors' beside them; `parse` reads one from its text.

Names and fields of vendors are vLLM-Omni's, as far as they do not contradict the official ones. What a session does
with an event, and which order is legal, is the session's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from antiphon.errors import InputError
from antiphon.server.events.items import Item, ItemOrReference
from antiphon.server.events.session import (
    AudioOutput,
    Format,
    MaxTokens,
    Modalities,
    Prompt,
    RateHz,
    Reasoning,
    SessionUpdate,
    Tool,
    ToolChoice,
)
from antiphon.server.events.wire import MAX_NAME_CHARACTERS, Count, Maybe, Metadata, Name, Row, Wire

MAX_EVENT_BYTES = 15 * 2**20
MAX_QUOTED = 64
"""Characters of a client's own words that an error repeats."""
MAX_FRAMES = 2
MAX_FRAME_CHARACTERS = 4_000_000

EventFault = Literal["invalid_json", "event_too_large", "unknown_event", "invalid_event"]


class EventError(InputError):
    """A message that is no event; the session goes on.

    code: what kind of fault. param: where, such as `item.content[0].type`. event_id: the client's, if it could be read.
    """

    def __init__(self, code: EventFault, message: str, param: str | None, event_id: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.event_id = event_id


class _Event(Wire):
    event_id: Maybe[Name] = None


class SessionUpdateEvent(_Event):
    type: Literal["session.update"]
    session: SessionUpdate


class AudioAppend(_Event):
    """audio: base64; empty if only pictures come. The rest is vendors': hints about this piece of sound, its pictures.

    max_slice_nums: into how many pieces a picture is cut; one, in duplex.
    """

    type: Literal["input_audio_buffer.append"]
    audio: str = ""
    format: Maybe[Format] = None
    input_audio_format: Maybe[Format] = None
    sample_rate_hz: Maybe[RateHz] = None
    video_frames: Maybe[
        Annotated[
            Row[Annotated[str, Field(min_length=1, max_length=MAX_FRAME_CHARACTERS)]], Field(max_length=MAX_FRAMES)
        ]
    ] = None
    max_slice_nums: Maybe[Literal[1]] = None
    is_speech: Maybe[bool] = None
    force_listen: Maybe[bool] = None
    duration_ms: Maybe[Count] = None
    audio_end_ms: Maybe[Count] = None


class AudioCommit(_Event):
    """`input.commit` asks for a response unless told not to."""

    type: Literal["input_audio_buffer.commit", "input.commit"]
    final: Maybe[bool] = None
    response_create: Maybe[bool] = None
    create_response: Maybe[bool] = None
    is_speech: Maybe[bool] = None

    @property
    def asks_for_response(self) -> bool:
        for asked in (self.response_create, self.create_response):
            if asked is not None:
                return asked
        return self.type == "input.commit"


class AudioClear(_Event):
    type: Literal["input_audio_buffer.clear"]


class OutputClear(_Event):
    type: Literal["output_audio_buffer.clear"]
    response_id: Maybe[Name] = None


class ItemCreate(_Event):
    """previous_item_id: null appends, `root` puts in front."""

    type: Literal["conversation.item.create"]
    item: Item
    previous_item_id: Maybe[Name] = None


class ItemRetrieve(_Event):
    type: Literal["conversation.item.retrieve"]
    item_id: Name


class ItemDelete(_Event):
    type: Literal["conversation.item.delete"]
    item_id: Name


class ItemTruncate(_Event):
    type: Literal["conversation.item.truncate"]
    item_id: Name
    content_index: Count
    audio_end_ms: Count


class ResponseAudio(Wire):
    output: Maybe[AudioOutput] = None


class ResponseOptions(Wire):
    """What one response does otherwise than its session. conversation: `none` keeps it out of the history.

    temperature: Pipecat's.
    """

    output_modalities: Maybe[Modalities] = None
    instructions: Maybe[str] = None
    audio: Maybe[ResponseAudio] = None
    tools: Maybe[Row[Tool]] = None
    tool_choice: Maybe[ToolChoice] = None
    parallel_tool_calls: Maybe[bool] = None
    reasoning: Maybe[Reasoning] = None
    max_output_tokens: Maybe[MaxTokens] = None
    conversation: Maybe[str] = None
    metadata: Maybe[Metadata] = None
    prompt: Maybe[Prompt] = None
    input: Maybe[Row[ItemOrReference]] = None
    temperature: Maybe[Annotated[float, Field(ge=0, le=2)]] = None


class ResponseCreate(_Event):
    type: Literal["response.create"]
    response: Maybe[ResponseOptions] = None


class ResponseCancel(_Event):
    type: Literal["response.cancel"]
    response_id: Maybe[Name] = None


class SessionResume(_Event):
    """The first message on a socket that takes up a session again. incarnation: older clients'; not needed."""

    type: Literal["session.resume"]
    session_id: Name
    resume_token: Name
    last_received_server_event_seq: Count
    incarnation: Maybe[Count] = None


class EventAck(_Event):
    """Everything up to this number has arrived and need not be kept."""

    type: Literal["session.event_ack"]
    server_event_seq: Count


class Heartbeat(_Event):
    type: Literal["session.heartbeat"]


class SessionClose(_Event):
    type: Literal["session.close", "close_session", "close"]
    reason: Maybe[Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]] = None


class TextAppend(_Event):
    """Words that the model reads with the next unit."""

    type: Literal["input.text.append", "input_text.append", "push_text"]
    text: str


class InputCancel(_Event):
    """Sound that has not become a unit is dropped."""

    type: Literal["input.cancel"]


class BargeIn(_Event):
    type: Literal["barge_in"]


class TurnSignal(_Event):
    type: Literal["turn.signal", "signal_turn"]
    event: Name
    payload: Maybe[JsonValue] = None


class PlaybackAck(_Event):
    """played_ms: of the item's audio, what came out of the loudspeaker. truncate: and no more will."""

    type: Literal["playback.ack", "audio.playback_ack"]
    played_ms: Count
    committed_ms: Maybe[Count] = None
    response_id: Maybe[Name] = None
    item_id: Maybe[Name] = None
    truncate: Maybe[bool] = None


OfficialClientEvent = (
    SessionUpdateEvent
    | AudioAppend
    | AudioCommit
    | AudioClear
    | OutputClear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
VendorClientEvent = (
    SessionResume | EventAck | Heartbeat | SessionClose | TextAppend | InputCancel | BargeIn | TurnSignal | PlaybackAck
)
ClientEvent = OfficialClientEvent | VendorClientEvent

_READER: TypeAdapter[ClientEvent] = TypeAdapter(Annotated[ClientEvent, Discriminator("type")])


def parse(text: str) -> ClientEvent:
    """One message, as it came. Raises EventError for whatever is no event, and nothing else."""
    message = _json_object(text)
    try:
        return _READER.validate_python(message)
    except ValidationError as error:
        raise _explained(error, message) from error


def _json_object(text: str) -> dict[str, JsonValue]:
    try:
        num_bytes = len(text.encode())
        if num_bytes > MAX_EVENT_BYTES:
            raise EventError(
                "event_too_large", f"A message of {num_bytes} bytes; at most {MAX_EVENT_BYTES}.", None, None
            )
        message: JsonValue = from_json(text, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        # The reader says where it stopped and never what it read; it bounds the depth itself.
        raise EventError("invalid_json", f"Not JSON: {error}.", None, None) from error
    if not isinstance(message, dict):
        raise EventError("invalid_json", "A message is a JSON object.", None, None)
    return message


def _explained(error: ValidationError, message: dict[str, JsonValue]) -> EventError:
    event_id = None
    match message:
        case {"event_id": str(given)} if len(given) <= MAX_NAME_CHARACTERS:
            event_id = given
    faults = error.errors(include_url=False, include_input=False)
    located = [(_param(message, fault), fault) for fault in faults]
    # Of a union's branches, the one that got furthest was meant.
    param, fault = max(located, key=lambda found: found[0].count(".") + found[0].count("["))
    match message:
        case {"type": str(name)} if param == "type":
            return EventError("unknown_event", f"No event is called {name[:MAX_QUOTED]!r}.", param, event_id)
    return EventError("invalid_event", _sentence(fault), param[: 4 * MAX_QUOTED], event_id)


def _param(message: JsonValue, fault: ErrorDetails) -> str:
    """Where the fault is, as the client would write it; pydantic's location also names the branches of unions."""
    path, value = "", message
    location: Sequence[int | str] = fault["loc"]
    for place, key in enumerate(location):
        is_last = place == len(location) - 1
        match value, key:
            case list(), int() if key < len(value):
                path, value = f"{path}[{key}]", value[key]
            case dict(), str() if key in value:
                path, value = f"{path}.{key}", value[key]
            case dict(), str() if is_last and fault["type"] == "missing":
                path = f"{path}.{key}"
    match value:
        case {"type": "message"} if fault["type"].startswith("union_tag"):
            path += ".role"
        case dict() if fault["type"].startswith("union_tag"):
            path += ".type"
    return path.removeprefix(".")


def _sentence(fault: ErrorDetails) -> str:
    """Without the client's words: pydantic quotes an unknown tag and nothing else."""
    match fault["type"]:
        case "union_tag_invalid":
            return f"The kind is none of {fault['ctx']['expected_tags']}."
        case "union_tag_not_found":
            return "The kind is missing."
        case _:
            return f"{fault['msg'].removeprefix('Value error, ').removesuffix('.')}."
