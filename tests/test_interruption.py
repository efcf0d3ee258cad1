"""Stopping an answer: at once for the listener, not forgotten by the model, unnoticed by other calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import build
from antiphon.call import UnitResult
from antiphon.changing import CallSettings, ChangingCall
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig, Wish
from antiphon.core.events import TurnEnded, TurnInterrupted, TurnStarted, UnitDecided
from antiphon.core.window import BasicWindow
from antiphon.engine import Call, Engine
from antiphon.happenings import Happening, Speech
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

SESSION = SessionConfig(window=BasicWindow(400, 300), duplex=DuplexConfig(num_forced_listens=0), max_pictures=0, seed=1)
MAX_UNITS = 60


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=3)
    return Engine.load(open_checkpoint(tiny_checkpoint), config, SESSION)


@pytest.fixture(scope="module")
def voice(engine: Engine) -> VoicePrompt:
    return build.voice(engine)


def until_mid_turn(call: Call) -> list[UnitResult]:
    """Units up to one that speaks and leaves its turn open."""
    results: list[UnitResult] = []
    for unit in range(MAX_UNITS):
        results.append(call.run_unit(build.second(unit)))
        handoffs = results[-1].outcome.handoffs
        if handoffs and not handoffs[-1].ends_turn:
            return results
    raise AssertionError("the tiny checkpoint never spoke")


def marks(results: list[UnitResult]) -> list[tuple[str, int]]:
    events = (event for result in results for event in result.events)
    return [(type(event).__name__, event.turn) for event in events if isinstance(event, TurnStarted | TurnEnded)]


def test_an_interrupted_turn_is_closed_in_the_context_and_its_words_stay(engine: Engine, voice: VoicePrompt) -> None:
    call = engine.open("a", SESSION, torch.empty(0), voice)
    spoken = until_mid_turn(call)
    before = spoken[-1].outcome
    happened = call.interrupt()
    assert isinstance(happened, TurnInterrupted)
    assert (happened.turn, happened.epoch) == (before.handoffs[-1].address.turn, 1)
    assert happened.at_s == len(spoken)
    after = call.run_unit(build.second(99)).outcome
    special = engine.tokenizer.special.duplex
    assert after.token_ids == (special.turn_eos, special.listen, special.unit_end)
    assert after.is_listen
    assert after.handoffs == ()
    assert after.num_context_tokens == before.num_context_tokens + 11 + len(after.token_ids)
    assert [*after.retained_units] == [*before.retained_units, after.unit]
    call.close()


def test_the_next_answer_starts_as_a_new_turn_of_a_new_epoch(engine: Engine, voice: VoicePrompt) -> None:
    call = engine.open("a", SESSION, torch.empty(0), voice)
    first = until_mid_turn(call)
    call.interrupt()
    second_answer = until_mid_turn(call)
    (chunk, *_) = [speech.chunk for result in second_answer for speech in result.speech]
    assert chunk.is_first_of_turn
    assert (chunk.address.epoch, chunk.address.turn) == (1, 1)
    assert marks(first + second_answer)[:2] == [("TurnStarted", 0), ("TurnStarted", 1)]
    call.close()


def test_queued_speech_is_void_at_once(engine: Engine, voice: VoicePrompt) -> None:
    call = engine.open("a", SESSION, torch.empty(0), voice)
    spoken = until_mid_turn(call)
    queued = sum(speech.samples.numel() for speech in spoken[-1].speech)
    happened = call.interrupt()
    assert happened is not None
    assert happened.num_void_samples == queued > 0
    total = sum(speech.samples.numel() for result in spoken for speech in result.speech)
    assert happened.num_heard_samples == total - queued
    assert call.record.playback.end_s == happened.at_s
    call.close()


def test_interrupting_silence_changes_nothing(engine: Engine, voice: VoicePrompt) -> None:
    listening = replace(SESSION, duplex=DuplexConfig(num_forced_listens=4))
    results = {}
    for is_interrupted in (False, True):
        call = engine.open("a", listening, torch.empty(0), voice)
        outcomes = []
        for unit in range(8):
            if is_interrupted and unit < 4:
                assert call.interrupt() is None
            outcomes.append(call.run_unit(build.second(unit)).outcome.token_ids)
        results[is_interrupted] = outcomes
        call.close()
    assert results[True] == results[False]


def test_interrupting_twice_is_interrupting_once(engine: Engine, voice: VoicePrompt) -> None:
    call = engine.open("a", SESSION, torch.empty(0), voice)
    until_mid_turn(call)
    assert call.interrupt() is not None
    call.run_unit(build.second(99))
    assert call.interrupt() is None
    call.close()


def test_another_call_does_not_notice(engine: Engine, voice: VoicePrompt) -> None:
    watched: dict[bool, list[tuple[int, ...]]] = {}
    for is_interrupting in (False, True):
        calls = [
            engine.open(name, replace(SESSION, seed=seed), torch.empty(0), voice) for seed, name in enumerate("ab")
        ]
        said: list[tuple[int, ...]] = []
        for unit in range(20):
            results = engine.run_units([(call, build.second(unit)) for call in calls])
            result = results[1]
            assert isinstance(result, UnitResult)
            said += (speech.chunk.codec_tokens for speech in result.speech)
            if is_interrupting and unit % 3 == 2:
                calls[0].interrupt()
        watched[is_interrupting] = said
        for call in calls:
            call.close()
    assert watched[True] == watched[False] != []


@pytest.mark.parametrize("num_steps", [*range(0, 14), 20])
def test_nothing_of_an_answer_is_told_after_it_was_stopped(engine: Engine, voice: VoicePrompt, num_steps: int) -> None:
    """Also if it was stopped before anybody knew that it begins; the listener waits for no sound then."""
    told: list[Happening] = []
    call = ChangingCall(engine, "a", CallSettings(SESSION, torch.empty(0), voice), told.append)
    while not engine.is_idle:
        engine.advance()
    call.hear(replace(build.second(0), wish=Wish.SPEAK))
    for _ in range(num_steps):
        if not engine.is_idle:
            engine.advance()
    before = len(told)
    call.interrupt()
    after = before + sum(isinstance(one, TurnInterrupted) for one in told[before:])
    while not engine.is_idle:
        engine.advance()
    assert sum(isinstance(one, UnitDecided) for one in told) == 1, "the second was heard"
    for happening in told[after:]:
        assert not isinstance(happening, TurnStarted | TurnEnded | Speech), happening
        assert not isinstance(happening, UnitDecided) or happening.said == ()
    call.close()
