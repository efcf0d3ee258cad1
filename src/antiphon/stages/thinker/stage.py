"""The thinker: a second of sound and pictures in, words with their hidden states out.

Joins `Senses` and `Decider`. Source: REFERENCE 4. Shown by tests/stages/test_thinker.py and the golden kind endtoend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.admission import Admission
from antiphon.errors import AntiphonError, ContextLengthExceeded, InputError, PromptTooLong
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.stages.paged import CacheConfig
from antiphon.stages.thinker.decider import Decider, DeciderState, DeciderSteps
from antiphon.stages.thinker.senses import Senses, SensesState
from antiphon.stages.thinker.state import PromptDone, ThinkerSession, UnitInput, UnitOutcome

NUM_SEGMENTS = 3
"""Prompt, `previous` with the suffix, ring: each may leave a block partly empty."""


@dataclass(slots=True)
class ThinkerState:
    """Owned by ThinkerStage. max_tokens: the context never holds more."""

    session: ThinkerSession
    max_tokens: int
    senses: SensesState
    mind: DeciderState


@dataclass(frozen=True, slots=True)
class ThinkerUnit:
    """A second that a session lives through. deadline_s: when its audio must exist, on the engine's clock."""

    state: ThinkerState
    heard: UnitInput
    deadline_s: float


class ThinkerStage:
    """Owns the thinker's session states.

    max_prompt_tokens: prompts above it are refused, so that a session's need is known before its prompt is.
    """

    def __init__(self, senses: Senses, decider: Decider, tokenizer: TextTokenizer, max_prompt_tokens: int) -> None:
        self._senses = senses
        self._decider = decider
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._admission = Admission(decider.decoder.pool.num_blocks)

    def open(self, session: ThinkerSession) -> ThinkerState:
        """Compute the prompt of a new session.

        Raises: PromptTooLong if it leaves no room for a unit, AudioError for its reference, ResourceExhausted if the
        cache may run out of blocks; nothing is held then.
        """
        prefix, suffix = (self._tokenizer.encode(text) for text in (session.prompt.prefix, session.prompt.suffix))
        reference = self._senses.embed_reference(session.reference)
        max_tokens = self._max_tokens(session, len(prefix) + len(suffix), reference.shape[0])
        pool = self._decider.decoder.pool
        num_blocks = CacheConfig.for_tokens(max_tokens, NUM_SEGMENTS, pool.block_size).num_blocks
        self._admission.admit(session.session_id, num_blocks)
        state = ThinkerState(session, max_tokens, self._senses.open(), self._decider.open(session, max_tokens))
        try:
            embeds = torch.cat([state.mind.memory.embed(prefix), reference])
            self._decider.loop.run(self._decider.prompt(state.mind, embeds, suffix))
        except BaseException:
            self.close(state)
            raise
        return state

    def close(self, state: ThinkerState) -> None:
        """Stop the session's work and give its blocks back; idempotent."""
        self._decider.loop.cancel(state.session.session_id)
        state.mind.memory.free()
        self._admission.leave(state.session.session_id)

    def run_units(self, units: Sequence[ThinkerUnit]) -> dict[str, UnitOutcome | AntiphonError]:
        """Let sessions live through a second each, together: take it in, decide on it, close the unit, slide.

        Returns by session id. A session that failed with AudioError, ImageError, InputError or ContextLengthExceeded
        has nothing of the unit in its context; one that failed otherwise must end.
        """
        failed: dict[str, UnitOutcome | AntiphonError] = {}
        works: list[tuple[str, DeciderSteps, float]] = []
        for unit in units:
            session_id = unit.state.session.session_id
            try:
                embeds = self._embed(unit.state, unit.heard)
            except AntiphonError as error:
                failed[session_id] = error
            else:
                works.append((session_id, self._decider.decide(unit.state.mind, embeds), unit.deadline_s))
        ended = self._decider.loop.run_all(works)
        return failed | {session_id: end for session_id, end in ended.items() if not isinstance(end, PromptDone)}

    def _embed(self, state: ThinkerState, heard: UnitInput) -> Tensor:
        """Check a second and turn it into embeddings, [n, hidden]."""
        session, num_tokens = state.session, state.mind.memory.context.num_tokens
        if len(heard.pictures) > session.max_pictures:
            raise InputError(f"a unit has {len(heard.pictures)} pictures; this session takes {session.max_pictures}")
        max_unit_tokens = self._max_unit_tokens(session, len(heard.pictures))
        if num_tokens + max_unit_tokens > state.max_tokens:
            raise ContextLengthExceeded(
                f"the context holds {num_tokens} of {state.max_tokens} tokens and the next unit may take "
                f"{max_unit_tokens}; use a sliding window for calls of any length"
            )
        return self._senses.embed_unit(state.senses, heard, session.max_slices)

    def _max_tokens(self, session: ThinkerSession, num_text_tokens: int, num_voice_tokens: int) -> int:
        """The most tokens that the session's context ever holds. Raises: PromptTooLong."""
        max_unit_tokens = self._max_unit_tokens(session, session.max_pictures)
        num_tokens = num_text_tokens + num_voice_tokens
        room = session.window.max_prompt_tokens(max_unit_tokens, self._decider.max_context_tokens)
        limit = min(room, self._max_prompt_tokens)
        if num_tokens > limit:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, {num_voice_tokens} of them the voice; this window, with units "
                f"of up to {max_unit_tokens} tokens, takes {limit}; shorten the instructions or the voice"
            )
        return session.window.peak_tokens(num_tokens, max_unit_tokens)

    def _max_unit_tokens(self, session: ThinkerSession, num_pictures: int) -> int:
        return self._senses.num_input_tokens(num_pictures, session.max_slices) + session.duplex.max_output_tokens
