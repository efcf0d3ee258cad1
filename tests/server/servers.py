"""Servers on the tiny checkpoint and a free port, each in a thread of its own; and an app to try them with."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from fastapi import FastAPI, WebSocket

from antiphon.loading import Running
from antiphon.server.auth import read_api_keys
from antiphon.server.run import BuildApp, DrainingServer, Host, bound_socket, make_server, operations_app
from antiphon.server.settings import ServerSettings, from_flags, resolve
from antiphon.server.vad.choice import speech_models


@dataclass(frozen=True, slots=True, eq=False)
class RunningServer:
    """url: http://host:port, or https. stop: what a signal does, from any thread. loop: the one that it runs in."""

    url: str
    stop: Callable[[], None]
    loop: asyncio.AbstractEventLoop

    @property
    def websocket_url(self) -> str:
        return self.url.replace("http", "ws", 1)

    def tasks(self) -> list[str]:
        """What its event loop is at, in words; for any thread."""

        async def look() -> list[str]:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            return [str(task.get_coro()).partition(" at ")[0] for task in others]

        return asyncio.run_coroutine_threadsafe(look(), self.loop).result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Its event loop does nothing inside, so that what is sent meanwhile comes to it all at once."""
        is_paused, may_go_on = threading.Event(), threading.Event()

        def pause() -> None:
            is_paused.set()
            may_go_on.wait()

        self.loop.call_soon_threadsafe(pause)
        is_paused.wait()
        try:
            yield
        finally:
            may_go_on.set()


StartServer = Callable[..., AbstractContextManager[RunningServer]]
"""`start(build_app, **options)`, options as text."""


def tiny_settings(checkpoint: Path, **options: str) -> ServerSettings:
    """options: as text. What is not said fits the tiny checkpoint."""
    given = {"model": str(checkpoint), "port": "0", "max_calls": "4"}
    window = {"window_high_tokens": "400", "window_low_tokens": "300", "max_prompt_tokens": "300"}
    return resolve(from_flags({**given, **window, **options})).settings


@contextmanager
def running_server(
    settings: ServerSettings, engine: Running, build_app: BuildApp, send_buffer_bytes: int | None = None
) -> Iterator[RunningServer]:
    """A server that listens, until the context ends. send_buffer_bytes: of the system, for each connection."""
    keys = None if settings.api_keys_file is None else read_api_keys(settings.api_keys_file)
    speech = speech_models(settings.vad_model)
    said: SimpleQueue[str] = SimpleQueue()
    servers: list[DrainingServer] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def live() -> None:
        loops.append(asyncio.get_running_loop())
        servers.append(make_server(settings, keys, engine, speech, build_app, said.put))
        await servers[0].serve(sockets=[listening])

    def stop() -> None:
        if not loops[0].is_closed():
            loops[0].call_soon_threadsafe(servers[0].stop)

    with bound_socket(settings.host, settings.port) as listening:
        if send_buffer_bytes is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        thread = threading.Thread(target=lambda: asyncio.run(live()), name="server")
        thread.start()
        try:
            _, _, url = said.get(timeout=60).rpartition(" ")
            yield RunningServer(url, stop, loops[0])
        finally:
            stop()
            stop()
            thread.join()


def echo_app(host: Host) -> FastAPI:
    """Calls that say what they hear, one at `/echo` for each WebSocket."""
    app = operations_app(host)

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        with host.door.enter(websocket.headers) as refusal:
            if refusal is not None:
                await refusal.deny(websocket)
                return
            await websocket.accept()
            async for text in websocket.iter_text():
                await websocket.send_text(text)

    return app
