"""Calls from several threads on one running engine. What they say is compared with the same calls, one by one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import build
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig, Wish
from antiphon.core.events import (
    SessionEnded,
    SessionOpened,
    SettingsChanged,
    SpeechQueued,
    TurnInterrupted,
    UnitDecided,
)
from antiphon.core.window import BasicWindow, OffWindow
from antiphon.engine import Engine
from antiphon.errors import AudioError, ImageError, InputError
from antiphon.happenings import Happening, Speech
from antiphon.live import MAX_WAITING_SAMPLES, LiveEngine, LiveSession
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.prompt import wrap
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.units import UNIT_SAMPLES

SESSION = SessionConfig(window=BasicWindow(400, 300), duplex=DuplexConfig(num_forced_listens=1))
NO_REFERENCE = torch.empty(0)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=6)
    with torch.inference_mode():
        return Engine.load(open_checkpoint(tiny_checkpoint), config, SESSION)


@pytest.fixture(scope="module")
def voice(engine: Engine) -> VoicePrompt:
    with torch.inference_mode():
        return build.voice(engine)


@pytest.fixture
def live(engine: Engine) -> Iterator[LiveEngine]:
    with LiveEngine(engine) as running:
        yield running


def sound(seed: int, num_seconds: int) -> Tensor:
    return torch.cat([build.second(100 * seed + unit).samples for unit in range(num_seconds)])


def alone(engine: Engine, voice: VoicePrompt, config: SessionConfig, heard: Tensor) -> list[tuple[int, ...]]:
    """Tokens of each unit of a call that nobody shares the engine with."""
    with torch.inference_mode():
        call = engine.open("alone", config, NO_REFERENCE, voice)
        units = [call.run_unit(replace(build.second(0), samples=second)) for second in torch.split(heard, UNIT_SAMPLES)]
        call.close()
    return [unit.outcome.token_ids for unit in units]


def read_units(session: LiveSession, num_units: int) -> list[Happening]:
    """What happens until so many units were decided."""
    read: list[Happening] = []
    for happening in session.happenings():
        read.append(happening)
        num_units -= isinstance(happening, UnitDecided)
        if not num_units:
            return read
    return read


def tokens(happened: list[Happening]) -> list[tuple[int, ...]]:
    return [happening.token_ids for happening in happened if isinstance(happening, UnitDecided)]


def test_callers_in_threads_of_their_own_hear_what_each_hears_alone(engine: Engine, voice: VoicePrompt) -> None:
    num_callers, num_units = 5, 6
    configs = [replace(SESSION, seed=number, prompt=wrap("a" * number)) for number in range(num_callers)]
    said: dict[int, list[tuple[int, ...]]] = {}

    def caller(running: LiveEngine, number: int) -> None:
        session = running.open(f"caller {number}", configs[number], NO_REFERENCE, voice)
        for piece in torch.split(sound(number, num_units), 997 * (number + 1)):
            session.send_audio(piece)
        said[number] = tokens(read_units(session, num_units))
        session.close()
        assert isinstance(list(session.happenings())[-1], SessionEnded)

    with LiveEngine(engine) as running:
        threads = [threading.Thread(target=caller, args=(running, number)) for number in range(num_callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(num_callers):
        assert said[number] == alone(engine, voice, configs[number], sound(number, num_units))


def test_pythons_collector_does_not_look_through_what_was_there_while_calls_may_be_live(engine: Engine) -> None:
    assert gc.get_freeze_count() == 0
    with LiveEngine(engine):
        assert gc.get_freeze_count() > len(gc.get_objects())
    assert gc.get_freeze_count() == 0


def test_speech_comes_with_its_samples_behind_the_events_of_its_unit(live: LiveEngine, voice: VoicePrompt) -> None:
    session = live.open("a", SESSION, NO_REFERENCE, voice)
    session.send_audio(sound(1, 9))
    happened = read_units(session, 9)
    session.close()
    happened += session.happenings()
    queued = [happening for happening in happened if isinstance(happening, SpeechQueued)]
    heard = [happening for happening in happened if isinstance(happening, Speech) and happening.samples.numel()]
    assert isinstance(happened[0], SessionOpened)
    assert [speech.samples.numel() for speech in heard] == [event.num_samples for event in queued] != []
    assert happened.index(heard[0]) > happened.index(queued[0])


def test_a_call_that_cannot_start_is_told_why(live: LiveEngine, voice: VoicePrompt) -> None:
    too_long = live.open("a", replace(SESSION, prompt=wrap("x" * 999)), NO_REFERENCE, voice)
    (ended,) = too_long.happenings()
    assert isinstance(ended, SessionEnded)
    assert ended.code == "prompt_too_long"
    first = live.open("twice", SESSION, NO_REFERENCE, voice)
    assert isinstance(next(first.happenings()), SessionOpened)
    (refused,) = live.open("twice", SESSION, NO_REFERENCE, voice).happenings()
    assert isinstance(refused, SessionEnded)
    assert refused.code == "invalid_config"
    first.close()
    (closed,) = first.happenings()
    assert isinstance(closed, SessionEnded)
    assert closed.code == "completed"


def test_a_full_context_ends_one_call_and_no_other(live: LiveEngine, voice: VoicePrompt) -> None:
    ends = live.open("ends", replace(SESSION, window=OffWindow(200), max_pictures=0), NO_REFERENCE, voice)
    stays = live.open("stays", SESSION, NO_REFERENCE, voice)
    for session in (ends, stays):
        session.send_audio(sound(3, 10))
    last = list(ends.happenings())[-1]
    assert isinstance(last, SessionEnded)
    assert last.code == "context_length_exceeded"
    assert len(tokens(read_units(stays, 10))) == 10
    ends.send_audio(sound(3, 1))
    ends.close()


def test_bad_sound_is_refused_where_it_is_sent(live: LiveEngine, voice: VoicePrompt) -> None:
    session = live.open("a", SESSION, NO_REFERENCE, voice)
    for bad in (torch.full((10,), torch.nan), torch.zeros(2, 10), torch.zeros(MAX_WAITING_SAMPLES + 1)):
        with pytest.raises(AudioError):
            session.send_audio(bad)
    session.send_audio(sound(4, 2))
    assert len(tokens(read_units(session, 2))) == 2


def test_a_picture_that_cannot_be_seen_is_refused_where_it_is_sent(live: LiveEngine, voice: VoicePrompt) -> None:
    session = live.open("a", SESSION, NO_REFERENCE, voice)
    with pytest.raises(ImageError, match="9000 x 1"):
        session.send_picture(Image.new("RGB", (9000, 1)))
    session.send_audio(sound(5, 1))
    assert len(tokens(read_units(session, 1))) == 1


def test_an_interrupted_caller_hears_nothing_more_of_the_answer(live: LiveEngine, voice: VoicePrompt) -> None:
    session = live.open("a", replace(SESSION, duplex=DuplexConfig(num_forced_listens=0)), NO_REFERENCE, voice)
    happened: list[Happening] = []
    # The engine has nothing to do whenever a unit was read, so an interruption meets it between units.
    while not any(isinstance(happening, Speech) for happening in happened):
        session.send_audio(sound(len(happened), 1))
        happened += read_units(session, 1)
    session.interrupt()
    session.close()
    after = list(session.happenings())
    at = next(i for i, happening in enumerate(after) if isinstance(happening, TurnInterrupted))
    assert not any(isinstance(happening, Speech) for happening in after[at:])
    assert isinstance(after[-1], SessionEnded)


def test_stopping_the_engine_ends_every_call(engine: Engine, voice: VoicePrompt) -> None:
    with LiveEngine(engine) as running:
        sessions = [running.open(str(number), SESSION, NO_REFERENCE, voice) for number in range(3)]
        sessions[0].send_audio(sound(8, 1))
    for session in sessions:
        last = list(session.happenings())[-1]
        assert isinstance(last, SessionEnded)
        assert last.code == "engine_stopped"
    (late,) = running.open("late", SESSION, NO_REFERENCE, voice).happenings()
    assert isinstance(late, SessionEnded)
    assert late.code == "engine_stopped"
    with LiveEngine(engine) as running:
        again = running.open("0", SESSION, NO_REFERENCE, voice)
        assert isinstance(next(again.happenings()), SessionOpened)


def test_a_second_that_must_be_answered_is(live: LiveEngine, voice: VoicePrompt) -> None:
    listening = replace(SESSION, duplex=DuplexConfig(num_forced_listens=50))
    session = live.open("a", listening, NO_REFERENCE, voice)
    session.send_audio(sound(6, 3))
    happened = read_units(session, 3)
    session.wish(Wish.SPEAK)
    session.send_audio(sound(7, 1))
    (answered,) = [one for one in read_units(session, 1) if isinstance(one, UnitDecided)]
    session.close()
    assert all(one.is_listen for one in happened if isinstance(one, UnitDecided))
    assert not answered.is_listen


def test_a_second_that_must_be_listened_to_ends_the_answer(live: LiveEngine, voice: VoicePrompt) -> None:
    session = live.open("a", replace(SESSION, duplex=DuplexConfig(num_forced_listens=0)), NO_REFERENCE, voice)
    for unit in range(30):
        session.send_audio(sound(unit, 1))
        (decided,) = [one for one in read_units(session, 1) if isinstance(one, UnitDecided)]
        if decided.said and not decided.said[-1].ends_turn:
            break
    session.wish(Wish.LISTEN)
    session.send_audio(sound(99, 1))
    happened = read_units(session, 1)
    (forced,) = [one for one in happened if isinstance(one, UnitDecided)]
    assert any(isinstance(one, TurnInterrupted) for one in happened)
    session.close()
    assert forced.is_listen
    assert len(forced.token_ids) == 3, "the turn's end, to listen, the unit's end"


def test_words_are_read_with_the_next_second_and_as_words_only(live: LiveEngine, voice: VoicePrompt) -> None:
    quiet = replace(SESSION, duplex=DuplexConfig(num_forced_listens=50), max_text_tokens=8)
    session = live.open("a", quiet, NO_REFERENCE, voice)
    sizes: list[int] = []
    for text in ("", "hello", "<|listen|>", ""):
        session.send_text(text)
        session.send_audio(sound(8, 1))
        (decided,) = [one for one in read_units(session, 1) if isinstance(one, UnitDecided)]
        sizes.append(decided.num_context_tokens)
    session.close()
    added = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
    # The tiny tokenizer has one id per byte: five letters; eight of ten bytes, then the other two.
    assert added == [13 + 5, 13 + 8, 13 + 2]


def test_too_many_words_are_refused_where_they_are_sent(live: LiveEngine, voice: VoicePrompt) -> None:
    session = live.open("a", replace(SESSION, max_text_tokens=8), NO_REFERENCE, voice)
    with pytest.raises(InputError, match="81 more came; the limit is 80"):
        session.send_text("x" * 81)
    session.close()


def test_a_call_changes_while_its_caller_goes_on_talking(live: LiveEngine, voice: VoicePrompt) -> None:
    config = replace(SESSION, keeps_inputs=True, duplex=DuplexConfig(num_forced_listens=3))
    session = live.open("a", config, NO_REFERENCE, voice)
    session.send_audio(sound(1, 2))
    session.change(replace(config, prompt=wrap("Be brief.")), NO_REFERENCE, voice)
    session.send_audio(sound(2, 3))
    happened = read_units(session, 5)
    session.close()
    happened += session.happenings()
    assert [one.unit for one in happened if isinstance(one, UnitDecided)] == [0, 1, 2, 3, 4]
    assert sum(isinstance(one, SettingsChanged) for one in happened) == 1
    assert [type(one) for one in (happened[0], happened[-1])] == [SessionOpened, SessionEnded]
