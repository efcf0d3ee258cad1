"""Calls whose prompt, window or voice changes while they go on, on the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

import build
from antiphon.call import MovedCall
from antiphon.changing import CallSettings, ChangingCall
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig, Wish
from antiphon.core.events import ChangeRefused, SessionEnded, SessionOpened, SettingsChanged, UnitDecided, WindowSlid
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow
from antiphon.engine import Engine
from antiphon.errors import AntiphonError, EngineStopped, InputError
from antiphon.happenings import Happening, Speech
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.prompt import wrap
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER

T = TypeVar("T")
SESSION = SessionConfig(
    window=BasicWindow(400, 300), duplex=DuplexConfig(num_forced_listens=0), max_pictures=0, keeps_inputs=True, seed=3
)
NO_REFERENCE = torch.empty(0)
OTHER_WORDS = wrap("Be as brief as can be.")


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=4, max_stored_prompt_bytes=0)
    return Engine.load(open_checkpoint(tiny_checkpoint), config, SESSION)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Without calls."""
    yield loaded
    loaded.end_all(EngineStopped("the test is over"))


@dataclass(slots=True, eq=False)
class Talk:
    """A call that may change, driven as far as its tests want it."""

    engine: Engine
    told: list[Happening] = field(default_factory=list)
    call: ChangingCall = field(init=False)

    @staticmethod
    def begin(engine: Engine, session: SessionConfig, name: str = "talk") -> Talk:
        talk = Talk(engine)
        talk.call = ChangingCall(engine, name, settings(engine, session), talk.told.append)
        talk.until(lambda: bool(talk.of(SessionOpened)))
        return talk

    def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert not self.engine.is_idle, f"nothing more happens after {self.told}"
            self.engine.advance()

    def settle(self) -> None:
        while not self.engine.is_idle:
            self.engine.advance()

    def live(self, units: range, wish: Wish = Wish.FREE) -> None:
        for unit in units:
            self.call.hear(replace(build.second(unit), wish=wish))
            self.settle()

    def of(self, kind: type[T]) -> list[T]:
        return [happening for happening in self.told if isinstance(happening, kind)]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [decided.token_ids for decided in self.of(UnitDecided)]

    @property
    def samples(self) -> Tensor:
        return torch.cat([speech.samples for speech in self.of(Speech)])

    def close(self) -> None:
        self.call.close()
        self.settle()
        counts = self.engine.survey().thinker.counts
        assert counts.num_free_blocks == counts.num_blocks


def settings(engine: Engine, session: SessionConfig, *, voice_seed: int = 1) -> CallSettings:
    return CallSettings(session, NO_REFERENCE, build.voice(engine, seed=voice_seed))


def moved_to(engine: Engine, talk: Talk, session: SessionConfig) -> list[tuple[int, ...]]:
    """What the talk would say in three more seconds if another call took it over, with other settings."""
    told: list[MovedCall | AntiphonError] = []
    decided: list[tuple[int, ...]] = []
    call = talk.call.present
    call.retain(told.append)
    talk.settle()
    (moved,) = told
    assert isinstance(moved, MovedCall)
    there = engine.resume("there", moved.under(session, NO_REFERENCE), build.voice(engine), lambda _: None)
    talk.settle()
    decided += [there.run_unit(build.second(unit)).outcome.token_ids for unit in range(20, 23)]
    there.close()
    return decided


def test_whoever_speaks_before_the_call_is_open_is_heard_when_it_is(engine: Engine) -> None:
    talk = Talk(engine)
    talk.call = ChangingCall(engine, "talk", settings(engine, SESSION, voice_seed=7), talk.told.append)
    for unit in range(3):
        talk.call.hear(build.second(unit))
    talk.settle()
    assert isinstance(talk.told[0], SessionOpened)
    assert [decided.unit for decided in talk.of(UnitDecided)] == [0, 1, 2]
    talk.close()


