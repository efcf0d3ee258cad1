"""A server from its settings to its end: load, listen, and let running calls finish when it is told to stop.

It knows no protocol: the app is built by whoever is given to it. Shown by tests/server/test_run.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.aio import AsyncEngine
from antiphon.core.clock import Clock
from antiphon.errors import ConfigError
from antiphon.garbage import spare_what_is_there
from antiphon.loading import Running, running_engine
from antiphon.server.auth import Access, ApiKeys, KeyLimits, read_api_keys
from antiphon.server.door import Door
from antiphon.server.for_engine import engine_config, session_config
from antiphon.server.health import Surveyor, operations_routes
from antiphon.server.logs import configure
from antiphon.server.metrics import Direction, Metrics
from antiphon.server.settings import Resolved, ServerSettings
from antiphon.server.vad.choice import SpeechModels, speech_models
from antiphon.server.waiting import Say, waiting_page

CLEANUP_LIMIT_S = 5
"""What connections have to clean up after they were closed with 1012; then their tasks are cancelled."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """All that an app stands on.

    running: what opening a call needs: voices, settings for those that ask for nothing.
    speech: for callers whose client wants the server to tell when they speak.
    access: for routes that are no calls. door: for calls, which it knows by their headers too.
    """

    settings: ServerSettings
    running: Running
    speech: SpeechModels
    engine: AsyncEngine
    access: Access
    door: Door
    metrics: Metrics
    surveyor: Surveyor
    clock: Clock


BuildApp = Callable[[Host], ASGIApp]


def operations_app(host: Host) -> FastAPI:
    """An app with the operator's routes and no calls."""
    app = FastAPI(title="Antiphon")
    app.include_router(operations_routes(host.surveyor, host.door, host.metrics, host.settings.max_calls))
    return app


def serve(resolved: Resolved, build_app: BuildApp, say: Say) -> None:
    """Run until a signal ends it. Raises: ConfigError, CheckpointError before anything is served."""
    settings = resolved.settings
    configure(settings.log_level, settings.log_format, sys.stderr)
    for line in resolved.lines():
        say(line)
    # What can be wrong without a checkpoint is found before one is loaded.
    keys = None if settings.api_keys_file is None else read_api_keys(settings.api_keys_file)
    _check_tls(settings)
    speech = speech_models(settings.vad_model)
    say(f"server_vad hears speech by {speech.name}")
    with bound_socket(settings.host, settings.port) as listening, ExitStack() as stack:
        with waiting_page(listening, settings.max_calls, partial(_uvicorn_config, settings), say) as tell:
            running = stack.enter_context(loaded(settings, tell))

        async def live() -> None:
            await make_server(settings, keys, running, speech, build_app, say).serve(sockets=[listening])

        asyncio.run(live())


def loaded(settings: ServerSettings, say: Say) -> AbstractContextManager[Running]:
    """The engine of these settings, as long as the context lasts. Raises: CheckpointError, ConfigError."""
    return running_engine(settings.model, engine_config(settings), partial(session_config, settings), say)


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that nobody can connect to yet, so that the port is known to be free. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            raise ConfigError(f"nobody can listen at host {host}, port {port}: {error}") from error
        yield bound


def make_server(
    settings: ServerSettings,
    keys: ApiKeys | None,
    running: Running,
    speech: SpeechModels,
    build_app: BuildApp,
    say: Say,
) -> DrainingServer:
    """A server that serves nobody yet, for the running event loop. keys: None lets anybody call."""
    clock = LoopClock()
    metrics = Metrics(clock)
    engine = AsyncEngine(running.live)
    access = Access(keys, settings.allowed_origins)
    door = Door(access, KeyLimits(settings.max_calls_per_key), metrics)
    surveyor = Surveyor(engine.survey, settings.survey_limit_s)
    app = build_app(Host(settings, running, speech, engine, access, door, metrics, surveyor, clock))
    return DrainingServer(_uvicorn_config(settings, CountedBytes(app, metrics)), door, settings, say)


class LoopClock:
    """The event loop's clock."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


class DrainingServer(uvicorn.Server):
    """A uvicorn server that a first signal drains and a second one ends. Made in the event loop that runs it."""

    def __init__(self, config: uvicorn.Config, door: Door, settings: ServerSettings, say: Say) -> None:
        super().__init__(config)
        self._door = door
        self._drain_s = settings.drain_s
        # Later than who does not read is given up, who may still be told so.
        self._unread_s = 2 * settings.max_output_queue_s
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in sockets or []:
            _cut_unread(listening, self._unread_s)
        await super().startup(sockets)
        spare_what_is_there()  # the engine was, and now the app is there too
        for listening in sockets or []:
            host, port = listening.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._say(f"listening at {scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; this runs in the midst of anything."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """The first time: let nobody in, and give those inside their time. Again: end at once."""
        if self._draining is not None:
            # Not uvicorn's own way to hurry, which leaves the app's cleanup out.
            self.config.timeout_graceful_shutdown = 0
            self.should_exit = True
            return
        self._door.closed.set()
        self._say(f"stopping: {self._door.num_inside} calls have {self._drain_s} s to end; a second signal ends them")
        self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        """Whoever is still inside afterwards is closed by uvicorn, with 1012."""
        try:
            async with asyncio.timeout(self._drain_s):
                await self._door.wait_until_empty()
        except TimeoutError:
            logger.warning("%d calls did not end in time", self._door.num_inside)
        self.should_exit = True


def _cut_unread(listening: socket.socket, after_s: float) -> None:
    """Let the system cut connections on which nothing was taken for so long, be the peer asleep or gone.

    Nobody waits for them any more, but what was written there and not taken would stay for as long as the peer does.
    """
    if sys.platform == "linux":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * after_s))


class CountedBytes:
    """An app whose WebSocket messages are counted, both ways."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return

        async def counted_receive() -> Message:
            message = await receive()
            self._count(Direction.IN, message)
            return message

        async def counted_send(message: Message) -> None:
            self._count(Direction.OUT, message)
            await send(message)

        await self._app(scope, counted_receive, counted_send)

    def _count(self, direction: Direction, message: Message) -> None:
        for part in ("text", "bytes"):
            if part in message and message[part] is not None:
                content = message[part]
                num_bytes = len(content) if isinstance(content, bytes) else len(content.encode())
                self._metrics.count_bytes(direction, num_bytes)


def _uvicorn_config(settings: ServerSettings, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=settings.max_message_bytes,
        ws_ping_interval=settings.ping_s,
        ws_ping_timeout=settings.ping_s,
        # Sound in base64 hardly shrinks, and a small message cannot unfold to a large one.
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=CLEANUP_LIMIT_S,
        ssl_certfile=settings.tls_certificate_file,
        ssl_keyfile=settings.tls_key_file,
    )


def _check_tls(settings: ServerSettings) -> None:
    if settings.tls_certificate_file is None:
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_certificate_file, settings.tls_key_file)
    except OSError as error:
        files = f"{settings.tls_certificate_file} and {settings.tls_key_file}"
        raise ConfigError(f"{files} are no certificate and its key: {error}") from error
