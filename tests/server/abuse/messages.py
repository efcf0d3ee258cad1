"""Messages that are right, nearly right or nothing at all, as a client's frames; and how they are drawn.

`$item`, `$response`, `$session` and `$token` in a text stand for what the server named last.
"""

from __future__ import annotations

import base64
import copy
import io
import json
from dataclasses import dataclass

from hypothesis import strategies as st
from PIL import Image

from server.raw_client import sound

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Binary:
    payload: bytes


@dataclass(frozen=True, slots=True)
class BadText:
    """A text frame of bytes that are none. payload: no UTF-8."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Until:
    """Not sent: go on when an event of this kind has come."""

    kind: str


Frame = Text | Binary | BadText
Json = dict[str, object]


def picture(width: int, height: int) -> bytes:
    """A file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


SILENCE = base64.b64encode(bytes(480)).decode()
NOISE = sound(1, seconds=0.02)
PIXEL = "data:image/png;base64," + base64.b64encode(picture(1, 1)).decode()


SILENCE = base64.b64encode(bytes(480)).decode()
NOISE = sound(1, seconds=0.02)
PIXEL = "data:image/png;base64," + base64.b64encode(picture(1, 1)).decode()


def _item(role: str, *content: Json, **more: object) -> Json:
    item: Json = {"type": "message", "role": role, "content": list(content), **more}
    return {"type": "conversation.item.create", "item": item}


def _update(**session: object) -> Json:
    return {"type": "session.update", "session": {"type": "realtime", **session}}


REALTIME: tuple[Json, ...] = (
    {"type": "input_audio_buffer.append", "audio": SILENCE},
    {"type": "input_audio_buffer.append", "audio": NOISE},
    {"type": "input_audio_buffer.append", "audio": NOISE, "sample_rate_hz": 24_000, "force_listen": True},
    {"type": "input_audio_buffer.append", "audio": NOISE, "format": "pcm16", "is_speech": True, "duration_ms": 20},
    {"type": "input_audio_buffer.append", "audio": "", "video_frames": [PIXEL]},
    {"type": "input_audio_buffer.commit"},
    {"type": "input.commit", "final": True, "response_create": False},
    {"type": "input_audio_buffer.clear"},
    {"type": "output_audio_buffer.clear", "response_id": "$response"},
    {"type": "output_audio_buffer.clear"},
    _item("user", {"type": "input_text", "text": "Hello."}),
    _item("user", {"type": "input_text", "text": "Hello."}, id="mine"),
    _item("user", {"type": "input_audio", "audio": NOISE}, {"type": "input_text", "text": "And?"}),
    _item("user", {"type": "input_image", "image_url": PIXEL, "detail": "low"}),
    _item("system", {"type": "input_text", "text": "Be kind."}),
    _item("assistant", {"type": "output_text", "text": "I did."}, status="completed"),
    _item("assistant", {"type": "output_audio", "transcript": "I did."}),
    {"type": "conversation.item.create", "item": {"type": "function_call_output", "call_id": "a", "output": "b"}},
    {**_item("user", {"type": "input_text", "text": "First."}), "previous_item_id": "root"},
    {**_item("user", {"type": "input_text", "text": "Second."}), "previous_item_id": "$item"},
    {"type": "conversation.item.retrieve", "item_id": "$item"},
    {"type": "conversation.item.delete", "item_id": "$item"},
    {"type": "conversation.item.delete", "item_id": "mine"},
    {"type": "conversation.item.truncate", "item_id": "$item", "content_index": 0, "audio_end_ms": 0},
    {"type": "conversation.item.truncate", "item_id": "$item", "content_index": 0, "audio_end_ms": 40},
    {"type": "response.create"},
    {"type": "response.create", "response": {"output_modalities": ["text"], "metadata": {"a": "b"}}},
    {"type": "response.create", "response": {"instructions": "Short.", "max_output_tokens": 1, "temperature": 0.8}},
    {"type": "response.create", "response": {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}},
    {"type": "response.create", "response": {"conversation": "none", "input": []}},
    {"type": "response.cancel"},
    {"type": "response.cancel", "response_id": "$response"},
    {"type": "session.heartbeat"},
    {"type": "session.event_ack", "server_event_seq": 1},
    {"type": "session.resume", "session_id": "$session", "resume_token": "$token", "last_received_server_event_seq": 1},
    {"type": "input.text.append", "text": "Words."},
    {"type": "push_text", "text": ""},
    {"type": "input.cancel"},
    {"type": "barge_in"},
    {"type": "turn.signal", "event": "interrupt", "payload": {"deep": [1, {"a": None}]}},
    {"type": "turn.signal", "event": "nothing"},
    {"type": "playback.ack", "played_ms": 20, "item_id": "$item"},
    {"type": "audio.playback_ack", "played_ms": 0, "truncate": True, "response_id": "$response"},
    _update(instructions="Be brief.", voice="alloy", temperature=0.7),
    _update(output_modalities=["text"], max_output_tokens="inf"),
    _update(output_modalities=["audio"], max_output_tokens=5),
    _update(audio={"input": {"format": {"type": "audio/pcm", "rate": 8000}, "turn_detection": None}}),
    _update(audio={"input": {"format": {"type": "audio/pcmu"}}, "output": {"format": {"type": "audio/pcma"}}}),
    _update(audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 0.5, "idle_timeout_ms": 5000}}}),
    _update(audio={"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}}}),
    _update(audio={"input": {"transcription": {"model": "any"}, "noise_reduction": {"type": "near_field"}}}),
    _update(input_audio_format="pcm_f32le", output_audio_format="g711_ulaw", sample_rate_hz=48_000),
    _update(vendor_events=True, playback_commit_policy="ack_only"),
    _update(turn_detection={"type": "server_vad"}, overlap_policy="barge_in_on_speech"),
    _update(idle_timeout_s=60.0, force_listen_count=0, initial_user_text="Hi."),
    _update(extra_body={"sliding_window_mode": "context", "context_max_units": 4, "context_previous_max_tokens": 8}),
    _update(extra_body={"sliding_window_mode": "off", "auto_response": False}),
    _update(extra_body={"basic_window_high_tokens": 400, "basic_window_low_tokens": 300}),
    _update(tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}], tool_choice="auto"),
    _update(prompt={"id": "p", "variables": {"a": {"b": 1}}}, tracing="auto", truncation="auto"),
    _update(ref_audio="data:audio/wav;base64,UklGRg=="),
)
"""One of every event that a client may send, and of every branch of those."""

