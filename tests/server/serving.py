"""A real server on a free port of this machine, for tests of protocols."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI

from antiphon.aio import AsyncEngine
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.engine import Engine
from antiphon.live import LiveEngine
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.server.service import Service
from antiphon.voices import VoiceBook


@contextmanager
def serving(
    checkpoint: Path, session: SessionConfig, router: Callable[[Service], APIRouter], max_calls: int = 2
) -> Iterator[str]:
    """Serve one protocol; gives `host:port`."""
    opened = open_checkpoint(checkpoint)
    config = EngineConfig(everywhere("cpu", Placement.THREAD), Dtype.FLOAT32, max_calls=max_calls)
    book = VoiceBook(opened)
    with Engine.load(opened, config, session) as engine, LiveEngine(engine) as live:

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            app.include_router(router(Service(AsyncEngine(live), book, session, book.default())))
            yield

        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(FastAPI(lifespan=lifespan), log_level="warning", ws_max_size=2**27))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
