"""Live calls for asyncio, with numpy arrays: the same sessions, and happenings that are awaited instead of waited for.

A thin adapter: sending never waits, so it is the same; what happens is handed from the engine's thread to the event
loop's. Whoever uses it needs no torch. Shown by tests/test_aio.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from antiphon.config import SessionConfig
from antiphon.core.duplex import Wish
from antiphon.core.events import SessionEnded
from antiphon.counts import EngineCounts
from antiphon.happenings import Happening
from antiphon.live import LiveEngine, Sender
from antiphon.models.minicpmo.image import decode_picture
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

Samples = NDArray[np.float32]
Picture = Image.Image
"""In RGB; what comes of a picture file."""


def read_picture(file: bytes) -> Picture:
    """Takes milliseconds that an event loop may not have. Raises: ImageError if it is no picture, or too large."""
    return decode_picture(file)


class AsyncSession:
    """One call for the tasks of one event loop. Everything sent is taken in order; SessionEnded happens last."""

    def __init__(self, sender: Sender, happened: asyncio.Queue[Happening]) -> None:
        self._sender = sender
        self._happened = happened

    @property
    def session_id(self) -> str:
        return self._sender.session_id

    def send_audio(self, samples: Samples) -> None:
        """samples: [n] float32, 16 kHz, any n. Raises: as `Sender.send_audio`."""
        self._sender.send_audio(torch.from_numpy(samples))

    def send_picture(self, picture: Picture) -> None:
        """As `Sender.send_picture`."""
        self._sender.send_picture(picture)

    def send_text(self, text: str) -> None:
        """As `Sender.send_text`."""
        self._sender.send_text(text)

    def change(self, config: SessionConfig, reference: Samples, voice: VoicePrompt) -> None:
        """As `Sender.change`. reference: as of `AsyncEngine.open`."""
        self._sender.change(config, torch.from_numpy(reference), voice)

    def wish(self, wish: Wish) -> None:
        """As `Sender.wish`."""
        self._sender.wish(wish)

    def interrupt(self) -> None:
        """As `Sender.interrupt`."""
        self._sender.interrupt()

    def close(self) -> None:
        """As `Sender.close`."""
        self._sender.close()

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

    def open(self, session_id: str, config: SessionConfig, reference: Samples, voice: VoicePrompt) -> AsyncSession:
        """As `LiveEngine.open`. reference: [n] float32, 16 kHz, the voice in the prompt; n = 0 for none."""
        happened: asyncio.Queue[Happening] = asyncio.Queue()

        def tell(happening: Happening) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(happened.put_nowait, happening)

        ongoing = self._live.begin(session_id, config, torch.from_numpy(reference), voice, tell)
        return AsyncSession(Sender(self._live, ongoing), happened)

    async def survey(self) -> EngineCounts:
        """As `LiveEngine.survey`."""
        return await asyncio.to_thread(self._live.survey)
