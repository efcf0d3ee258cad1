"""A peer that stops reading, or that is gone without a word: its own session ends by a rule, the others go on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from server.abuse.conftest import KEY, NEIGHBOUR_KEY, StartWatched
from server.abuse.messages import MIB, SHORT
from server.abuse.neighbour import undisturbed_neighbour
from server.abuse.watching import Watched, resident_bytes

LIMIT_S = 60.0
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nAuthorization: Bearer {key}\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ECHOED = {"type": "session.update", "session": {"instructions": "x" * 60_000}}
"""Answered with as many bytes."""
REALTIME = [ECHOED] * 1000
DEMO = [{"type": "prepare"}, *[{"type": "audio_chunk", "audio_base64": SHORT}] * 1000]
"""Every second of it is answered with a second of sound."""


@contextmanager
def raw_peer(watched: Watched, path: str) -> Iterator[socket.socket]:
    """A WebSocket of which nobody reads, and that holds next to nothing."""
    host, _, port = watched.url.removeprefix("http://").partition(":")
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect((host, int(port)))
        peer.sendall(HANDSHAKE.format(path=path, key=KEY).encode())
        assert peer.recv(12) == b"HTTP/1.1 101"
        yield peer
        with suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)


def say_all(peer: socket.socket, messages: Sequence[object]) -> None:
    """As long as the server takes them."""
    with suppress(OSError):
        for message in messages:
            peer.sendall(Frame(Opcode.TEXT, json.dumps(message).encode()).serialize(mask=True))


def count_of(url: str, sample: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample)), 0.0)


@pytest.mark.parametrize(
    ("path", "messages"),
    [("/v1/realtime", REALTIME), ("/v1/realtime?vendor_events=1", REALTIME), ("/ws/duplex/a", DEMO)],
    ids=["official", "resumable", "demo"],
)
def test_a_reader_that_stops_loses_its_session_alone(
    start_watched: StartWatched, two_keys: str, path: str, messages: list[object]
) -> None:
    """Although it stays connected: it is given up, then cut, and what waited for it was bounded."""
    limits = {"max_output_queue_bytes": "200000", "max_output_queue_s": "1", "max_journal_bytes": "200000"}
    with start_watched(api_keys_file=two_keys, resume_s="0.2", **limits) as watched:
        before_bytes = most_bytes = resident_bytes()
        with raw_peer(watched, path) as peer:
            saying = threading.Thread(target=say_all, args=(peer, messages))
            with undisturbed_neighbour(watched.url, NEIGHBOUR_KEY):
                saying.start()
                ends_s = time.monotonic() + LIMIT_S
                while not count_of(watched.url, 'antiphon_errors_total{code="slow_reader"}'):
                    most_bytes = max(most_bytes, resident_bytes())
                    assert time.monotonic() < ends_s, "it was never given up"
            watched.wait_until_nothing_is_left()
        saying.join()
        assert most_bytes - before_bytes < 64 * MIB


@pytest.mark.parametrize(
    "path", ["/v1/realtime", "/v1/realtime?vendor_events=1", "/v1/realtime?resume=1", "/ws/duplex/a"]
)
def test_a_peer_that_answers_no_ping_is_gone(start_watched: StartWatched, path: str) -> None:
    with start_watched(ping_s="0.1", resume_s="0.2") as watched, raw_peer(watched, path):
        watched.wait_until_nothing_is_left()


@pytest.mark.parametrize("path", ["/v1/realtime", "/ws/duplex/a"])
def test_who_answers_pings_and_says_nothing_is_sent_away(start_watched: StartWatched, path: str) -> None:
    async def conversation(address: str) -> tuple[str, int | None]:
        async with connect(address) as client:
            last = ""
            async for message in client:
                last = str(message)
        return last, client.close_code

    with start_watched(idle_s="0.1") as watched:
        last, code = asyncio.run(asyncio.wait_for(conversation(watched.server.websocket_url + path), LIMIT_S))
        assert "idle_timeout" in last or json.loads(last)["type"] == "timeout"
        assert code == 1000
