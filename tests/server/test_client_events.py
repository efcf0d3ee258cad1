"""Clients' events: whatever the official types can express is read, whatever is no event is explained, nothing else."""

from __future__ import annotations

import json
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import realtime as official
from openai.types.realtime.realtime_client_event import RealtimeClientEvent
from pydantic import BaseModel

from antiphon.server.audio import Encoding, WireFormat
from antiphon.server.events.client import (
    MAX_EVENT_BYTES,
    AudioAppend,
    ClientEvent,
    EventError,
    ItemCreate,
    OfficialClientEvent,
    PlaybackAck,
    ResponseCreate,
    SessionResume,
    SessionUpdateEvent,
    VendorClientEvent,
    parse,
)
from antiphon.server.events.items import AssistantMessage, FunctionCallOutput, InputImage, InputText, UserMessage
from antiphon.server.events.session import AudioFormat, SemanticVad, SessionUpdate

Json = st.SearchStrategy[object]

words = st.text(min_size=1, max_size=12)
json_values: Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
BOUNDED: dict[str, Json] = {
    "speed": st.floats(0.25, 1.5),
    "threshold": st.floats(0, 1),
    "retention_ratio": st.floats(0, 1),
    "max_output_tokens": st.integers(1, 4096) | st.just("inf"),
    "idle_timeout_ms": st.integers(5000, 30000) | st.none(),
    "output_modalities": st.sampled_from([["text"], ["audio"]]),
    "metadata": st.dictionaries(words, words, max_size=3) | st.none(),
}
"""Fields whose bounds the specification states and the types do not."""
PARTS: dict[str, Json] = {
    "RealtimeConversationItemSystemMessage": st.fixed_dictionaries({"type": st.just("input_text"), "text": words}),
    "RealtimeConversationItemUserMessage": st.fixed_dictionaries(
        {"type": st.just("input_text"), "text": words}, optional={"audio": st.none(), "detail": st.none()}
    )
    | st.fixed_dictionaries({"type": st.just("input_audio"), "audio": words, "transcript": words | st.none()})
    | st.fixed_dictionaries({"type": st.just("input_image"), "image_url": words, "detail": st.just("low")}),
    "RealtimeConversationItemAssistantMessage": st.fixed_dictionaries({"type": st.just("output_text"), "text": words})
    | st.fixed_dictionaries({"type": st.just("output_audio"), "transcript": words}),
}
"""Contents of messages: the types are one class for all parts of a role, where each part needs a field of its own."""

SCALARS: dict[object, Json] = {
    str: words,
    bool: st.booleans(),
    int: st.integers(0, 2**31),
    float: st.floats(0, 1e6),
    object: json_values,
    type(None): st.none(),
}


def of_model(model: type[BaseModel]) -> Json:
    """JSON that the model can express. What kind an object is, is always said."""
    required: dict[str, Json] = {}
    optional: dict[str, Json] = {}
    for name, field in model.model_fields.items():
        if name in BOUNDED:
            values = BOUNDED[name]
        elif name == "content":
            values = st.lists(PARTS[model.__name__], max_size=2)
        else:
            values = of_type(field.annotation)
        if name in ("type", "role"):
            required[name] = values.filter(lambda value: value is not None)
        else:
            (required if field.is_required() else optional)[name] = values
    return st.fixed_dictionaries(required, optional=optional)


def of_type(annotation: object) -> Json:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return st.deferred(lambda: of_model(annotation))
    arguments = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Annotated:
            values = of_type(arguments[0])
        case origin if origin in (Union, UnionType):
            # A transcription session is another service; see below.
            kinds = [kind for kind in arguments if kind is not official.RealtimeTranscriptionSessionCreateRequest]
            values = st.one_of([of_type(kind) for kind in kinds])
        case origin if origin is Literal:
            values = st.sampled_from(arguments)
        case origin if origin is list:
            values = st.lists(of_type(arguments[0]), max_size=2)
        case origin if origin is dict:
            values = st.dictionaries(words, of_type(arguments[1]), max_size=2)
        case _:
            values = SCALARS[annotation]
    return values


official_events = of_type(RealtimeClientEvent)

