"""The thinker: a second of sound and pictures in, words with their hidden states out.

Joins `Senses` and `Decider`. Source: REFERENCE 4. Shown by tests/stages/test_thinker.py and the golden kind endtoend.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.admission import Admission
from antiphon.core.prompts import PromptStore
from antiphon.errors import AntiphonError, ConfigError, ContextLengthExceeded, InputError, PromptTooLong
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.stages.paged import CacheConfig
from antiphon.stages.thinker.decider import Decider, DeciderState
from antiphon.stages.thinker.senses import Senses, SensesState
from antiphon.stages.thinker.state import PromptDone, ThinkerSession, UnitInput, UnitOutcome

NUM_SEGMENTS = 3
"""Prompt, `previous` with the suffix, ring: each may leave a block partly empty."""


@dataclass(slots=True)
class ThinkerState:
    """Owned by ThinkerStage. max_tokens: the context never holds more. is_prompt_hit: its prompt was there already."""

    session: ThinkerSession
    max_tokens: int
    is_prompt_hit: bool
    senses: SensesState
    mind: DeciderState


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt's ids. key: digest of all that is shared: prefix, the voice's samples, suffix if it is shared."""

    key: str
    prefix_ids: tuple[int, ...]
    shared_suffix_ids: tuple[int, ...]
    private_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """max_tokens: longer prompts are refused, so that a session's need is known before its prompt is.

    is_shared: sessions with equal prompts use one copy. max_stored_bytes: of prompts that are kept without a user.
    """

    max_tokens: int
    is_shared: bool
    max_stored_bytes: int


