"""From a unit's embeddings to its decisions: context, sampling, turns, words. Encoders are in `senses.py`.

Source: REFERENCE 4.3, 4.4 and 5. Shown by tests/stages/test_decider.py and the golden kinds thinker and endtoend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.duplex import UnitDecisions, Utterance, Wish
from antiphon.core.messages import Address, Handoff
from antiphon.core.window import OffWindow, SlideMode
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import TextStream, TextTokenizer
from antiphon.stages.draw_table import DrawPlace, DrawSlot, Newest
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.stepping import ArrivingState, Drawn, Settle, StepLoop
from antiphon.stages.thinker.choosing import TextChooser, TextDraw, Turn, UnitDraw
from antiphon.stages.thinker.memory import MemorySteps, ThinkerMemory
from antiphon.stages.thinker.state import PieceOutcome, PromptDone, ThinkerSession, UnitOutcome

DeciderSteps = MemorySteps[PromptDone | UnitOutcome]


@dataclass(slots=True)
class DeciderState:
    """What the thinker remembers of a session. Owned by Decider.

    slot: where the device remembers its draws. newest: what the last one there is to the next.
    is_turn_open: the model has begun an answer and not ended it. is_speaking: some of the turn went to the talker.
    is_interrupted: the next unit listens and closes the turn.
    epoch: counts interruptions. turn: number of the present or next answer. num_*: counters that number the next one,
    handoffs within an epoch.
    """

    session: ThinkerSession
    memory: ThinkerMemory
    text: TextStream
    slot: DrawSlot
    newest: Newest = Newest.FORGOTTEN
    is_turn_open: bool = False
    is_speaking: bool = False
    is_interrupted: bool = False
    epoch: int = 0
    turn: int = 0
    num_units: int = 0
    num_handoffs: int = 0
    num_draws: int = 0


class Decider:
    """Owns the language model's cache and the unfinished work of its sessions."""

    def __init__(self, network: ThinkerNetwork, tokenizer: TextTokenizer, cache: CacheConfig) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._special = tokenizer.special
        weight = network.lm_head.weight
        self.decoder = PagedDecoder(network, network.config.decoder, cache, weight.device, weight.dtype)
        self.chooser = TextChooser(network, tokenizer.special)
        self.loop: StepLoop[TextDraw, PromptDone | UnitOutcome | PieceOutcome] = StepLoop(self.decoder, self.chooser)

    @property
    def num_runs(self) -> NumRuns:
        """Of steps and draws."""
        return self.decoder.num_runs + self.chooser.num_runs

    @property
    def max_context_tokens(self) -> int:
        """Positions that the model can tell apart."""
        return self._network.config.max_position_tokens

    def embed(self, ids: tuple[int, ...]) -> Tensor:
        """ids: n token ids. Returns [n, hidden]."""
        return self._network.embed_ids(ids)

    def chat_memory(self, max_tokens: int) -> ThinkerMemory:
        """An empty context for a chat, which never slides."""
        return ThinkerMemory(self._network, self.decoder, OffWindow(max_tokens), SlideMode.ROTATE_QUERY, max_tokens)

    def open(self, session: ThinkerSession, max_tokens: int) -> DeciderState:
        """A session with an empty context of at most `max_tokens`; the caller feeds the prompt into its memory."""
        return DeciderState(
            session=session,
            memory=ThinkerMemory(
                self._network,
                self.decoder,
                session.window,
                session.slide,
                max_tokens,
                keeps_inputs=session.keeps_inputs,
            ),
            text=TextStream(self._tokenizer),
            slot=self.chooser.table.take(session.sampling.repetition_window_tokens),
        )

    def close(self, state: DeciderState) -> None:
        """Stop the session's work and give everything back; idempotent."""
        self.loop.cancel(state.session.session_id)
        state.memory.free()
        self.chooser.table.give_back(state.slot)

    def prompt(self, state: DeciderState, embeds: Tensor, suffix: tuple[int, ...]) -> DeciderSteps:
        """Compute a session's prompt. embeds: [n, hidden], what stands in front of the suffix."""
        yield from state.memory.feed_prompt(embeds)
        yield from state.memory.feed_suffix(suffix)
        return PromptDone(state.memory.context.num_tokens)

    def interrupt(self, state: DeciderState, epoch: int) -> None:
        """Stop the present answer, and enter an epoch; what was said stays in the context.

        Between units, the next one closes the turn. A unit on its way ends as soon as it can and closes it; if its last
        tokens are on their way, the next one does. Nobody hears what comes of it.
        """
        state.epoch = epoch
        state.is_interrupted = state.is_turn_open
        state.turn += int(state.is_speaking)
        state.is_speaking = False
        state.num_handoffs = 0
        state.text.finish()

    def decide(self, state: DeciderState, embeds: Tensor, deadline_s: float, wish: Wish) -> DeciderSteps:
        """Run one unit: its input, its decisions, its close, the slide.

        embeds: [n, hidden], the unit's input. deadline_s: of what is said in it.
        Raises: ContextLengthExceeded or ResourceExhausted; then the unit stays open and the session must end.
        """
        memory, unit, epoch = state.memory, state.num_units, state.epoch
        # A turn that has begun in these seconds was asked for, and one that was handed on has to come to its end.
        is_in_turn = state.is_turn_open or state.is_speaking
        is_early = unit < state.session.duplex.num_forced_listens and wish is not Wish.SPEAK and not is_in_turn
        may_begin = wish is not Wish.LISTEN and (wish is not Wish.HOLD or is_in_turn)
        decisions = UnitDecisions(
            self._special.duplex,
            state.session.duplex,
            is_turn_open=state.is_turn_open,
            is_forced_listen=state.is_interrupted or is_early or not may_begin,
            is_last_turn=wish is Wish.HOLD,
        )
        states = yield from self._run(state, decisions, embeds, must_speak=wish is Wish.SPEAK)
        if not decisions.is_done:
            decisions.interrupt()
        utterances = decisions.utterances() if state.epoch == epoch else ()
        rest = (*decisions.fed, *decisions.closing_ids)[len(states) :]
        memory.feed_later(memory.embed(rest))
        slide = yield from memory.close_unit(unit, self._tokenizer.text_ids(decisions.previous_ids()))
        for row in (row for said in utterances for row in said.rows):
            # Most often it is. To read it if not would be to wait for the step under way, and to let the device wait.
            if not states[row].is_there:
                yield Settle(states[row])
        if state.epoch != epoch:
            utterances = ()
        nothing = torch.empty((0, embeds.shape[1]), dtype=embeds.dtype, device="cpu")
        hidden = [torch.cat([nothing, *(states[row].read()[None] for row in said.rows)]) for said in utterances]
        state.num_units += 1
        state.is_turn_open = decisions.is_turn_open
        state.is_interrupted = state.epoch != epoch and decisions.is_turn_open
        return UnitOutcome(
            unit=unit,
            token_ids=(*decisions.fed, *decisions.closing_ids),
            is_listen=decisions.is_listen,
            handoffs=tuple(
                self._handoff(state, unit, deadline_s, said, own) for said, own in zip(utterances, hidden, strict=True)
            ),
            texts=tuple(_caption(state, said) for said in utterances),
            slide=slide,
            num_context_tokens=memory.context.num_tokens,
            num_context_blocks=memory.context.num_blocks,
            retained_units=range(unit + 1 - len(memory.context.units), unit + 1),
            previous_ids=memory.context.previous,
        )

    def _run(
        self, state: DeciderState, decisions: UnitDecisions, embeds: Tensor, *, must_speak: bool
    ) -> MemorySteps[list[ArrivingState]]:
        """Feed the unit's input, then sample and feed until the unit is done or interrupted.

        Returns the own states of the tokens after the input that are fed by then; the first of them are
        the unit's decisions, and one more is its terminator.
        """
        memory, epoch = state.memory, state.epoch
        states: list[ArrivingState] = []
        if decisions.is_done:  # forced to listen: nothing is drawn
            yield from memory.feed(embeds)
            return states
        turn = Turn.OPEN if decisions.is_turn_open else Turn.CLOSED
        first = yield from memory.feed_and_draw(embeds, _next_draw(state, turn, must_speak=must_speak))
        unread: Drawn | None = first
        if turn is Turn.CLOSED:
            # Most of these units listen: a row on suspicion would mostly be wasted.
            yield Settle(first)
            decisions.take(first.read())
            unread = None
        while not decisions.is_done and state.epoch == epoch:
            # What was drawn is fed before it is read. Nothing is drawn after a token that fills the unit.
            is_last = unread is not None and decisions.num_left == 1
            draw = None if is_last else _next_draw(state, Turn.BY_LAST, must_speak=False)
            reply = yield from memory.feed_drawn(state.slot, draw)
            states.append(reply.arriving_state())
            if unread is not None:
                decisions.take(unread.read())
                if decisions.is_done:
                    if not is_last:
                        _void_newest_draw(state)
                    return states
            unread = reply.drawn
        if unread is not None:  # interrupted; what was drawn by then still counts
            yield Settle(unread)
            decisions.take(unread.read())
        return states

    def _handoff(
        self, state: DeciderState, unit: int, deadline_s: float, said: Utterance, hidden: Tensor
    ) -> Handoff[Tensor]:
        """hidden: [len(said.rows), hidden] on the host."""
        address = Address(state.session.session_id, state.epoch, state.turn, state.num_handoffs)
        state.num_handoffs += 1
        state.turn += int(said.ends_turn)
        state.is_speaking = not said.ends_turn
        return Handoff(address, deadline_s, unit, said.token_ids, hidden, said.ends_turn)


def _next_draw(state: DeciderState, turn: Turn, *, must_speak: bool) -> UnitDraw:
    session = state.session
    place = DrawPlace(state.slot, state.newest, session.sampling.repetition_window_tokens)
    draw = UnitDraw(
        session.sampling, session.draws, place, turn, must_speak, session.seed, state.num_draws, session.script
    )
    state.num_draws += 1
    state.newest = Newest.TAKEN
    return draw


def _void_newest_draw(state: DeciderState) -> None:
    """It came after the unit's end; its number is used again."""
    state.num_draws -= 1
    state.newest = Newest.VOID


def _caption(state: DeciderState, said: Utterance) -> str:
    text = state.text.push(said.token_ids)
    return text + state.text.finish() if said.ends_turn else text