VENDOR_TEXTS = (
    '{"type":"session.resume","session_id":"s","resume_token":"t","last_received_server_event_seq":7}',
    '{"type":"session.resume","session_id":"s","resume_token":"t","last_received_server_event_seq":0,"incarnation":0}',
    '{"type":"session.event_ack","server_event_seq":3}',
    '{"type":"session.heartbeat"}',
    '{"type":"session.close","reason":"done"}',
    '{"type":"close"}',
    '{"type":"input.text.append","text":"hello"}',
    '{"type":"push_text","text":"hello"}',
    '{"type":"input.cancel"}',
    '{"type":"input.commit","final":false,"response_create":true}',
    '{"type":"barge_in"}',
    '{"type":"turn.signal","event":"user_started","payload":{}}',
    '{"type":"playback.ack","played_ms":1200,"committed_ms":1000,"item_id":"item_1","truncate":true}',
    '{"type":"input_audio_buffer.append","audio":"AAAA","format":"pcm16","sample_rate_hz":16000,"duration_ms":100,'
    '"audio_end_ms":100,"is_speech":true,"video_frames":["AAAA","BBBB"]}',
    '{"type":"session.update","session":{"model":"m","modalities":["audio","text"],"input_audio_format":"pcm16",'
    '"output_audio_format":"pcm16","sample_rate_hz":16000,"audio":{"input":{"sample_rate_hz":16000},'
    '"output":{"sample_rate_hz":24000}},"turn_detection":null,"ref_audio":"data:audio/wav;base64,AAAA",'
    '"overlap_policy":"listen_only","playback_commit_policy":"ack_only","extra_body":{"auto_response":true,'
    '"force_listen_count":0,"sliding_window_mode":"context","context_max_units":24,"basic_window_high_tokens":8000,'
    '"basic_window_low_tokens":6000,"context_previous_max_tokens":500}}}',
)


def update(session: str) -> SessionUpdate:
    event = parse(f'{{"type":"session.update","session":{session}}}')
    assert isinstance(event, SessionUpdateEvent), event
    return event.session


def refusal(text: str) -> EventError:
    with pytest.raises(EventError) as refused:
        parse(text)
    return refused.value


@settings(max_examples=400)
@given(official_events)
def test_whatever_the_official_types_can_express_is_read(event: object) -> None:
    read = parse(json.dumps(event))
    assert isinstance(event, dict), event
    assert (read.type, read.event_id) == (event["type"], event.get("event_id"))


def test_every_official_event_has_a_class_of_its_own() -> None:
    theirs = {
        get_args(event.model_fields["type"].annotation)[0] for event in get_args(get_args(RealtimeClientEvent)[0])
    }
    ours = [get_args(event.model_fields["type"].annotation)[0] for event in get_args(OfficialClientEvent)]
    assert set(ours) == theirs
    assert len(ours) == 11


@pytest.mark.parametrize("text", VENDOR_TEXTS)
def test_events_in_the_spelling_of_vllm_omni_are_read(text: str) -> None:
    assert parse(text).type == json.loads(text)["type"]


def test_every_vendor_event_is_among_those() -> None:
    assert {type(parse(text)) for text in VENDOR_TEXTS} >= set(get_args(VendorClientEvent))


def test_only_what_a_session_update_names_counts() -> None:
    session = update('{"type":"realtime","audio":{"input":{"turn_detection":null}}}')
    assert session.model_fields_set == {"type", "audio"}
    assert session.audio is not None
    assert session.audio.model_fields_set == {"input"}
    assert session.audio.input is not None
    assert session.audio.input.model_fields_set == {"turn_detection"}


def test_turn_detection_comes_as_its_kind() -> None:
    session = update('{"audio":{"input":{"turn_detection":{"type":"semantic_vad","eagerness":"low"}}}}')
    assert session.audio is not None
    assert session.audio.input is not None
    assert session.audio.input.turn_detection == SemanticVad(eagerness="low")


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ('{"type":"audio/pcm","rate":24000}', WireFormat(Encoding.PCM16, 24_000)),
        ('{"rate":24000}', WireFormat(Encoding.PCM16, 24_000)),
        ('{"type":"audio/pcmu"}', WireFormat(Encoding.ULAW, 8_000)),
        ('{"type":"audio/pcma"}', WireFormat(Encoding.ALAW, 8_000)),
        ('"g711_ulaw"', WireFormat(Encoding.ULAW, 8_000)),
        ('{"type":"pcm_f32le","rate":48000}', WireFormat(Encoding.FLOAT32, 48_000)),
    ],
)
def test_a_format_is_written_as_an_object_or_as_its_name(written: str, form: WireFormat) -> None:
    session = update(f'{{"audio":{{"output":{{"format":{written}}}}}}}')
    assert session.audio is not None
    assert session.audio.output is not None
    assert session.audio.output.format is not None
    assert session.audio.output.format.wire_format() == form


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("rate_hz", [8_000, 24_000])
def test_the_server_writes_a_format_so_that_it_means_the_same(encoding: Encoding, rate_hz: int) -> None:
    form = WireFormat(encoding, rate_hz)
    assert AudioFormat.model_validate_json(AudioFormat.of(form).model_dump_json()).wire_format() == form


