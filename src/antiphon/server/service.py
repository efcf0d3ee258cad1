"""What all protocols of the server stand on: who may come in, one engine, its voices, and what a call is by default.

Shown by the tests of the protocols.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from antiphon.aio import AsyncChat, AsyncEngine, AsyncSession
from antiphon.config import SessionConfig, WindowLimits, WindowMode
from antiphon.happenings import Happening, Speech
from antiphon.server.door import Door
from antiphon.server.journal import JournalConfig
from antiphon.server.logs import in_session, log_event
from antiphon.server.metrics import Metrics
from antiphon.server.outbox import OutboxLimits
from antiphon.server.vad.choice import SpeechModels
from antiphon.voices import PreparedVoice, VoiceBook

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Limits:
    """idle_s: a client that sends nothing for so long is closed. max_input_samples: heard later. outbox: of each.

    resume_s: a client whose connection was cut may come back for so long. journal: what is kept for it.
    first_message_s: it says by then to which session.
    """

    idle_s: float
    max_input_samples: int
    outbox: OutboxLimits
    resume_s: float
    first_message_s: float
    journal: JournalConfig


def random_seed() -> int:
    return secrets.randbelow(2**31)


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """session: a call that asks for nothing else. voice: what it speaks with. draw_seed: of a call that names none.

    model: its name for clients.
    mode, window_limits: of a window that a call asks for in part. marker: ids in front of `previous` text.
    speech: for callers whose client wants the server to tell when they speak.
    """

    model: str
    engine: AsyncEngine
    book: VoiceBook
    session: SessionConfig
    voice: PreparedVoice
    mode: WindowMode
    window_limits: WindowLimits
    marker: tuple[int, ...]
    speech: SpeechModels
    door: Door
    metrics: Metrics
    limits: Limits
    draw_seed: Callable[[], int]

    def seeded(self) -> SessionConfig:
        """Of a call that asks for nothing and draws from a seed of its own."""
        return replace(self.session, seed=self.draw_seed())

    def open(self, config: SessionConfig, voice: PreparedVoice) -> AsyncSession:
        """Start a call; its first happening says whether it could."""
        return self.engine.open(f"call_{uuid.uuid4().hex}", config, voice.reference, voice.prompt)

    async def happenings(self, session: AsyncSession | AsyncChat) -> AsyncGenerator[Happening, None]:
        """Everything that happens in a call or a chat, counted and logged. For one reader."""
        watch = self.metrics.watch_chat() if isinstance(session, AsyncChat) else self.metrics.watch()
        try:
            async for happening in session.happenings():
                watch.observe(happening)
                if not isinstance(happening, Speech):
                    with in_session(session.session_id):
                        log_event(happening)
                yield happening
        finally:
            watch.end("disconnected")

    async def prepare_voice(self, samples: Samples, rate_hz: int) -> PreparedVoice:
        """samples: [channels, n] float32. Takes up to seconds, not of the event loop's. Raises: AudioError."""
        return await asyncio.to_thread(self.book.prepare, samples, rate_hz)
