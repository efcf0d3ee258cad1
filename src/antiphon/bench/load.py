"""What came of a load of paced callers, as figures and counts. Pure: times in, numbers out.

Nothing is left out: units that were never finished, callers that were refused or lost, gaps in what was heard are
counted beside the times. Shown by tests/bench/test_load.py; who makes the load is in `callers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from antiphon.bench.pacing import Arrival, Heard, Playback, lateness_s, play
from antiphon.bench.results import Count, Figure, Limit, Quantity, Series, Unit
from antiphon.bench.script import Talk
from antiphon.units import OUTPUT_RATE_HZ


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load. num_warm_up_units: in real time, before what is measured. num_parts: that the measured time is cut into.

    lead_ms: that a listener buffers. max_late_ms: of a unit, to count as late. picture_side: of a camera's pictures,
    one a second; 0 for none. voice_s: of the callers' common voice.
    """

    num_sessions: int
    talk: Talk
    arrival: Arrival
    num_warm_up_units: int
    num_units: int
    num_parts: int
    lead_ms: float
    max_late_ms: float
    picture_side: int
    voice_s: float

    @property
    def case(self) -> str:
        return f"{self.arrival.value}, {self.talk.speaking_share:.0%} speaking"


@dataclass(frozen=True, slots=True)
class Stages:
    """How long a unit was in each stage, waiting included."""

    thinker_ms: float
    talker_ms: float
    code2wav_ms: float


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """A unit of a session: when it was complete, decided, first heard of, and over; None for what never was.

    unit: from 0 on, the warm-up's included.
    """

    session: int
    unit: int
    complete_s: float
    decided_s: float | None
    first_pcm_s: float | None
    finished_s: float | None
    stages: Stages | None


@dataclass(frozen=True, slots=True)
class TurnHeard:
    """What came of a turn after the warm-up. first_complete_s: when the unit was complete that it began in.

    None if it began before.
    """

    session: int
    unit: int
    first_complete_s: float | None
    pieces: tuple[Heard, ...]


