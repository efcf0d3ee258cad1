"""A client that knows nothing but JSON over a WebSocket, for what no official client does."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

LIMIT_S = 60.0
"""Of a whole conversation; what takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Event:
    """What the server said; a path leads to a field of it."""

    fields: dict[str, JsonValue]

    @property
    def kind(self) -> str:
        return self.text("type")

    @property
    def code(self) -> str:
        """Of an error."""
        return self.text("error", "code")

    def text(self, *path: str) -> str:
        value = self._at(path)
        assert isinstance(value, str), f"{path} is {value!r}"
        return value

    def number(self, *path: str) -> int:
        value = self._at(path)
        assert isinstance(value, int), f"{path} is {value!r}"
        return value

    def _at(self, path: tuple[str, ...]) -> JsonValue:
        value: JsonValue = self.fields
        for name in path:
            assert isinstance(value, dict), f"{path} in {self.fields}"
            value = value[name]
        return value


class RawClient:
    """got: all events so far."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.got: list[Event] = []

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def recv(self) -> Event:
        event = Event(json.loads(await self.socket.recv()))
        self.got.append(event)
        return event

    async def until(self, kind: str) -> Event:
        """The next event of this kind; an error on the way is one of the test."""
        while (event := await self.recv()).kind != kind:
            assert event.kind != "error", event
        return event

    async def error(self) -> Event:
        """The next error, whatever comes before it."""
        while (event := await self.recv()).kind != "error":
            pass
        return event

    async def says(self, seconds: int, seed: int = 0) -> None:
        """Noise, a second a message."""
        for second in range(seconds):
            await self.send("input_audio_buffer.append", audio=sound(seed + second))

    async def waits(self, seconds: int) -> None:
        """Silence, sent at once: the call need not wait for the clock."""
        for _ in range(seconds):
            await self.send("input_audio_buffer.append", audio=sound(0, loudness=0))

    async def asks(self, seconds: int = 8, **response: object) -> None:
        """Ask for an answer and wait long enough for all of it."""
        await self.send("response.create", response=response)
        await self.waits(seconds)

    async def closed(self) -> int:
        """Read to the end. Returns the close code."""
        try:
            while True:
                await self.recv()
        except ConnectionClosed:
            assert self.socket.close_code is not None
            return self.socket.close_code

    def cut(self) -> None:
        """The connection is gone without a word."""
        self.socket.transport.abort()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.got]

    def audio(self) -> bytes:
        return audio_of(self.got)


def audio_of(events: list[Event]) -> bytes:
    deltas = [event.text("delta") for event in events if event.kind == "response.output_audio.delta"]
    return b"".join(map(base64.b64decode, deltas))


def sound(seed: int, loudness: float = 0.05, seconds: float = 1.0) -> str:
    """24 kHz PCM16."""
    noise = loudness * np.random.default_rng(seed).standard_normal(round(24_000 * seconds))
    return base64.b64encode((noise * 32767).clip(-32768, 32767).astype("<i2").tobytes()).decode()


@asynccontextmanager
async def connected(url: str, query: str = "", key: str = "", path: str = "/v1/realtime") -> AsyncIterator[RawClient]:
    """url: of the server, http://..."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = url.replace("http://", "ws://", 1)
    async with connect(f"{address}{path}{query}", max_size=2**20, additional_headers=headers) as socket:
        yield RawClient(socket)


def talk(conversation: Callable[[], Awaitable[None]], limit_s: float = LIMIT_S) -> None:
    """Let a conversation happen, within its time."""

    async def main() -> None:
        async with asyncio.timeout(limit_s):
            await conversation()

    asyncio.run(main())
