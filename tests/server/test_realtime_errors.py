"""Every code of an error: what brings it, and that the session goes on unless the table of codes says otherwise."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from antiphon.server.app import build_app
from antiphon.server.events.client import MAX_EVENT_BYTES
from antiphon.server.realtime.codes import CODES, Ends
from server.lifecycle import session
from server.raw_client import Event, RawClient, sound, talk
from server.servers import StartServer

TESTS = Path(__file__).parents[1]
Before = Callable[[RawClient], Awaitable[dict[str, object]]]


async def nothing(client: RawClient) -> dict[str, object]:
    assert client.got
    return {}


async def an_answer(client: RawClient) -> dict[str, object]:
    """One is under way, and some of it was sent. Returns its item."""
    await client.says(1)
    await client.asks()
    await client.until("response.output_audio.delta")
    added = next(event for event in client.got if event.kind == "response.output_item.added")
    return {"item_id": added.text("item", "id")}


async def an_answer_unnamed(client: RawClient) -> dict[str, object]:
    await an_answer(client)
    return {}


async def a_message(client: RawClient) -> dict[str, object]:
    """The client's own item."""
    await client.send("conversation.item.create", item=message("a"))
    await client.until("conversation.item.done")
    return {}


async def some_sound(client: RawClient) -> dict[str, object]:
    """The call has begun."""
    await client.says(1)
    return {}


async def half_a_sample(client: RawClient) -> dict[str, object]:
    await client.send("input_audio_buffer.append", audio=base64.b64encode(bytes(48_001)).decode())
    return {}


def answer(item_id: str, text: str) -> dict[str, object]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "id": item_id, "content": content}


def message(item_id: str, *parts: dict[str, object]) -> dict[str, object]:
    content = list(parts) or [{"type": "input_text", "text": "Hello?"}]
    return {"type": "message", "role": "user", "id": item_id, "content": content}


def picture(url: str) -> dict[str, object]:
    return {"item": message("a", {"type": "input_image", "image_url": url})}


def setting(**fields: object) -> dict[str, object]:
    return {"session": {"type": "realtime", **fields}}


@dataclass(frozen=True, slots=True)
class Case:
    """A message that is refused. settings: of the session. before: gives fields of the message too."""

    code: str
    kind: str
    fields: dict[str, object] = field(default_factory=dict)
    before: Before = nothing
    settings: dict[str, object] = field(default_factory=dict)


NAN = base64.b64encode(np.full(4, np.nan, "<f4").tobytes()).decode()
MINUTES = base64.b64encode(bytes(400 * 8000)).decode()
APPEND, CREATE, UPDATE = "input_audio_buffer.append", "conversation.item.create", "session.update"
TRUNCATE, ACK = "conversation.item.truncate", "playback.ack"