class ThinkerStage:
    """Owns the thinker's session states, the reservations on its cache and the prompts that sessions share."""

    def __init__(self, senses: Senses, decider: Decider, tokenizer: TextTokenizer, limits: PromptLimits) -> None:
        self._senses = senses
        self._decider = decider
        self._tokenizer = tokenizer
        self._limits = limits
        pool = decider.decoder.pool
        self._admission = Admission(pool.num_blocks)
        max_stored_blocks = limits.max_stored_bytes // decider.decoder.block_bytes
        self.prompts = PromptStore(pool, self._admission, max_stored_blocks)

    def open(self, session: ThinkerSession) -> ThinkerState:
        """Start a session; its prompt is computed unless an equal one is in the cache.

        Raises: ConfigError if a session of this name is open, PromptTooLong if the prompt leaves no room for a unit,
        AudioError for its reference, ResourceExhausted if the cache may run out of blocks; nothing is held then.
        """
        if self._admission.is_admitted(session.session_id):
            raise ConfigError(f"a session named {session.session_id!r} is open; end it first or take another name")
        prompt = self._read_prompt(session)
        stored = self.prompts.find(prompt.key) if self._limits.is_shared else None
        embeds = self._embed_prompt(prompt, session.reference) if stored is None else self._embed(())
        num_shared_tokens = embeds.shape[0] if stored is None else stored.num_tokens
        max_tokens = self._max_tokens(session, num_shared_tokens + len(prompt.private_ids))
        self._admit(session, prompt, max_tokens, num_shared_tokens)
        mind = self._decider.open(session, max_tokens)
        state = ThinkerState(session, max_tokens, stored is not None, self._senses.open(), mind)
        context = state.mind.memory.context
        try:
            if stored is not None:
                context.adopt_prompt(stored)
            work = self._decider.prompt(state.mind, embeds, prompt.private_ids)
            self._decider.loop.run(session.session_id, work, deadline_s=0.0)
        except BaseException:
            self.close(state)
            if stored is None:
                self._admission.leave(prompt.key)
            raise
        if stored is None and self._limits.is_shared:
            self.prompts.keep(prompt.key, context.prompt)
        return state

    def close(self, state: ThinkerState) -> None:
        """Stop the session's work and give its blocks back; idempotent."""
        self._decider.loop.cancel(state.session.session_id)
        state.mind.memory.free()
        self._admission.leave(state.session.session_id)
        self.prompts.trim()

    def interrupt(self, state: ThinkerState) -> None:
        """Stop the session's present answer; between units."""
        self._decider.interrupt(state.mind)

    def start_unit(self, state: ThinkerState, heard: UnitInput, deadline_s: float) -> None:
        """Let a session live through a second: decide on it, close the unit, slide. `step` returns what it came to.

        deadline_s: when its audio must exist, on the engine's clock.
        Raises: AudioError, ImageError, InputError or ContextLengthExceeded; nothing of the unit is in the context then.
        """
        work = self._decider.decide(state.mind, self._embed_unit(state, heard))
        self._decider.loop.add(state.session.session_id, work, deadline_s)

    def step(self) -> dict[str, UnitOutcome | AntiphonError]:
        """One forward pass for the most urgent sessions. Returns the units that came to their end, by session id.

        A session whose unit ended with an error is over.
        """
        ended: dict[str, UnitOutcome | AntiphonError] = {}
        for finished in self._decider.loop.step():
            assert not isinstance(finished.result, PromptDone), "a prompt ends in the call that opens its session"
            ended[finished.session_id] = finished.result
        return ended

    def _embed_unit(self, state: ThinkerState, heard: UnitInput) -> Tensor:
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

    def _read_prompt(self, session: ThinkerSession) -> PromptParts:
        prefix, suffix = (self._tokenizer.encode(text) for text in (session.prompt.prefix, session.prompt.suffix))
        # `previous` text will stand in front of the suffix, so that the suffix cannot be part of what is shared.
        shared, private = ((), suffix) if session.window.keeps_previous else (suffix, ())
        content = hashlib.sha256()
        for part in (repr(prefix).encode(), session.reference.numpy().tobytes(), repr(shared).encode()):
            content.update(hashlib.sha256(part).digest())
        return PromptParts(f"prompt {content.hexdigest()}", prefix, shared, private)

    def _embed_prompt(self, prompt: PromptParts, reference: Tensor) -> Tensor:
        """What is shared, [n, hidden]."""
        voice = self._senses.embed_reference(reference)
        return torch.cat([self._embed(prompt.prefix_ids), voice, self._embed(prompt.shared_suffix_ids)])

    def _embed(self, ids: tuple[int, ...]) -> Tensor:
        return self._decider.embed(ids)

    def _admit(self, session: ThinkerSession, prompt: PromptParts, max_tokens: int, num_shared_tokens: int) -> None:
        """Reserve what the session may ever need, a shared prompt apart; unused prompts make room.

        Raises: ResourceExhausted; nothing is reserved then.
        """
        size = self._decider.decoder.pool.block_size
        wanted = {session.session_id: CacheConfig.for_tokens(max_tokens, NUM_SEGMENTS, size).num_blocks}
        if self._limits.is_shared:
            num_prompt_blocks = -(-num_shared_tokens // size)
            wanted[session.session_id] -= num_prompt_blocks
            if not self._admission.is_admitted(prompt.key):
                wanted[prompt.key] = num_prompt_blocks
        while self._admission.num_free_blocks < sum(wanted.values()) and self.prompts.evict(but=prompt.key):
            pass
        self._admission.admit(wanted)

    def _max_tokens(self, session: ThinkerSession, num_prompt_tokens: int) -> int:
        """The most tokens that the session's context ever holds. Raises: PromptTooLong."""
        max_unit_tokens = self._max_unit_tokens(session, session.max_pictures)
        room = session.window.max_prompt_tokens(max_unit_tokens, self._decider.max_context_tokens)
        limit = min(room, self._limits.max_tokens)
        if num_prompt_tokens > limit:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens, ten a second of them the voice; this window, with units "
                f"of up to {max_unit_tokens} tokens, takes {limit}; shorten the instructions or the voice"
            )
        return session.window.peak_tokens(num_prompt_tokens, max_unit_tokens)

    def _max_unit_tokens(self, session: ThinkerSession, num_pictures: int) -> int:
        return self._senses.num_input_tokens(num_pictures, session.max_slices) + session.duplex.max_output_tokens
