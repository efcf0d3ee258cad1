"""The same calls with stages here, in threads and in processes: they say the same, and a stage that dies ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import pytest
import torch

import build
import chats
from antiphon.call import CallPhase, MovedCall, UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, StageConfig, StagesConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import SessionEnded, TurnInterrupted
from antiphon.core.window import BasicWindow
from antiphon.engine import Call, Engine
from antiphon.errors import AntiphonError, ConfigError, InputError, InternalError
from antiphon.happenings import Happening
from antiphon.models.minicpmo.checkpoint import open_checkpoint

SESSION = SessionConfig(
    window=BasicWindow(200, 120), duplex=DuplexConfig(num_forced_listens=0), max_pictures=0, keeps_inputs=True
)
NO_REFERENCE = torch.empty(0)
NUM_UNITS = 8
PLACED = {
    "here": everywhere("cpu", Placement.HERE),
    "threads": everywhere("cpu", Placement.THREAD),
    "processes": everywhere("cpu", Placement.PROCESS),
    "mixed": StagesConfig(
        StageConfig("cpu", Placement.HERE), StageConfig("cpu", Placement.PROCESS), StageConfig("cpu", Placement.THREAD)
    ),
}

Said = list[tuple[tuple[int, ...], list[tuple[int, ...]], list[list[float]]]]


def engine_in(folder: Path, place: str) -> Engine:
    config = EngineConfig(PLACED[place], Dtype.FLOAT32, max_calls=3)
    return Engine.load(open_checkpoint(folder), config, SESSION)


def open_calls(engine: Engine, num_calls: int) -> list[Call]:
    return [
        engine.open(str(seed), replace(SESSION, seed=seed), NO_REFERENCE, build.voice(engine, seed=seed))
        for seed in range(num_calls)
    ]


def said(results: list[UnitResult | AntiphonError]) -> Said:
    units = [result for result in results if isinstance(result, UnitResult)]
    assert len(units) == len(results), results
    return [
        (
            unit.outcome.token_ids,
            [speech.chunk.codec_tokens for speech in unit.speech],
            [speech.samples.tolist() for speech in unit.speech],
        )
        for unit in units
    ]


@pytest.fixture(scope="module")
def here(tiny_checkpoint: Path) -> list[Said]:
    engine = engine_in(tiny_checkpoint, "here")
    calls = open_calls(engine, 3)
    return [said(engine.run_units([(call, build.second(unit)) for call in calls])) for unit in range(NUM_UNITS)]


@pytest.mark.parametrize("place", ["threads", "processes", "mixed"])
def test_calls_say_the_same_wherever_the_stages_are(tiny_checkpoint: Path, place: str, here: list[Said]) -> None:
    with engine_in(tiny_checkpoint, place) as engine:
        calls = open_calls(engine, 3)
        there = [said(engine.run_units([(call, build.second(unit)) for call in calls])) for unit in range(NUM_UNITS)]
    assert there == here
    assert any(chunks for unit in here for _, chunks, _ in unit)


def test_a_chat_says_the_same_wherever_the_stages_are(tiny_checkpoint: Path) -> None:
    talks = []
    for place in ("here", "processes"):
        with engine_in(tiny_checkpoint, place) as engine:
            asked = chats.prompt(engine, "Hello", chats.picture(1), chats.noise(2))
            _, talk = chats.begin(engine, "chat", replace(chats.SPOKEN, seed=1), asked, build.voice(engine))
            while not talk.code:
                engine.advance()
            talks.append(talk)
    assert talks[0].said() == talks[1].said()
    assert talks[0].codec_tokens


def test_an_interruption_reaches_every_process_and_nothing_old_is_heard(tiny_checkpoint: Path) -> None:
    with engine_in(tiny_checkpoint, "processes") as engine:
        (call,) = open_calls(engine, 1)
        for unit in range(30):
            if call.run_unit(build.second(unit)).speech and call.record.is_saying:
                break
        assert isinstance(call.interrupt(), TurnInterrupted)
        later = [call.run_unit(build.second(100 + unit)) for unit in range(6)]
    assert later[0].outcome.is_listen
    assert {speech.chunk.address.epoch for result in later for speech in result.speech} <= {1}


def stage_processes() -> list[BaseProcess]:
    """Other tests may have processes of their own."""
    return [one for one in multiprocessing.active_children() if one.name.startswith("antiphon ")]


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_a_process_that_is_killed_ends_all_calls_with_a_reason_and_takes_nobody_along(
    tiny_checkpoint: Path, stage: str
) -> None:
    happened: list[Happening] = []
    with engine_in(tiny_checkpoint, "processes") as engine:
        call = engine.begin("a", SESSION, NO_REFERENCE, build.voice(engine), happened.append)
        (child,) = (one for one in stage_processes() if one.name == f"antiphon {stage}")
        os.kill(cast(int, child.pid), signal.SIGKILL)  # a running process has one
        while not happened or not isinstance(happened[-1], SessionEnded):
            engine.advance()
        assert isinstance(call.record.error, InternalError)
        assert f"antiphon {stage} ended with status -9" in str(call.record.error)
        with pytest.raises(InternalError, match="is gone"):
            engine.open("b", SESSION, NO_REFERENCE, build.voice(engine))
    assert not stage_processes()


def test_an_engine_that_cannot_be_built_in_processes_says_why_and_leaves_none(tiny_checkpoint: Path) -> None:
    config = EngineConfig(PLACED["processes"], Dtype.FLOAT32)
    with pytest.raises(ConfigError, match="over the model"):
        Engine.load(open_checkpoint(tiny_checkpoint), config, replace(SESSION, window=BasicWindow(10**6, 10)))
    assert not stage_processes()


def test_a_call_goes_on_in_another_engine_and_says_what_it_would_have_said(tiny_checkpoint: Path) -> None:
    wide = replace(SESSION, window=BasicWindow(800, 600), seed=3)

    def run(call: Call, units: range) -> list[tuple[int, ...]]:
        return [call.run_unit(build.second(unit)).outcome.token_ids for unit in units]

    stays, moves, target = (engine_in(tiny_checkpoint, "here") for _ in range(3))
    voice = build.voice(stays)
    whole = run(stays.open("a", wide, NO_REFERENCE, voice), range(12))
    call = moves.open("a", wide, NO_REFERENCE, voice)
    said_there = run(call, range(5))
    while call.record.is_saying:  # an answer that is being spoken would end with the move
        said_there += run(call, range(len(said_there), len(said_there) + 1))
    told: list[MovedCall | AntiphonError] = []
    moves.retain(call.record, told.append)
    while not told:
        moves.advance()
    call.close()
    (moved,) = told
    assert isinstance(moved, MovedCall)
    again = target.resume("a", moved, voice, lambda _: None)
    while again.record.phase is CallPhase.OPENING:
        target.advance()
    said_here = run(again, range(len(said_there), 12))
    assert said_there + said_here == whole
    assert again.record.num_units == 12


def test_a_call_that_keeps_nothing_cannot_be_moved_and_goes_on(tiny_checkpoint: Path) -> None:
    engine = engine_in(tiny_checkpoint, "here")
    call = engine.open("a", replace(SESSION, keeps_inputs=False), NO_REFERENCE, build.voice(engine))
    told: list[MovedCall | AntiphonError] = []
    engine.retain(call.record, told.append)
    while not told:
        engine.advance()
    assert isinstance(told[0], InputError)
    assert call.run_unit(build.second(0)).outcome.unit == 0
