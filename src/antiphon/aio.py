"""Live calls for asyncio, with numpy arrays: the same sessions, and happenings that are awaited instead of waited for.

A thin adapter: sending never waits, so it is the same; what happens is handed from the engine's thread to the event
loop's. Whoever uses it needs no torch. Shown by tests/test_aio.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from antiphon.config import ChatConfig, SessionConfig
from antiphon.core.chat import ChatMessage, ConversationSize, Sound
from antiphon.core.duplex import Wish
from antiphon.core.events import SessionEnded
from antiphon.counts import EngineCounts
from antiphon.happenings import Happening
from antiphon.live import LiveEngine, Sender, Tell
from antiphon.models.minicpmo.chat_prompt import ChatModel, ChatPrompt, chat_prompt
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


class AsyncChat:
    """One chat for the tasks of one event loop. asked: how much was said to it."""

    def __init__(
        self, session_id: str, asked: ConversationSize, end: Callable[[], None], told: asyncio.Queue[Happening]
    ) -> None:
        """end: closes it in the engine."""
        self.session_id = session_id
        self.asked = asked
        self._end = end
        self._told = told

    async def happenings(self) -> AsyncIterator[Happening]:
        """SessionOpened, AnswerGrew and Speech as they come, SessionEnded. For one reader."""
        while True:
            happening = await self._told.get()
            yield happening
            if isinstance(happening, SessionEnded):
                return

    def close(self) -> None:
        """Nobody wants the rest; idempotent."""
        self._end()


class AsyncEngine:
    """A running engine for the event loop that it is made in."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live
        self._loop = asyncio.get_running_loop()

    def open(self, session_id: str, config: SessionConfig, reference: Samples, voice: VoicePrompt) -> AsyncSession:
        """As `LiveEngine.open`. reference: [n] float32, 16 kHz, the voice in the prompt; n = 0 for none."""
        happened, tell = self._queue()
        ongoing = self._live.begin(session_id, config, torch.from_numpy(reference), voice, tell)
        return AsyncSession(Sender(self._live, ongoing), happened)

    async def chat(
        self, session_id: str, messages: Sequence[ChatMessage[Samples]], chat: ChatConfig, voice: VoicePrompt
    ) -> AsyncChat:
        """Start a chat. voice: to speak with, if it speaks.

        Raises: InputError, ImageError, AudioError, ContextLengthExceeded for what is in it; it is not started then.
        """
        prompt = await asyncio.to_thread(self._lay_out, messages, chat)
        told, tell = self._queue()
        ongoing = self._live.begin_chat(session_id, chat, prompt, voice, tell)
        return AsyncChat(session_id, prompt.size, lambda: self._live.call_soon(ongoing.close), told)

    async def survey(self) -> EngineCounts:
        """As `LiveEngine.survey`."""
        return await asyncio.to_thread(self._live.survey)

    def _queue(self) -> tuple[asyncio.Queue[Happening], Tell]:
        """What happens in a session, and what the engine's thread puts it there with."""
        happened: asyncio.Queue[Happening] = asyncio.Queue()

        def tell(happening: Happening) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(happened.put_nowait, happening)

        return happened, tell

    def _lay_out(self, messages: Sequence[ChatMessage[Samples]], chat: ChatConfig) -> ChatPrompt:
        engine = self._live.engine
        model = ChatModel(engine.tokenizer, engine.model.vision, engine.model.audio)
        answer = chat.answer
        heard = [
            ChatMessage(
                message.role,
                tuple(
                    Sound(torch.from_numpy(part.samples)) if isinstance(part, Sound) else part for part in message.parts
                ),
            )
            for message in messages
        ]
        return chat_prompt(heard, model, is_spoken=answer.is_spoken, max_tokens=answer.max_context_tokens - 1)