SECOND = base64.b64encode(bytes(4 * 16_000)).decode()
SHORT = base64.b64encode(bytes(4 * 160)).decode()
DEMO: tuple[Json, ...] = (
    {"type": "prepare", "system_prompt": "Be kind.", "config": {"max_slice_nums": 1, "generate_audio": True}},
    {"type": "prepare", "ref_audio_base64": base64.b64encode(bytes(4 * 8_000)).decode()},
    {"type": "audio_chunk", "audio_base64": SECOND},
    {"type": "audio_chunk", "audio_base64": SHORT, "force_listen": True},
    {"type": "audio_chunk", "audio_base64": SHORT, "frame_base64_list": [PIXEL.partition(",")[2]]},
    {"type": "pause", "timeout": 60},
    {"type": "resume"},
    {"type": "interrupt"},
    {"type": "client_diagnostic", "anything": {"a": 1}},
    {"type": "stop"},
)
"""The same for the demo's protocol."""

ODD_TEXTS = (
    *(
        "",
        " ",
        "\x00",
        "\ufeff",
        "null",
        "root",
        "$item",
        "é\u0301\u202e",
        "😀" * 40,
        "x" * 513,
        "x" * 70_000,
        "\ud800",
    ),
    *("AAA", "AAAA", "====", "A===", "data:image/png;base64,AAAA", "data:audio/wav;base64,", "http://127.0.0.1/"),
    *("<|listen|>", "response.create", "inf", "auto", "../.."),
    base64.b64encode(bytes(7)).decode(),
    base64.b64encode(b"\xff\xff\xff\x7f" * 40).decode(),
)
ODD_NUMBERS: tuple[int | float, ...] = (
    *(0, -1, 1, 2, 3, 0.0, -0.0, 0.5, 1e-320, 1e-45, 1e-9, 1.5, 1e308, -1e308, 2**31, 2**53, 2**53 + 1, 2**64),
    *(-(2**63), 10**400, 4_000, 3_999, 192_000, 192_001, 4_096, 4_097),
)
RAW_VALUES = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "01",
    "+1",
    "0x1",
    "'a'",
    "undefined",
    "{}",
    "[]",
    "[[[]]]",
    '"\\ud800"',
)
"""Not all of them JSON."""
DEEP = ("[" * 3_000, "[" * 150 + "]" * 150, '{"a":' * 3_000, '{"a":' * 150 + "1" + "}" * 150)

