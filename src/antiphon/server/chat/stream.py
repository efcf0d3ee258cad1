"""An answer as server-sent events, for a client that reads them in time. Shown by tests/server/test_chat_stream.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Send

from antiphon.server.api_error import ApiError
from antiphon.server.chat.answer import Answer
from antiphon.server.outbox import SlowReaderError

Pieces = AsyncGenerator[Answer | str | bytes, None]
"""An answer that has begun, then what comes with it."""

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerStream:
    """Sends an answer as server-sent events. max_s: that the client may take to read what is sent."""

    def __init__(self, send: Send, max_s: float) -> None:
        self._send = send
        self._max_s = max_s

    async def tell(self, answer: Answer, pieces: Pieces, *, has_usage: bool) -> None:
        """Raises: SlowReaderError if the client does not read; it gets no end then, and its connection is cut."""
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await self._event(answer.chunk(answer.first_delta(), None, has_usage=has_usage))
        try:
            async for piece in pieces:
                assert not isinstance(piece, Answer), "an answer begins once"
                await self._event(answer.chunk(answer.delta(piece), None, has_usage=has_usage))
        except ApiError as error:
            await self._event(error.json())
            await self._end()
            return
        *deltas, last = answer.last_deltas()
        for delta in deltas:
            await self._event(answer.chunk(delta, None, has_usage=has_usage))
        await self._event(answer.chunk(last, answer.end, has_usage=has_usage))
        if has_usage:
            await self._event(answer.usage_chunk())
        await self._event("[DONE]")
        await self._end()

    async def _event(self, data: str) -> None:
        body = f"data: {data}\n\n".encode()
        try:
            async with asyncio.timeout(self._max_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError as error:
            raise SlowReaderError(f"the client has read nothing for {self._max_s} s") from error

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
