"""What a client may ask for: all that the official types can express is done, ignored or refused by name."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import JsonValue

from antiphon.core.sampling import CHAT_TEXT, Draws
from antiphon.server.api_error import ApiError
from antiphon.server.chat.asking import ChatOffer, chat_config, conversation
from antiphon.server.chat.request import IGNORED, UNSUPPORTED, ChatRequest, parse

Fields = dict[str, JsonValue]

OFFER = ChatOffer(max_context_tokens=100, answer_tokens=50, max_slices=9, max_body_bytes=1000)
HELLO: JsonValue = {"role": "user", "content": "Hello"}
TOOL: JsonValue = {"type": "function", "function": {"name": "f"}}
SPOKEN: Fields = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}


def body(**fields: JsonValue) -> bytes:
    return json.dumps({"model": "m", "messages": [HELLO], **fields}).encode()


def said(*content: JsonValue, role: str = "user") -> Fields:
    """A conversation of one message."""
    return {"messages": [{"role": role, "content": [*content]}]}


def fault(fields: Fields) -> tuple[int, str, str | None]:
    """Status, code and place of what is wrong with a request."""
    with pytest.raises(ApiError) as refused:
        conversation(parse(body(**fields)), OFFER)
    return refused.value.status, refused.value.code, refused.value.param


def test_every_official_parameter_is_done_ignored_or_refused_by_name() -> None:
    official = {*get_type_hints(CompletionCreateParamsBase), "stream"}
    known = {*ChatRequest.model_fields, *UNSUPPORTED, *IGNORED}
    assert official <= known, official - known
    assert known <= official, known - official


@pytest.mark.parametrize("name", sorted(IGNORED))
@pytest.mark.parametrize("value", [None, "x", {"a": "b"}, True])
def test_what_does_not_change_the_answer_is_ignored(name: str, value: JsonValue) -> None:
    assert parse(body(**{name: value})) == parse(body())


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_would_change_the_answer_may_only_say_what_is_the_case(name: str) -> None:
    allowed, _ = UNSUPPORTED[name]
    for value in (None, *allowed):
        assert parse(body(**{name: value})) == parse(body())
    others: tuple[JsonValue, ...] = (2, "other", [TOOL], {"type": "json_object"})
    for value in others:
        assert fault({name: value}) == (400, "unsupported_parameter", name)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": None}, "invalid_value", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "Hello"}, "invalid_value", "messages"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"content": "Hello"}]}, "invalid_value", "messages[0]"),
        ({"messages": [HELLO, {"role": "tool", "content": "x"}]}, "invalid_value", "messages[1]"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_value", "messages[0].content"),
        (said({"type": "text"}), "missing_required_parameter", "messages[0].content[0].text"),
        (said({"type": "file"}), "invalid_value", "messages[0].content[0]"),
        (said({"type": "text", "text": "x", "loud": True}), "unknown_parameter", "messages[0].content[0].loud"),
        (
            said({"type": "image_url", "image_url": {"url": "http://a/b.png"}}),
            "invalid_image",
            "messages[0].content[0]",
        ),
        (
            said({"type": "image_url", "image_url": {"url": "data:image/png,x"}}),
            "invalid_image",
            "messages[0].content[0]",
        ),
        (
            said({"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}),
            "invalid_image",
            "messages[0].content[0]",
        ),
        (
            said(
                {"type": "text", "text": ""}, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
            ),
            "invalid_audio",
            "messages[0].content[1]",
        ),
        (
            said({"type": "input_audio", "input_audio": {"data": "*", "format": "mp3"}}),
            "invalid_audio",
            "messages[0].content[0]",
        ),
        (
            said({"type": "input_audio", "input_audio": {"data": "", "format": "aac"}}),
            "invalid_value",
            "messages[0].content[0].input_audio.format",
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "audio": {"id": "audio_1"}}]},
            "unsupported_parameter",
            "messages[1].audio",
        ),
        ({"messages": [HELLO, {"role": "assistant", "tool_calls": [TOOL]}]}, "invalid_value", "messages[1].tool_calls"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"top_p": -0.1}, "invalid_value", "top_p"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": 1.5}, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "invalid_value", "max_tokens"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"more": True}}, "unknown_parameter", "stream_options.more"),
        ({"modalities": ["audio"]}, "invalid_value", "modalities"),
        ({"modalities": ["text", "video"]}, "invalid_value", "modalities[1]"),
        ({"modalities": ["text", "audio"]}, "missing_required_parameter", "audio"),
        ({**SPOKEN, "audio": {"voice": "alloy", "format": "aac"}}, "invalid_value", "audio.format"),
        ({**SPOKEN, "audio": {"format": "wav"}}, "missing_required_parameter", "audio.voice"),
        ({**SPOKEN, "stream": True}, "unsupported_value", "audio.format"),
        ({"top_k": 3}, "unknown_parameter", "top_k"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(fields: Fields, code: str, param: str) -> None:
    assert fault(fields) == (400, code, param)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"1", b"\xff", b'{"model": NaN}', b"[" * 100_000])
def test_what_is_no_object_is_no_request(text: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse(text)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_an_error_does_not_repeat_what_is_said() -> None:
    secret = "my mother's maiden name"
    for fields in ({"messages": [{"role": "user", "content": {"said": secret}}]}, {"temperature": secret}):
        with pytest.raises(ApiError) as refused:
            parse(body(**fields))
        assert secret not in refused.value.message


def test_what_nobody_says_is_as_the_operator_has_it() -> None:
    config = chat_config(parse(body()), OFFER, seed=7)
    assert (config.answer.max_tokens, config.answer.max_context_tokens, config.answer.stop) == (50, 100, ())
    assert (config.text, config.draws, config.seed, config.answer.is_spoken) == (CHAT_TEXT, Draws.SAMPLED, 7, False)


def test_what_is_asked_for_is_what_the_engine_is_told() -> None:
    request = parse(body(temperature=1.5, top_p=0.5, seed=-1, stop=["a", "b"], max_completion_tokens=9, **SPOKEN))
    config = chat_config(request, OFFER, seed=7)
    assert (config.text.temperature, config.text.top_p) == (1.5, 0.5)
    assert config.answer.stop == ("a", "b")
    assert (config.answer.max_tokens, config.answer.is_spoken) == (9, True)
    assert config.seed >= 0
    assert config.seed != 7
    assert chat_config(parse(body(stop="a", max_tokens=3)), OFFER, seed=7).answer.stop == ("a",)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0), ("temperature", 1e-40), ("top_p", 0)])
def test_no_temperature_at_all_is_the_likeliest_answer(name: str, value: float) -> None:
    assert chat_config(parse(body(**{name: value})), OFFER, seed=7).draws is Draws.MOST_LIKELY


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    written: JsonValue = {"role": "assistant", "content": "Hi.", "refusal": None, "annotations": [], "audio": None}
    spoken: JsonValue = {
        "role": "assistant",
        "content": None,
        "tool_calls": None,
        "function_call": None,
        "audio": {"id": "audio_1", "data": "AAAA", "expires_at": 1, "transcript": "Hello."},
    }
    parts: JsonValue = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
    }
    messages = conversation(parse(body(messages=[HELLO, written, HELLO, spoken, HELLO, parts])), OFFER)
    assert [message.parts for message in messages[1::2]] == [("Hi.",), ("Hello.",), ("a\nb",)]


def test_a_developer_is_the_system() -> None:
    messages: JsonValue = [{"role": role, "content": "x", "name": "n"} for role in ("system", "developer", "user")]
    read = conversation(parse(body(messages=messages)), OFFER)
    assert [message.role.value for message in read] == ["system", "system", "user"]
