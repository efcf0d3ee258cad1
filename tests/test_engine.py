"""Calls through the whole engine on the tiny checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import build
from antiphon.bench.long_call import NUM_COMPARED_UNITS, UnitCost, measure
from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import TurnEnded, TurnStarted
from antiphon.core.sampling import Draws
from antiphon.core.window import BasicWindow, OffWindow
from antiphon.engine import Call, Engine
from antiphon.errors import AudioError, ConfigError, ContextLengthExceeded, InputError, PromptTooLong
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.prompt import wrap
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import UNIT_SAMPLES

SESSION = SessionConfig(window=BasicWindow(300, 200), duplex=DuplexConfig(num_forced_listens=1))
NO_REFERENCE = torch.empty(0)


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return engine_for(tiny_checkpoint, SESSION)


def engine_for(folder: Path, session: SessionConfig) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32)
    return Engine.load(open_checkpoint(folder), config, session)


@pytest.fixture(scope="module")
def voice(engine: Engine) -> VoicePrompt:
    return build.voice(engine, 50)


def run(call: Call, num_units: int) -> list[UnitResult]:
    results = [call.run_unit(build.second(unit)) for unit in range(num_units)]
    call.close()
    return results


def heard_by_the_caller(results: list[UnitResult]) -> list[tuple[int, Tensor]]:
    return [(speech.start_samples, speech.samples) for result in results for speech in result.speech]


def test_calls_after_each_other_do_not_notice_each_other(engine: Engine, voice: VoicePrompt) -> None:
    one, other = (heard_by_the_caller(run(engine.open(name, SESSION, NO_REFERENCE, voice), 20)) for name in "ab")
    assert len(one) > 3
    for (start, samples), (again_start, again_samples) in zip(one, other, strict=True):
        assert start == again_start
        assert torch.equal(samples, again_samples)


def test_speech_never_overlaps_and_never_plays_before_it_was_decided(engine: Engine, voice: VoicePrompt) -> None:
    results = run(engine.open("a", SESSION, NO_REFERENCE, voice), 25)
    end_samples = 0
    for result in results:
        for speech in result.speech:
            assert speech.start_samples >= max(end_samples, 24_000 * (result.outcome.unit + 1))
            end_samples = speech.start_samples + speech.samples.numel()


def test_a_turn_is_started_once_and_ended_once_with_its_number(engine: Engine, voice: VoicePrompt) -> None:
    results = run(engine.open("a", SESSION, NO_REFERENCE, voice), 40)
    marks = [
        (type(event).__name__, event.turn)
        for result in results
        for event in result.events
        if isinstance(event, TurnStarted | TurnEnded)
    ]
    num_turns = len(marks) // 2
    assert num_turns >= 2
    both = [(kind, turn) for turn in range(num_turns + 1) for kind in ("TurnStarted", "TurnEnded")]
    assert marks == both[: len(marks)]


@pytest.mark.parametrize("bad", [torch.full((UNIT_SAMPLES,), torch.nan), torch.zeros(7), torch.zeros(UNIT_SAMPLES, 2)])
def test_bad_samples_are_refused_and_the_call_goes_on_as_if_they_had_not_come(
    engine: Engine, voice: VoicePrompt, bad: Tensor
) -> None:
    undisturbed = run(engine.open("a", SESSION, NO_REFERENCE, voice), 6)
    call = engine.open("b", SESSION, NO_REFERENCE, voice)
    disturbed: list[UnitResult] = []
    for unit in range(6):
        with pytest.raises(AudioError):
            call.run_unit(UnitInput(bad, ()))
        disturbed.append(call.run_unit(build.second(unit)))
    call.close()
    assert [r.outcome.token_ids for r in disturbed] == [r.outcome.token_ids for r in undisturbed]


def test_a_prompt_that_does_not_fit_holds_nothing(engine: Engine, voice: VoicePrompt) -> None:
    for _ in range(50):  # were blocks kept, the cache would be empty after a few
        with pytest.raises(PromptTooLong, match="shorten"):
            engine.open("a", SessionConfig(wrap("a" * 400), SESSION.window), NO_REFERENCE, voice)
    run(engine.open("b", SESSION, NO_REFERENCE, voice), 12)


def test_more_pictures_than_agreed_are_refused(engine: Engine, voice: VoicePrompt) -> None:
    call = engine.open("a", SESSION, NO_REFERENCE, voice)
    pictures = (Image.new("RGB", (64, 64)),) * 2
    with pytest.raises(InputError, match="2 pictures"):
        call.run_unit(replace(build.second(0), pictures=pictures))
    call.close()


def test_without_a_window_the_call_ends_when_the_context_is_full(tiny_checkpoint: Path) -> None:
    session = SessionConfig(window=OffWindow(200), draws=Draws.MOST_LIKELY, max_text_tokens=0)
    engine = engine_for(tiny_checkpoint, session)
    call = engine.open("a", session, NO_REFERENCE, build.voice(engine))
    sizes: list[int] = []
    with pytest.raises(ContextLengthExceeded, match="sliding window"):
        sizes.extend(result.outcome.num_context_tokens for result in forever(call))
    assert 200 - 98 < sizes[-1] <= 200


def forever(call: Call) -> Iterator[UnitResult]:
    for unit in count():
        yield call.run_unit(build.second(unit))


def test_a_long_call_stays_bounded(engine: Engine) -> None:
    num_live_bytes: list[int] = []
    costs: list[UnitCost] = []
    for cost in measure(engine, SESSION, 3 * NUM_COMPARED_UNITS):
        costs.append(cost)
        if len(costs) % NUM_COMPARED_UNITS == 0:
            num_live_bytes.append(live_tensor_bytes())
    assert sum(cost.num_slides for cost in costs) > 10
    assert max(cost.num_context_tokens for cost in costs) <= 300
    whole_blocks = -(-300 // 16)
    assert max(cost.num_blocks for cost in costs) <= whole_blocks + 2, (
        "prompt and ring may each begin or end in a block"
    )
    # What differs is how much of an answer is being spoken at the moment: at most a voice and its retained frames.
    assert max(num_live_bytes) - min(num_live_bytes) < 5_000_000


def live_tensor_bytes() -> int:
    """Memory behind all tensors that anything still refers to."""
    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if issubclass(type(thing), Tensor)  # isinstance asks objects that warn when asked
    }
    return sum(storages.values())


def test_closing_a_call_again_does_not_touch_a_later_call_of_the_same_name(engine: Engine, voice: VoicePrompt) -> None:
    first = engine.open("same", SESSION, NO_REFERENCE, voice)
    first.close()
    second = engine.open("same", SESSION, NO_REFERENCE, voice)
    under_way = engine.hear(second.record, build.second(0))
    engine.advance()
    first.close()
    assert first.interrupt() is None
    while not under_way.is_over:
        engine.advance()
    assert isinstance(under_way.result(), UnitResult)
    with pytest.raises(ConfigError, match="is open"):
        engine.open("same", SESSION, NO_REFERENCE, voice)
    second.close()


def test_a_closed_call_hears_nothing_more(engine: Engine, voice: VoicePrompt) -> None:
    call = engine.open("a", SESSION, NO_REFERENCE, voice)
    call.close()
    with pytest.raises(InputError, match="has ended"):
        call.run_unit(build.second(0))


def test_a_large_picture_may_be_seen_in_slices_too(tiny_checkpoint: Path) -> None:
    session = replace(SESSION, window=BasicWindow(600, 400), max_slices=4)
    engine = engine_for(tiny_checkpoint, session)
    num_tokens: list[int] = []
    for max_slices in (1, 4):
        call = engine.open("a", replace(session, max_slices=max_slices), NO_REFERENCE, build.voice(engine))
        heard = replace(build.second(0), pictures=(Image.new("RGB", (1280, 720)),))
        num_tokens.append(call.run_unit(heard).outcome.num_context_tokens)
        call.close()
    assert num_tokens[1] - num_tokens[0] == 3 * (64 + 2), "a view of 16:9 is cut into three"
