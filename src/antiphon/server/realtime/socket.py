"""The socket of a realtime session: messages in, events out, and the time between them.

One task reads, one writes; whatever happens is handled by a third, one thing at a time. Shown by
tests/server/test_realtime_socket.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from antiphon.aio import AsyncSession
from antiphon.happenings import Happening
from antiphon.models.minicpmo.prompt import wrap
from antiphon.server.events.client import EventError, parse
from antiphon.server.events.ids import Ids
from antiphon.server.events.server import ServerEvent
from antiphon.server.events.session import Session
from antiphon.server.outbox import Outbox, SlowReaderError
from antiphon.server.pacing import PacingConfig
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.session import RealtimeSession
from antiphon.server.service import Service

MODEL_NAME = "minicpm-o-4_5"
CLOSED_NORMALLY, CLOSED_TOO_SLOW = 1000, 1008


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    async def talk(socket: WebSocket) -> None:
        with service.door.enter(socket.headers) as refusal:
            if refusal is not None:
                await refusal.deny(socket)
                return
            await _Connection(service, socket).run()

    routes.add_api_websocket_route("/v1/realtime", talk)
    return routes


@dataclass(frozen=True, slots=True)
class _Gone:
    """The client closed its end."""


class _Connection:
    """One client from its handshake to its end."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self._service = service
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[str | Happening | _Gone] = asyncio.Queue()
        self._outbox = Outbox(service.limits.outbox)
        self._last_message_s = self._loop.time()
        self._follower: asyncio.Task[None] | None = None
        ids = Ids()
        session = Session(id=ids.session(), model=MODEL_NAME, instructions="")
        self._session = RealtimeSession(ids, session, self._open, PacingConfig(), service.limits.max_input_samples)

    async def run(self) -> None:
        await self._socket.accept()
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        code = CLOSED_NORMALLY
        try:
            self._tell(self._session.greet())
            while not self._session.is_over:
                await self._handle_next()
        except SlowReaderError as error:
            self._service.metrics.count_error(error.code)
            code = CLOSED_TOO_SLOW
        finally:
            self._session.leave()
            if code == CLOSED_NORMALLY:
                await self._flush(writer)
            for task in (reader, writer, self._follower):
                if task is not None:
                    task.cancel()
        if self._socket.client_state.name == "CONNECTED":
            await self._socket.close(code)

    async def _handle_next(self) -> None:
        """Wait for the next thing and handle it, or do what is due until then."""
        now_s = self._loop.time()
        idle_s = self._last_message_s + self._service.limits.idle_s
        try:
            async with asyncio.timeout_at(min(self._session.next_due_s(now_s), idle_s)):
                came = await self._inbox.get()
        except TimeoutError:
            now_s = self._loop.time()
            if now_s >= idle_s:
                waited_s = self._service.limits.idle_s
                error = RequestError("idle_timeout", f"nothing came for {waited_s} s; the session is over")
                self._tell([self._session.error(error, None)])
                self._session.is_over = True
                return
            self._session.keep_going(now_s)
            self._tell(self._session.due(now_s))
            return
        now_s = self._loop.time()
        match came:
            case _Gone():
                self._session.is_over = True
            case str():
                self._last_message_s = now_s
                self._obey(came, now_s)
            case happening:
                self._tell(self._session.happened(happening, now_s))

    def _obey(self, text: str, now_s: float) -> None:
        try:
            event = parse(text)
        except EventError as error:
            self._tell([self._session.error(error, error.event_id)])
            return
        self._tell(self._session.obey(event, now_s))

    def _open(self, instructions: str) -> AsyncSession:
        config = self._service.session
        if instructions:
            config = replace(config, prompt=wrap(instructions))
        call = self._service.open(config, self._service.voice)
        self._follower = asyncio.create_task(self._follow(call))
        return call

    async def _follow(self, call: AsyncSession) -> None:
        async for happening in self._service.happenings(call):
            self._inbox.put_nowait(happening)

    async def _read(self) -> None:
        try:
            while True:
                self._inbox.put_nowait(await self._socket.receive_text())
        except WebSocketDisconnect:
            self._inbox.put_nowait(_Gone())

    async def _write(self) -> None:
        try:
            while True:
                await self._socket.send_text(await self._outbox.next())
                self._outbox.sent()
        except WebSocketDisconnect:
            self._inbox.put_nowait(_Gone())

    async def _flush(self, writer: asyncio.Task[None]) -> None:
        """Let what was told leave, unless nobody reads it any more."""
        flushed = asyncio.create_task(self._outbox.flushed())
        await asyncio.wait((flushed, writer), timeout=5, return_when=asyncio.FIRST_COMPLETED)
        flushed.cancel()

    def _tell(self, events: Iterable[ServerEvent]) -> None:
        for event in events:
            self._outbox.put(event.to_json(), self._loop.time())