def test_a_second_is_not_taken_by_a_call_that_is_still_opening(engine: Engine) -> None:
    call = engine.begin("early", SESSION, NO_REFERENCE, build.voice(engine), lambda _: None)
    with pytest.raises(InputError, match="still opening"):
        call.hear(build.second(0))
    call.close()


def test_a_change_to_the_same_settings_changes_nothing_that_is_said(engine: Engine) -> None:
    stays, changes = Talk.begin(engine, SESSION, "stays"), Talk.begin(engine, SESSION, "changes")
    for talk in (stays, changes):
        talk.live(range(4))
    changes.call.change(settings(engine, SESSION))
    for talk in (stays, changes):
        talk.live(range(4, 12))
    assert len(changes.of(SettingsChanged)) == 1
    assert changes.tokens == stays.tokens
    assert [decided.unit for decided in changes.of(UnitDecided)] == [*range(12)]
    ends = [0, *(speech.start_samples + speech.samples.numel() for speech in changes.of(Speech))]
    assert all(speech.start_samples >= end for speech, end in zip(changes.of(Speech), ends, strict=False))
    stays.call.close()
    changes.close()


def test_after_a_change_of_instructions_the_past_stands_behind_the_new_ones(engine: Engine) -> None:
    talk = Talk.begin(engine, SESSION)
    talk.live(range(5), Wish.LISTEN)
    new = replace(SESSION, prompt=OTHER_WORDS)
    expected = moved_to(engine, talk, new)
    talk.call.change(settings(engine, new))
    talk.settle()
    (changed,) = talk.of(SettingsChanged)
    last = talk.of(UnitDecided)[-1]
    assert changed.num_context_tokens != last.num_context_tokens
    talk.live(range(20, 23))
    assert talk.tokens[-3:] == expected
    assert talk.of(UnitDecided)[-1].num_retained_units == last.num_retained_units + 3
    assert len(talk.of(SessionOpened)) == 1
    talk.close()


def test_an_answer_is_spoken_to_its_end_before_anything_changes(engine: Engine) -> None:
    stays, changes = Talk.begin(engine, SESSION, "stays"), Talk.begin(engine, SESSION, "changes")
    for talk in (stays, changes):
        talk.live(range(1), Wish.SPEAK)
        assert talk.of(Speech)
        assert not talk.of(Speech)[-1].chunk.ends_turn
    changes.call.change(settings(engine, replace(SESSION, prompt=OTHER_WORDS), voice_seed=2))
    changes.settle()
    assert not changes.of(SettingsChanged), "an answer is being said"
    unit = 1
    while not stays.of(Speech)[-1].chunk.ends_turn:
        for talk in (stays, changes):
            talk.live(range(unit, unit + 1))
        unit += 1
    ends = next(at for at, speech in enumerate(stays.of(Speech)) if speech.chunk.ends_turn)
    for before, after in zip(stays.of(Speech)[: ends + 1], changes.of(Speech)[: ends + 1], strict=True):
        assert torch.equal(before.samples, after.samples)
    changes.settle()
    last_sound = next(at for at, told in enumerate(changes.told) if isinstance(told, Speech) and told.chunk.ends_turn)
    assert any(isinstance(told, SettingsChanged) for told in changes.told[last_sound:])
    stays.call.close()
    changes.close()


def test_a_changed_voice_is_the_one_that_is_heard(engine: Engine) -> None:
    stays, changes = Talk.begin(engine, SESSION, "stays"), Talk.begin(engine, SESSION, "changes")
    changes.call.change(settings(engine, SESSION, voice_seed=2))
    changes.settle()
    for talk in (stays, changes):
        talk.live(range(1), Wish.SPEAK)
    assert stays.tokens == changes.tokens
    assert not torch.allclose(stays.samples, changes.samples, atol=1e-2)
    assert sorted(engine.survey().code2wav.counts.voices.num_users)[-2:] == [1, 1]
    stays.call.close()
    changes.close()


