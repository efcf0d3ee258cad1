"""The sockets of `/v1/realtime`: a handshake, a reader, a writer; what is said in between is `hosting.py`'s.

Shown by tests/server/test_realtime_socket.py.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from antiphon.server.auth import POLICY_VIOLATION, Refusal
from antiphon.server.client_socket import ABNORMAL_CLOSURE, ClientSocket
from antiphon.server.events.client import EventError, SessionResume, parse
from antiphon.server.events.ids import Ids
from antiphon.server.events.server import ErrorDetails, ErrorEvent
from antiphon.server.outbox import Outbox
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.hosting import Attachment, Hosted, Sessions
from antiphon.server.realtime.incoming import read
from antiphon.server.service import Service

FLUSH_S = 5.0
"""What was told leaves by then, after the session's end."""

REALTIME_PROTOCOL = "realtime"
"""The official subprotocol; a page offers it beside the one that is its key."""

_ON = ("1", "true", "on")


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    sessions = Sessions(service)

    async def talk(socket: WebSocket) -> None:
        if _asks(socket, "resume"):
            await _resume(service, sessions, socket)
        else:
            is_resumable = _asks(socket, "vendor_events") or _asks(socket, "duplex")
            await _begin(service, sessions, socket, is_resumable=is_resumable)

    async def talk_duplex(socket: WebSocket) -> None:
        if _asks(socket, "resume"):
            await _resume(service, sessions, socket)
        else:
            await _begin(service, sessions, socket, is_resumable=True)

    routes.add_api_websocket_route("/v1/realtime", talk)
    # Where vLLM-Omni's clients look for it.
    routes.add_api_websocket_route("/v1/duplex", talk_duplex)
    return routes


def _asks(socket: WebSocket, name: str) -> bool:
    return socket.query_params.get(name, "").lower() in _ON


def _protocol(socket: WebSocket) -> str | None:
    """Of those that the client offers; a browser that offers some hangs up if none is chosen."""
    return REALTIME_PROTOCOL if REALTIME_PROTOCOL in socket.scope["subprotocols"] else None


async def _begin(service: Service, sessions: Sessions, socket: WebSocket, *, is_resumable: bool) -> None:
    """is_resumable: for a client that knows vendors' events."""
    with ExitStack() as stack:
        refusal = stack.enter_context(service.door.enter(socket.headers))
        if refusal is not None:
            await refusal.deny(socket)
            return
        owner = service.door.identify(socket.headers)
        assert not isinstance(owner, Refusal), "who is inside was known at the door"
        await socket.accept(_protocol(socket))
        attachment = Attachment(Outbox(service.limits.outbox))
        # The place is the session's from now on.
        hosted = sessions.begin(owner, stack.pop_all(), attachment, is_resumable=is_resumable)
    await _Socket(service, ClientSocket(socket), attachment, hosted).run()


async def _resume(service: Service, sessions: Sessions, socket: WebSocket) -> None:
    """A socket that takes up a session has no place of its own: it has the session's."""
    owner = service.door.identify(socket.headers)
    if isinstance(owner, Refusal):
        await owner.deny(socket)
        return
    await socket.accept(_protocol(socket))
    client, limit_s = ClientSocket(socket), service.limits.first_message_s
    attachment = Attachment(Outbox(service.limits.outbox))
    try:
        async with asyncio.timeout(limit_s):
            event = parse(await client.receive())
        if not isinstance(event, SessionResume):
            raise RequestError("invalid_session_resume", "the first message here is session.resume", "type")
        hosted = sessions.resume(event, owner, attachment)
    except WebSocketDisconnect:
        return
    except TimeoutError:
        await _refuse(client, RequestError("config_timeout", f"session.resume did not come in {limit_s} s"))
    except (RequestError, EventError) as error:
        await _refuse(client, error)
    else:
        await _Socket(service, client, attachment, hosted).run()


async def _refuse(client: ClientSocket, error: RequestError | EventError) -> None:
    details = ErrorDetails(type="invalid_request_error", code=error.code, message=str(error), param=error.param)
    with suppress(WebSocketDisconnect):
        await client.send(ErrorEvent(event_id=Ids().event(), error=details).to_json())
    await client.close(POLICY_VIOLATION)


class _Socket:
    """Carries messages between a socket and its session until one of them ends."""

    def __init__(self, service: Service, client: ClientSocket, attachment: Attachment, hosted: Hosted) -> None:
        self._service = service
        self._client = client
        self._attachment = attachment
        self._hosted = hosted

    async def run(self) -> None:
        reader, writer = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait((reader, writer, self._attachment.closed), return_when=asyncio.FIRST_COMPLETED)
            code = self._attachment.closed.result() if self._attachment.closed.done() else ABNORMAL_CLOSURE
            if code != ABNORMAL_CLOSURE:
                await self._flush(writer)
        finally:
            reader.cancel()
            writer.cancel()
            self._hosted.left(self._attachment)
        if code != ABNORMAL_CLOSURE:
            await self._client.close(code)

    async def _read(self) -> None:
        """Until the client has gone."""
        try:
            while True:
                text = await self._client.receive()
                # Taken before the message is read, so that a flood waits in the network.
                await self._attachment.room.acquire()
                self._hosted.said(self._attachment, await read(text, self._service.book))
        except WebSocketDisconnect:
            return

    async def _write(self) -> None:
        """Until the client has gone."""
        outbox = self._attachment.outbox
        try:
            while True:
                await self._client.send(await outbox.next())
                outbox.sent()
        except WebSocketDisconnect:
            return

    async def _flush(self, writer: asyncio.Task[None]) -> None:
        """Let what was told leave, unless nobody reads it any more."""
        flushed = asyncio.create_task(self._attachment.outbox.flushed())
        await asyncio.wait((flushed, writer), timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        flushed.cancel()