def test_an_item_comes_as_what_it_is() -> None:
    def item(text: str) -> object:
        event = parse(f'{{"type":"conversation.item.create","item":{text}}}')
        assert isinstance(event, ItemCreate), event
        return event.item

    shown = item(
        '{"type":"message","role":"user","content":[{"type":"input_text","text":"what?"},'
        '{"type":"input_image","image_url":"data:image/png;base64,AAAA"}]}'
    )
    assert shown == UserMessage(content=(InputText(text="what?"), InputImage(image_url="data:image/png;base64,AAAA")))
    said = item('{"type":"message","role":"assistant","content":[{"type":"text","text":"hm"}]}')
    assert isinstance(said, AssistantMessage)
    called = item('{"type":"function_call_output","call_id":"c","output":"{}","id":"mine"}')
    assert called == FunctionCallOutput(call_id="c", output="{}", id="mine")


def test_a_response_can_name_items_and_carries_the_clients_metadata() -> None:
    event = parse(
        '{"type":"response.create","response":{"conversation":"none","metadata":{"client_event_id":"7"},'
        '"input":[{"type":"item_reference","id":"item_1"}]}}'
    )
    assert isinstance(event, ResponseCreate)
    assert event.response is not None
    assert event.response.metadata == {"client_event_id": "7"}
    assert event.response.input is not None
    assert event.response.input[0].id == "item_1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"session.update"',
        "null",
        '{"type":"input_audio_buffer.clear"} {}',
        '{"type":"playback.ack","played_ms":NaN}',
        '{"type":"playback.ack","played_ms":-Infinity}',
        '{"type":"turn.signal","event":"e","payload":' + "[" * 5000 + "]" * 5000 + "}",
        '{"type":"input_audio_buffer.clear","event_id":"\\ud800"}',
        '{"type":"input_audio_buffer.clear","event_id":"\ud800"}',
        "9" * 10_000,
        "\ufeff{}",
    ],
    ids=range(13),
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert refusal(text).code == "invalid_json"


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("{}", "type"),
        ('{"type":null}', "type"),
        ('{"type":["session.update"]}', "type"),
        ('{"type":"session.update"}', "session"),
        ('{"type":"session.update","session":{"type":"transcription"}}', "session.type"),
        ('{"type":"session.update","session":{"colour":1}}', "session.colour"),
        ('{"type":"session.update","session":{"max_output_tokens":4097}}', "session.max_output_tokens"),
        ('{"type":"session.update","session":{"tool_choice":{"type":"function"}}}', "session.tool_choice.name"),
        ('{"type":"session.update","session":{"audio":{"input":{"format":{"type":"audio/mp3"}}}}}',
         "session.audio.input.format.type"),
        ('{"type":"session.update","session":{"audio":{"input":{"format":{"rate":3999}}}}}',
         "session.audio.input.format.rate"),
        ('{"type":"session.update","session":{"audio":{"input":{"turn_detection":{"type":"server_vad",'
         '"threshold":"loud"}}}}}', "session.audio.input.turn_detection.threshold"),
        ('{"type":"session.update","session":{"audio":{"input":{"turn_detection":{"type":"clap"}}}}}',
         "session.audio.input.turn_detection.type"),
        ('{"type":"session.update","session":{"tools":[{"type":"function","parameters":{"x":[1e999]}}]}}',
         "session.tools[0].parameters.x[0]"),
        ('{"type":"conversation.item.create","item":{"type":"song"}}', "item.type"),
        ('{"type":"conversation.item.create","item":{"type":"message","role":"robot","content":[]}}', "item.role"),
        ('{"type":"conversation.item.create","item":{"type":"message","role":"user","content":[{"text":"a"}]}}',
         "item.content[0].type"),
        ('{"type":"conversation.item.create","item":{"type":"message","role":"user","content":[{"type":"input_text",'
         '"text":"a"},{"type":"input_text"}]}}', "item.content[1].text"),
        ('{"type":"conversation.item.truncate","item_id":"a","content_index":0,"audio_end_ms":-1}', "audio_end_ms"),
        ('{"type":"conversation.item.truncate","item_id":"a","content_index":0,"audio_end_ms":"7"}', "audio_end_ms"),
        ('{"type":"conversation.item.delete","item_id":""}', "item_id"),
        ('{"type":"response.create","response":{"metadata":{"a":1}}}', "response.metadata.a"),
        ('{"type":"response.cancel","reason":"x"}', "reason"),
        ('{"type":"input_audio_buffer.append","audio":"","video_frames":["A","B","C"]}', "video_frames"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_place(text: str, param: str) -> None:
    error = refusal(text)
    assert (error.code, error.param) == ("invalid_event", param)


def test_an_unknown_event_is_told_with_the_clients_id() -> None:
    error = refusal('{"type":"session.dance","event_id":"mine"}')
    assert (error.code, error.param, error.event_id) == ("unknown_event", "type", "mine")
    assert "session.dance" in error.message


def test_an_error_does_not_repeat_a_clients_words_at_length() -> None:
    long = "w" * 100_000
    for text in (
        f'{{"type":"{long}"}}',
        f'{{"type":"response.cancel","{long}":1}}',
        f'{{"type":"session.update","session":{{"audio":{{"input":{{"format":"{long}"}}}}}}}}',
        f'{{"type":"conversation.item.create","item":{{"type":"{long}"}}}}',
        f'{{"type":"response.cancel","event_id":"{long}"}}',
    ):
        error = refusal(text)
        assert len(error.message) + len(error.param or "") + len(error.event_id or "") < 1500


def test_a_message_up_to_the_limit_is_read_and_more_is_not() -> None:
    empty = '{"type":"input_audio_buffer.append","audio":""}'
    room = MAX_EVENT_BYTES - len(empty)
    event = parse(empty[:-2] + "A" * room + empty[-2:])
    assert isinstance(event, AudioAppend)
    assert len(event.audio) == room
    assert refusal(empty[:-2] + "A" * (room + 1) + empty[-2:]).code == "event_too_large"
    assert refusal(empty[:-2] + "é" * (room // 2 + 1) + empty[-2:]).code == "event_too_large"


def test_vendor_events_have_the_fields_of_the_vendor() -> None:
    acknowledged, resumed = parse(VENDOR_TEXTS[12]), parse(VENDOR_TEXTS[0])
    assert isinstance(acknowledged, PlaybackAck)
    assert (acknowledged.played_ms, acknowledged.committed_ms, acknowledged.truncate) == (1200, 1000, True)
    assert isinstance(resumed, SessionResume)
    assert resumed.last_received_server_event_seq == 7


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """An event with something in it replaced, taken away or added; or a text with a hole or a foreign character."""
    event = draw(official_events | st.sampled_from([json.loads(text) for text in VENDOR_TEXTS]))
    place = event
    for _ in range(draw(st.integers(0, 4))):
        inner = list(place.values()) if isinstance(place, dict) else place if isinstance(place, list) else []
        containers = [value for value in inner if isinstance(value, dict | list) and value]
        place = draw(st.sampled_from(containers)) if containers else place
    match place:
        case dict():
            key = draw(st.sampled_from(list(place)) | words)
            place[key] = draw(json_values)
            if draw(st.booleans()):
                del place[key]
        case list():
            place[draw(st.integers(0, len(place) - 1))] = draw(json_values)
    text = json.dumps(event)
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(st.text(max_size=3)) + text[start + draw(st.integers(0, 5)) :]
    return text


@settings(max_examples=2000)
@given(mutated() | st.text(max_size=200) | json_values.map(json.dumps))
def test_whatever_comes_is_an_event_or_an_event_error(text: str) -> None:
    event, fault = outcome(text)
    if event is not None:
        assert parse(event.model_dump_json(exclude_unset=True)) == event
    if fault is not None:
        assert fault.code in ("invalid_json", "unknown_event", "invalid_event")
        assert (fault.param is None) == (fault.code == "invalid_json")
        assert fault.param != ""


def outcome(text: str) -> tuple[ClientEvent | None, EventError | None]:
    try:
        return parse(text), None
    except EventError as error:
        return None, error