@dataclass(frozen=True, slots=True)
class MemoryAt:
    """at_s: since the clock started. Device: what torch holds, and what it has reserved."""

    at_s: float
    host_bytes: int
    held_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Troubles:
    """Of all callers. num_refused: never opened. num_lost: ended by themselves. num_unsent: units that were not taken.

    num_inputs_refused, num_speech_lost: events of these names.
    """

    num_refused: int
    num_lost: int
    num_unsent: int
    num_inputs_refused: int
    num_speech_lost: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All that was observed. sending_s: by how much the generator was late, per unit.

    num_slides: in the measured time. fill_s: that filling the windows took. context_tokens: of each session then.
    """

    plan: LoadPlan
    units: tuple[UnitTimes, ...]
    turns: tuple[TurnHeard, ...]
    sending_s: tuple[float, ...]
    memory: tuple[MemoryAt, ...]
    troubles: Troubles
    num_slides: int
    fill_s: float
    context_tokens: tuple[int, ...]

    @property
    def measured(self) -> tuple[UnitTimes, ...]:
        return tuple(one for one in self.units if one.unit >= self.plan.num_warm_up_units)

    @property
    def warm_up(self) -> tuple[UnitTimes, ...]:
        return tuple(one for one in self.units if one.unit < self.plan.num_warm_up_units)

    def num_late(self, units: Iterable[UnitTimes]) -> int:
        """Of those that were finished; the others are counted apart."""
        limit_s = self.plan.max_late_ms / 1000
        return sum(one.finished_s is not None and lateness_s(one.complete_s, one.finished_s) > limit_s for one in units)

    @property
    def num_unfinished(self) -> int:
        return sum(one.finished_s is None for one in self.measured)

    @property
    def playbacks(self) -> tuple[Playback, ...]:
        return tuple(play(turn.pieces, self.plan.lead_ms / 1000) for turn in self._audible)

    @property
    def num_underruns(self) -> int:
        return sum(one.num_underruns for one in self.playbacks)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the load was too much; none if it was not."""
        troubles = self.troubles
        counted = (
            (self.num_late(self.measured), "units were late"),
            (self.num_unfinished, "units were never finished"),
            (self.num_underruns, "underruns"),
            (troubles.num_refused, "sessions were refused"),
            (troubles.num_lost, "sessions were lost"),
            (troubles.num_unsent, "units were not taken"),
            (troubles.num_inputs_refused, "inputs were refused"),
            (troubles.num_speech_lost, "answers were cut short"),
        )
        return tuple(f"{number} {what}" for number, what in counted if number)

    @property
    def _audible(self) -> tuple[TurnHeard, ...]:
        return tuple(turn for turn in self.turns if any(piece.num_samples for piece in turn.pieces))

    def figures(self) -> Iterator[Figure]:
        """Times that exist; nothing for what never happened."""
        plan, measured = self.plan, self.measured
        decided = [(one.unit, one.decided_s - one.complete_s) for one in measured if one.decided_s is not None]
        spoken = [(one.unit, one.first_pcm_s - one.complete_s) for one in measured if one.first_pcm_s is not None]
        late = [
            (one.unit, lateness_s(one.complete_s, one.finished_s)) for one in measured if one.finished_s is not None
        ]
        begun = [
            (turn.unit, next(piece.at_s for piece in turn.pieces if piece.num_samples) - turn.first_complete_s)
            for turn in self._audible
            if turn.first_complete_s is not None
        ]
        leads = [
            (turn.unit, playback.needed_lead_s) for turn, playback in zip(self._audible, self.playbacks, strict=True)
        ]
        yield from self._figure(Quantity.DECIDED, decided)
        yield from self._figure(Quantity.FIRST_PCM, spoken)
        yield from self._figure(Quantity.FIRST_AUDIO, begun)
        yield from self._stage_figures()
        yield from self._figure(Quantity.LATENESS, late, Limit("late above", plan.max_late_ms))
        yield from self._figure(Quantity.NEEDED_LEAD, leads, Limit("lead", plan.lead_ms))
        if self.sending_s:
            in_order = [(plan.num_warm_up_units, value) for value in self.sending_s]
            yield from self._figure(Quantity.SENDING, in_order)

    def _stage_figures(self) -> Iterator[Figure]:
        """Of units that listen, what the thinker takes; of those that speak, what each stage does."""
        over = [(one.unit, one.stages, one.first_pcm_s is not None) for one in self.measured]
        listening = [(unit, stages) for unit, stages, speaks in over if stages is not None and not speaks]
        speaking = [(unit, stages) for unit, stages, speaks in over if stages is not None and speaks]
        for name, values in (
            ("thinker, listening", [(unit, stages.thinker_ms / 1000) for unit, stages in listening]),
            ("thinker, speaking", [(unit, stages.thinker_ms / 1000) for unit, stages in speaking]),
            ("talker", [(unit, stages.talker_ms / 1000) for unit, stages in speaking]),
            ("code2wav", [(unit, stages.code2wav_ms / 1000) for unit, stages in speaking]),
        ):
            yield from self._figure(Quantity.STAGE_TIME, values, case=f"{name}: {self.plan.case}")

    def _figure(
        self, quantity: Quantity, values: Sequence[tuple[int, float]], *limits: Limit, case: str = ""
    ) -> Iterator[Figure]:
        """values: unit and seconds. The parts of the measured time are the repetitions. case: if not the load's."""
        parts: list[list[float]] = [[] for _ in range(self.plan.num_parts)]
        for unit, value_s in values:
            part = (unit - self.plan.num_warm_up_units) * self.plan.num_parts // self.plan.num_units
            parts[part].append(1000 * value_s)
        if values:
            size = ("sessions", self.plan.num_sessions)
            yield Figure.of(quantity, case or self.plan.case, size, Unit.MS, [part for part in parts if part], limits)

    def counts(self) -> Iterator[Count]:
        """What happened how often, zeros too."""
        plan, troubles, playbacks = self.plan, self.troubles, self.playbacks
        seconds = plan.num_units
        num_samples = sum(piece.num_samples for turn in self.turns for piece in turn.pieces)
        counted: tuple[tuple[str, float, str], ...] = (
            ("units complete", len(self.measured), ""),
            (f"units late by more than {plan.max_late_ms:g} ms", self.num_late(self.measured), ""),
            ("units late in the warm-up", self.num_late(self.warm_up), ""),
            ("units never finished", self.num_unfinished, ""),
            ("units not taken", troubles.num_unsent, ""),
            (f"underruns with {plan.lead_ms:g} ms of lead", self.num_underruns, ""),
            ("silence in underruns", 1000 * sum(one.gap_s for one in playbacks), "ms"),
            ("turns heard", len(playbacks), ""),
            ("sessions refused", troubles.num_refused, ""),
            ("sessions lost", troubles.num_lost, ""),
            ("inputs refused", troubles.num_inputs_refused, ""),
            ("answers cut short", troubles.num_speech_lost, ""),
            ("slides", self.num_slides, ""),
            ("speech a second", num_samples / OUTPUT_RATE_HZ / seconds, "s"),
            ("filling the windows took", self.fill_s, "s"),
            ("tokens of the shortest context at the start", min(self.context_tokens, default=0), ""),
            ("tokens of the longest context at the start", max(self.context_tokens, default=0), ""),
            *((name, value, "MB") for name, value in self._memory_growth()),
        )
        for name, value, unit in counted:
            yield Count(name, plan.case, "sessions", plan.num_sessions, value, unit)

    def _memory_growth(self) -> Iterator[tuple[str, float]]:
        """From the first tenth of the measured time to its last, means of each."""
        at = [one for one in self.memory if one.at_s >= self.plan.num_warm_up_units]
        if not at:
            return
        tenth = max(1, len(at) // 10)
        for name, values in (
            ("host memory grew by", [one.host_bytes for one in at]),
            ("device memory held grew by", [one.held_bytes for one in at]),
            ("device memory reserved grew by", [one.reserved_bytes for one in at]),
        ):
            yield name, (sum(values[-tenth:]) - sum(values[:tenth])) / tenth / 1e6
        yield "device memory reserved at most", max(one.reserved_bytes for one in at) / 1e6

    def series(self) -> Iterator[Series]:
        """Memory over time."""
        times = tuple(one.at_s for one in self.memory)
        case = f"{self.plan.num_sessions} sessions, {self.plan.case}"
        yield Series("host memory", case, "MB", times, tuple(one.host_bytes / 1e6 for one in self.memory))
        if any(one.reserved_bytes for one in self.memory):
            held = tuple(one.held_bytes / 1e6 for one in self.memory)
            yield Series("device memory", f"{case}, held", "MB", times, held)
            reserved = tuple(one.reserved_bytes / 1e6 for one in self.memory)
            yield Series("device memory", f"{case}, reserved", "MB", times, reserved)