def test_a_smaller_window_keeps_the_newest_and_a_larger_one_forgets_later(engine: Engine) -> None:
    talk = Talk.begin(engine, SESSION)
    talk.live(range(8), Wish.LISTEN)
    held = talk.of(UnitDecided)[-1]
    assert held.num_context_tokens > 130
    talk.call.change(settings(engine, replace(SESSION, window=BasicWindow(130, 100))))
    talk.settle()
    (changed,) = talk.of(SettingsChanged)
    assert changed.num_context_tokens <= 100
    talk.live(range(8, 9), Wish.LISTEN)
    assert talk.of(UnitDecided)[-1].num_retained_units < held.num_retained_units
    talk.call.change(settings(engine, SESSION))
    num_slides = len(talk.of(WindowSlid))
    talk.live(range(9, 15), Wish.LISTEN)
    assert len(talk.of(SettingsChanged)) == 2
    assert talk.of(UnitDecided)[-1].num_context_tokens > 130
    assert len(talk.of(WindowSlid)) == num_slides
    talk.close()


def test_words_that_left_one_window_go_into_the_next_as_far_as_it_keeps_any(engine: Engine) -> None:
    marker = engine.tokenizer.encode(PREVIOUS_MARKER)
    wide, narrow = ContextWindow(2, 12, marker), ContextWindow(2, 3, marker)
    talk = Talk.begin(engine, replace(SESSION, window=wide))
    talk.live(range(2), Wish.SPEAK)
    while not talk.of(WindowSlid) or len(talk.of(WindowSlid)[-1].previous_ids) < len(marker) + 5:
        talk.live(range(2, 3), Wish.SPEAK)
    before = talk.of(WindowSlid)[-1].previous_ids
    talk.live(range(2), Wish.LISTEN)
    talk.call.change(settings(engine, replace(SESSION, window=narrow)))
    talk.live(range(1), Wish.LISTEN)
    after = talk.of(WindowSlid)[-1].previous_ids
    assert talk.of(SettingsChanged)
    assert after[: len(marker)] == marker
    assert len(after) == len(marker) + 3
    assert before != after
    talk.call.change(settings(engine, SESSION))
    talk.live(range(3), Wish.LISTEN)
    assert len(talk.of(SettingsChanged)) == 2
    talk.close()


def test_what_comes_while_a_call_changes_is_heard_in_its_order(engine: Engine) -> None:
    slow, quick = Talk.begin(engine, SESSION, "slow"), Talk.begin(engine, SESSION, "quick")
    new = settings(engine, replace(SESSION, prompt=OTHER_WORDS))
    for talk in (slow, quick):
        talk.live(range(3), Wish.LISTEN)
        talk.call.change(new)
    slow.settle()
    for unit, wish in ((3, Wish.SPEAK), (4, Wish.FREE)):
        for talk in (slow, quick):
            talk.call.hear(replace(build.second(unit), wish=wish))
        slow.settle()
    quick.call.interrupt()
    slow.call.interrupt()
    for talk in (slow, quick):
        talk.live(range(5, 8))
    assert slow.of(UnitDecided)[-1].unit == quick.of(UnitDecided)[-1].unit == 7
    quick.call.close()
    slow.close()


def test_a_change_that_does_not_fit_is_refused_and_the_call_goes_on_as_if_nobody_had_asked(engine: Engine) -> None:
    stays, changes = Talk.begin(engine, SESSION, "stays"), Talk.begin(engine, SESSION, "changes")
    for talk in (stays, changes):
        talk.live(range(6), Wish.LISTEN)
    too_small = replace(SESSION, window=OffWindow(changes.of(UnitDecided)[-1].num_context_tokens))
    others = [*build.until_full(engine, SESSION, build.voice(engine))]
    assert others
    for wanted in (too_small, replace(SESSION, prompt=OTHER_WORDS)):
        changes.call.change(settings(engine, wanted))
        changes.call.hear(build.second(6))
        changes.settle()
        stays.live(range(6, 7))
    assert [refused.code for refused in changes.of(ChangeRefused)] == ["prompt_too_long", "resource_exhausted"]
    for talk in (stays, changes):
        talk.live(range(7, 10))
    assert changes.tokens == stays.tokens
    assert torch.equal(changes.samples, stays.samples)
    for other in others:
        other.close()
    stays.call.close()
    changes.close()


