"""The thinker: a second of sound and pictures in, words with their hidden states out.

Joins `Senses` and `Decider`. Source: REFERENCE 4. Shown by tests/stages/test_thinker.py and the golden kind endtoend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from antiphon.errors import ContextLengthExceeded, InputError, PromptTooLong
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.stages.thinker.decider import Decider, DeciderState
from antiphon.stages.thinker.senses import Senses, SensesState
from antiphon.stages.thinker.state import ThinkerSession, UnitInput, UnitOutcome


@dataclass(slots=True)
class ThinkerState:
    """Owned by ThinkerStage. max_tokens: the context never holds more."""

    session: ThinkerSession
    max_tokens: int
    senses: SensesState
    mind: DeciderState


class ThinkerStage:
    """Owns the thinker's session states.

    max_prompt_tokens: prompts above it are refused, so that a session's need is known before its prompt is.
    """

    def __init__(self, senses: Senses, decider: Decider, tokenizer: TextTokenizer, max_prompt_tokens: int) -> None:
        self._senses = senses
        self._decider = decider
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens

    def open(self, session: ThinkerSession) -> ThinkerState:
        """Compute the prompt of a new session.

        Raises: PromptTooLong if it leaves no room for a unit, AudioError for its reference, ResourceExhausted; nothing
        is held then.
        """
        prefix, suffix = (self._tokenizer.encode(text) for text in (session.prompt.prefix, session.prompt.suffix))
        reference = self._senses.embed_reference(session.reference)
        max_unit_tokens = self._max_unit_tokens(session, session.max_pictures)
        num_tokens = len(prefix) + reference.shape[0] + len(suffix)
        room = session.window.max_prompt_tokens(max_unit_tokens, self._decider.max_context_tokens)
        limit = min(room, self._max_prompt_tokens)
        if num_tokens > limit:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, {reference.shape[0]} of them the voice; this window, with units "
                f"of up to {max_unit_tokens} tokens, takes {limit}; shorten the instructions or the voice"
            )
        max_tokens = session.window.peak_tokens(num_tokens, max_unit_tokens)
        state = ThinkerState(session, max_tokens, self._senses.open(), self._decider.open(session, max_tokens))
        memory = state.mind.memory
        try:
            memory.feed_prompt(torch.cat([memory.embed(prefix), reference]))
            memory.feed_suffix(suffix)
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
        max_unit_tokens = self._max_unit_tokens(session, len(heard.pictures))
        if num_tokens + max_unit_tokens > state.max_tokens:
            raise ContextLengthExceeded(
                f"the context holds {num_tokens} of {state.max_tokens} tokens and the next unit may take "
                f"{max_unit_tokens}; use a sliding window for calls of any length"
            )
        return self._decider.decide(state.mind, self._senses.embed_unit(state.senses, heard, session.max_slices))

    def _max_unit_tokens(self, session: ThinkerSession, num_pictures: int) -> int:
        return self._senses.num_input_tokens(num_pictures, session.max_slices) + session.duplex.max_output_tokens
