"""Chats beside calls on one engine: nobody notices the others, and whoever goes leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import build
from antiphon.config import ChatConfig, Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.chat import AnswerConfig
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import UnitDecided
from antiphon.core.sampling import Draws
from antiphon.core.window import BasicWindow
from antiphon.engine import Engine
from antiphon.errors import ConfigError
from antiphon.happenings import Happening, Speech
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from chats import SPOKEN, WRITTEN, Talk, begin, noise, picture, prompt, run_down

SESSION = SessionConfig(
    window=BasicWindow(300, 200), duplex=DuplexConfig(num_forced_listens=1), max_pictures=0, max_text_tokens=0
)
CONFIG = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=8, max_speaking_chats=2)
NO_REFERENCE = torch.empty(0)
NUM_UNITS = 6

Said = tuple[list[UnitDecided], list[tuple[tuple[int, ...], list[float]]]]
"""Of a call: its decisions, and the codec tokens and samples of its speech."""


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return Engine.load(open_checkpoint(tiny_checkpoint), CONFIG, SESSION)


@pytest.fixture(scope="module")
def voices(engine: Engine) -> tuple[VoicePrompt, VoicePrompt]:
    return build.voice(engine, 20, 0), build.voice(engine, 50, 1)


def alone(engine: Engine, config: ChatConfig, *parts: str, voice: VoicePrompt) -> Talk:
    _, talk = begin(engine, "alone", config, prompt(engine, *parts, is_spoken=config.answer.is_spoken), voice)
    run_down(engine)
    return talk


def check_nothing_is_left(engine: Engine) -> None:
    counts = engine.survey()
    assert (counts.thinker.num_sessions, counts.talker.num_sessions, counts.code2wav.num_sessions) == (0, 0, 0)
    thinker = counts.thinker.counts
    assert thinker.num_free_blocks == thinker.num_blocks - thinker.prompts.num_blocks
    assert thinker.num_unreserved_blocks == thinker.num_free_blocks
    assert (counts.talker.counts.num_waiting, counts.talker.counts.num_rooms) == (0, CONFIG.max_speaking_calls)
    assert (counts.code2wav.counts.num_due, counts.code2wav.counts.num_speaking) == (0, 0)


class Caller:
    """A call that hears its seconds one after the other, whatever happens beside it."""

    def __init__(self, engine: Engine, number: int, voice: VoicePrompt) -> None:
        self._number = number
        self._happened: list[Happening] = []
        session = replace(SESSION, seed=number)
        self._call = engine.begin(f"call {number}", session, NO_REFERENCE, voice, self._happened.append)
        run_down(engine)
        self._num_heard = 0

    def hear(self) -> None:
        self._call.hear(build.second(1000 * self._number + self._num_heard))
        self._num_heard += 1

    def said(self) -> Said:
        """All of it, comparable to the last bit; hangs up."""
        self._call.close()
        decided = [one for one in self._happened if isinstance(one, UnitDecided)]
        speech = [one for one in self._happened if isinstance(one, Speech)]
        return decided, [(one.chunk.codec_tokens, one.samples.tolist()) for one in speech]


@pytest.fixture(scope="module")
def calls_alone(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> list[Said]:
    """What three calls say, each by itself."""
    said = []
    for number in range(3):
        caller = Caller(engine, number, voices[number % 2])
        for _ in range(NUM_UNITS):
            caller.hear()
            run_down(engine)
        said.append(caller.said())
    return said


def test_chats_and_calls_in_a_crowd_say_what_each_says_alone(
    engine: Engine, voices: tuple[VoicePrompt, VoicePrompt], calls_alone: list[Said]
) -> None:
    asked = [("Hello",), ("Look", picture(1)), ("Listen", noise(2)), ("Which?", picture(3), noise(4)), ("And",)]
    configs = [replace(WRITTEN if number % 2 else SPOKEN, seed=number) for number in range(len(asked))]
    prompts = [
        prompt(engine, *parts, is_spoken=config.answer.is_spoken) for parts, config in zip(asked, configs, strict=True)
    ]
    solo = []
    for config, one in zip(configs, prompts, strict=True):
        _, talk = begin(engine, "alone", config, one, voices[0])
        run_down(engine)
        solo.append(talk)

    callers = [Caller(engine, number, voices[number % 2]) for number in range(3)]
    crowd: list[Talk] = []
    for unit in range(NUM_UNITS):
        for caller in callers:
            caller.hear()
        for number in (2 * unit, 2 * unit + 1):
            if number < len(prompts):
                _, talk = begin(engine, f"chat {number}", configs[number], prompts[number], voices[0])
                crowd.append(talk)
        for _ in range(40):
            if not engine.is_idle:
                engine.advance()
    run_down(engine)

    assert [talk.said() for talk in crowd] == [talk.said() for talk in solo]
    assert len({talk.text for talk in crowd}) == len(crowd)
    assert all(talk.code == "completed" for talk in crowd)
    assert [bool(len(talk.samples)) for talk in crowd] == [config.answer.is_spoken for config in configs]
    assert [caller.said() for caller in callers] == calls_alone
    check_nothing_is_left(engine)


@pytest.mark.parametrize("at", [*range(0, 30, 2), 31, 37, 45, 60])
def test_a_chat_closed_at_any_point_leaves_nothing_and_nobody_notices(
    engine: Engine, voices: tuple[VoicePrompt, VoicePrompt], at: int
) -> None:
    config = replace(SPOKEN, seed=3)
    expected = alone(engine, config, "Do you hear me?", voice=voices[0]).said()
    asked = prompt(engine, "Do you hear me?", is_spoken=True)
    _, watched = begin(engine, "watched", config, asked, voices[0])
    victim, talk = begin(engine, "victim", replace(SPOKEN, seed=2), prompt(engine, picture(1), noise(2)), voices[1])
    for _ in range(at):
        if not engine.is_idle:
            engine.advance()
    victim.close()
    victim.close()
    assert talk.code == "completed"
    num_told = len(talk.happened)
    run_down(engine)
    assert len(talk.happened) == num_told
    assert watched.said() == expected
    check_nothing_is_left(engine)


def test_a_name_is_free_again_when_its_chat_is_over(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> None:
    asked = prompt(engine, "Hello")
    chat, _ = begin(engine, "chat", WRITTEN, asked, voices[0])
    with pytest.raises(ConfigError, match="chat"):
        begin(engine, "chat", WRITTEN, asked, voices[0])
    chat.close()
    _, talk = begin(engine, "chat", WRITTEN, asked, voices[0])
    run_down(engine)
    assert talk.code == "completed"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (AnswerConfig(max_tokens=10_000, max_context_tokens=20_000), "resource_exhausted"),
        (AnswerConfig(max_tokens=10, max_context_tokens=20), "context_length_exceeded"),
    ],
)
def test_a_chat_for_which_there_is_no_room_is_refused_and_harms_nobody(
    engine: Engine,
    voices: tuple[VoicePrompt, VoicePrompt],
    calls_alone: list[Said],
    answer: AnswerConfig,
    code: str,
) -> None:
    caller = Caller(engine, 0, voices[0])
    _, other = begin(engine, "other", WRITTEN, prompt(engine, "Hello"), voices[0])
    talks = []
    for unit in range(NUM_UNITS):
        caller.hear()
        config = replace(SPOKEN, answer=replace(answer, is_spoken=True))
        _, talk = begin(engine, f"refused {unit}", config, prompt(engine, "a" * 30), voices[0])
        talks.append(talk)
        run_down(engine)
    assert [talk.code for talk in talks] == [code] * NUM_UNITS
    assert all(len(talk.happened) == 1 for talk in talks)
    assert other.said() == alone(engine, WRITTEN, "Hello", voice=voices[0]).said()
    assert caller.said() == calls_alone[0]
    check_nothing_is_left(engine)


def test_an_answer_has_no_more_tokens_than_asked_for(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> None:
    full = alone(engine, replace(WRITTEN, seed=1), "Hi", voice=voices[0])
    for max_tokens in (1, 9, 10, 11, 20):
        config = replace(WRITTEN, answer=replace(WRITTEN.answer, max_tokens=max_tokens), seed=1)
        talk = alone(engine, config, "Hi", voice=voices[0])
        assert full.text.startswith(talk.text)
        assert (talk.grown[-1].num_tokens, talk.grown[-1].end) == (max_tokens, "length")
    check_nothing_is_left(engine)


def test_an_answer_ends_where_the_context_does(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> None:
    num_tokens = prompt(engine, "Hi").num_tokens
    config = replace(WRITTEN, answer=replace(WRITTEN.answer, max_context_tokens=num_tokens + 12), seed=1)
    last = alone(engine, config, "Hi", voice=voices[0]).grown[-1]
    assert (last.num_tokens, last.end) == (12, "length")


def test_the_model_ends_its_answer_itself(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> None:
    config = replace(WRITTEN, answer=replace(WRITTEN.answer, max_tokens=300))
    ends = [alone(engine, replace(config, seed=seed), "Hi", voice=voices[0]).grown[-1] for seed in range(5)]
    assert {last.end for last in ends} == {"stop"}
    assert len({last.num_tokens for last in ends}) > 1


@pytest.mark.parametrize("is_spoken", [False, True])
def test_an_answer_stops_before_its_stop_sequence_and_does_not_say_it(
    engine: Engine, voices: tuple[VoicePrompt, VoicePrompt], *, is_spoken: bool
) -> None:
    seeded = [replace(SPOKEN if is_spoken else WRITTEN, seed=seed) for seed in range(9)]
    talks = [alone(engine, config, "Hi there", voice=voices[0]) for config in seeded]
    config, full = next((one, talk) for one, talk in zip(seeded, talks, strict=True) if len(talk.text) > 12)
    stop = full.text[7:10]
    stopped = replace(config, answer=replace(config.answer, stop=("\x00", stop)))
    talk = alone(engine, stopped, "Hi there", voice=voices[0])
    assert talk.text == full.text[: full.text.index(stop)]
    assert talk.grown[-1].end == "stop"
    if is_spoken:
        assert 0 < len(talk.samples) < len(full.samples)
    check_nothing_is_left(engine)


def test_what_only_looks_like_the_beginning_of_a_stop_sequence_is_said_in_the_end(
    engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]
) -> None:
    full = alone(engine, replace(SPOKEN, seed=2), "Hi there", voice=voices[0])
    config = replace(SPOKEN, answer=replace(SPOKEN.answer, stop=(full.text[-3:] + "\x00",)), seed=2)
    assert alone(engine, config, "Hi there", voice=voices[0]).text == full.text


def test_the_likeliest_answer_is_the_same_whatever_the_seed(
    engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]
) -> None:
    texts = [
        [alone(engine, replace(WRITTEN, draws=draws, seed=seed), "Hi", voice=voices[0]).text for seed in range(3)]
        for draws in Draws
    ]
    assert [len(set(one)) for one in texts] == [3, 1]


def test_what_is_seen_and_heard_decides_the_answer(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> None:
    asked = [prompt(engine, *parts) for parts in ((picture(1),), (picture(2),), (noise(1),), (noise(2),))]
    talks = []
    for one in asked:
        _, talk = begin(engine, "chat", replace(WRITTEN, draws=Draws.MOST_LIKELY), one, voices[0])
        run_down(engine)
        talks.append(talk)
    assert len({talk.text for talk in talks}) == len(talks)


def test_more_chats_than_may_speak_at_once_speak_one_after_the_other(
    engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]
) -> None:
    talks, asked = [], prompt(engine, "Hi", is_spoken=True)
    for number in range(2 * CONFIG.max_speaking_chats + 1):
        _, talk = begin(engine, f"chat {number}", replace(SPOKEN, seed=number), asked, voices[0])
        talks.append(talk)
    run_down(engine)
    for number, talk in enumerate(talks):
        assert talk.said() == alone(engine, replace(SPOKEN, seed=number), "Hi", voice=voices[0]).said()
    check_nothing_is_left(engine)


def test_a_stopped_engine_says_so_to_its_chats(tiny_checkpoint: Path) -> None:
    engine = Engine.load(open_checkpoint(tiny_checkpoint), CONFIG, SESSION)
    voice = build.voice(engine)
    _, talk = begin(engine, "chat", SPOKEN, prompt(engine, "Hi"), voice)
    engine.stop()
    assert talk.code == "engine_stopped"
