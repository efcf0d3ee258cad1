"""The thinker: a second of sound and pictures in, words with their hidden states out.

Joins `Senses` and `Decider`. Source: REFERENCE 4. Shown by tests/stages/test_thinker.py and the golden kind endtoend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from antiphon.core.duplex import DuplexConfig
from antiphon.errors import ContextLengthExceeded, InputError, PromptTooLong
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.stages.thinker.decider import Decider, DeciderState
from antiphon.stages.thinker.senses import Senses, SensesState
from antiphon.stages.thinker.state import ThinkerSession, UnitInput, UnitOutcome


@dataclass(slots=True)
class ThinkerState:
    """Owned by ThinkerStage."""

    session: ThinkerSession
    senses: SensesState
    mind: DeciderState


class ThinkerStage:
    """Owns the thinker's session states."""

    def __init__(self, senses: Senses, decider: Decider, tokenizer: TextTokenizer) -> None:
        self._senses = senses
        self._tokenizer = tokenizer
        self.decider = decider

    def open(self, session: ThinkerSession) -> ThinkerState:
        """Compute the prompt of a new session.

        Raises: PromptTooLong if it leaves no room for a unit, AudioError for its reference, ResourceExhausted; nothing
        is held then.
        """
        state = ThinkerState(session, self._senses.open(), self.decider.open(session))
        try:
            self._feed_prompt(state)
        except BaseException:
            self.close(state)
            raise
        return state

    def close(self, state: ThinkerState) -> None:
        """Give the session's blocks back; idempotent."""
        state.mind.memory.free()

    def run_unit(self, state: ThinkerState, heard: UnitInput) -> UnitOutcome:
        """Take in one second and decide on it, close the unit, slide.

        Raises: AudioError, ImageError, InputError or ContextLengthExceeded; nothing of the unit is in the context then.
        """
        session, num_tokens = state.session, state.mind.memory.context.num_tokens
        if len(heard.pictures) > session.max_pictures:
            raise InputError(f"a unit has {len(heard.pictures)} pictures; this session takes {session.max_pictures}")
        max_unit_tokens = self.max_unit_tokens(session.duplex, len(heard.pictures), session.max_slices)
        if num_tokens + max_unit_tokens > session.max_tokens:
            raise ContextLengthExceeded(
                f"the context holds {num_tokens} of {session.max_tokens} tokens and the next unit may take "
                f"{max_unit_tokens}; use a sliding window for calls of any length"
            )
        return self.decider.decide(state.mind, self._senses.embed_unit(state.senses, heard, session.max_slices))

    def max_unit_tokens(self, duplex: DuplexConfig, num_pictures: int, max_slices: int) -> int:
        """The most tokens that a unit of so many pictures takes, `<unit>` and `</unit>` included."""
        return self._senses.num_input_tokens(num_pictures, max_slices) + duplex.max_unit_tokens + 1

    def _feed_prompt(self, state: ThinkerState) -> None:
        session, memory = state.session, state.mind.memory
        prefix, suffix = (self._tokenizer.encode(text) for text in (session.prompt.prefix, session.prompt.suffix))
        reference = self._senses.embed_reference(session.reference)
        num_tokens = len(prefix) + reference.shape[0] + len(suffix)
        max_unit_tokens = self.max_unit_tokens(session.duplex, session.max_pictures, session.max_slices)
        if num_tokens + max_unit_tokens > session.max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens ({reference.shape[0]} of them reference audio) and a unit up to "
                f"{max_unit_tokens}, but the context holds {session.max_tokens}; shorten the instructions or the voice"
            )
        memory.feed_prompt(torch.cat([memory.embed(prefix), reference]))
        memory.feed_suffix(suffix)