def test_a_call_that_keeps_no_inputs_says_so_when_it_is_to_change(engine: Engine) -> None:
    talk = Talk.begin(engine, replace(SESSION, keeps_inputs=False))
    talk.live(range(1))
    talk.call.interrupt()
    talk.call.change(settings(engine, SESSION))
    talk.live(range(1, 2), Wish.LISTEN)
    (refused,) = talk.of(ChangeRefused)
    assert "keeps_inputs" in refused.message
    talk.close()


@pytest.mark.parametrize("num_steps", range(4))
def test_a_call_that_is_closed_while_it_changes_leaves_nothing(engine: Engine, num_steps: int) -> None:
    talk = Talk.begin(engine, SESSION)
    talk.live(range(3), Wish.LISTEN)
    talk.call.change(settings(engine, replace(SESSION, prompt=OTHER_WORDS)))
    for _ in range(num_steps):
        engine.advance()
    talk.close()
    assert len(talk.of(SessionEnded)) == 1
    assert isinstance(talk.told[-1], SessionEnded)


def test_a_change_before_the_call_is_open_comes_before_what_is_said_after_it(engine: Engine) -> None:
    talk = Talk(engine)
    session = replace(SESSION, duplex=DuplexConfig(num_forced_listens=3))
    talk.call = ChangingCall(engine, "talk", settings(engine, session), talk.told.append)
    talk.call.hear(build.second(0))
    talk.call.change(settings(engine, replace(session, prompt=OTHER_WORDS)))
    talk.call.hear(build.second(1))
    talk.settle()
    (changed,) = (at for at, told in enumerate(talk.told) if isinstance(told, SettingsChanged))
    first, second = (at for at, told in enumerate(talk.told) if isinstance(told, UnitDecided))
    assert first < changed < second
    talk.close()


def test_each_of_several_changes_is_made_in_turn(engine: Engine) -> None:
    talk = Talk.begin(engine, SESSION)
    talk.live(range(2), Wish.LISTEN)
    for words in ("One.", "Two, which is longer.", "Three, which is the longest of them all."):
        talk.call.change(settings(engine, replace(SESSION, prompt=wrap(words))))
    talk.settle()
    lengths = [changed.num_context_tokens for changed in talk.of(SettingsChanged)]
    assert lengths == sorted({*lengths})
    assert len(lengths) == 3
    talk.close()


@pytest.mark.parametrize("num_steps", range(4))
def test_an_engine_that_stops_ends_a_call_that_is_changing_once(engine: Engine, num_steps: int) -> None:
    talk = Talk.begin(engine, SESSION)
    talk.live(range(2), Wish.LISTEN)
    talk.call.change(settings(engine, replace(SESSION, prompt=OTHER_WORDS)))
    for _ in range(num_steps):
        engine.advance()
    engine.end_all(EngineStopped("the engine was stopped"))
    assert [ended.code for ended in talk.of(SessionEnded)] == ["engine_stopped"]
    talk.settle()
    counts = engine.survey().thinker.counts
    assert counts.num_free_blocks == counts.num_blocks


@pytest.mark.parametrize("num_steps", range(4))
def test_what_an_interruption_cuts_while_a_call_changes_stays_cut(engine: Engine, num_steps: int) -> None:
    talk = Talk.begin(engine, SESSION)
    talk.live(range(1), Wish.SPEAK)
    while not talk.of(Speech)[-1].chunk.ends_turn:
        talk.live(range(1, 2), Wish.HOLD)
    assert talk.call.present.record.playback.end_s > talk.call.present.record.now_s
    talk.call.change(settings(engine, replace(SESSION, prompt=OTHER_WORDS)))
    for _ in range(num_steps):
        engine.advance()
    talk.call.interrupt()
    talk.settle()
    assert len(talk.of(SettingsChanged)) == 1
    record = talk.call.present.record
    assert record.playback.end_s == record.now_s
    talk.close()