CASES = (
    Case("unknown_event", "sing"),
    Case("invalid_event", UPDATE, setting(nonsense=1)),
    Case("invalid_event", CREATE, {"item": message("a", {"type": "input_image"})}),
    Case("unsupported_audio_format", APPEND, {"audio": "", "format": "g711_ulaw"}),
    Case("unsupported_audio_format", APPEND, {"audio": "", "input_audio_format": "pcm_f32le"}),
    Case("unsupported_sample_rate", APPEND, {"audio": "", "sample_rate_hz": 8000}),
    Case("invalid_base64", APPEND, {"audio": "?"}),
    Case("invalid_base64", CREATE, {"item": message("a", {"type": "input_audio", "audio": "abc"})}),
    Case("incomplete_audio_sample", "input_audio_buffer.commit", before=half_a_sample),
    Case("incomplete_audio_sample", "response.create", before=half_a_sample),
    Case("audio_not_finite", APPEND, {"audio": NAN}, settings={"input_audio_format": "pcm_f32le"}),
    Case("invalid_audio", UPDATE, setting(ref_audio="AAAA")),
    Case("invalid_audio", UPDATE, setting(ref_audio="https://example.com/voice.wav")),
    Case("invalid_image", CREATE, picture("data:image/png;base64,AAAA")),
    Case("invalid_image", CREATE, picture("data:image/png;base64,?")),
    Case("invalid_image", CREATE, picture("https://example.com/cat.png")),
    Case("invalid_image", APPEND, {"audio": sound(1), "video_frames": ["AAAA"]}),
    Case("invalid_input", "input.text.append", {"text": "word " * 50_000}),
    Case("invalid_input", CREATE, {"item": message("a", {"type": "input_text", "text": "word " * 50_000})}),
    Case("input_backpressure", APPEND, {"audio": MINUTES}, settings={"input_audio_format": "g711_ulaw"}),
    Case(
        "input_backpressure",
        CREATE,
        {"item": message("a", {"type": "input_audio", "audio": MINUTES})},
        settings={"input_audio_format": "g711_ulaw"},
    ),
    Case("input_audio_buffer_commit_empty", "input_audio_buffer.commit"),
    Case("response_cancel_not_active", "response.cancel"),
    Case("response_cancel_not_active", "response.cancel", {"response_id": "resp_no"}, an_answer_unnamed),
    Case("conversation_already_has_active_response", "response.create", before=an_answer_unnamed),
    Case("response_option_unsupported", "response.create", {"response": {"conversation": "none"}}),
    Case("response_option_unsupported", "response.create", {"response": {"input": []}}),
    Case("response_option_unsupported", "response.create", {"response": {"prompt": {"id": "p"}}}),
    Case("invalid_event", CREATE, {"item": answer("a", "word " * 120_000)}),
    Case("invalid_event", "session.close", {"reason": "because " * 100}),
    Case("item_create_duplicate_item_id", CREATE, {"item": message("a")}, a_message),
    Case("item_not_found", CREATE, {"item": message("b"), "previous_item_id": "no"}),
    Case("item_retrieve_invalid_item_id", "conversation.item.retrieve", {"item_id": "no"}),
    Case("item_delete_invalid_item_id", "conversation.item.delete", {"item_id": "no"}),
    Case("item_truncate_invalid_item_id", TRUNCATE, {"item_id": "no", "content_index": 0, "audio_end_ms": 0}),
    Case("item_not_truncatable", TRUNCATE, {"item_id": "a", "content_index": 0, "audio_end_ms": 0}, a_message),
    Case("content_not_found", TRUNCATE, {"content_index": 1, "audio_end_ms": 0}, an_answer),
    Case("audio_end_ms_too_large", TRUNCATE, {"content_index": 0, "audio_end_ms": 99_999}, an_answer),
    Case("audio_end_ms_too_large", ACK, {"played_ms": 99_999}, an_answer),
    Case("playback_item_not_found", ACK, {"played_ms": 0}),
    Case("playback_item_not_found", ACK, {"played_ms": 0, "item_id": "a"}, a_message),
    Case("playback_item_not_found", "output_audio_buffer.clear"),
    Case("playback_item_mismatch", ACK, {"played_ms": 0, "response_id": "resp_no"}, an_answer),
    Case("tools_unsupported", UPDATE, setting(tool_choice="required")),
    Case("tools_unsupported", "response.create", {"response": {"tool_choice": {"type": "function", "name": "f"}}}),
    Case("tools_unsupported", CREATE, {"item": {"type": "mcp_list_tools", "server_label": "s", "tools": []}}),
    Case("prompt_unsupported", UPDATE, setting(prompt={"id": "p"})),
    Case("truncation_unsupported", UPDATE, setting(truncation="disabled")),
    Case("speed_unsupported", UPDATE, setting(speed=1.5)),
    Case("unsupported_turn_detection", UPDATE, setting(overlap_policy="barge_in_on_speech")),
    Case("invalid_sliding_window_config", UPDATE, setting(extra_body={"basic_window_high_tokens": 10**6})),
    Case("initial_user_text_update_unsupported", UPDATE, setting(initial_user_text="Hello?"), some_sound),
    Case("unknown_turn_signal", "turn.signal", {"event": "sing"}),
    Case("unsupported_session_resume", "session.event_ack", {"server_event_seq": 1}),
    Case(
        "unsupported_session_resume",
        "session.resume",
        {"session_id": "s", "resume_token": "t", "last_received_server_event_seq": 1},
    ),
)
OF_THEIR_OWN = {
    "invalid_json": "server/test_realtime_errors.py",
    "event_too_large": "server/test_realtime_errors.py",
    "idle_timeout": "server/test_realtime_errors.py",
    "prompt_too_long": "server/test_realtime_errors.py",
    "resource_exhausted": "server/test_realtime_errors.py",
    "context_length_exceeded": "server/test_realtime_windows.py",
    "instructions_update_unsupported": "server/test_realtime_settings.py",
    "sliding_window_update_unsupported": "server/test_realtime_settings.py",
    "ref_audio_update_unsupported": "server/test_realtime_settings.py",
    "config_timeout": "server/test_resume.py",
    "invalid_session_resume": "server/test_resume.py",
    "invalid_resume_token": "server/test_resume.py",
    "unknown_session": "server/test_resume.py",
    "engine_stopped": "test_live.py",
}
"""Codes that take more than a message to an ordinary session, and where they are brought about."""
UNTESTED = {
    "shape_error",  # a fault of the server, which no message brings about
    "internal_error",  # the same
}


