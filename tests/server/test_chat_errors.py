"""Requests that are not answered, and clients that go: who is told what, and that nothing is left of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from pydantic import JsonValue

from antiphon.core.events import SessionEnded, SessionOpened
from antiphon.live import LiveSession
from antiphon.loading import Running
from antiphon.server.api_error import ApiError
from antiphon.server.app import build_app
from antiphon.server.run import loaded
from server.servers import RunningServer, StartServer, running_server, tiny_settings

HELLO: JsonValue = {"role": "user", "content": "Hello"}
LONG: dict[str, JsonValue] = {
    "stream": True,
    "seed": 4,
    "max_tokens": 300,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "pcm16"},
}
"""An answer that takes seconds."""


@pytest.fixture
def server(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server(build_app) as running:
        yield running


def request(**fields: JsonValue) -> dict[str, JsonValue]:
    return {"model": "tiny", "messages": [HELLO], "seed": 1, "max_tokens": 30, **fields}


def ask(server: RunningServer, **fields: JsonValue) -> httpx.Response:
    return ask_as(server, {}, **fields)


def ask_as(server: RunningServer, headers: dict[str, str], /, **fields: JsonValue) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=request(**fields), headers=headers, timeout=60)


def refused(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error in OpenAI's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
        response.status_code, "invalid_request_error"
    )
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))
    return response.status_code, error["code"]


@contextmanager
def asking(server: RunningServer, **fields: JsonValue) -> Iterator[Iterator[str]]:
    """The lines of an answer that goes on as long as the context lasts, if it is long enough; it has begun."""
    url, body = f"{server.url}/v1/chat/completions", request(**{**LONG, **fields})
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert '"role":"assistant"' in next(lines)
        yield lines


def test_a_chat_needs_a_key_where_calls_do(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with start_server(build_app, api_keys_file=str(keys)) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert refused(ask_as(server, headers)) == (401, "invalid_api_key")
            for path in ("models", "models/tiny"):
                assert refused(httpx.get(f"{server.url}/v1/{path}", headers=headers)) == (401, "invalid_api_key")
        right = {"Authorization": "Bearer right"}
        assert ask_as(server, right).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers=right).status_code == 200


def test_a_foreign_page_may_not_chat(server: RunningServer) -> None:
    assert refused(ask_as(server, {"Origin": "https://bad.example"})) == (403, "origin_not_allowed")


def test_what_is_not_there_is_not_found(server: RunningServer) -> None:
    assert refused(ask(server, model="gpt-5")) == (404, "model_not_found")
    assert refused(httpx.get(f"{server.url}/v1/models/gpt-5")) == (404, "model_not_found")
    assert refused(httpx.post(f"{server.url}/v1/completions")) == (404, "not_found")
    assert refused(httpx.get(f"{server.url}/v1/chat/completions")) == (405, "method_not_allowed")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_body_that_is_no_request_is_refused(server: RunningServer, content: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", content=content)
    assert refused(response) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"reply_in": "verse"}, "unknown_parameter", "reply_in"),
        ({"messages": [HELLO] * 400}, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "invalid_input", "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}
                ]
            },
            "invalid_image",
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}]}
                ]
            },
            "invalid_image",
            "messages",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_told(
    server: RunningServer, fields: dict[str, JsonValue], code: str, param: str
) -> None:
    for stream in (False, True):
        response = ask(server, **{"stream": stream, **fields})
        assert refused(response) == (400, code)
        assert response.json()["error"]["param"] == param


def test_a_picture_of_the_network_is_refused_by_name(server: RunningServer) -> None:
    part: JsonValue = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
    message = ask(server, messages=[{"role": "user", "content": [part]}]).json()["error"]["message"]
    assert "data:" in message
    assert "network" in message


def test_a_body_over_the_limit_is_refused_and_the_next_one_is_not(start_server: StartServer) -> None:
    with start_server(build_app, max_message_bytes="1000") as server:
        for size in (1001, 2_000_000):
            content = json.dumps(request(user="x" * size)).encode()
            assert refused(httpx.post(f"{server.url}/v1/chat/completions", content=content)) == (
                413,
                "request_too_large",
            )
        assert ask(server).status_code == 200


def test_a_key_has_only_so_many_chats_and_calls_at_once(start_server: StartServer) -> None:
    with start_server(build_app, max_calls_per_key="1") as server:
        with asking(server):
            assert refused(ask(server)) == (429, "too_many_calls")
        until_nobody_is_left(server)
        assert ask(server).status_code == 200


def opened(running: Running, number: int) -> tuple[LiveSession, bool]:
    """A call, and whether there was room for it."""
    voice = running.voices.default()
    session = running.live.open(f"call {number}", running.session, torch.empty(0), voice.prompt)
    first = next(iter(session.happenings()))
    assert isinstance(first, SessionOpened | SessionEnded)
    return session, isinstance(first, SessionOpened)


def test_a_chat_that_finds_no_room_is_told_to_come_again(server: RunningServer, tiny_engine: Running) -> None:
    calls: list[LiveSession] = []
    while True:
        call, has_room = opened(tiny_engine, len(calls))
        if not has_room:
            break
        calls.append(call)
    for stream in (False, True):
        assert refused(ask(server, stream=stream, max_tokens=2000)) == (503, "resource_exhausted")
    for call in calls:
        call.close()
    until_nobody_is_left(server)
    assert ask(server).status_code == 200


def test_a_stopping_server_takes_no_chat_and_finishes_those_inside(start_server: StartServer) -> None:
    with start_server(build_app, drain_s="60") as server, asking(server, max_tokens=40) as lines:
        server.stop()
        while not httpx.get(f"{server.url}/ready").json()["reasons"]:
            pass
        assert refused(ask(server)) == (503, "draining")
        *_, last = lines
        assert last == "[DONE]"


def until_nobody_is_left(server: RunningServer) -> None:
    """Until the engine has given back all that sessions held."""
    while True:
        if sessions_and_chats(server) == (0, 0):
            return


@pytest.mark.parametrize("fields", [{}, {"stream": False}])
def test_when_a_client_goes_its_chat_ends_and_gives_everything_back(
    start_server: StartServer, fields: dict[str, JsonValue]
) -> None:
    with start_server(build_app) as server:
        if fields:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/chat/completions", json=request(**{**LONG, **fields}), timeout=0.2)
        else:
            with asking(server):
                pass
        until_nobody_is_left(server)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'antiphon_chats_ended_total{code="disconnected"} 1.0' in metrics
        assert ask(server).status_code == 200


def test_the_chat_of_a_client_that_has_gone_ends_before_its_answer_does(server: RunningServer) -> None:
    """It would be answered after the other one, since one speaks at a time."""
    with asking(server):
        with asking(server):
            assert sessions_and_chats(server) == (2, 2)
        while (found := sessions_and_chats(server)) != (1, 1):
            assert found[1], "the other answer was over first"


def sessions_and_chats(server: RunningServer) -> tuple[int, int]:
    """Of the engine, and that the server answers."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return int(float(values['antiphon_stage_sessions{stage="thinker"}'])), int(float(values["antiphon_chats"]))


def test_an_engine_that_stops_in_the_midst_of_an_answer_is_told(tiny_checkpoint: Path) -> None:
    settings, said = tiny_settings(tiny_checkpoint), list[str]()
    with loaded(settings, said.append) as running, running_server(settings, running, build_app) as server:
        with asking(server) as lines:
            running.live.__exit__(None, None, None)
            *_, last = lines
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_stopped")
        assert refused(ask(server)) == (503, "engine_stopped")


def test_a_fault_of_ours_is_the_servers() -> None:
    assert ApiError.by_code("internal_error", "broken").status == 500
    assert ApiError.by_code("speech_lost", "never told so").body == ApiError(500, "speech_lost", "never told so").body
