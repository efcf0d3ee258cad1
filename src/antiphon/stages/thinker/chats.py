"""The thinker's chats: who may come in, their prompts piece by piece between the seconds of calls, their answers.

Shares cache, chooser and step loop with the calls of the same stage. Source: REFERENCE 14. Shown by
tests/stages/test_chats.py.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from antiphon.core.admission import Admission
from antiphon.core.chat import StopText
from antiphon.core.messages import GoOn
from antiphon.core.prompts import PromptStore
from antiphon.errors import AntiphonError, ContextLengthExceeded
from antiphon.models.minicpmo.chat_prompt import HeardSound, PromptPiece
from antiphon.models.minicpmo.tokens import TextStream, TextTokenizer
from antiphon.stages.paged import CacheConfig
from antiphon.stages.thinker.answering import ChatState, answer, read_prompt
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.senses import Senses, failure
from antiphon.stages.thinker.state import ChatSession, PromptReady

NUM_SEGMENTS = 1
"""All of a chat is in the ring."""


class Chats:
    """Owns the states of a thinker's chats."""

    def __init__(
        self,
        senses: Senses,
        decider: Decider,
        tokenizer: TextTokenizer,
        admission: Admission,
        prompts: PromptStore,
    ) -> None:
        self._senses = senses
        self._decider = decider
        self._tokenizer = tokenizer
        self._admission = admission
        self._prompts = prompts
        self._opening: dict[str, ChatState] = {}  # their prompts are not embedded, or not computed
        self._embedding: dict[str, ChatState] = {}  # in order; not embedded

    def open(self, session: ChatSession) -> ChatState:
        """A chat whose prompt is read in the next steps.

        Raises: ContextLengthExceeded if the prompt leaves no room for an answer, ResourceExhausted if prompt and answer
        do not fit now; nothing is held then.
        """
        num_prompt_tokens = session.prompt.num_tokens
        max_tokens = min(num_prompt_tokens + session.answer.max_tokens, self._limit(session))
        if max_tokens <= num_prompt_tokens:
            raise ContextLengthExceeded(
                f"the conversation has {num_prompt_tokens} tokens and the answer needs one at least; both may have "
                f"{self._limit(session)}: send fewer or shorter messages"
            )
        size = self._decider.decoder.pool.block_size
        num_blocks = CacheConfig.for_tokens(max_tokens, NUM_SEGMENTS, size).num_blocks
        self._prompts.admit({session.session_id: num_blocks})
        state = ChatState(
            session=session,
            max_answer_tokens=max_tokens - num_prompt_tokens,
            memory=self._decider.chat_memory(max_tokens),
            text=TextStream(self._tokenizer),
            stop=StopText(session.answer.stop),
            slot=self._decider.chooser.table.take(session.sampling.repetition_window_tokens),
            unread=deque(session.prompt.pieces),
        )
        self._opening[session.session_id] = self._embedding[session.session_id] = state
        return state

    def start(self, state: ChatState, work: GoOn) -> None:
        """Decide the next piece of the answer; a step of the decider's loop returns it."""
        steps = answer(state, self._tokenizer.special.chat, work.deadline_s)
        self._decider.loop.add(state.session.session_id, steps, work.deadline_s)

    @property
    def is_idle(self) -> bool:
        """Nothing is to be embedded."""
        return not self._embedding

    def embed_some(self) -> dict[str, AntiphonError]:
        """Embed one picture's item or one sound of the chat that waits longest, and all text up to it.

        So much and no more in a step, for the calls that wait meanwhile. Returns the chats that failed with it.
        """
        for session_id, state in self._embedding.items():
            try:
                self._embed_up_to_media(state)
            except Exception as error:  # noqa: BLE001 - the fence: whatever is wrong with a chat is its own business
                return {session_id: failure(error)}
            if not state.unread:
                del self._embedding[session_id]
                self._decider.loop.add(session_id, read_prompt(state), state.session.deadline_s)
            break
        return {}

    def ready(self, session_id: str) -> PromptReady | None:
        """What is said of a chat whose prompt was just computed; None if it is no chat's."""
        state = self._opening.pop(session_id, None)
        if state is None:
            return None
        num_tokens = state.memory.context.num_tokens
        return PromptReady(num_tokens, num_tokens + state.max_answer_tokens, is_hit=False)

    def close(self, state: ChatState) -> None:
        """Stop the chat's work and give everything back; idempotent."""
        session_id = state.session.session_id
        if self._opening.get(session_id) is state:
            del self._opening[session_id]
        if self._embedding.get(session_id) is state:
            del self._embedding[session_id]
        self._decider.loop.cancel(session_id)
        state.memory.free()
        state.embeds, state.unsaid = [], []
        self._decider.chooser.table.give_back(state.slot)
        self._admission.leave(session_id)

    def _limit(self, session: ChatSession) -> int:
        """Tokens of prompt and answer together: what is asked for, what the model tells apart, what the cache holds."""
        pool = self._decider.decoder.pool
        num_cache_tokens = (pool.num_blocks - CacheConfig.for_tokens(0, NUM_SEGMENTS).num_blocks) * pool.block_size
        return min(session.answer.max_context_tokens, self._decider.max_context_tokens, num_cache_tokens)

    def _embed_up_to_media(self, state: ChatState) -> None:
        while state.unread:
            piece = state.unread.popleft()
            state.embeds.append(self._embed(piece))
            if not isinstance(piece, tuple):
                return

    def _embed(self, piece: PromptPiece) -> Tensor:
        """[n, hidden]."""
        match piece:
            case tuple():
                return self._decider.embed(piece)
            case HeardSound(samples=samples):
                return self._senses.embed_reference(samples)
            case item:
                return self._senses.embed_item(item)
