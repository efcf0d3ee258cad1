"""From a unit's embeddings to its decisions: context, sampling, turns, words. Encoders are in `senses.py`.

Source: REFERENCE 4.3, 4.4 and 5. Shown by the golden kinds thinker and endtoend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.duplex import UnitDecisions, Utterance
from antiphon.core.messages import Address, Handoff
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import TextStream, TextTokenizer
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.stepping import StepLoop
from antiphon.stages.thinker.choosing import Chosen, TextChooser, TextDraw
from antiphon.stages.thinker.memory import MemorySteps, ThinkerMemory
from antiphon.stages.thinker.state import PromptDone, ThinkerSession, UnitOutcome

DeciderSteps = MemorySteps[PromptDone | UnitOutcome]


@dataclass(slots=True)
class DeciderState:
    """What the thinker remembers of a session. Owned by Decider.

    history: ids that the repetition penalty remembers.
    is_turn_open: the model has begun an answer and not ended it. is_speaking: some of the turn went to the talker.
    is_interrupted: the next unit listens and closes the turn.
    epoch: counts interruptions. turn: number of the present or next answer. num_*: counters that number the next one.
    """

    session: ThinkerSession
    memory: ThinkerMemory
    text: TextStream
    history: deque[int]
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
        self.loop: StepLoop[TextDraw, Chosen, PromptDone | UnitOutcome] = StepLoop(
            self.decoder, TextChooser(network, tokenizer.special)
        )

    @property
    def max_context_tokens(self) -> int:
        """Positions that the model can tell apart."""
        return self._network.config.max_position_tokens

    def embed(self, ids: tuple[int, ...]) -> Tensor:
        """ids: n token ids. Returns [n, hidden]."""
        return self._network.embed_ids(ids)

    def open(self, session: ThinkerSession, max_tokens: int) -> DeciderState:
        """A session with an empty context of at most `max_tokens`; the caller feeds the prompt into its memory."""
        return DeciderState(
            session=session,
            memory=ThinkerMemory(self._network, self.decoder, session.window, session.slide, max_tokens),
            text=TextStream(self._tokenizer),
            history=deque(maxlen=session.sampling.repetition_window_tokens),
        )

    def prompt(self, state: DeciderState, embeds: Tensor, suffix: tuple[int, ...]) -> DeciderSteps:
        """Compute a session's prompt. embeds: [n, hidden], what stands in front of the suffix."""
        yield from state.memory.feed_prompt(embeds)
        yield from state.memory.feed_suffix(suffix)
        return PromptDone(state.memory.context.num_tokens)

    def interrupt(self, state: DeciderState) -> None:
        """Stop the present answer between units; what was said stays, and the next unit closes the turn."""
        state.epoch += 1
        state.is_interrupted = state.is_turn_open
        state.turn += int(state.is_speaking)
        state.is_speaking = False
        state.text.finish()

    def decide(self, state: DeciderState, embeds: Tensor) -> DeciderSteps:
        """Run one unit: its input, its decisions, its close, the slide.

        embeds: [n, hidden], the unit's input.
        Raises: ContextLengthExceeded or ResourceExhausted; then the unit stays open and the session must end.
        """
        memory, unit = state.memory, state.num_units
        decisions = UnitDecisions(
            self._special.duplex,
            state.session.duplex,
            is_turn_open=state.is_turn_open,
            is_forced_listen=state.is_interrupted or unit < state.session.duplex.num_forced_listens,
        )
        hidden = yield from self._run(state, decisions, embeds)
        yield from memory.feed(memory.embed(decisions.closing_ids))
        slide = yield from memory.close_unit(unit, self._tokenizer.text_ids(decisions.previous_ids()))
        state.num_units += 1
        state.is_turn_open = decisions.is_turn_open
        state.is_interrupted = False
        utterances = decisions.utterances()
        return UnitOutcome(
            unit=unit,
            token_ids=(*decisions.fed, *decisions.closing_ids),
            is_listen=decisions.is_listen,
            handoffs=tuple(self._handoff(state, unit, utterance, hidden) for utterance in utterances),
            text="".join(_caption(state, utterance) for utterance in utterances),
            slide=slide,
            num_context_tokens=memory.context.num_tokens,
            retained_units=tuple(record.unit for record in memory.context.units),
            previous_ids=memory.context.previous,
        )

    def _run(self, state: DeciderState, decisions: UnitDecisions, embeds: Tensor) -> MemorySteps[list[Tensor]]:
        """Feed the unit's input, then sample and feed until the unit is done.

        Returns each fed token's own state, [1, hidden].
        """
        memory = state.memory
        states: list[Tensor] = []
        if decisions.is_done:  # forced to listen: nothing is drawn
            yield from memory.feed(torch.cat([embeds, memory.embed(tuple(decisions.fed))]))
            return states
        _, chosen = yield from memory.feed_and_draw(embeds, _next_draw(state))
        while (token := _take(state, decisions, chosen)) is not None:
            embeds = memory.embed((token,))
            if decisions.is_done:  # the unit is full: the token is fed, and nothing is drawn after it
                states.append((yield from memory.feed(embeds)))
                break
            hidden, chosen = yield from memory.feed_and_draw(embeds, _next_draw(state))
            states.append(hidden)
        return states

    def _handoff(self, state: DeciderState, unit: int, said: Utterance, hidden: Sequence[Tensor]) -> Handoff[Tensor]:
        address = Address(state.session.session_id, state.epoch, state.turn, state.num_handoffs)
        state.num_handoffs += 1
        state.turn += int(said.ends_turn)
        state.is_speaking = not said.ends_turn
        rows = [self._network.embed_ids(()), *(hidden[row] for row in said.rows)]
        return Handoff(address, unit, said.token_ids, torch.cat(rows), said.ends_turn)


def _next_draw(state: DeciderState) -> TextDraw:
    session = state.session
    draw = TextDraw(session.sampling, session.draws, tuple(state.history), session.seed, state.num_draws)
    state.num_draws += 1
    return draw


def _take(state: DeciderState, decisions: UnitDecisions, chosen: Chosen) -> int | None:
    """Record a choice; the token to feed for it, or None if it ended the unit."""
    if chosen.is_recorded:
        state.history.append(chosen.token)
    return decisions.take(chosen.token)


def _caption(state: DeciderState, said: Utterance) -> str:
    text = state.text.push(said.token_ids)
    return text + state.text.finish() if said.ends_turn else text
