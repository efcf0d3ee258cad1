"""What all protocols of the server stand on: one engine, its voices, and what a call is when nobody asks for more.

Shown by the tests of the protocols.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.aio import AsyncEngine, AsyncSession
from antiphon.config import SessionConfig
from antiphon.voices import PreparedVoice, VoiceBook

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """session: a call that asks for nothing else. voice: what it speaks with."""

    engine: AsyncEngine
    book: VoiceBook
    session: SessionConfig
    voice: PreparedVoice

    def open(self, config: SessionConfig, voice: PreparedVoice) -> AsyncSession:
        """Start a call; its first happening says whether it could."""
        return self.engine.open(f"call_{uuid.uuid4().hex}", config, voice.reference, voice.prompt)

    async def prepare_voice(self, samples: Samples, rate_hz: int) -> PreparedVoice:
        """samples: [channels, n] float32. Takes up to seconds, not of the event loop's. Raises: AudioError."""
        return await asyncio.to_thread(self.book.prepare, samples, rate_hz)
