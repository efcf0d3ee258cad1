"""A client's WebSocket as the protocols use it: text in, text out, and one way to learn that it is gone.

Shown by tests/server/abuse.
"""

from __future__ import annotations

import asyncio

from fastapi import WebSocket, WebSocketDisconnect

ABNORMAL_CLOSURE = 1006
CLOSE_S = 1.0
"""A close frame leaves by then, or the connection is cut."""


class ClientSocket:
    """For one reader and one writer. The WebSocket is accepted."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def receive(self) -> str:
        """The next message; a binary one is no event, and neither is an empty one. Raises: WebSocketDisconnect."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        match message:
            case {"text": str(text)}:
                return text
            case _:
                return ""

    async def send(self, text: str) -> None:
        """Waits as long as the client does not read. Raises: WebSocketDisconnect."""
        try:
            await self._socket.send_text(text)
        except RuntimeError as error:
            # uvicorn has closed it by itself: bad UTF-8, too long a message, no pong. It is told with the next receive.
            raise WebSocketDisconnect(ABNORMAL_CLOSURE) from error

    async def close(self, code: int) -> None:
        """Unless it is gone. Who does not read is not waited for."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code)
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            return
