"""The sound that a client sends, over a socket: none of a turn is kept back when it ends."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from antiphon.server.app import build_app
from server.raw_client import RawClient, connected, talk
from server.servers import RunningServer, StartServer

TENTH_S = {"audio/pcm": base64.b64encode(bytes(2 * 2400)).decode(), "audio/pcmu": base64.b64encode(bytes(800)).decode()}
"""A tenth of a second of each format: the least that may be a turn."""


@pytest.fixture
def running(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running


async def speak_in(form: str, client: RawClient) -> None:
    """No answer comes that is not asked for."""
    told = {"format": {"type": form}, "turn_detection": None}
    await client.send("session.update", session={"type": "realtime", "audio": {"input": told}})
    await client.until("session.updated")


@pytest.mark.parametrize("form", TENTH_S)
def test_all_that_was_said_of_a_turn_is_in_it(running: RunningServer, form: str) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await speak_in(form, client)
            await client.send("input_audio_buffer.append", audio=TENTH_S[form])
            await client.send("input_audio_buffer.commit")
            await client.until("input_audio_buffer.committed")
            await client.send("response.create")
            await client.send("response.cancel")
            done = await client.until("response.done")
            assert done.number("response", "usage", "input_token_details", "audio_tokens") == 1

    talk(conversation)


@pytest.mark.parametrize("form", TENTH_S)
def test_nothing_is_left_of_what_was_cleared(running: RunningServer, form: str) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await speak_in(form, client)
            await client.send("input_audio_buffer.append", audio=TENTH_S[form])
            await client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
            await client.send("input_audio_buffer.commit")
            error = await client.error()
            assert error.code == "input_audio_buffer_commit_empty"
            assert " 0 ms" in error.text("error", "message")

    talk(conversation)
