"""Live calls from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import build
from antiphon.aio import AsyncEngine, AsyncSession, Samples
from antiphon.config import ChatConfig, Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.chat import AnswerConfig, ChatMessage, PictureFile, Role, Sound
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import AnswerGrew, SessionEnded, SessionOpened, UnitDecided
from antiphon.core.window import BasicWindow
from antiphon.engine import Engine
from antiphon.errors import ContextLengthExceeded, ImageError
from antiphon.happenings import Happening
from antiphon.live import LiveEngine
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

SESSION = SessionConfig(window=BasicWindow(400, 300), duplex=DuplexConfig(num_forced_listens=1))
CHAT = ChatConfig(AnswerConfig(max_tokens=40, max_context_tokens=400))
NUM_UNITS = 4
NO_REFERENCE = np.empty(0, np.float32)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=4)
    return Engine.load(open_checkpoint(tiny_checkpoint), config, SESSION)


@pytest.fixture
def live(engine: Engine) -> Iterator[LiveEngine]:
    with LiveEngine(engine) as running:
        yield running


@pytest.fixture(scope="module")
def voice(engine: Engine) -> VoicePrompt:
    return build.voice(engine)


async def talk(session: AsyncSession, seed: int) -> list[tuple[int, ...]]:
    """The tokens of a caller's units, until it hangs up."""
    for unit in range(NUM_UNITS):
        session.send_audio(build.second(10 * seed + unit).samples.numpy())
    decided: list[tuple[int, ...]] = []
    last: object = None
    async for last in session.happenings():
        if isinstance(last, UnitDecided):
            decided.append(last.token_ids)
            if len(decided) == NUM_UNITS:
                session.close()
    assert isinstance(last, SessionEnded)
    return decided


def test_tasks_of_one_loop_talk_at_once_and_each_hears_its_own(live: LiveEngine, voice: VoicePrompt) -> None:
    async def main() -> tuple[list[list[tuple[int, ...]]], list[list[tuple[int, ...]]]]:
        running = AsyncEngine(live)

        def call(seed: int) -> AsyncSession:
            return running.open(f"caller {seed}", replace(SESSION, seed=seed), NO_REFERENCE, voice)

        apart = [await talk(call(seed), seed) for seed in range(3)]
        together = await asyncio.gather(*(talk(call(seed), seed) for seed in range(3)))
        return apart, together

    apart, together = asyncio.run(main())
    assert together == apart
    assert len(set(map(str, apart))) == 3


def test_the_loop_is_free_while_the_engine_works(live: LiveEngine, voice: VoicePrompt) -> None:
    async def main() -> int:
        session = AsyncEngine(live).open("a", SESSION, NO_REFERENCE, voice)
        talking = asyncio.create_task(talk(session, 1))
        num_turns = 0
        while not talking.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    assert asyncio.run(main()) > 100


def question(*parts: str | PictureFile | Sound[Samples]) -> list[ChatMessage[Samples]]:
    return [ChatMessage(Role.USER, parts)]


def test_tasks_of_one_loop_chat_at_once_and_each_gets_its_own_answer(live: LiveEngine, voice: VoicePrompt) -> None:
    async def main() -> tuple[list[list[Happening]], list[list[Happening]]]:
        running = AsyncEngine(live)

        async def answered(seed: int) -> list[Happening]:
            heard = Sound(0.1 * np.random.default_rng(seed).standard_normal(16_000).astype(np.float32))
            chat = await running.chat(f"chat {seed}", question("Hello", heard), replace(CHAT, seed=seed), voice)
            assert chat.asked.num_sound_tokens == 10
            return [one async for one in chat.happenings() if not isinstance(one, SessionOpened)]

        apart = [await answered(seed) for seed in range(3)]
        return apart, await asyncio.gather(*(answered(seed) for seed in range(3)))

    apart, together = asyncio.run(main())
    assert together == apart
    assert len(set(map(str, apart))) == 3


def test_a_chat_that_is_closed_says_no_more(live: LiveEngine, voice: VoicePrompt) -> None:
    async def main() -> list[Happening]:
        endless = replace(CHAT, answer=replace(CHAT.answer, max_tokens=300, is_spoken=True), seed=4)
        chat = await AsyncEngine(live).chat("chat", question("Hello"), endless, voice)
        told: list[Happening] = []
        async for happening in chat.happenings():
            told.append(happening)
            chat.close()
            chat.close()
        return told

    first, *rest, last = asyncio.run(main())
    assert isinstance(first, SessionOpened)
    assert not any(one.end for one in rest if isinstance(one, AnswerGrew))
    assert isinstance(last, SessionEnded)


def test_a_conversation_that_cannot_be_read_is_refused_before_it_is_a_chat(
    live: LiveEngine, voice: VoicePrompt
) -> None:
    async def main() -> None:
        running = AsyncEngine(live)
        with pytest.raises(ImageError):
            await running.chat("chat", question(PictureFile(b"none", 1)), CHAT, voice)
        with pytest.raises(ContextLengthExceeded):
            await running.chat("chat", question("a" * 1000), CHAT, voice)
        assert (await running.survey()).thinker.num_sessions == 0

    asyncio.run(main())


def test_counts_are_told_and_a_stopped_engine_ends_its_calls(engine: Engine, voice: VoicePrompt) -> None:
    async def main() -> tuple[int, object]:
        with LiveEngine(engine) as live:
            running = AsyncEngine(live)
            session = running.open("a", SESSION, NO_REFERENCE, voice)
            happenings = session.happenings()
            assert isinstance(await anext(happenings), SessionOpened)
            counts = await running.survey()
        return counts.thinker.num_sessions, await anext(happenings)

    num_sessions, last = asyncio.run(main())
    assert num_sessions == 1
    assert isinstance(last, SessionEnded)
    assert last.code == "engine_stopped"
