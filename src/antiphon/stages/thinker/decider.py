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
from antiphon.core.sampling import Draws
from antiphon.kernels.sampling.contract import TextRules
from antiphon.kernels.sampling.op import sample_text
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import TextStream, TextTokenizer
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.thinker.memory import ThinkerMemory
from antiphon.stages.thinker.state import ThinkerSession, UnitOutcome


@dataclass(slots=True)
class DeciderState:
    """What the thinker remembers of a session. Owned by Decider.

    history: ids that the repetition penalty remembers.
    turn: number of the present or next answer. num_*: counters that number the next one.
    """

    session: ThinkerSession
    memory: ThinkerMemory
    text: TextStream
    history: deque[int]
    is_turn_open: bool = False
    epoch: int = 0
    turn: int = 0
    num_units: int = 0
    num_handoffs: int = 0
    num_draws: int = 0


class Decider:
    """Owns the language model's cache. Single calls for now: one session advances at a time."""

    def __init__(self, network: ThinkerNetwork, tokenizer: TextTokenizer, cache: CacheConfig) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._special = tokenizer.special
        self._device = network.lm_head.weight.device
        self.decoder = PagedDecoder(network, network.config.decoder, cache, self._device, network.lm_head.weight.dtype)
        forbidden = torch.zeros(network.config.vocab_size, dtype=torch.bool)
        forbidden[list(self._special.forbidden)] = True
        self._forbidden = forbidden.to(self._device)

    @property
    def max_context_tokens(self) -> int:
        """Positions that the model can tell apart."""
        return self._network.config.max_position_tokens

    def open(self, session: ThinkerSession, max_tokens: int) -> DeciderState:
        """A session with an empty context of at most `max_tokens`; the caller feeds the prompt into its memory."""
        return DeciderState(
            session=session,
            memory=ThinkerMemory(self._network, self.decoder, session.window, session.slide, max_tokens),
            text=TextStream(self._tokenizer),
            history=deque(maxlen=session.sampling.repetition_window_tokens),
        )

    def decide(self, state: DeciderState, embeds: Tensor) -> UnitOutcome:
        """Run one unit: its input, its decisions, its close, the slide.

        embeds: [n, hidden], the unit's input.
        Raises: ContextLengthExceeded or ResourceExhausted; then the unit stays open and the session must end.
        """
        memory, unit = state.memory, state.num_units
        decisions = UnitDecisions(
            self._special.duplex,
            state.session.duplex,
            is_turn_open=state.is_turn_open,
            is_forced_listen=unit < state.session.duplex.num_forced_listens,
        )
        hidden = self._run(state, decisions, memory.feed(embeds)[-1:])
        memory.feed(memory.embed(decisions.closing_ids))
        slide = memory.close_unit(unit, self._tokenizer.text_ids(decisions.previous_ids()))
        state.num_units += 1
        state.is_turn_open = decisions.is_turn_open
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

    def _run(self, state: DeciderState, decisions: UnitDecisions, hidden: Tensor) -> list[Tensor]:
        """Sample and feed until the unit is done.

        hidden: [1, hidden], the state that the first decision is made from.
        Returns each fed token's own state, [1, hidden].
        """
        states: list[Tensor] = []
        while not decisions.is_done:
            token = decisions.take(self._sample(state, hidden))
            if token is not None:
                hidden = state.memory.feed(state.memory.embed((token,)))
                states.append(hidden)
        return states

    def _sample(self, state: DeciderState, hidden: Tensor) -> int:
        choice = sample_text(self._network.logits(hidden), self._rules(state))
        state.num_draws += 1
        token = int(choice.ids)
        if bool(choice.is_recorded):
            state.history.append(token)
        return token

    def _rules(self, state: DeciderState) -> TextRules:
        sampling, device = state.session.sampling, self._device

        def row(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=device)

        history = torch.full((1, sampling.repetition_window_tokens), -1, dtype=torch.int64)
        history[0, : len(state.history)] = torch.tensor(tuple(state.history), dtype=torch.int64)
        return TextRules(
            forbidden=self._forbidden,
            chunk_eos=self._special.duplex.chunk_eos,
            turn_eos=self._special.duplex.turn_eos,
            listen=self._special.duplex.listen,
            history=history.to(device),
            repetition_penalty=row(sampling.repetition_penalty),
            length_penalty=row(sampling.length_penalty),
            listen_scale=row(sampling.listen_scale),
            listen_top_k=row(sampling.listen_top_k, torch.int64),
            is_greedy=row(state.session.draws is Draws.MOST_LIKELY, torch.bool),
            temperature=row(sampling.temperature),
            top_k=row(sampling.top_k, torch.int64),
            top_p=row(sampling.top_p),
            seeds=row(state.session.seed, torch.int64),
            counters=row(state.num_draws, torch.int64),
        )

    def _handoff(self, state: DeciderState, unit: int, said: Utterance, hidden: Sequence[Tensor]) -> Handoff[Tensor]:
        address = Address(state.session.session_id, state.epoch, state.turn, state.num_handoffs)
        state.num_handoffs += 1
        state.turn += int(said.ends_turn)
        rows = [self._network.embed_ids(()), *(hidden[row] for row in said.rows)]
        return Handoff(address, unit, said.token_ids, torch.cat(rows), said.ends_turn)


def _caption(state: DeciderState, said: Utterance) -> str:
    text = state.text.push(said.token_ids)
    return text + state.text.finish() if said.ends_turn else text
