"""The talker: spoken tokens and their hidden states in, codec tokens out. Waveforms are code2wav's.

Source: REFERENCE 8. Shown by tests/stages/test_talker.py and the golden kind talker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk, Handoff
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.errors import AntiphonError
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.paged import CacheConfig, PagedDecoder, Row
from antiphon.stages.stepping import Request, StepLoop, Steps
from antiphon.stages.talker.choosing import CodecChooser, CodecDraw
from antiphon.stages.talker.state import TalkerSession, TalkerState

MAX_CHUNK_TOKENS = 25
"""Codec tokens in one second of speech. The reference samples one more and drops it (REFERENCE 8.2)."""


ResultT = TypeVar("ResultT")
TalkerSteps = Steps[CodecDraw, int, ResultT]


@dataclass(frozen=True, slots=True)
class CodecStep:
    """One sampled codec token. hidden: [hidden], the state it was drawn from. is_eos: it ends the segment."""

    token: int
    hidden: Tensor
    is_eos: bool


class TalkerStage:
    """Owns the talker's states, its cache and the unfinished work of its sessions."""

    def __init__(self, network: TalkerNetwork, cache: CacheConfig) -> None:
        weight = network.emb_text.weight
        self._network = network
        self._device = weight.device
        self._eos = network.config.num_codec_tokens - 1
        self.decoder = PagedDecoder(network, network.config.decoder, cache, weight.device, weight.dtype)
        self.loop: StepLoop[CodecDraw, int, tuple[CodecChunk, ...]] = StepLoop(self.decoder, CodecChooser(network))

    def open(self, session: TalkerSession) -> TalkerState:
        """A fresh session; it holds no block until it speaks."""
        max_tokens = self._network.config.max_position_tokens
        return TalkerState(session, Context(self.decoder.pool, SlideMode.ROTATE_QUERY, max_tokens))

    def close(self, state: TalkerState) -> None:
        """Stop the session's work, forget its turn and give its blocks back; idempotent. It may speak again."""
        self.loop.cancel(state.session.session_id)
        state.context.free()

    def start(self, state: TalkerState, handoffs: Sequence[Handoff[Tensor]], deadline_s: float) -> None:
        """Speak a unit's handoffs, one chunk for each, in order; `step` returns them.

        deadline_s: when their audio must exist, on the engine's clock.
        """
        self.loop.add(state.session.session_id, self.speak(state, handoffs), deadline_s)

    def step(self) -> dict[str, tuple[CodecChunk, ...] | AntiphonError]:
        """One forward pass for the most urgent sessions. Returns the chunks of those that are done, by session id."""
        return {finished.session_id: finished.result for finished in self.loop.step()}

    def speak(self, state: TalkerState, handoffs: Sequence[Handoff[Tensor]]) -> TalkerSteps[tuple[CodecChunk, ...]]:
        """The codec tokens of a unit's handoffs. Raises: ResourceExhausted; the session must end then."""
        chunks: list[CodecChunk] = []
        for handoff in handoffs:
            chunks.append((yield from self._speak(state, handoff)))
        return tuple(chunks)

    def codes(self, state: TalkerState, condition: Tensor, *, min_tokens: int) -> TalkerSteps[tuple[CodecStep, ...]]:
        """Sample until EOS or until one token more than a chunk holds; that one is not fed.

        condition: [m, hidden].
        min_tokens: EOS is impossible before so many tokens.
        """
        context = state.context
        self._make_room(context, condition.shape[0] + MAX_CHUNK_TOKENS)
        steps: list[CodecStep] = []
        embeds = condition
        while True:
            row = Row(context, context.append(embeds.shape[0]), embeds)
            reply = yield Request(row, self._draw(state, steps, is_eos_masked=len(steps) < min_tokens))
            assert reply.choice is not None, "a draw was asked for"
            steps.append(CodecStep(reply.choice, reply.states[-1], reply.choice == self._eos))
            if steps[-1].is_eos or len(steps) > MAX_CHUNK_TOKENS:
                break
            embeds = self._network.embed_codes(self._ids((reply.choice,)))
        context.close_unit(state.num_chunks, ())
        return tuple(steps)

    def _speak(self, state: TalkerState, handoff: Handoff[Tensor]) -> TalkerSteps[CodecChunk]:
        """handoff.hidden: [n, llm_hidden]; n = 0 is a unit that only goes on with the turn."""
        is_first_of_turn = state.context.num_tokens == 0
        condition = self._network.condition(self._ids(handoff.token_ids), handoff.hidden)
        # The first and the last chunk of a turn may be short; one in between fills its second.
        may_end = is_first_of_turn or handoff.ends_turn
        steps = yield from self.codes(state, condition, min_tokens=0 if may_end else MAX_CHUNK_TOKENS + 1)
        tokens = [step.token for step in steps if not step.is_eos][:MAX_CHUNK_TOKENS]
        state.num_chunks += 1
        if handoff.ends_turn:
            state.context.free()
        return CodecChunk(handoff.address, handoff.unit, tuple(tokens), is_first_of_turn, handoff.ends_turn)

    def _make_room(self, context: Context, num_tokens: int) -> None:
        """Drop the turn's oldest chunks until the next one fits into the positions the talker was trained on."""
        limit = self._network.config.max_position_tokens - num_tokens
        window = BasicWindow(high_tokens=limit, low_tokens=limit - 1)
        plan = window.plan(context.num_tokens, context.units, ())
        if plan is not None:
            context.slide(plan)

    def _draw(self, state: TalkerState, steps: Sequence[CodecStep], *, is_eos_masked: bool) -> CodecDraw:
        session = state.session
        newest = steps[-session.sampling.repetition_window_tokens :]
        draw = CodecDraw(
            sampling=session.sampling,
            draws=session.draws,
            history=tuple(step.token for step in newest),
            is_eos_masked=is_eos_masked,
            seed=session.seed,
            counter=state.num_draws,
        )
        state.num_draws += 1
        return draw

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)
