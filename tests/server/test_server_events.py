"""The server's events, each with all it can say, read by the official client's types: nothing unknown or missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import get_args

import pytest
from openai.types import realtime as official
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from pydantic import BaseModel, TypeAdapter

from antiphon.server.audio import Encoding, WireFormat
from antiphon.server.events import server, vendor
from antiphon.server.events.ids import Ids
from antiphon.server.events.items import (
    AssistantMessage,
    AudioPart,
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputImage,
    InputText,
    Item,
    OutputAudio,
    OutputText,
    SystemMessage,
    TextPart,
    UserMessage,
)
from antiphon.server.events.server import OFFICIAL_SERVER_EVENTS, CachedTokens, OutputTokens, ServerEvent, Usage
from antiphon.server.events.session import (
    Audio,
    AudioFormat,
    AudioInput,
    AudioOutput,
    FunctionTool,
    NoiseReduction,
    Prompt,
    Reasoning,
    RetentionRatio,
    SemanticVad,
    ServerVad,
    Session,
    TokenLimits,
    TracingLabels,
    Transcription,
)
from antiphon.server.events.vendor import VENDOR_SERVER_EVENTS

NOT_IN_SESSION_EVENTS = {"id", "object", "expires_at"}
"""The official client reads the session of an event as it would write it; a session that it created has these too."""

OTHERS_EVENTS = {
    "input_audio_buffer.dtmf_event_received": "telephone keys, over SIP",
    "output_audio_buffer.started": "WebRTC and SIP",
    "output_audio_buffer.stopped": "WebRTC and SIP",
    "output_audio_buffer.cleared": "WebRTC and SIP; among the vendor events here",
    "conversation.item.input_audio_transcription.segment": "speakers told apart",
    "mcp_list_tools.in_progress": "MCP",
    "mcp_list_tools.completed": "MCP",
    "mcp_list_tools.failed": "MCP",
    "response.mcp_call_arguments.delta": "MCP",
    "response.mcp_call_arguments.done": "MCP",
    "response.mcp_call.in_progress": "MCP",
    "response.mcp_call.completed": "MCP",
    "response.mcp_call.failed": "MCP",
}
NEVER_SAID = {
    "ConversationItemInputAudioTranscriptionCompletedEvent.languages",
    "ConversationItemInputAudioTranscriptionCompletedEvent.logprobs",
    "ConversationItemInputAudioTranscriptionDeltaEvent.logprobs",
    "Part.audio",  # a part's audio is in its deltas
}
SOMETIMES_SAID = {
    # One class for all parts of a role: each part has its own fields.
    *(f"Content.{name}" for name in ("audio", "detail", "image_url", "text", "transcript")),
    "Part.text",
    "Part.transcript",
    # Only where it was set, or where there is one.
    "RealtimeAudioConfig.output",
    "RealtimeAudioConfigOutput.speed",
    "RealtimeAudioConfigOutput.voice",
    "RealtimeResponseStatus.error",
    "RealtimeResponseStatus.reason",
    "RealtimeSessionCreateRequest.parallel_tool_calls",
    "RealtimeSessionCreateRequest.reasoning",
}
"""All other official fields are in every event that has a place for them."""

ids = Ids(partial(format, 7))
event_id = ids.event()
pcm, ulaw = AudioFormat.of(WireFormat(Encoding.PCM16, 24_000)), AudioFormat.of(WireFormat(Encoding.ULAW, 8_000))
in_response: dict[str, object] = {"event_id": event_id, "response_id": ids.response(), "output_index": 0}
in_part = in_response | {"item_id": ids.item(), "content_index": 0}

SESSIONS = (
    Session(id=ids.session(), model="minicpm-o-4.5"),
    Session(
        id=ids.session(),
        model="minicpm-o-4.5",
        output_modalities=("text",),
        instructions="Be brief.",
        audio=Audio(
            input=AudioInput(
                format=pcm,
                transcription=Transcription(
                    model="m", language="en", prompt="p", delay="low", keywords=("k",), languages=("en",)
                ),
                noise_reduction=NoiseReduction(type="near_field", strength=1.0),
                turn_detection=ServerVad(
                    threshold=0.5,
                    prefix_padding_ms=300,
                    silence_duration_ms=500,
                    idle_timeout_ms=None,
                    create_response=True,
                    interrupt_response=True,
                ),
            ),
            output=AudioOutput(format=pcm, voice="nova", speed=1.0),
        ),
        tools=(FunctionTool(name="f", description="d", parameters={"type": "object", "default": None}),),
        tool_choice="none",
        max_output_tokens=4096,
        truncation=RetentionRatio(retention_ratio=0.8, token_limits=TokenLimits(post_instructions=8000)),
        prompt=Prompt(id="p", version="1", variables={"name": "Ann"}),
        tracing=TracingLabels(workflow_name="w", group_id="g", metadata={}),
        include=("item.input_audio_transcription.logprobs",),
        expires_at=1_900_000_000,
        reasoning=Reasoning(effort="low"),
        parallel_tool_calls=False,
    ),
)
SEMANTIC = SemanticVad(eagerness="auto", create_response=True, interrupt_response=False)

ITEMS: tuple[Item, ...] = (
    SystemMessage(id=ids.item(), content=(InputText(text="t"),)),
    UserMessage(
        id=ids.item(),
        content=(
            InputText(text="t"),
            InputAudio(audio="AAAA", transcript="t"),
            InputImage(image_url="data:image/png;base64,AAAA", detail="low"),
        ),
    ),
    AssistantMessage(
        id=ids.item(), status="incomplete", content=(OutputText(text="t"), OutputAudio(audio="AAAA", transcript="t"))
    ),
    FunctionCall(id=ids.item(), name="f", arguments="{}", call_id=ids.call()),
    FunctionCallOutput(id=ids.item(), call_id=ids.call(), output="{}"),
)
USAGE = Usage.count(
    CachedTokens(text_tokens=30, audio_tokens=20, image_tokens=64),
    CachedTokens(text_tokens=10),
    OutputTokens(text_tokens=5, audio_tokens=40),
)
BEGUN = server.Response(
    id=ids.response(),
    status="in_progress",
    conversation_id=ids.conversation(),
    output_modalities=("audio",),
    max_output_tokens="inf",
    audio=server.ResponseAudio(output=server.ResponseAudioOutput(format=ulaw, voice="nova")),
    metadata={"client_event_id": "7"},
)
FAILED = server.StatusDetails(
    type="failed", error=server.StatusError(type="server_error", code="internal_error", message="m")
)
STATUSES = (
    server.StatusDetails(type="completed"),
    server.StatusDetails(type="cancelled", reason="turn_detected"),
    server.StatusDetails(type="cancelled", reason="client_cancelled"),
    server.StatusDetails(type="incomplete", reason="max_output_tokens"),
    FAILED,
)


def said(kind: type[ServerEvent], common: Mapping[str, object], **more: object) -> ServerEvent:
    """An event of this kind; common: what it shares with its neighbours."""
    return kind.model_validate({**common, **more})


def sessions() -> Iterator[ServerEvent]:
    for session in SESSIONS:
        yield server.SessionCreated(event_id=event_id, session=session)
        yield server.SessionUpdated(event_id=event_id, session=session)
    semantic = Audio(input=AudioInput(format=ulaw, turn_detection=SEMANTIC))
    yield server.SessionUpdated(event_id=event_id, session=SESSIONS[0].model_copy(update={"audio": semantic}))
    details = server.ErrorDetails(type="invalid_request_error", code="c", message="m", param="p", event_id="mine")
    yield server.ErrorEvent(event_id=event_id, error=details)
    yield server.ErrorEvent(
        event_id=event_id, error=server.ErrorDetails(type="server_error", code="internal_error", message="m")
    )
    limit = server.RateLimit(name="tokens", limit=10, remaining=3, reset_seconds=0.5)
    yield server.RateLimitsUpdated(event_id=event_id, rate_limits=(limit,))
    yield server.RateLimitsUpdated(event_id=event_id)


def conversations() -> Iterator[ServerEvent]:
    yield server.ConversationCreated(event_id=event_id, conversation=server.Conversation(id=ids.conversation()))
    for item in ITEMS:
        for previous in (None, ids.item()):
            yield server.ItemAdded(event_id=event_id, previous_item_id=previous, item=item)
            yield server.ItemDone(event_id=event_id, previous_item_id=previous, item=item)
            yield server.ItemCreated(event_id=event_id, previous_item_id=previous, item=item)
        yield server.ItemRetrieved(event_id=event_id, item=item)
        yield said(server.OutputItemAdded, in_response, item=item)
        yield said(server.OutputItemDone, in_response, item=item)
    yield server.ItemDeleted(event_id=event_id, item_id=ids.item())
    at: dict[str, object] = {"event_id": event_id, "item_id": ids.item(), "content_index": 0}
    yield said(server.ItemTruncated, at, audio_end_ms=1500)
    yield said(server.TranscriptionDelta, at, delta="d")
    yield said(server.TranscriptionCompleted, at, transcript="t", usage=server.TranscriptionSeconds(seconds=1.5))
    error = server.TranscriptionError(type="server_error", code="c", message="m", param="p")
    yield said(server.TranscriptionFailed, at, error=error)


def buffers() -> Iterator[ServerEvent]:
    for previous in (None, ids.item()):
        yield server.AudioCommitted(event_id=event_id, previous_item_id=previous, item_id=ids.item())
    yield server.AudioCleared(event_id=event_id)
    yield server.SpeechStarted(event_id=event_id, audio_start_ms=0, item_id=ids.item())
    yield server.SpeechStopped(event_id=event_id, audio_end_ms=2**53, item_id=ids.item())
    yield server.TimeoutTriggered(event_id=event_id, audio_start_ms=0, audio_end_ms=6000, item_id=ids.item())


def responses() -> Iterator[ServerEvent]:
    yield server.ResponseCreated(event_id=event_id, response=BEGUN)
    for details in STATUSES:
        done = {"status": details.type, "status_details": details, "usage": USAGE, "output": ITEMS}
        yield server.ResponseDone(event_id=event_id, response=BEGUN.model_copy(update=done))
    for part in (TextPart(text="t"), AudioPart(transcript="t")):
        yield said(server.ContentPartAdded, in_part, part=part)
        yield said(server.ContentPartDone, in_part, part=part)
    yield said(server.TextDelta, in_part, delta="d")
    yield said(server.TextDone, in_part, text="t")
    yield said(server.AudioDelta, in_part, delta="AAAA")
    yield said(server.AudioDone, in_part)
    yield said(server.TranscriptDelta, in_part, delta="d")
    yield said(server.TranscriptDone, in_part, transcript="t")
    call = in_response | {"item_id": ids.item(), "call_id": ids.call()}
    yield said(server.ArgumentsDelta, call, delta="{")
    yield said(server.ArgumentsDone, call, name="f", arguments="{}")


EVENTS = (*sessions(), *conversations(), *buffers(), *responses())


def vendors() -> Iterator[ServerEvent]:
    of_session: dict[str, object] = {"event_id": event_id, "session_id": ids.session()}
    token: dict[str, object] = {"attachment_generation": 1, "resume_token": "t"}
    yield said(vendor.ResumableSessionCreated, token, event_id=event_id, session=SESSIONS[0])
    yield said(vendor.SessionResumed, of_session | token, session=SESSIONS[0], received_client_events=7)
    yield said(vendor.SessionReplaced, of_session, attachment_generation=2)
    yield said(vendor.SessionResyncRequired, of_session, reason="journal_gap")
    yield said(vendor.SessionClosed, of_session, epoch=1, reason="client_close")
    yield said(vendor.SessionExpired, of_session, reason="idle_ttl_expired")
    yield said(vendor.HeartbeatAck, of_session, received_client_events=7)
    yield said(
        vendor.WindowSlid,
        of_session,
        unit=30,
        dropped_units=4,
        dropped_tokens=300,
        context_tokens=6000,
        previous_tokens=12,
    )
    opened = {"prompt_tokens": 40, "max_context_tokens": 8192, "is_prompt_shared": True, "opening_ms": 12}
    yield said(vendor.CallOpened, of_session | opened)
    decided = {"unit": 3, "is_listen": True, "context_tokens": 90, "context_blocks": 2, "retained_units": 4}
    yield said(vendor.UnitReport, of_session | decided)
    yield said(vendor.UnitCosts, of_session | {"unit": 3, "thinker_ms": 40, "talker_ms": 0, "code2wav_ms": 0})
    yield said(vendor.CallChanged, of_session | {"context_tokens": 90, "max_context_tokens": 400, "took_ms": 20})
    listening = vendor.ListenResponse(metadata=vendor.ListenMetadata(reason="model_listen", unit=3))
    yield said(vendor.ResponseListen, of_session, epoch=0, response=listening)
    yield said(vendor.ResponseSpeak, in_part)
    metadata = vendor.DeltaMetadata(
        session_id=ids.session(),
        epoch=0,
        end_of_turn=False,
        audio_duration_ms=200,
        audio_text_marks=(vendor.TextMark(text_chars=4, audio_end_ms=200),),
    )
    yield said(vendor.TimedAudioDelta, in_part, delta="AAAA", format="pcm16", sample_rate_hz=24_000, metadata=metadata)
    yield vendor.OutputCleared(event_id=event_id, response_id=ids.response())
    record = vendor.PlaybackRecord(
        item_id=ids.item(), generated_ms=3000, sent_ms=2000, played_ms=1500, committed_ms=1500, history_committed=False
    )
    yield vendor.PlaybackAcknowledged(event_id=event_id, event=record)


def official_classes() -> dict[str, type[BaseModel]]:
    classes: tuple[type[BaseModel], ...] = get_args(get_args(RealtimeServerEvent)[0])
    return {get_args(event.model_fields["type"].annotation)[0]: event for event in classes}


def inner_models(value: object) -> Iterator[BaseModel]:
    """The official objects inside each other."""
    match value:
        case BaseModel():
            yield value
            for name in value.model_fields_set:
                yield from inner_models(getattr(value, name))
        case list():
            for element in value:
                yield from inner_models(element)


def read_officially(event: ServerEvent) -> BaseModel:
    written = json.loads(event.to_json())
    return official_classes()[written["type"]].model_validate(written, strict=True)


def unknown_fields(read: BaseModel) -> set[str]:
    found = set()
    for model in inner_models(read):
        extra = set(model.model_extra or {})
        if isinstance(model, official.RealtimeSessionCreateRequest):
            extra -= NOT_IN_SESSION_EVENTS
        found |= {f"{type(model).__name__}.{name}" for name in extra}
    return found


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_the_official_client_knows_every_field_of(event: ServerEvent) -> None:
    assert unknown_fields(read_officially(event)) == set()


def test_no_other_official_field_is_ever_missing() -> None:
    missing, present = set[str](), set[str]()
    for event in EVENTS:
        for model in inner_models(read_officially(event)):
            for name in type(model).model_fields:
                fields = present if name in model.model_fields_set else missing
                fields.add(f"{type(model).__name__}.{name}")
    assert (missing - present, missing & present) == (NEVER_SAID, SOMETIMES_SAID)


def test_a_session_is_what_the_official_client_gets_when_it_creates_one() -> None:
    for session in SESSIONS:
        read = official.RealtimeSessionCreateResponse.model_validate(json.loads(session.model_dump_json()), strict=True)
        assert unknown_fields(read) <= {"RealtimeSessionCreateResponse.parallel_tool_calls"}
    assert read.model_fields_set >= set(type(read).model_fields)


def test_every_official_event_of_a_websocket_is_among_those() -> None:
    assert {type(event) for event in EVENTS} == set(OFFICIAL_SERVER_EVENTS)
    ours = {json.loads(event.to_json())["type"] for event in EVENTS}
    assert ours | set(OTHERS_EVENTS) == set(official_classes())
    assert not ours & set(OTHERS_EVENTS)


def test_every_vendor_event_can_be_said_and_read_back() -> None:
    events = list(vendors())
    assert [type(event) for event in events] == list(VENDOR_SERVER_EVENTS)
    for event in events:
        assert type(event).model_validate_json(event.to_json()) == event


def test_an_official_event_is_the_same_for_who_asked_for_vendors_fields_and_has_more() -> None:
    by_class: dict[type[ServerEvent], ServerEvent] = {type(event): event for event in vendors()}
    for plain, full in (
        (server.SessionCreated(event_id=event_id, session=SESSIONS[0]), by_class[vendor.ResumableSessionCreated]),
        (said(server.AudioDelta, in_part, delta="AAAA"), by_class[vendor.TimedAudioDelta]),
    ):
        less, more = json.loads(plain.to_json()), json.loads(full.to_json())
        assert less == {name: more[name] for name in less}
        assert set(more) > set(less)


def test_usage_adds_up() -> None:
    assert (USAGE.total_tokens, USAGE.input_tokens, USAGE.output_tokens) == (159, 114, 45)
    assert json.loads(USAGE.model_dump_json())["input_token_details"] == {
        "cached_tokens": 10,
        "text_tokens": 30,
        "audio_tokens": 20,
        "image_tokens": 64,
        "cached_tokens_details": {"text_tokens": 10, "audio_tokens": 0, "image_tokens": 0},
    }


def test_what_is_switched_off_is_said_as_null_and_what_nobody_set_is_not_said() -> None:
    written = json.loads(SESSIONS[0].model_dump_json())
    assert written["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": 24_000},
        "transcription": None,
        "noise_reduction": None,
        "turn_detection": {
            "type": "semantic_vad",
            "eagerness": "auto",
            "create_response": True,
            "interrupt_response": True,
        },
    }
    assert json.loads(AudioInput().model_dump_json())["turn_detection"] is None
    transcribing = AudioInput(transcription=Transcription(model="m"))
    assert json.loads(transcribing.model_dump_json())["transcription"] == {"model": "m"}


def test_nulls_in_a_clients_own_words_are_kept() -> None:
    tools = json.loads(SESSIONS[1].model_dump_json())["tools"]
    assert tools[0]["parameters"] == {"type": "object", "default": None}


def test_a_numbered_event_is_the_event_and_its_number() -> None:
    for event in EVENTS:
        written = json.loads(event.to_numbered_json(12))
        assert written.pop("server_event_seq") == 12
        assert written == json.loads(event.to_json())


def test_ids_say_what_they_name_and_come_from_one_source() -> None:
    counted = Ids(partial(lambda numbers: str(next(numbers)), count(1)))
    made = [
        counted.event(),
        counted.item(),
        counted.response(),
        counted.session(),
        counted.conversation(),
        counted.call(),
    ]
    assert made == ["event_1", "item_2", "resp_3", "sess_4", "conv_5", "call_6"]
    assert len({Ids().event() for _ in range(1000)}) == 1000


def test_an_item_in_an_event_is_read_back_as_what_it_was() -> None:
    for item in ITEMS:
        adapter: TypeAdapter[Item] = TypeAdapter(Item)
        assert adapter.validate_json(adapter.dump_json(item)) == item
