"""A server with the measure of what it holds: what is there when nobody calls is there again when all have gone."""

from __future__ import annotations

import gc
import logging
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from antiphon.aio import AsyncSession
from antiphon.live import LiveEngine
from antiphon.server.journal import Journal
from antiphon.server.outbox import Outbox
from antiphon.server.realtime.feeding import Feeder
from antiphon.server.realtime.hosting import Attachment, Hosted
from antiphon.server.realtime.session import RealtimeSession
from server.servers import RunningServer

LIMIT_S = 30.0
"""In which a server has to be rid of whoever has gone."""
QUEUES = (WebSocketsSansIOProtocol, AsyncSession, Outbox, Journal, Feeder, Attachment, Hosted, RealtimeSession)
"""Where bytes of a client wait: none of these outlives its client."""
NO_FAILURES = (
    "Invalid UTF-8 sequence received from client.",
    "ASGI callable returned without completing handshake.",
)
"""What uvicorn calls errors: a client that it closes with 1007, and a handshake that was refused with a status."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a server and its engine hold. queues: objects by class. tasks: of the event loop."""

    sessions: tuple[int, int, int]
    free_blocks: int
    unreserved_blocks: int
    prompt_blocks: int
    voices: int
    turn_rooms: int
    turns_waiting: int
    chunks_waiting: int
    speaking: int
    queues: Counter[str]
    tasks: Counter[str]


class Watched:
    """A running server that held nobody when this was made."""

    def __init__(self, server: RunningServer, engine: LiveEngine) -> None:
        self.server = server
        self.url = server.url
        self._engine = engine
        self._before = self.held()

    def held(self) -> Held:
        counts = self._engine.survey()
        thinker, talker, code2wav = counts.thinker.counts, counts.talker.counts, counts.code2wav.counts
        gc.collect()
        queues = Counter(type(one).__name__ for one in gc.get_objects() if type(one) in QUEUES)
        return Held(
            sessions=(counts.thinker.num_sessions, counts.talker.num_sessions, counts.code2wav.num_sessions),
            free_blocks=thinker.num_free_blocks,
            unreserved_blocks=thinker.num_unreserved_blocks,
            prompt_blocks=thinker.prompts.num_blocks,
            voices=code2wav.voices.num_voices,
            turn_rooms=talker.num_rooms,
            turns_waiting=talker.num_waiting,
            chunks_waiting=code2wav.num_due,
            speaking=code2wav.num_speaking,
            queues=queues,
            tasks=Counter(self.server.tasks()),
        )

    def wait_until_nothing_is_left(self) -> None:
        """Nobody calls any more."""
        ends_s = time.monotonic() + LIMIT_S
        while (left := self.held()) != self._before:
            assert time.monotonic() < ends_s, f"{left} instead of {self._before}"
        ready = httpx.get(f"{self.url}/ready").json()
        assert ready["calls"]["now"] == 0, ready


class _Failures(logging.Handler):
    """Keeps what the server calls a failure, in words: a record would keep all that it is about."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() not in NO_FAILURES:
            self.said.append(self.format(record))


def _forget_frames(record: logging.LogRecord) -> bool:
    """pytest keeps all records, and with their frames the connections that they are about."""
    if record.getMessage() in NO_FAILURES:
        record.exc_info = None
    return True


@contextmanager
def logged_failures() -> Iterator[list[str]]:
    handler, uvicorn = _Failures(), logging.getLogger("uvicorn.error")
    logging.getLogger().addHandler(handler)
    uvicorn.addFilter(_forget_frames)
    try:
        yield handler.said
    finally:
        logging.getLogger().removeHandler(handler)
        uvicorn.removeFilter(_forget_frames)


def resident_bytes() -> int:
    """Of this process, clients and server."""
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])