def test_every_code_is_brought_about_somewhere() -> None:
    assert {case.code for case in CASES} | set(OF_THEIR_OWN) | UNTESTED == set(CODES)
    assert all(CODES[case.code].ends is Ends.NOTHING for case in CASES)
    for code, file in OF_THEIR_OWN.items():
        assert f'"{code}"' in (TESTS / file).read_text(encoding="utf-8"), f"{file} has no {code}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.kind}")
def test_what_cannot_be_done_is_refused_by_its_code_and_the_session_goes_on(realtime: str, case: Case) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=case.settings) as client:
            found = await case.before(client)
            await client.send(case.kind, event_id="mine", **found, **case.fields)
            error = await client.error()
            assert error.code == case.code
            assert error.text("error", "event_id") == "mine"
            assert error.text("error", "message")
            await is_well(client)
            assert [event.code for event in client.got if event.kind == "error"] == [case.code]

    talk(conversation)


async def is_well(client: RawClient) -> None:
    """What was refused changed nothing: an answer under way was not stopped, and items may be made."""
    ends = [event.text("response", "status") for event in client.got if event.kind == "response.done"]
    assert "cancelled" not in ends
    await client.send("conversation.item.create", item=message("new"))
    await client.until("conversation.item.done")


@pytest.mark.parametrize("text", ["", "{", "[]", '"word"', '{"type": NaN}', "[" * 100_000])
def test_what_is_no_message_is_refused_and_the_session_goes_on(realtime: str, text: str) -> None:
    async def conversation() -> None:
        async with session(realtime) as client:
            await client.socket.send(text)
            assert (await client.error()).code == "invalid_json"
            await client.socket.send(b"\0")
            assert (await client.error()).code == "invalid_json"
            await is_well(client)

    talk(conversation)


def test_a_message_that_is_too_large_is_refused_and_the_session_goes_on(start_server: StartServer) -> None:
    """If the network lets it in at all."""

    async def conversation(url: str) -> None:
        async with session(url) as client:
            await client.send(APPEND, audio="A" * MAX_EVENT_BYTES)
            assert (await client.error()).code == "event_too_large"
            await is_well(client)

    with start_server(build_app, max_message_bytes=str(2 * MAX_EVENT_BYTES)) as running:
        talk(lambda: conversation(running.url))


async def ended(client: RawClient, code: str, close_code: int) -> Event:
    """The session ends with this error."""
    error = await client.error()
    assert error.code == code
    assert await client.closed() == close_code
    return error


def test_a_client_that_says_nothing_for_too_long_is_told_and_closed(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, idle_timeout_s=0.05) as client:
            await ended(client, "idle_timeout", 1000)
        async with session(realtime, vendor_events=True, idle_timeout_s=0.05) as client:
            assert await client.closed() == 1000
            assert client.got[-1].kind == "session.expired"

    talk(conversation)


def test_instructions_that_leave_no_room_end_the_call_that_is_begun_with_them(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, instructions="word " * 2_000) as client:
            await client.send("response.create")
            error = await ended(client, "prompt_too_long", 1008)
            assert error.text("error", "type") == "server_error"
            done = next(event for event in client.got if event.kind == "response.done")
            assert done.text("response", "status_details", "error", "code") == "prompt_too_long"

    talk(conversation)


def test_a_call_for_which_there_is_no_memory_may_be_tried_again(start_server: StartServer) -> None:
    async def conversation(url: str) -> None:
        async with session(url) as one, session(url) as two, session(url) as three, session(url) as four:
            for client in (one, two, three, four):
                await client.says(1)
                await client.send("response.create")
                await client.until("response.created")
            async with session(url) as fifth:
                await fifth.says(1)
                await ended(fifth, "resource_exhausted", 1013)

    with start_server(build_app, max_calls="8") as running:
        talk(lambda: conversation(running.url))
