"""What leaves of a session's answers when the engine stops some of them."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from antiphon.core.events import TurnText, UnitDecided
from antiphon.server.audio import FORMATS
from antiphon.server.events.ids import Ids
from antiphon.server.events.server import ServerEvent
from antiphon.server.pacing import PacingConfig
from antiphon.server.realtime.answer import AnswerSettings, Taken
from antiphon.server.realtime.answering import Answering
from antiphon.server.realtime.conversation import Conversation
from server.raw_client import Event

SETTINGS = AnswerSettings("conv", ("audio",), FORMATS["audio/pcm"], "inf", None, None)


def answering() -> Answering:
    return Answering(Ids(), Conversation(), PacingConfig(), lambda: SETTINGS, lambda: Taken(0, 0), lambda: None)


def decided(*turns: int) -> UnitDecided:
    said = tuple(TurnText(turn, "Hm.", ends_turn=True) for turn in turns)
    return UnitDecided(0, 1.0, False, said, (1,), 100, 7, 1)


def kinds(events: Iterable[ServerEvent]) -> list[str]:
    return [Event(json.loads(event.to_json())).kind for event in events]


@pytest.mark.parametrize("stopped", [1, 2])
def test_an_answer_is_over_with_the_turn_that_the_engine_stopped_behind_it(stopped: int) -> None:
    """Its words were on the way when the engine voided its sound, and only the newest turn is named."""
    answers = answering()
    assert kinds(answers.decide(decided(1, stopped), 1.0))[0] == "response.created"
    assert kinds(answers.was_stopped(stopped, 1.0))[-1] == "response.done"
    assert not answers.is_under_way
    assert kinds(answers.decide(decided(stopped), 2.0)) == []
    assert kinds(answers.decide(decided(stopped + 1), 3.0))[0] == "response.created"


def test_an_answer_goes_on_when_an_earlier_turn_is_told_to_be_stopped() -> None:
    answers = answering()
    assert kinds(answers.decide(decided(2), 1.0))[0] == "response.created"
    assert kinds(answers.was_stopped(1, 1.0)) == []
    assert answers.is_under_way
