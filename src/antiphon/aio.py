"""Live calls for asyncio: the same sessions, with happenings that are awaited instead of waited for.

A thin adapter: sending never waits, so it is the same; what happens is handed from the engine's thread to the event
loop's. Shown by tests/test_aio.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from torch import Tensor

from antiphon.config import SessionConfig
from antiphon.core.events import SessionEnded
from antiphon.counts import EngineCounts
from antiphon.happenings import Happening
from antiphon.live import LiveEngine, Ongoing, Sender
from antiphon.models.minicpmo.voice_prompt import VoicePrompt


class AsyncSession(Sender):
    """One call for the tasks of one event loop: a sender, and what happens."""

    def __init__(self, live: LiveEngine, ongoing: Ongoing, happened: asyncio.Queue[Happening]) -> None:
        super().__init__(live, ongoing)
        self._happened = happened

    async def happenings(self) -> AsyncIterator[Happening]:
        """Everything that happens in the call until it has ended. For one reader."""
        while True:
            happening = await self._happened.get()
            yield happening
            if isinstance(happening, SessionEnded):
                return


class AsyncEngine:
    """A running engine for the event loop that it is made in."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live
        self._loop = asyncio.get_running_loop()

    def open(self, session_id: str, config: SessionConfig, reference: Tensor, voice: VoicePrompt) -> AsyncSession:
        """As `LiveEngine.open`."""
        happened: asyncio.Queue[Happening] = asyncio.Queue()

        def tell(happening: Happening) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(happened.put_nowait, happening)

        ongoing = self._live.begin(session_id, config, reference, voice, tell)
        return AsyncSession(self._live, ongoing, happened)

    async def survey(self) -> EngineCounts:
        """As `LiveEngine.survey`."""
        return await asyncio.to_thread(self._live.survey)
