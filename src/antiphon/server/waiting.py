"""A server whose engine is loading: it shows the page and how far loading is, and lets nobody in yet.

It has the port until the engine is there; who connects in between waits in the system's queue and meets the other one.
Shown by tests/server/test_waiting.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from antiphon.server.api_error import ApiError
from antiphon.server.auth import LOADING
from antiphon.server.page import files_router

Say = Callable[[str], None]
"""Takes a line for the operator."""

THREAD = "waiting page"


class _Progress:
    """Owns the last line that loading said. Written by one thread, read by another."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.line = "starting"

    def hear(self, line: str) -> None:
        self._say(line)
        self.line = line


@contextmanager
def waiting_page(
    listening: socket.socket, max_calls: int, config: Callable[[ASGIApp], uvicorn.Config], say: Say
) -> Iterator[Say]:
    """Serve the page as long as the context lasts. Gives what loading shall say its lines to; `say` is told them too.

    listening: bound; it stays open. max_calls: for /ready. config: of a server of an app.
    """
    progress = _Progress(say)
    server = uvicorn.Server(config(waiting_app(lambda: progress.line, max_calls)))
    # From now on nobody is turned away, be the server there yet or not.
    listening.listen()
    # Its own copy, which it closes at its end.
    listening_too = listening.dup()
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listening_too])), name=THREAD, daemon=True
    )
    uvicorns = logging.getLogger("uvicorn.error")
    uvicorns.addFilter(_is_worth_telling)
    thread.start()
    try:
        yield progress.hear
    finally:
        server.should_exit = True
        thread.join()
        uvicorns.removeFilter(_is_worth_telling)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """That this server starts and ends is not: an operator waits for the other one."""
    return record.threadName != THREAD or record.levelno >= logging.WARNING


def waiting_app(line: Callable[[], str], max_calls: int) -> FastAPI:
    """line: what loading said last."""
    app = FastAPI(title="Antiphon", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(files_router())

    async def health() -> JSONResponse:
        return JSONResponse({"status": "loading", "reasons": []})

    async def ready() -> JSONResponse:
        reasons = [f"the model is loading: {line()}"]
        return JSONResponse(
            {"status": "not_ready", "reasons": reasons, "calls": {"now": 0, "most": max_calls}}, LOADING.status
        )

    async def refuse(_: Request) -> Response:
        return ApiError(LOADING.status, LOADING.code, line()).response()

    async def deny(websocket: WebSocket) -> None:
        await LOADING.deny(websocket)

    app.add_api_route("/health", health)
    app.add_api_route("/ready", ready)
    app.add_route("/{path:path}", refuse, methods=["GET", "POST"])
    app.add_api_websocket_route("/{path:path}", deny)
    return app
