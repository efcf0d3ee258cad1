"""A session's move to another thinker: what it takes along, and how it goes on from there.

Of the context only ids and input embeddings move, no keys and values: they are computed anew, as `reprefill` computes
them, so a moved session remembers what is in its window and nothing of what left it. Shown by
tests/stages/test_rebuild.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from antiphon.core.unit_records import UnitRecords
from antiphon.models.minicpmo.audio_history import AudioHistory
from antiphon.models.minicpmo.audio_stream import MelStream
from antiphon.stages.draw_table import DrawPlace, DrawTable, Newest
from antiphon.stages.thinker.decider import DeciderState, DeciderSteps
from antiphon.stages.thinker.memory import RetainedUnit
from antiphon.stages.thinker.senses import Senses, SensesState
from antiphon.stages.thinker.state import PromptDone, ThinkerSession


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Where a session is in its talk: of DeciderState, all but the context. pending_text_ids: of half a character."""

    pending_text_ids: tuple[int, ...]
    history: tuple[int, ...]
    is_turn_open: bool
    is_speaking: bool
    is_interrupted: bool
    epoch: int
    turn: int
    num_units: int
    num_handoffs: int
    num_draws: int


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """A session between two units, on the host, bounded by its window.

    num_prompt_tokens: prompt and suffix, `previous` apart. units: one record each, oldest first.
    stream, hearing: of its ears.
    """

    session: ThinkerSession
    num_prompt_tokens: int
    previous: tuple[int, ...]
    units: tuple[RetainedUnit, ...]
    progress: Progress
    stream: MelStream
    hearing: AudioHistory

    @property
    def num_tokens(self) -> int:
        """The length of its context."""
        num_unit_tokens = sum(unit.record.num_tokens for unit in self.units)
        return self.num_prompt_tokens + len(self.previous) + num_unit_tokens

    @property
    def next_turn(self) -> int:
        """The number of its next answer; one that is being spoken is over when it moves."""
        return self.progress.turn + int(self.progress.is_speaking)

    def behind(self, num_prompt_tokens: int) -> Retained:
        """The same past behind a prompt so long; what the session's window would drop then is gone."""
        window = self.session.window
        previous = window.taken_over(self.previous)
        retained = replace(self, num_prompt_tokens=num_prompt_tokens, previous=previous)
        plan = window.plan(retained.num_tokens, UnitRecords.of(unit.record for unit in retained.units), previous)
        if plan is None:
            return retained
        return replace(retained, previous=plan.previous, units=retained.units[plan.num_dropped_units :])

    def for_session(self, session: ThinkerSession) -> Retained:
        """The same past for a session that starts in epoch 0; an answer that is being spoken is over."""
        progress = replace(
            self.progress,
            epoch=0,
            num_handoffs=0,
            turn=self.next_turn,
            is_speaking=False,
            is_interrupted=self.progress.is_turn_open,
            pending_text_ids=(),
        )
        return replace(self, session=session, progress=progress)


def retain(senses: Senses, heard: SensesState, mind: DeciderState, table: DrawTable) -> Retained:
    """Take a session along, its draws from the table; it stays as it is. Raises: InputError if it keeps no inputs."""
    context = mind.memory.context
    stream, hearing = senses.recall(heard)
    return Retained(
        session=mind.session,
        num_prompt_tokens=context.num_anchor_tokens - len(context.previous),
        previous=context.previous,
        units=mind.memory.retained(),
        progress=Progress(
            pending_text_ids=mind.text.pending_ids,
            history=table.recall(DrawPlace(mind.slot, mind.newest, mind.session.sampling.repetition_window_tokens)),
            is_turn_open=mind.is_turn_open,
            is_speaking=mind.is_speaking,
            is_interrupted=mind.is_interrupted,
            epoch=mind.epoch,
            turn=mind.turn,
            num_units=mind.num_units,
            num_handoffs=mind.num_handoffs,
            num_draws=mind.num_draws,
        ),
        stream=stream,
        hearing=hearing,
    )


def resume(
    senses: Senses, heard: SensesState, mind: DeciderState, table: DrawTable, retained: Retained
) -> DeciderSteps:
    """Make a session that has just been opened, with its prompt, the retained one."""
    yield from mind.memory.refill(retained.previous, retained.units)
    progress = retained.progress
    mind.text.pending_ids = progress.pending_text_ids
    table.restore(mind.slot, progress.history)
    mind.newest = Newest.VOID
    mind.is_turn_open, mind.is_speaking = progress.is_turn_open, progress.is_speaking
    mind.is_interrupted, mind.epoch, mind.turn = progress.is_interrupted, progress.epoch, progress.turn
    mind.num_units, mind.num_handoffs, mind.num_draws = progress.num_units, progress.num_handoffs, progress.num_draws
    senses.restore(heard, retained.stream, retained.hearing)
    return PromptDone(mind.memory.context.num_tokens)
