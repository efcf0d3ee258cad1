"""The thinker: a second of sound and pictures in, words with their hidden states out.

Joins `Senses` and `Decider`. Source: REFERENCE 4. Shown by tests/stages/test_thinker.py and the golden kind endtoend.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from antiphon.core.admission import Admission
from antiphon.core.cache_dtype import check_slide
from antiphon.core.duplex import Wish
from antiphon.core.messages import GoOn, HeardUnit, Retain
from antiphon.core.prompts import PromptStore
from antiphon.errors import AntiphonError, ContextLengthExceeded, PromptTooLong
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.stages.loop import Ready
from antiphon.stages.paged import CacheConfig
from antiphon.stages.thinker.answering import ChatState
from antiphon.stages.thinker.chats import Chats
from antiphon.stages.thinker.decider import Decider, DeciderState, DeciderSteps
from antiphon.stages.thinker.rebuild import Retained, resume, retain
from antiphon.stages.thinker.senses import Senses, SensesState, UnitRow, check_limits
from antiphon.stages.thinker.state import (
    ChatSession,
    PieceOutcome,
    PromptDone,
    PromptReady,
    ThinkerCounts,
    ThinkerSession,
    UnitInput,
    UnitOutcome,
)

ThinkerResult = UnitOutcome | Retained | PieceOutcome

NUM_SEGMENTS = 3
"""Prompt, `previous` with the suffix, ring: each may leave a block partly empty."""


class PromptSource(Enum):
    """Where a session has the shared part of its prompt from."""

    OWN = "own"
    """It computes it; if prompts are shared, for others as well."""
    STORED = "stored"
    """It was in the cache."""
    AWAITED = "awaited"
    """Another session is computing it."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt's ids. key: digest of all that is shared: prefix, the voice's samples, suffix if it is shared."""

    key: str
    prefix_ids: tuple[int, ...]
    shared_suffix_ids: tuple[int, ...]
    private_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ThinkerState:
    """Owned by ThinkerStage.

    max_tokens: the context never holds more.
    num_shared_tokens: of the prompt's shared part. shared_embeds: [n, hidden], its inputs until they are in the cache.
    prompt_source: where the shared part comes from.
    """

    settings: ThinkerSession | Retained
    max_tokens: int
    prompt: PromptParts
    num_shared_tokens: int
    shared_embeds: Tensor
    prompt_source: PromptSource
    senses: SensesState
    mind: DeciderState

    @property
    def session(self) -> ThinkerSession:
        return self.mind.session


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
        self._opening: dict[str, ThinkerState] = {}  # in order; their prompts are not being read yet
        self._reading: dict[str, ThinkerState] = {}  # their prompts are
        self._due: dict[str, tuple[ThinkerState, HeardUnit[UnitInput]]] = {}
        self._retained: dict[str, Retained] = {}
        self._chats = Chats(senses, decider, tokenizer, self._admission, self.prompts)

    def open(self, settings: ThinkerSession | Retained | ChatSession) -> ThinkerState | ChatState:
        """Start a session of either kind. Raises: as `open_call` and `Chats.open`; nothing is held then."""
        return self._chats.open(settings) if isinstance(settings, ChatSession) else self.open_call(settings)

    def open_call(self, settings: ThinkerSession | Retained) -> ThinkerState:
        """Start a session, or go on with one that another stage retained, where it stopped.

        Its prompt is computed in the next steps unless an equal one is there or on its way.
        Raises: ConfigError if the cache cannot slide so, PromptTooLong if the prompt leaves no room for a unit,
        ContextLengthExceeded if what was retained leaves none, AudioError for its reference, ResourceExhausted if the
        cache may run out of blocks; nothing is held then.
        """
        session = settings.session if isinstance(settings, Retained) else settings
        check_slide(session.slide, self._decider.decoder.kept_in)
        prompt = self._read_prompt(session)
        source, num_shared_tokens, embeds = PromptSource.OWN, 0, self._embed(())
        stored = None
        if awaited := self._computer_of(prompt.key):
            source, num_shared_tokens = PromptSource.AWAITED, awaited.num_shared_tokens
        elif self._limits.is_shared and (stored := self.prompts.find(prompt.key)):
            source, num_shared_tokens = PromptSource.STORED, stored.num_tokens
        else:
            embeds = self._embed_prompt(prompt, session.reference)
            num_shared_tokens = embeds.shape[0]
        num_prompt_tokens = num_shared_tokens + len(prompt.private_ids)
        max_tokens = self._max_tokens(session, num_prompt_tokens)
        if isinstance(settings, Retained):
            settings = settings.behind(num_prompt_tokens)
            self._check_room(settings, max_tokens)
        self._admit(session, prompt, max_tokens, num_shared_tokens)
        mind = self._decider.open(session, max_tokens)
        if stored is not None:
            mind.memory.context.adopt_prompt(stored)
        state = ThinkerState(settings, max_tokens, prompt, num_shared_tokens, embeds, source, self._senses.open(), mind)
        self._opening[session.session_id] = state
        return state

    def start(self, state: ThinkerState | ChatState, work: HeardUnit[UnitInput] | Retain | GoOn) -> None:
        """Let a call live through a second: decide on it, close the unit, slide; or retain it. Let a chat go on.

        `step` returns what it came to.
        Raises: InputError or ContextLengthExceeded; nothing of the unit is in the context then. InputError also if the
        session keeps nothing that it could be retained by.
        """
        session_id = state.session.session_id
        if isinstance(state, ChatState) or isinstance(work, GoOn):
            assert isinstance(state, ChatState), f"the call {session_id} is asked to go on"
            assert isinstance(work, GoOn), f"the chat {session_id} hears {work}"
            self._chats.start(state, work)
            return
        if isinstance(work, Retain):
            self._retained[session_id] = self.retain(state)
            return
        self._check(state, work.heard)
        self._due[session_id] = (state, work)

    def retain(self, state: ThinkerState) -> Retained:
        """A session between two units, to be gone on with elsewhere; it stays as it is."""
        return retain(self._senses, state.senses, state.mind, self._decider.chooser.table)

    @property
    def is_idle(self) -> bool:
        is_calm = not self._opening and not self._due and not self._retained
        return is_calm and self._chats.is_idle and self._decider.loop.is_idle

    def step(self) -> dict[str, Ready[PromptReady] | ThinkerResult | AntiphonError]:
        """One forward pass for the most urgent sessions; encoders run for all units that have come in."""
        ended: dict[str, Ready[PromptReady] | ThinkerResult | AntiphonError] = {**self._retained}
        self._retained.clear()
        ended |= self._start_prompts()
        ended |= self._start_units()
        ended |= self._chats.embed_some()
        for finished in self._decider.loop.step():
            result = finished.result
            if isinstance(result, PromptDone):
                of_chat = self._chats.ready(finished.session_id)
                ended[finished.session_id] = (
                    self._end_prompt(self._reading.pop(finished.session_id)) if of_chat is None else Ready(of_chat)
                )
            else:
                ended[finished.session_id] = result
        return ended

    def interrupt(self, state: ThinkerState | ChatState, epoch: int) -> None:
        """Stop the session's present answer. A chat is its answer: whoever does not want it closes it."""
        if isinstance(state, ThinkerState):
            self._decider.interrupt(state.mind, epoch)

    def close(self, state: ThinkerState | ChatState) -> None:
        """Stop the session's work and give its blocks back; idempotent."""
        if isinstance(state, ChatState):
            self._chats.close(state)
            self.prompts.trim()
            return
        session_id = state.session.session_id
        is_prompt_due = any(pending.pop(session_id, None) is state for pending in (self._opening, self._reading))
        self._due.pop(session_id, None)
        self._retained.pop(session_id, None)
        self._decider.close(state.mind)
        self._admission.leave(session_id)
        is_alone = not any(other.prompt.key == state.prompt.key for other in self._opening.values())
        if is_prompt_due and state.prompt_source is PromptSource.OWN and is_alone:
            self._admission.leave(state.prompt.key)
        self.prompts.trim()

    def survey(self) -> ThinkerCounts:
        return ThinkerCounts(
            prompts=self.prompts.counts,
            num_blocks=self._decider.decoder.pool.num_blocks,
            num_free_blocks=self._decider.decoder.pool.num_free_blocks,
            num_unreserved_blocks=self._admission.num_free_blocks,
            block_bytes=self._decider.decoder.block_bytes,
            num_runs=self._decider.num_runs + self._senses.num_runs,
        )

    def _computer_of(self, key: str) -> ThinkerState | None:
        """The session that computes, or will compute, a prompt for others."""
        if not self._limits.is_shared:
            return None
        at_work = (*self._reading.values(), *self._opening.values())
        return next((one for one in at_work if one.prompt.key == key and one.prompt_source is PromptSource.OWN), None)

    def _start_prompts(self) -> dict[str, AntiphonError]:
        failed: dict[str, AntiphonError] = {}
        for session_id, state in list(self._opening.items()):
            try:
                if state.prompt_source is PromptSource.AWAITED and not self._find_awaited(state):
                    continue
            except AntiphonError as error:
                failed[session_id] = error
                continue
            self._reading[session_id] = self._opening.pop(session_id)
            self._decider.loop.add(session_id, self._read(state), state.session.deadline_s)
        return failed

    def _read(self, state: ThinkerState) -> DeciderSteps:
        """Compute the prompt, and after it what was retained."""
        done = yield from self._decider.prompt(state.mind, state.shared_embeds, state.prompt.private_ids)
        if isinstance(state.settings, Retained):
            table = self._decider.chooser.table
            done = yield from resume(self._senses, state.senses, state.mind, table, state.settings)
        return done

    def _find_awaited(self, state: ThinkerState) -> bool:
        """Whether the prompt is there by now, or this session has to compute it because the other one has gone."""
        if self._computer_of(state.prompt.key):
            return False
        stored = self.prompts.find(state.prompt.key)
        if stored is not None:
            state.prompt_source = PromptSource.STORED
            state.mind.memory.context.adopt_prompt(stored)
        else:
            state.prompt_source = PromptSource.OWN
            state.shared_embeds = self._embed_prompt(state.prompt, state.session.reference)
        return True

    def _end_prompt(self, state: ThinkerState) -> Ready[PromptReady]:
        context = state.mind.memory.context
        if state.prompt_source is PromptSource.OWN and self._limits.is_shared:
            self.prompts.keep(state.prompt.key, context.prompt)
        state.shared_embeds = self._embed(())
        is_hit = state.prompt_source is PromptSource.STORED
        return Ready(PromptReady(context.num_tokens, state.max_tokens, is_hit))

    def _start_units(self) -> dict[str, AntiphonError]:
        """Encode the units that have come in, all sessions together, and begin to decide on them."""
        failed: dict[str, AntiphonError] = {}
        due, self._due = self._due, {}
        rows = [UnitRow(state.senses, unit.heard, state.session.max_slices) for state, unit in due.values()]
        encoded = self._senses.embed_units(rows) if rows else []
        for (session_id, (state, unit)), embeds in zip(due.items(), encoded, strict=True):
            if isinstance(embeds, AntiphonError):
                failed[session_id] = embeds
                continue
            work = self._decider.decide(state.mind, embeds, unit.deadline_s, _valid_wish(state, unit))
            self._decider.loop.add(session_id, work, unit.deadline_s)
        return failed

    def _check(self, state: ThinkerState, heard: UnitInput) -> None:
        session, num_tokens = state.session, state.mind.memory.context.num_tokens
        check_limits(heard, session, self._tokenizer)
        max_unit_tokens = self._max_unit_tokens(session, len(heard.pictures), len(heard.text_ids))
        if num_tokens + max_unit_tokens > state.max_tokens:
            raise ContextLengthExceeded(
                f"the context holds {num_tokens} of {state.max_tokens} tokens and the next unit may take "
                f"{max_unit_tokens}; use a sliding window for calls of any length"
            )

    def _check_room(self, retained: Retained, max_tokens: int) -> None:
        session = retained.session
        max_unit_tokens = self._max_unit_tokens(session, session.max_pictures, session.max_text_tokens)
        if retained.num_tokens + max_unit_tokens > max_tokens:
            raise ContextLengthExceeded(
                f"the context to be rebuilt holds {retained.num_tokens} of {max_tokens} tokens and the next unit may "
                f"take {max_unit_tokens}; open the session anew"
            )

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
        self.prompts.admit(wanted, but=prompt.key)

    def _max_tokens(self, session: ThinkerSession, num_prompt_tokens: int) -> int:
        """The most tokens that the session's context ever holds. Raises: PromptTooLong."""
        max_unit_tokens = self._max_unit_tokens(session, session.max_pictures, session.max_text_tokens)
        room = session.window.max_prompt_tokens(max_unit_tokens, self._decider.max_context_tokens)
        limit = min(room, self._limits.max_tokens)
        if num_prompt_tokens > limit:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens, ten a second of them the voice; this window, with units "
                f"of up to {max_unit_tokens} tokens, takes {limit}; shorten the instructions or the voice"
            )
        return session.window.peak_tokens(num_prompt_tokens, max_unit_tokens)

    def _max_unit_tokens(self, session: ThinkerSession, num_pictures: int, num_text_tokens: int) -> int:
        num_input_tokens = self._senses.num_input_tokens(num_pictures, session.max_slices, num_text_tokens)
        return num_input_tokens + session.duplex.max_output_tokens


def _valid_wish(state: ThinkerState, unit: HeardUnit[UnitInput]) -> Wish:
    """What is wanted of a unit. An answer that was asked for before an interruption is not begun after it."""
    is_stale = unit.address.epoch < state.mind.epoch
    return Wish.HOLD if is_stale and unit.heard.wish is Wish.SPEAK else unit.heard.wish
