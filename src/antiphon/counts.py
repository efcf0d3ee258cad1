"""How things stand in an engine: what its stages say when they are asked. For whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.core.messages import Survey, Surveyed
from antiphon.errors import AntiphonError
from antiphon.stages.code2wav.state import Code2WavCounts
from antiphon.stages.talker.state import TalkerCounts
from antiphon.stages.thinker.state import ThinkerCounts


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """How things stand in each stage."""

    thinker: Surveyed[ThinkerCounts]
    talker: Surveyed[TalkerCounts]
    code2wav: Surveyed[Code2WavCounts]


Tell = Callable[[EngineCounts | AntiphonError], None]


@dataclass(slots=True)
class _UnderWay:
    tell: Tell
    thinker: Surveyed[ThinkerCounts] | None = None
    talker: Surveyed[TalkerCounts] | None = None
    code2wav: Surveyed[Code2WavCounts] | None = None


@dataclass(slots=True)
class Surveys:
    """Owns the questions that are not answered yet."""

    _num_asked: int = 0
    _under_way: dict[int, _UnderWay] = field(default_factory=dict)

    def ask(self, tell: Tell) -> Survey:
        """The question to send to every stage; tell: is called when all have answered."""
        self._num_asked += 1
        self._under_way[self._num_asked] = _UnderWay(tell)
        return Survey(self._num_asked)

    def take_thinker(self, answer: Surveyed[ThinkerCounts]) -> None:
        if survey := self._under_way.get(answer.ticket):
            survey.thinker = answer
            self._tell(answer.ticket, survey)

    def take_talker(self, answer: Surveyed[TalkerCounts]) -> None:
        if survey := self._under_way.get(answer.ticket):
            survey.talker = answer
            self._tell(answer.ticket, survey)

    def take_code2wav(self, answer: Surveyed[Code2WavCounts]) -> None:
        if survey := self._under_way.get(answer.ticket):
            survey.code2wav = answer
            self._tell(answer.ticket, survey)

    def give_up(self, error: AntiphonError) -> None:
        """Nobody will answer any more."""
        under_way, self._under_way = self._under_way, {}
        for survey in under_way.values():
            survey.tell(error)

    def _tell(self, ticket: int, survey: _UnderWay) -> None:
        if survey.thinker is not None and survey.talker is not None and survey.code2wav is not None:
            del self._under_way[ticket]
            survey.tell(EngineCounts(survey.thinker, survey.talker, survey.code2wav))
