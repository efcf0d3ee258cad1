"""Many calls on one engine: nobody notices the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import build
from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import TurnEnded
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.engine import Call, Engine
from antiphon.errors import AntiphonError, AudioError, ContextLengthExceeded, ResourceExhausted
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.prompt import wrap
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import UNIT_SAMPLES

MAX_CALLS = 16
SESSION = SessionConfig(
    window=BasicWindow(300, 200), duplex=DuplexConfig(num_forced_listens=1), max_pictures=0, max_text_tokens=0
)
NO_REFERENCE = torch.empty(0)

Said = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]
"""Per unit: the thinker's tokens, and the codec tokens of each chunk."""


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=MAX_CALLS)
    return Engine.load(open_checkpoint(tiny_checkpoint), config, SESSION)


@pytest.fixture(scope="module")
def voices(engine: Engine) -> list[VoicePrompt]:
    return [build.voice(engine, 20 + 30 * seed, seed) for seed in range(3)]


def second(call: int, unit: int) -> UnitInput:
    return build.second(1000 * call + unit)


def session(engine: Engine, number: int) -> SessionConfig:
    """Sessions that differ in prompt, window, slide and seed."""
    marker = engine.tokenizer.encode(PREVIOUS_MARKER)
    windows: list[WindowPolicy] = [
        BasicWindow(300, 200),
        ContextWindow(3, 10, marker),
        BasicWindow(150, 90),
        OffWindow(300),
    ]
    return replace(
        SESSION,
        prompt=wrap("word " * (number % 5)),
        window=windows[number % 4],
        slide=list(SlideMode)[number % 3],
        seed=number,
    )


def said(results: list[UnitResult]) -> Said:
    return [(r.outcome.token_ids, [speech.chunk.codec_tokens for speech in r.speech]) for r in results]


def alone(engine: Engine, voice: VoicePrompt, number: int, num_units: int) -> list[UnitResult]:
    call = engine.open("alone", session(engine, number), NO_REFERENCE, voice)
    results = [call.run_unit(second(number, unit)) for unit in range(num_units)]
    call.close()
    return results


def together(engine: Engine, calls: dict[int, Call], unit: int) -> dict[int, UnitResult | AntiphonError]:
    results = engine.run_units([(call, second(number, unit)) for number, call in calls.items()])
    return dict(zip(calls, results, strict=True))


def test_sixteen_calls_at_once_say_what_each_says_alone(engine: Engine, voices: list[VoicePrompt]) -> None:
    num_units = 9
    calls = {n: engine.open(str(n), session(engine, n), NO_REFERENCE, voices[n % 3]) for n in range(MAX_CALLS)}
    crowd: dict[int, list[UnitResult]] = {number: [] for number in calls}
    for unit in range(num_units):
        for number, result in together(engine, calls, unit).items():
            assert isinstance(result, UnitResult)
            crowd[number].append(result)
    for call in calls.values():
        call.close()
    slid = 0
    for number, results in crowd.items():
        solo = alone(engine, voices[number % 3], number, num_units)
        assert said(results) == said(solo)
        for mine, his in zip(results, solo, strict=True):
            for one, other in zip(mine.speech, his.speech, strict=True):
                torch.testing.assert_close(one.samples, other.samples, rtol=0, atol=5e-3)
        slid += sum(result.outcome.slide is not None for result in results)
    assert slid > 10


@pytest.mark.parametrize("num_calls", [1, 2, 4, 8])
def test_calls_that_join_and_leave_at_different_times_all_complete_two_turns(
    engine: Engine, voices: list[VoicePrompt], num_calls: int
) -> None:
    calls: dict[int, Call] = {}
    turns: dict[int, int] = dict.fromkeys(range(num_calls), 0)
    age: dict[int, int] = {}
    for tick in range(60):
        if tick < num_calls:
            calls[tick] = engine.open(str(tick), replace(SESSION, seed=tick), NO_REFERENCE, voices[tick % 3])
            age[tick] = 0
        if not calls:
            break
        heard = [(call, second(number, age[number])) for number, call in calls.items()]
        for number, result in zip(list(calls), engine.run_units(heard), strict=True):
            assert isinstance(result, UnitResult)
            age[number] += 1
            turns[number] += sum(isinstance(event, TurnEnded) for event in result.events)
            if turns[number] >= 2:
                calls.pop(number).close()
    assert calls == {}
    assert all(count >= 2 for count in turns.values())


@pytest.mark.parametrize(
    "bad", [torch.full((UNIT_SAMPLES,), torch.nan), torch.zeros(3), torch.zeros(UNIT_SAMPLES, dtype=torch.float64)]
)
def test_one_callers_bad_input_is_his_alone(engine: Engine, voices: list[VoicePrompt], bad: Tensor) -> None:
    calls = {n: engine.open(str(n), session(engine, n), NO_REFERENCE, voices[0]) for n in range(3)}
    crowd: dict[int, list[UnitResult]] = {0: [], 2: []}
    for unit in range(6):
        heard = [(calls[0], second(0, unit)), (calls[1], UnitInput(bad, ())), (calls[2], second(2, unit))]
        first, refused, last = engine.run_units(heard)
        assert isinstance(refused, AudioError)
        assert isinstance(first, UnitResult)
        assert isinstance(last, UnitResult)
        crowd[0].append(first)
        crowd[2].append(last)
    for call in calls.values():
        call.close()
    for number, results in crowd.items():
        assert said(results) == said(alone(engine, voices[0], number, 6))


def test_a_call_whose_context_is_full_ends_and_the_others_go_on(engine: Engine, voices: list[VoicePrompt]) -> None:
    ends = engine.open("ends", replace(SESSION, window=OffWindow(110)), NO_REFERENCE, voices[0])
    stays = engine.open("stays", session(engine, 0), NO_REFERENCE, voices[0])
    errors: list[AntiphonError] = []
    stayed: list[UnitResult] = []
    for unit in range(8):
        full, result = engine.run_units([(ends, second(5, unit)), (stays, second(0, unit))])
        if isinstance(full, AntiphonError):
            errors.append(full)
        assert isinstance(result, UnitResult)
        stayed.append(result)
    ends.close()
    stays.close()
    assert errors
    assert all(isinstance(error, ContextLengthExceeded) for error in errors)
    assert said(stayed) == said(alone(engine, voices[0], 0, 8))


def test_a_full_engine_says_so_and_takes_the_next_one_when_a_call_has_ended(
    engine: Engine, voices: list[VoicePrompt]
) -> None:
    calls = list(build.until_full(engine, SESSION, voices[0]))
    assert len(calls) >= MAX_CALLS
    with pytest.raises(ResourceExhausted, match="engine is full"):
        engine.open("one more", SESSION, NO_REFERENCE, voices[0])
    calls.pop().close()
    calls.append(engine.open("again", SESSION, NO_REFERENCE, voices[0]))
    for call in calls:
        call.close()
        call.close()
    again = list(build.until_full(engine, SESSION, voices[0]))
    assert len(again) == len(calls), "everything came back"
    for call in again:
        call.close()
