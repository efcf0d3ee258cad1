"""A chat's answer, piece by piece: sampling, words, handoffs. Whoever may come in, and encoders, are in `chats.py`.

Source: REFERENCE 14.4. Shown by tests/stages/test_chats.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from antiphon.core.chat import ChatTokens, PieceDecisions, StopText
from antiphon.core.messages import Address, Handoff
from antiphon.models.minicpmo.chat_prompt import PromptPiece
from antiphon.models.minicpmo.tokens import TextStream
from antiphon.stages.draw_table import DrawPlace, DrawSlot, Newest
from antiphon.stages.stepping import ArrivingState, Drawn, Settle
from antiphon.stages.thinker.choosing import ChatDraw
from antiphon.stages.thinker.memory import MemorySteps, ThinkerMemory
from antiphon.stages.thinker.state import ChatSession, PieceOutcome, PromptDone


@dataclass(slots=True, eq=False)
class ChatState:
    """Owned by Chats.

    max_answer_tokens: what fits behind the prompt of what was asked for.
    unread: of the prompt, what is not embedded yet. embeds: [n, hidden] each, of the rest until it is in the cache.
    drawn: the next token of the answer; newest: whether one was drawn before.
    unsaid: words with their states, [1, hidden], that may be the beginning of a stop sequence.
    num_tokens: of the answer so far. num_handoffs, num_draws: number the next one.
    """

    session: ChatSession
    max_answer_tokens: int
    memory: ThinkerMemory
    text: TextStream
    stop: StopText
    slot: DrawSlot
    unread: deque[PromptPiece]
    embeds: list[Tensor] = field(default_factory=list)
    drawn: Drawn | None = None
    newest: Newest = Newest.FORGOTTEN
    unsaid: list[tuple[int, ArrivingState]] = field(default_factory=list)
    num_tokens: int = 0
    num_handoffs: int = 0
    num_draws: int = 0


def read_prompt(state: ChatState) -> MemorySteps[PromptDone]:
    """Compute the whole conversation, and draw the answer's first token."""
    embeds = torch.cat(state.embeds)
    state.embeds = []
    state.drawn = yield from state.memory.feed_and_draw(embeds, _next_draw(state))
    return PromptDone(state.memory.context.num_tokens)


def answer(state: ChatState, tokens: ChatTokens, deadline_s: float) -> MemorySteps[PieceOutcome]:
    """Decide the next piece. What was drawn is fed before it is read, so that the device need not wait for the host."""
    piece = PieceDecisions(tokens, state.max_answer_tokens, state.num_tokens)
    texts: list[str] = []
    said: list[tuple[int, ArrivingState]] = []
    while not piece.is_done:
        drawn = state.drawn
        assert drawn is not None, "the answer is over"
        reply = yield from state.memory.feed_drawn(state.slot, None if piece.is_last_of_answer else _next_draw(state))
        state.drawn, token = reply.drawn, drawn.read()
        if not piece.take(token):
            continue
        texts.append(state.stop.push(state.text.push((token,))))
        if state.session.answer.is_spoken:
            state.unsaid.append((token, reply.arriving_state()))
        if state.stop.is_stopped:
            piece.stop()
        elif not state.stop.is_holding:
            said += state.unsaid
            state.unsaid = []
    state.num_tokens += piece.num_taken
    if piece.end is not None and not state.stop.is_stopped:
        texts += (state.stop.push(state.text.finish()), state.stop.finish())
        said += state.unsaid
    handoffs: tuple[Handoff[Tensor], ...] = ()
    if state.session.answer.is_spoken and (said or piece.end is not None):
        handoffs = ((yield from _handoff(state, said, deadline_s, ends_turn=piece.end is not None)),)
    return PieceOutcome("".join(texts), state.num_tokens, piece.end, handoffs)


def _handoff(
    state: ChatState, said: list[tuple[int, ArrivingState]], deadline_s: float, *, ends_turn: bool
) -> MemorySteps[Handoff[Tensor]]:
    for _, own in said:
        if not own.is_there:
            yield Settle(own)  # to read it would be to wait for the step under way
    nothing = state.memory.embed(())
    hidden = torch.cat([nothing.new_empty(nothing.shape, device="cpu"), *(own.read()[None] for _, own in said)])
    address = Address(state.session.session_id, 0, 0, state.num_handoffs)
    unit, token_ids = state.num_handoffs, tuple(token for token, _ in said)
    state.num_handoffs += 1
    return Handoff(address, deadline_s, unit, token_ids, hidden, ends_turn)


def _next_draw(state: ChatState) -> ChatDraw:
    session = state.session
    place = DrawPlace(state.slot, state.newest, session.sampling.repetition_window_tokens)
    draw = ChatDraw(session.sampling, session.draws, place, session.answer.is_spoken, session.seed, state.num_draws)
    state.num_draws += 1
    state.newest = Newest.TAKEN
    return draw
