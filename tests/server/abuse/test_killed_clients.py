"""A client that is killed, wherever it is in its talk: its place, blocks and voice are back, and others come in."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator

import pytest
from websockets.asyncio.client import ClientConnection, connect

from server.abuse.conftest import StartWatched
from server.abuse.messages import SECOND
from server.abuse.speaking import admitted
from server.abuse.watching import Watched
from server.raw_client import RawClient, sound

Point = Callable[[RawClient], Awaitable[None]]


@pytest.fixture(scope="module")
def watched(start_watched: StartWatched) -> Iterator[Watched]:
    with start_watched(max_calls_per_key="1", resume_s="0.2") as watched:
        yield watched


def kill(connection: socket.socket) -> None:
    """Its next close is a reset, as of a process that is gone with data unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def kill_client(client: ClientConnection) -> None:
    kill(client.transport.get_extra_info("socket"))
    client.transport.abort()


async def lets_somebody_in(watched: Watched) -> None:
    """There is one place, and it is free at once or soon."""
    async with admitted(f"{watched.server.websocket_url}/v1/realtime", "") as other:
        client = RawClient(other)
        await client.until("session.created")
        await client.send("session.close")
        assert await client.closed() == 1000


async def at_once(client: RawClient) -> None:
    pass


async def when_it_was_greeted(client: RawClient) -> None:
    await client.until("session.created")


async def amid_its_sound(client: RawClient) -> None:
    await client.says(1)
    await client.send("input_audio_buffer.append", audio=sound(1, seconds=0.3))


async def when_its_call_was_asked_for(client: RawClient) -> None:
    await client.says(1)
    await client.send("response.create")
    await client.until("response.created")


async def while_an_answer_is_spoken(client: RawClient) -> None:
    await when_its_call_was_asked_for(client)
    await client.until("response.output_audio.delta")


async def while_it_takes_leave(client: RawClient) -> None:
    await while_an_answer_is_spoken(client)
    await client.send("session.close")


POINTS: tuple[Point, ...] = (
    at_once,
    when_it_was_greeted,
    amid_its_sound,
    when_its_call_was_asked_for,
    while_an_answer_is_spoken,
    while_it_takes_leave,
)


@pytest.mark.parametrize("query", ["", "?vendor_events=1"], ids=["official", "resumable"])
@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_of_a_client_that_is_killed(watched: Watched, point: Point, query: str) -> None:
    async def conversation() -> None:
        async with connect(f"{watched.server.websocket_url}/v1/realtime{query}") as client:
            await point(RawClient(client))
            kill_client(client)
        await lets_somebody_in(watched)

    asyncio.run(asyncio.wait_for(conversation(), 60))
    watched.wait_until_nothing_is_left()


HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("num_bytes", [0, 1, 40, len(HANDSHAKE) - 1, len(HANDSHAKE)])
def test_nothing_is_left_of_a_client_that_is_killed_in_its_handshake(watched: Watched, num_bytes: int) -> None:
    host, _, port = watched.url.removeprefix("http://").partition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(HANDSHAKE[:num_bytes])
            kill(client)
    asyncio.run(asyncio.wait_for(lets_somebody_in(watched), 60))
    watched.wait_until_nothing_is_left()


PREPARE = {"type": "prepare"}
CHUNK = {"type": "audio_chunk", "audio_base64": SECOND}


@pytest.mark.parametrize("num_read", [0, 1, 2, 3])
@pytest.mark.parametrize("said", [[PREPARE], [PREPARE, CHUNK, {"type": "stop"}]], ids=len)
def test_nothing_is_left_of_a_killed_client_of_the_demo(
    watched: Watched, said: list[dict[str, str]], num_read: int
) -> None:
    async def conversation() -> None:
        async with connect(f"{watched.server.websocket_url}/ws/duplex/a") as client:
            for message in said:
                await client.send(json.dumps(message))
            for _ in range(min(num_read, 1 + len(said))):
                await client.recv()
            kill_client(client)
        await lets_somebody_in(watched)

    asyncio.run(asyncio.wait_for(conversation(), 60))
    watched.wait_until_nothing_is_left()


def test_a_session_that_ends_while_its_client_comes_back_closes_the_new_socket_too(watched: Watched) -> None:
    async def conversation() -> None:
        address = f"{watched.server.websocket_url}/v1/realtime"
        async with connect(f"{address}?vendor_events=1") as first, connect(f"{address}?resume=1") as second:
            created = await RawClient(first).until("session.created")
            with watched.server.paused():
                await RawClient(first).send("session.close")
                await RawClient(second).send(
                    "session.resume",
                    session_id=created.text("session", "id"),
                    resume_token=created.text("resume_token"),
                    last_received_server_event_seq=1,
                )
            back = RawClient(second)
            assert await back.closed() in (1000, 1008)
            assert back.got[-1].kind == "session.closed" or back.got[-1].code == "unknown_session"

    asyncio.run(asyncio.wait_for(conversation(), 60))