words = st.text(max_size=12)
odd_values: st.SearchStrategy[object] = st.deferred(lambda: _odd_values.map(copy.deepcopy))
"""Each of them new, as what is drawn may be changed."""
_odd_values: st.SearchStrategy[object] = (
    st.none()
    | st.booleans()
    | st.sampled_from(ODD_NUMBERS)
    | st.sampled_from(ODD_TEXTS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
    | st.sampled_from(([], {}, [None], [[]], {"type": "x"}, {"a": {"b": {"c": []}}}))
)
Path = tuple[str | int, ...]


def paths(value: object) -> list[Path]:
    """To everything in a JSON value, itself included."""
    found: list[Path] = [()]
    match value:
        case dict():
            found += [(key, *path) for key, inner in value.items() for path in paths(inner)]
        case list():
            found += [(index, *path) for index, inner in enumerate(value) for path in paths(inner)]
    return found


@st.composite
def mutated(draw: st.DrawFn, templates: tuple[Json, ...]) -> Json:
    """A right message with one to three things changed."""
    message = copy.deepcopy(draw(st.sampled_from(templates)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(message)[1:] or [("type",)]))
        _change(draw, message, path, templates)
    return message


def _change(draw: st.DrawFn, message: object, path: Path, templates: tuple[Json, ...]) -> None:
    for key in path[:-1]:
        message = message[key]  # type: ignore[index]  # paths lead through dicts and lists
    last = path[-1]
    how = draw(st.sampled_from(("odd", "odd", "odd", "gone", "null", "more", "renamed", "from another")))
    match message:
        case dict() if how == "gone":
            message.pop(last, None)
        case dict() if how == "more":
            message[draw(st.sampled_from(("extra", "type", "event_id", "session", "audio", "é")) | words)] = draw(
                odd_values
            )
        case dict() if how == "renamed":
            message[draw(words)] = message.pop(last, None)
        case dict() if how == "from another":
            other = draw(st.sampled_from(templates))
            message |= {key: value for key, value in copy.deepcopy(other).items() if key != "type"}
        case dict() | list():
            message[last] = None if how == "null" else draw(odd_values)  # type: ignore[index]  # as above


@st.composite
def garbled(draw: st.DrawFn, templates: tuple[Json, ...]) -> str:
    """A right message as text, with something done to the text."""
    text = json.dumps(draw(st.sampled_from(templates)))
    at = draw(st.integers(0, len(text)))
    put_inside = st.sampled_from(RAW_VALUES).map(lambda value: f', "event_id": {value}}}')
    put_deep = st.sampled_from(DEEP).map(lambda value: f', "payload": {value}}}')
    put_twice = st.sampled_from(templates).map(lambda other: f', "type": {json.dumps(other["type"])}}}')
    results = (
        st.just(text[:at]),
        words.map(lambda more: text[:at] + more + text[at:]),
        st.just(text + text),
        (put_inside | put_deep | put_twice).map(lambda more: text[:-1] + more),
        st.sampled_from((" ", "\ufeff", "\t\n", "\x00")).map(lambda space: space + text),
    )
    return draw(st.one_of(results))


@st.composite
def large(draw: st.DrawFn, templates: tuple[Json, ...], max_bytes: int) -> str:
    """A message about as long as one may be."""
    text = json.dumps(draw(st.sampled_from(templates)))
    num_bytes = draw(st.sampled_from((max_bytes - 1, max_bytes, max_bytes + 1, 2 * max_bytes)))
    filling = draw(st.sampled_from(("extra", "text", "audio", "instructions", "audio_base64")))
    head = f'{text[:-1]}, "{filling}": "'
    return head + "A" * (num_bytes - len(head) - 2) + '"}'


BAD_UTF8 = (b"\xff", b"\xc3\x28", b'{"type": "\xed\xa0\x80"}', b"\xf4\x90\x80\x80", b'{"type":"barge_in"}\xc0')


def frames(templates: tuple[Json, ...], max_bytes: int) -> st.SearchStrategy[Frame]:
    """templates: right messages. max_bytes: longer ones end the connection."""
    right = st.sampled_from(templates).map(json.dumps)
    often = right | mutated(templates).map(json.dumps) | mutated(templates).map(json.dumps) | garbled(templates)
    texts = often.map(Text)
    seldom: st.SearchStrategy[Frame] = (
        st.sampled_from(BAD_UTF8).map(BadText)
        | st.binary(max_size=40).map(Binary)
        | large(templates, max_bytes).map(Text)
        | words.map(Text)
        | odd_values.map(json.dumps).map(Text)
    )
    return st.integers(0, 59).flatmap(lambda number: seldom if number == 0 else texts)
